"""Plans of models with a recurrence: the op's memory is computed by its own code, its time from measurements."""

import functools
from dataclasses import replace

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting import workspace
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.ext.planning.counting.model_specs import Facts, counted_model_of
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.estimate import BANDWIDTH, Case
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.machine import measured_rules
from lightning_dilated.ext.planning.plan import recurrence_notes
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.recurrence import op, triton_chunks
from lightning_dilated.memory.settings import MemorySettings

pytestmark = pytest.mark.full

SPECS = {"gated_delta": None, "linear": 40, "delta": 48}


def call(tokens, whole=None):
    return OpCall(ld.DilatedPattern.dense(64), 4, 2, 16, True, tokens, torch.float32, whole=whole)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", SPECS)
def test_workspace_is_that_of_a_longer_call(kind, forward, monkeypatch):
    """An estimate from two short lengths equals a longer call. With windows, it covers a window and all stored states."""
    spec, tokens = op.encode(kind, SPECS[kind], True), 3000
    counted = workspace.recurrence_workspace(forward, call(tokens), spec, Meter)
    held = workspace._recurrence_held(forward, tokens, (4, 2, 16), torch.float32, spec, Meter())
    assert counted == pytest.approx(held, rel=0.03)
    monkeypatch.setattr(op, "WINDOW", 1000)
    monkeypatch.setattr(triton_chunks, "window", lambda *unused: 1000)
    less = workspace.recurrence_workspace(forward, call(tokens), spec, Meter)
    held = workspace._recurrence_held(forward, tokens, (4, 2, 16), torch.float32, spec, Meter())
    assert less == pytest.approx(held, rel=0.15) and less < 0.45 * counted
    assert workspace.recurrence_workspace(forward, call(tokens, 2 * tokens), spec, Meter) == counted  # of one rank


# -- in a model --------------------------------------------------------------------------------------------------------
GATED, LINEAR, KEPT = {"kind": "gated_delta"}, {"kind": "linear", "segment": 256}, MemorySettings("attention-kept")
TOKENS = 1 << 18


@functools.cache
def case(layers=(), gpu="H100", heads=4, precision="bf16-mixed"):
    """Return the case of a model of four layers: "g" means gated_delta, "l" linear, "-" no recurrence."""
    kinds = {"g": GATED, "l": LINEAR, "-": None}
    sizes = {"dim": 64 * heads, "depth": 4, "num_heads": heads}
    model = ld.LongNetLM(ld.DilatedPattern.longnet([2048], [1]), **sizes, recurrence=[kinds[x] for x in layers or "-"])
    subject = counted_model_of(model, precision, None, False)
    return Case(subject, Facts.of(model, subject), Setup(), find_gpu(gpu))


def seconds(settings=KEPT, tokens=TOKENS, **options):
    """Return the seconds that all recurrences of a step take."""
    return case(**options).time(settings, tokens).step.compute.get("recurrence", 0.0)


def test_layers_that_differ_lie_between():
    """With a recurrence in half of the layers, its time is half, and memory is between none and all."""
    none, half, whole = (case(layers) for layers in ("", "-g", "g"))
    peaks = [x.memory(KEPT, TOKENS).peak for x in (none, half, whole)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert seconds() == 0 < seconds(layers="-g") == pytest.approx(seconds(layers="g") / 2)
    steps = [x.time(KEPT, TOKENS).seconds for x in (none, half, whole)]
    assert steps[1] - steps[0] == pytest.approx(seconds(layers="-g"), rel=0.02)  # includes the parameters' optimizer
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=0.01)
    parameters = [x.facts.parameters for x in (none, half, whole)]
    assert parameters[2] - parameters[1] == parameters[1] - parameters[0] > 0
    assert half.facts.block_parameters == none.facts.block_parameters


def test_the_rule_takes_what_was_measured():
    """The rule's time is proportional to heads, tokens and 1 / FLOP/s. Memory bandwidth limits operators around it."""
    layer, times = case("g").facts.recurrences[0], measured_rules()
    forward, backward = times.of("gated_delta", times.tokens * layer.flops * 3)  # the measurement had twelve heads
    assert (forward, backward) == pytest.approx(tuple(times.rules["gated_delta"].values()))
    around = 4 * TOKENS * (2 * layer.forward.moved + layer.backward.moved) / BANDWIDTH
    rule = 4 / 3 * (forward + backward)
    assert seconds(layers="g") == pytest.approx(rule + around * 4.8 / 3.35, rel=1e-3)
    assert seconds(layers="g", gpu="H200") == pytest.approx(rule + around, rel=1e-3)
    slower = rule * 989.4 / 312 + around * 4.8 / 2.039
    assert seconds(layers="g", gpu="A100") == pytest.approx(slower, rel=1e-3)
    assert seconds(layers="g", tokens=2 * TOKENS) == pytest.approx(2 * seconds(layers="g"), rel=1e-3)
    assert seconds(layers="g", heads=8) == pytest.approx(2 * seconds(layers="g"), rel=0.05)
    once = seconds(MemorySettings(), layers="g")
    again = 4 * TOKENS * layer.forward.moved / BANDWIDTH * 4.8 / 3.35
    assert seconds(layers="g") - once == pytest.approx(again, rel=1e-3)
    assert seconds(MemorySettings("block"), layers="g") - once == pytest.approx(again + 4 / 3 * forward, rel=1e-3)


def test_what_is_around_the_rule():
    """Count passes over the rows of all heads by hand: the convolution reads and writes q, k and v once (three rows);
    its backward reads them and their gradients, and writes the gradients of its inputs.
    """
    layers = [{"kind": "gated_delta", "conv": taps} for taps in (0, 4)]
    model = ld.LongNetLM(ld.DilatedPattern.dense(64), dim=256, depth=2, num_heads=4, recurrence=layers)
    without, convolved = Facts.of(model, counted_model_of(model)).recurrences
    row = 256 * 2
    assert convolved.forward.beyond(without.forward) == (0, pytest.approx(6 * row, rel=0.01))
    assert convolved.backward.beyond(without.backward) == (0, pytest.approx(9 * row, rel=0.05))
    assert 4 * row < without.forward.moved < 8 * row


@pytest.mark.parametrize("options, says", [
    ({"layers": "l"}, "only gated_delta was measured"),
    ({"layers": "g", "precision": "32-true"}, "only rows of 16 bits"),
])  # fmt: skip
def test_a_rule_that_was_not_measured_is_said_to_be_left_out(options, says):
    (layer,), planned_case = case(**options).facts.recurrences, case(**options)
    assert says in layer.unmeasured
    around = seconds(MemorySettings(), **options)
    assert 0 < around < 4 * TOKENS * (layer.forward.moved + layer.backward.moved) / BANDWIDTH * 1.5
    notes = " ".join(recurrence_notes(planned_case))
    assert f"{3 * 4 * layer.flops:.3g} FLOPs a token of a step, has no time here: {says}" in notes
    assert "rule as measured on" not in notes


def test_notes_say_what_is_counted():
    notes = " ".join(recurrence_notes(case("gl")))
    assert "as measured on NVIDIA H100" in notes and "only gated_delta was measured" in notes
    assert recurrence_notes(case("")) == []


def test_model_flops_have_the_rules():
    """As in `step_flops`, the rule counts three times its forward."""
    flops = [case(layers).time(KEPT, TOKENS).flops for layers in ("", "g")]
    layer = case("g").facts.recurrences[0]
    assert flops[1] - flops[0] == pytest.approx(3 * 4 * layer.flops * TOKENS)


def test_ranks_compute_their_own_tokens():
    several = replace(case("g"), setup=Setup("ring_dilated", 4))
    own = several.time(KEPT, TOKENS).step.compute["recurrence"]
    assert own == pytest.approx(seconds(layers="g") / 4, rel=1e-3)
