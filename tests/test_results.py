"""Each figure exists, and a page of benchmarks/results has its rows."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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
    script = runpy.run_path(str(ROOT / "benchmarks" / "draw_streams.py"))
    script["main"]()
    assert picture.read_bytes()[:4] == b"\x89PNG"
