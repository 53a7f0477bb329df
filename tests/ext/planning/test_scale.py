"""The table and the picture of estimated steps."""

import runpy
import sys
from pathlib import Path

import pytest

from lightning_dilated.sequence.planner import Links

from .machines import machine

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulate_scale.py"
sys.path.insert(0, str(SCRIPT.parent))
from scale_tables import Setting, scale_plot, sweep, table  # noqa: E402 - a benchmark's part

SETTING = Setting(machine(), 4, Links(near=1e6, far=1e5))


def test_sweep_leaves_out_what_does_not_serve():
    steps = sweep(SETTING, [64, 128], [1, 4, 16], ["gather", "hierarchical_butterfly"])
    names = [None, "gather", "gather", "hierarchical_butterfly"]
    assert [(s.tokens // s.ranks, s.exchange) for s in steps] == [(n, x) for n in (64, 128) for x in names]
    with pytest.raises(ValueError, match="'post' is no exchange"):
        sweep(SETTING, [64], [1], ["post"])


def _table(setting, ranks):
    return table(setting, sweep(setting, [64], ranks, ["gather"]))


def test_table():
    """The bytes of one layer are averaged over ranks: 16 rows of 32 bytes, and their gradients in fp32."""
    head, _, one, two = _table(Setting(machine(), 1, Links(round=1e-12)), [1, 2])
    assert one.split(" | ")[:4] == ["| 64", "1", "64", "none"] and one.endswith("| 115.0 | 0.6 | 100.0 % |")
    assert two.split(" | ")[4:6] == ["0.00 (0.00)", "0.00 (0.00)"] and head.count("|") == two.count("|")
    wide = Setting(machine(head_dim=8000), 1, Links(round=1e-12))
    (line,) = _table(wide, [2])[2:]
    assert line.split(" | ")[4:6] == ["0.51 (0.51)", "1.02 (1.02)"]


def test_plots(tmp_path):
    steps = sweep(SETTING, [64, 128], [1, 2, 4, 16])
    scale_plot(steps, tmp_path / "scale.png", SETTING.assumptions())
    assert (tmp_path / "scale.png").read_bytes()[:4] == b"\x89PNG"


def test_assumptions_name_the_links():
    text = SETTING.assumptions()
    assert (
        "made up" in text
        and "0.001 GB/s a GPU inside it, 0.0001 GB/s a GPU between nodes" in text
        and "4 GPUs a node" in text
        and "links: given" in text
    )


def run_script(tmp_path, monkeypatch, options: str) -> list[str]:
    """Return the lines that the script writes."""
    machine().save(tmp_path / "m.json")
    files = ["--machine", str(tmp_path / "m.json"), "--record", str(tmp_path / "r.md")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulate_scale.py", *files, *options.split()])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return (tmp_path / "r.md").read_text().splitlines()


def test_script(tmp_path, monkeypatch, capsys):
    """If a step took the estimated time, the deviation is 0. If it took 1.5 times as long, the deviation is -1/3."""
    options = "--tokens 64 --ranks 1 2 --round 1e-12 --plot p.png"
    lines = run_script(tmp_path, monkeypatch, f"{options} --measured 1:64:115 1:64:172.5 2:64:500:gather")
    assert "| 1 | 64 | none | 115.0 | 115.0 | +0.0 % | 0.00 |" in lines
    assert "| 1 | 64 | none | 172.5 | 115.0 | -33.3 % | 0.00 |" in lines
    assert any(x.startswith("| 2 | 64 | gather | 500.0 |") for x in lines) and lines[1] in capsys.readouterr().out
    assert (tmp_path / "p.png").exists()


def test_calibrated(tmp_path, monkeypatch):
    """With 64 tokens, a step of one GPU took 5 ms longer than its parts. With 128 tokens, it took 9 ms longer."""
    options = "--no-table --round 1e-12 --calibrate --measured 2:64:500:gather"
    lines = run_script(tmp_path, monkeypatch, f"{options} 1:128:232 1:64:120")
    assert "5.0 ms with 64 tokens, 9.0 ms with 128 tokens" in lines[1]
    assert "| 1 | 64 | none | 120.0 | 120.0 | +0.0 % | 0.00 |" in lines
    assert "| 1 | 128 | none | 232.0 | 232.0 | +0.0 % | 0.00 |" in lines
    assert any("gave what is beyond the parts" in x for x in lines)
    with pytest.raises(SystemExit, match="needs a step of one GPU"):
        run_script(tmp_path, monkeypatch, options)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(32, 2.0), (64, 4.0), (96, 5.0), (128, 6.0), (192, 8.0), (256, 10.0), (512, 20.0)]
)
def test_overheads(tokens, seconds):
    setting = Setting(machine(), overheads=((64, 4.0), (128, 6.0), (256, 10.0)))
    assert setting.overhead(tokens) == pytest.approx(seconds)
    assert Setting(machine()).overhead(tokens) == 0
    assert Setting(machine(), overheads=((64, 4.0),)).overhead(tokens) == pytest.approx(tokens / 16)


def test_links_of_a_file(tmp_path, monkeypatch):
    Links(near=3e9, source="measured here").save(tmp_path / "links.json")
    files = "--no-table --measured 1:64:115 --links links.json"
    (tmp_path / "r.md").touch()
    assert "3 GB/s a GPU inside it" in (line := run_script(tmp_path, monkeypatch, files)[1])
    assert "links: measured here" in line
    assert "5 GB/s a GPU inside it" in run_script(tmp_path, monkeypatch, f"{files} --near 5e9")[-6]


def test_parts_longer_than_the_step(tmp_path, monkeypatch):
    """If the parts take longer than the step, the overhead is 0."""
    lines = run_script(tmp_path, monkeypatch, "--no-table --calibrate --measured 1:64:100")
    assert "0.0 ms with 64 tokens" in lines[1]
    assert "| 1 | 64 | none | 100.0 | 115.0 | +15.0 % | 0.00 |" in lines
