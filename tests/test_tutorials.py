"""Tutorials run as written: all blocks of a page in order, in one folder, with the output that the page shows."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"


def load_hook() -> ModuleType:
    """Load docs/notebooks.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebooks"] = module
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = load_hook()
#: a script that runs the cells of a page in one Python session, like a reader, and prints a JSON list of outputs
SESSION = """
import contextlib, io, json, subprocess, sys
from pathlib import Path
sys.path.insert(0, "")
session, printed = {"__name__": "__main__"}, []
for kind, text, title in json.loads(Path(sys.argv[1]).read_text()):
    if kind == "file":
        Path(title).write_text(text)
        printed.append("")
    elif kind == "bash":
        done = subprocess.run(["bash", "-ec", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed.append(done.stdout)
        if done.returncode:
            sys.exit(f"{text}\\n{done.stdout}")
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "block", "exec"), session)
        printed.append(out.getvalue())
Path(sys.argv[2]).write_text(json.dumps(printed))
"""
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"


def run_page(name: str, tmp_path: Path) -> list[str]:
    """Run a page in its own folder and check its output. Return the output of each block that runs."""
    parts = [x for x in NOTEBOOKS.cells((FOLDER / name).read_text()) if x.kind in ("file", "bash", "python")]
    programs, folder = tmp_path / "programs", tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    command = programs / "lightning-dilated"  # from this checkout, even if another version is installed
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lightning_dilated "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    (tmp_path / "cells.json").write_text(json.dumps([(x.kind, x.text, x.title) for x in parts]))
    done = subprocess.run(
        [sys.executable, "-c", SESSION, tmp_path / "cells.json", tmp_path / "printed.json"],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads((tmp_path / "printed.json").read_text())
    for part, text in zip(parts, printed, strict=True):
        missing = not_printed(part.output, text)
        assert not missing, f"{missing} is not among what this printed:\n{part.text}\n{text[-3000:]}"
    return [text for part, text in zip(parts, printed, strict=True) if part.kind != "file"]


def pattern_of(part: str) -> str:
    """Return the regular expression for a word, number, space or … in a page's output."""
    if re.fullmatch(NUMBER, part):
        return f"({NUMBER})"
    return ".*" if part == "…" else r"\s+" if part.isspace() else re.escape(part)


def not_printed(shown: str, printed: str) -> list[str]:
    """Return the page's lines that were not printed in this order. Numbers may differ slightly; … matches anything."""
    missing, end = [], 0
    for line in filter(None, map(str.strip, shown.splitlines())):
        parts = [part for part in re.split(rf"(…|{NUMBER}|\s+)", line) if part]
        expected = [float(part.replace(",", "")) for part in parts if re.fullmatch(NUMBER, part)]
        pattern = "".join(map(pattern_of, parts))
        for match in re.compile(pattern).finditer(printed, end):
            got = [float(x.replace(",", "")) for x in match.groups()]
            if all(abs(x - y) <= 0.3 + 0.3 * max(abs(x), abs(y)) for x, y in zip(expected, got, strict=True)):
                end = match.end()
                break
        else:
            missing.append(line)
    return missing


def numbers(pattern: str, texts: list[str]) -> list[float]:
    """Return the numbers that the group of `pattern` matches in all outputs."""
    return [float(x.replace(",", "")) for x in re.findall(pattern.replace("#", f"({NUMBER})"), "\n".join(texts))]


def check_first_model(texts: list[str]) -> None:
    """The model beats the bigram model, has one result on one and two ranks, and finds Python most likely."""
    bits, bigram = numbers(r"LongNetLM +│ +#", texts), numbers(r"bigram of the training bytes +│ +#", texts)
    assert bits[-1] < bigram[-1]
    assert bits[-1] == pytest.approx(bits[-2], abs=2e-3)
    python, english, noise = numbers(r"# bits a byte:", texts)
    assert python < english < noise


def check_slides(texts: list[str]) -> None:
    """The model predicts the class, and attends to some tiles more than to others."""
    assert numbers(r"│ auroc +│ +#", texts)[-1] > 0.9
    assert numbers(r"has # times the mean", texts)[-1] > 1.5


def check_genomes(texts: list[str]) -> None:
    """Variants inside of sites score lower than variants between sites."""
    site, between = numbers(r"variants, mean score #", texts)
    assert site < between - 1
    assert abs(between) < 0.3


def check_own_module(texts: list[str]) -> None:
    """Two ranks have the losses of one rank."""
    one, two = numbers(r"val_accuracy +│ +#", texts)
    assert one == pytest.approx(two, abs=1e-3) and one > 0.6
    assert numbers(r"difference of a weight: #", texts)[-1] < 1e-2


def check_transformers(texts: list[str]) -> None:
    """Two ranks have the losses of one rank."""
    one, two = numbers(r"val_bits_per_byte +│ +#", texts)
    assert one == pytest.approx(two, abs=0.02) and one < 5


def check_billion(texts: list[str]) -> None:
    """Streaming in chunks changes no number, and uses less memory."""
    assert numbers(r"loss #,", texts)[0] == numbers(r"loss #,", texts)[1]
    whole, chunks = numbers(r"# MiB", texts)
    assert chunks < whole / 2


#: {page: function that checks its numbers}; pages without `slow` run in CI
TUTORIALS: dict[str, Callable[[list[str]], None]] = {
    "first_model.md": check_first_model,
    "slides.md": check_slides,
    "genomes.md": check_genomes,
    "own_module.md": check_own_module,
    "transformers.md": check_transformers,
    "billion.md": check_billion,
}
IN_CI = ("own_module.md",)
MARKS = {name: pytest.mark.full if name in IN_CI else pytest.mark.slow for name in TUTORIALS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in TUTORIALS])
def test_tutorial_runs(name: str, tmp_path: Path) -> None:
    if name == "transformers.md":
        pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
    TUTORIALS[name](run_page(name, tmp_path))


def test_every_tutorial_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == {*TUTORIALS}


def test_what_a_page_shows_has_to_be_printed() -> None:
    printed = "loss 1.25, of 1,000\nname  │ 2.5e-3 │\nlast\n"
    assert not_printed("loss 1.3, of 999\nname │ 1e-3 │", printed) == []
    assert not_printed("loss 2.5, of 1,000", printed) == ["loss 2.5, of 1,000"]
    assert not_printed("lo…, of 1,000\nlast", printed) == []
    assert not_printed("last\nloss 1.25, of 1,000", printed) == ["loss 1.25, of 1,000"]  # in the wrong order
    assert not_printed("loss one", printed) == ["loss one"]


def test_cells_of_a_page() -> None:
    page = '# T\n\nwords\n\n```python\nx = 1\n```\n\n```text\nout\n```\n\n```python title="a.py"\ny\n```\nend\n'
    kinds = [(x.kind, x.title, x.output) for x in NOTEBOOKS.cells(page)]
    assert kinds == [("prose", "", ""), ("python", "", "out\n"), ("file", "a.py", ""), ("prose", "", "")]
    with pytest.raises(ValueError, match="got yaml"):
        NOTEBOOKS.cells("```yaml\na: 1\n```\n")
    with pytest.raises(ValueError, match="follows no code"):
        NOTEBOOKS.cells("```text\nout\n```\n")


@pytest.mark.parametrize("page", NOTEBOOKS.PAGES)
def test_notebook_holds_the_code_of_its_page(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    sources = ["".join(x["source"]) for x in NOTEBOOKS.notebook(text)["cells"] if x["cell_type"] == "code"]
    first = {"python": "", "bash": "%%bash\n"}
    parts = [x for x in NOTEBOOKS.cells(text) if x.kind in ("file", "bash", "python")]
    assert sources == [
        (first.get(x.kind) or (f"%%writefile {x.title}\n" if x.title else "")) + x.text[:-1] for x in parts
    ]
    for source in sources:
        if not source.startswith("%%"):
            compile(source, page, "exec")


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda path: path.name)
def test_tutorials_are_read_in_one_sitting(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) >= 60 and len(text.split()) <= 760
    assert "At the end you have" in text[:400]
