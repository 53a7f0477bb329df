"""The documentation site: every public name has one entry, every page is in the navigation once, every link works."""

import ast
import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lightning_dilated as ld

ROOT = Path(__file__).resolve().parents[1]
#: folders with an `__all__` for use within the package only
INTERNAL = {"cli", "kernels"}


def load_hooks() -> ModuleType:
    """Load docs/site_hooks.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


# -- reference ---------------------------------------------------------------------------------------------------------
def exported(folder: Path) -> list[str]:
    """Return `__all__` of a folder's `__init__.py` without importing it."""
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(targets[0], ast.Name) and targets[0].id == "__all__":
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return []


def public_names() -> dict[str, object]:
    """Return {dotted name: object} for the public names of the package, its folders, and the modules they export."""
    package = Path(ld.__file__).parent
    folders = {path.parent for path in package.glob("[a-z]*/__init__.py")}
    todo = ["lightning_dilated"]
    todo += [f"lightning_dilated.{x.name}" for x in sorted(folders) if x.name not in INTERNAL and exported(x)]
    names: dict[str, object] = {}
    visited = set()
    while todo:
        name = todo.pop()
        if name in visited:
            continue
        visited.add(name)
        module = importlib.import_module(name)
        for word in module.__all__:
            value = getattr(module, word)
            if isinstance(value, ModuleType):
                todo.append(value.__name__)
            else:
                names[f"{name}.{word}"] = value
    return names


def entries() -> list[str]:
    """Return the names that have entries on pages of docs/api."""
    return [
        name
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]


def problems(public: dict[str, object], listed: list[str]) -> list[str]:
    """Return public objects without an entry or with several, and entries that are not public."""
    counts = Counter(id(public[name]) for name in listed if name in public)
    wrong = [f"{name} is not public" for name in listed if name not in public]
    return wrong + [f"{name} has {counts[id(x)]} entries" for name, x in public.items() if counts[id(x)] != 1]


def test_every_public_name_has_one_entry() -> None:
    public = public_names()
    assert {"lightning_dilated.LongNetLM", "lightning_dilated.data.Genome", "lightning_dilated.models.TokenModel"} < {
        *public
    }
    assert "lightning_dilated.integrations.transformers.HFCausalLM" in public
    wrong = problems(public, entries())
    assert not wrong, f"write entries in docs/api/, as `::: lightning_dilated.NAME`: {wrong}"


def test_missing_repeated_and_unknown_entries_are_seen() -> None:
    public, listed = public_names(), entries()
    assert problems(public, listed[1:])
    assert problems(public, [*listed, "lightning_dilated.models.LongNetLM"])  # another name of the same class
    assert problems(public, [*listed, "lightning_dilated.attention.oracle"])


def test_entries_have_docstrings() -> None:
    public = public_names()
    assert not [name for name, value in public.items() if callable(value) and not value.__doc__]


# -- navigation --------------------------------------------------------------------------------------------------------
KINDS = ("Tutorials", "How-to", "Reference", "Explanation")


def pages_of(nav: Any) -> list[str]:
    """Return the pages in a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def sections() -> dict[str, list[str]]:
    """Return {title of a tab: its pages} from the navigation."""
    return {title: pages_of(part) for entry in CONFIG["nav"] for title, part in entry.items()}


def test_every_page_of_docs_has_one_place() -> None:
    assert tuple(sections()) == ("Home", *KINDS)
    counts = Counter(pages_of(CONFIG["nav"]))
    assert set(counts.values()) == {1}
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    outside = {HOOKS.site_path(path) for path in HOOKS.linked_files(ROOT)}
    assert written <= set(counts) <= written | outside


def test_index_sorts_pages_as_the_navigation_does() -> None:
    parts = re.split(
        r"^\*\*(Tutorials|How-to|Reference|Explanation)\b", (ROOT / "docs/index.md").read_text(), flags=re.M
    )
    assert tuple(parts[1::2]) == KINDS
    for kind, text in zip(parts[1::2], parts[2::2], strict=True):
        paths = (HOOKS.linked_path(ROOT, "docs/index.md", target) for target in HOOKS.links(text))
        pages = {page for page in sections()[kind] if not page.startswith("api/") or page == "api/index.md"}
        assert {HOOKS.site_path(path) for path in paths} == pages, kind


# -- links -------------------------------------------------------------------------------------------------------------
def test_every_link_of_the_site_leads_to_a_file() -> None:
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    dead = [
        (page, target)
        for page in pages + [path for path in HOOKS.linked_files(ROOT) if path.endswith(".md")]
        for target in HOOKS.links(HOOKS.page_text(ROOT, page))
        if not re.match(r"https?://|#", target) and HOOKS.linked_path(ROOT, page, target) is None
    ]
    assert not dead


@pytest.mark.parametrize(
    "page, text, result",
    [
        ("docs/a.md", "[x](../recipes/quickstart.yaml)", "[x](recipes/quickstart.yaml.md)"),
        ("docs/api/index.md", "[x](../python.md#engines)", "[x](../python.md#engines)"),
        ("docs/a.md", "[x](../README.md)", "[x](readme.md)"),
        ("docs/a.md", "[rows](../benchmarks/results/)", "[rows](benchmarks/results/README.md)"),
        ("README.md", "![x](docs/pattern.png)", "![x](pattern.png)"),
        ("recipes/README.md", "[x](../docs/data.md#by-url)", "[x](../data.md#by-url)"),
        ("docs/a.md", "[x](nowhere.md) [y](https://a.b/c) [z](#z)", "[x](nowhere.md) [y](https://a.b/c) [z](#z)"),
        ("docs/a.md", "`[x](../README.md)` [`y`](../README.md)", "`[x](../README.md)` [`y`](readme.md)"),
        ("docs/a.md", "```\n[x](../README.md)\n```\n", "```\n[x](../README.md)\n```\n"),
        ("docs/a.md", "[old files][new files]", r"\[old files\]\[new files\]"),
    ],
)
def test_links_are_rewritten(page: str, text: str, result: str) -> None:
    assert HOOKS.rewritten(ROOT, page, text) == result


def test_dead_links_of_a_built_site_are_named(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "x.css").write_text("")
    (tmp_path / "a b" / "index.html").write_text('<h1 id="top"></h1><a href="../#here"></a><a href="gone/"></a>')
    (tmp_path / "index.html").write_text(
        '<link href="x.css"><h1 id="here"></h1><a href="a%20b/#top"></a><a href="https://a.b/c"></a><a href="."></a>'
        '<a href="a%20b/#none"></a><img src="none.png"><a href="#no"></a>'
    )
    assert HOOKS.dead_links(tmp_path) == [
        ("a b/index.html", "gone/"),
        ("index.html", "#no"),
        ("index.html", "a%20b/#none"),
        ("index.html", "none.png"),
    ]
