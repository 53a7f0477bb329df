"""The walks in ARCHITECTURE.md: each file exists, defines the named object, and occurs once. No walk is long."""

import importlib
import re
from pathlib import Path

import pytest

import lightning_dilated

ROOT = Path(lightning_dilated.__file__).parent
TEXT = (ROOT.parent / "ARCHITECTURE.md").read_text()
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `(\w+)`", re.M)
#: {title of a section with a walk: its (file, name) pairs}
WALKS = {
    section.partition("\n")[0]: STEP.findall(section)
    for section in TEXT.split("\n## ")
    if section.startswith("The way of")
}
LIMITS = {"The way of q on one rank": 7, "The way of q on many ranks": 11}


def test_every_walk_is_written():
    assert {"The way of a batch", *LIMITS} < set(WALKS)
    assert sum("checkpoint" in title for title in WALKS) == 2
    numbered = len(re.findall(r"^\d+\. ", TEXT, re.M))
    assert sum(map(len, WALKS.values())) == numbered  # all numbered steps have this form


@pytest.mark.parametrize("title", WALKS)
def test_names_exist(title):
    for path, name in WALKS[title]:
        module = importlib.import_module(
            ".".join((ROOT.name, *Path(path).with_suffix("").parts)).removesuffix(".__init__")
        )
        assert (ROOT / path).samefile(module.__file__)
        defined = getattr(module, name, None)
        assert defined is not None and re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.M), name


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_short(title):
    files = [path for path, _ in WALKS[title]]
    assert 3 <= len(files) <= LIMITS.get(title, 11)
    assert len(set(files)) == len(files)


def test_folders_stand_in_the_order_of_the_lint():
    lint = ROOT.parent / ".ci" / "lint.py"
    if not lint.exists():
        pytest.skip("no checkout: a source archive has no .ci")
    names = re.findall(r'"(\w+)"', re.search(r"ORDER = \((.*?)\n\)", lint.read_text(), re.S)[1])
    core, _, extensions = TEXT.partition("| folder of `ext/` |")
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (`.*?) \|", core, re.M)]
    assert [name for row in rows for name in row if name in names] == [name for name in names if name != "__main__"]
    listed = re.findall(r"^\| `(\w+)/` \|", extensions, re.M)
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "ext").glob("*/__init__.py"))
