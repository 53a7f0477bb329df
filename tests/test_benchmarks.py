"""Every benchmark script prints its options by `--help`; each figure exists, and a page of results has its rows."""

import json
import runpy
import subprocess
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


def test_peak_of_counts_what_is_live_at_the_peak() -> None:
    script = runpy.run_path(str(ROOT / "peak_of.py"))
    frame = lambda folder, name: {"filename": f"/x/{folder}/{name}.py", "line": 7, "name": "run"}  # noqa: E731
    stacks = [[frame("torch", "nn"), frame("models", "own")], [frame("torch", "nn")], []]
    event = lambda action, addr, size, stack=(): {"action": action, "addr": addr, "size": size, "frames": stack}  # noqa: E731
    events = [
        event("free_requested", 9, 8),  # allocated before the snapshot
        event("alloc", 1, 3 << 20, stacks[0]),
        event("alloc", 2, 1 << 20, stacks[1]),
        event("free_requested", 1, 3 << 20),
        event("alloc", 1, 2 << 20, stacks[0]),
        event("alloc", 3, 2 << 20, stacks[0]),
        event("alloc", 4, 1 << 19, stacks[2]),
        event("free_requested", 2, 1 << 20),
        event("alloc", 5, 1 << 19, stacks[1]),
    ]
    rows = script["table"](events).splitlines()[2:]
    assert rows == [
        "| 4.0 | 2 | models/own.py:7 run |", "| 1.0 | 1 | torch/nn.py:7 run |", "| 0.5 | 1 | no Python frame |",
        "| 5.5 | | all |",
    ]  # fmt: skip
    assert script["at_peak"]([]) == (0, [])
    # the peak is before an older allocation is freed, though newer ones have more bytes afterwards
    events = [event("alloc", 1, 4), event("free_requested", 9, 8), event("alloc", 2, 3)]
    assert script["at_peak"](events) == (4, events[:1])


@pytest.mark.slow
def test_one_rank_runs_without_the_others():
    """A rank of four asks for rows in both passes, and its steps end."""
    sizes = "--tokens 2048 --dim 32 --depth 1 --heads 2 --hybrid 1 --layout zigzag --no-compile --precision 32-true"
    options = f"--ranks 4 --rank 1 {sizes} --warm 1 --steps 1 --accelerator cpu".split()
    script = [sys.executable, str(ROOT / "one_rank.py"), *options]
    run = subprocess.run(script, capture_output=True, text=True, timeout=120)
    rows = [x.split(" | ") for x in run.stdout.splitlines() if x.startswith("| 4 |")]
    assert run.returncode == 0 and len(rows) == 1, run.stdout + run.stderr[-2000:]
    assert all(float(x) > 0 for x in rows[0][10:12])


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
