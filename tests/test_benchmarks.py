"""Every benchmark script prints its options by `--help`; each figure exists, and a page of results has its rows."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path for path in ROOT.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help(path, monkeypatch, capsys):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:  # modules in different folders have the same name
            if str(ROOT) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


# -- figures and their rows --------------------------------------------------------------------------------------------
CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
STREAMS = sorted(RESULTS.glob("*_streams.jsonl"))
TABLES = [
    {cell.strip(" *") for cell in line.split("|")}
    for page in RESULTS.glob("*.md")
    for line in page.read_text().splitlines()
    if line.startswith("|")
]


@pytest.mark.parametrize("line", [line for file in STREAMS for line in file.read_text().splitlines()])
def test_each_stream_has_its_row(line: str) -> None:
    row = json.loads(line)
    cells = {f"{row['tokens']:,}", *(str(row[key]) for key in ("planned_gib", "gib", "seconds"))}
    assert any(cells <= table for table in TABLES), cells


def test_streams_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "streams.png"
    monkeypatch.setattr(sys, "argv", ["draw_streams.py", *map(str, STREAMS), str(picture)])
    script = runpy.run_path(str(CHECKOUT / "benchmarks" / "draw_streams.py"))
    script["main"]()
    assert picture.read_bytes()[:4] == b"\x89PNG"
