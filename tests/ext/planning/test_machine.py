"""Measurements of a device: interpolation, extrapolation, a file, and refusal for another model."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.step_parts import fit_line
from lightning_dilated.ext.planning.machine import Line, Machine, Parts

from .machines import MS, machine, parts

PARTS = Path(__file__).parents[3] / "benchmarks" / "step_parts.py"


@pytest.mark.parametrize(
    "points, want",
    [
        ([(0, 2.0), (10, 7.0)], Line(2.0, 0.5)),
        ([(10, 7.0), (20, 12.0), (40, 22.0)], Line(2.0, 0.5)),
        ([(10, 3.0), (20, 3.0)], Line(3.0, 0.0)),
        ([(10, 1.0), (20, 3.0)], None),  # a line through these points is negative at 0
        ([(10, 3.0), (20, 1.0)], None),
    ],
)
def test_fit(points, want):
    line = fit_line(points)
    if want is not None:
        assert (line.fixed, line.each) == pytest.approx((want.fixed, want.each))
    assert line.fixed >= 0 and line.each >= 0
    low, high = sorted(y for _, y in points)[0], sorted(y for _, y in points)[-1]
    assert all(low / 2 <= line.of(x) <= 2 * high for x, _ in points)


def test_line():
    assert Line(2.0, 0.5).of(10) == 7 and Line(2.0, 0.5).of(10, calls=3) == 11


@pytest.mark.parametrize("tokens, want", [(64, 1.0), (96, 3.0), (128, 5.0), (32, 0.5), (256, 10.0)])
def test_between_and_beyond(tokens, want):
    """With 6 ms at 64 tokens and 30 ms at 128, times are linear in between and proportional outside."""
    steep = dataclasses.replace(parts(64), tokens=128, rest_forward=30 * MS)
    part = machine(parts=(parts(64), steep)).at(tokens)
    assert part.tokens == tokens and part.rest_forward == pytest.approx(want * 6 * MS)


def test_file(tmp_path):
    path = tmp_path / "machine.json"
    machine().save(path)
    assert Machine.load(path) == machine()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("again"), "a Machine lacks again"),
        (lambda x: x.update(colour=1), "has unknown colour"),
        (lambda x: x["pack"].pop("each"), "a Line lacks each"),
        (lambda x: x["parts"][0].pop("rest_forward"), "a Parts lacks rest_forward"),
        (lambda x: x.update(optimizer=-1.0), "optimizer must be a number in .0, inf., got -1.0"),
        (lambda x: x["parts"].reverse(), "rising tokens"),
        (lambda x: x.update(parts=[]), "rising tokens"),
        (lambda x: x.update(precision="fp7"), "precision must be one of"),
        (lambda x: x.update(kv_heads=3), "kv_heads=3 must divide heads=2"),
    ],
)
def test_damaged_file(tmp_path, change, message):
    fields = dataclasses.asdict(machine())
    fields["parts"] = list(fields["parts"])
    change(fields)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        Machine.load(path)
    path.write_text("nothing")
    with pytest.raises(ValueError, match="is no JSON"):
        Machine.load(path)


def test_another_model():
    assert machine().require(dim=16, causal=False) == machine()
    with pytest.raises(ValueError, match=r"dim=768 \(measured: 16\), causal=True \(measured: False\)"):
        machine().require(dim=768, heads=2, causal=True)
    with pytest.raises(TypeError, match="'width' is no size"):
        machine().require(width=3)


def test_numbers_are_checked():
    with pytest.raises(ValueError, match=r"Parts.tokens must be at least 1"):
        Parts(0, *[0.0] * 8)
    with pytest.raises(ValueError, match=r"Line.fixed must be a number in"):
        Line(float("nan"), 0.0)


@pytest.mark.slow
def test_measured_on_this_machine(tmp_path, monkeypatch):
    """Run the complete script on the package's own layers, at tiny sizes."""
    path = tmp_path / "cpu.json"
    sizes = "--tokens 64 128 --first 32 --dim 16 --depth 2 --heads 2 --repeats 1 --precision 32-true --no-compile"
    sizes += " --long 128"
    monkeypatch.setattr(sys, "argv", ["step_parts.py", "--output", str(path), "--device", "cpu", *sizes.split()])
    runpy.run_path(str(PARTS), run_name="__main__")
    read = Machine.load(path)
    assert read.require(dim=16, depth=2, heads=2, causal=True, first=32) and [p.tokens for p in read.parts] == [
        64,
        128,
    ]
    # in_proj, out_proj, gate, fc1, fc2 (64 hidden features), two norms; tied embedding and the last norm
    assert (read.block_parameters, read.edge_parameters) == (4 * 256 + 3 * 1024 + 32, 256 * 16 + 16)
    assert min(read.optimizer, *(x for p in read.parts for x in (p.attention_forward, p.attention_backward))) > 0
    lines = read.arrive_forward, read.arrive_backward, read.pack, read.add, read.few_forward, read.few_backward
    assert all(line.of(1e6) > 0 for line in lines)
    assert 0 < read.long_forward < read.long_backward
