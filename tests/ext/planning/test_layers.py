"""Memory of models whose layers differ in positions and recurrences, beside a count of the whole model."""

import itertools
from collections import defaultdict

import pytest

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting import dry_run
from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.memory_tracker import Tape
from lightning_dilated.ext.planning.counting.model_specs import subject_of
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern

pytestmark = pytest.mark.full

PATTERN, TOKENS = DilatedPattern.longnet([64, 128], [1, 2]), 5120
LINEAR = {"kind": "linear", "segment": 256}
MODELS = {
    "all have positions": {"rotary_base": [1e4]},
    "none has": {"rotary_base": ["none"]},
    "half have": {"rotary_base": ["none", 1e4]},
    "one of four has": {"rotary_base": ["none", 1e4, "none", "none"]},
    "every second recurs": {"recurrence": [None, LINEAR]},
    "the first of four recurs": {"recurrence": [LINEAR, None, None, None]},
    "both differ": {"recurrence": [LINEAR, None, None], "rotary_base": [1e4, "none"]},
}
SETTINGS = {
    "none": (MemorySettings(), False),
    "block": (MemorySettings("block"), False),
    "attention-kept": (MemorySettings("attention-kept"), False),
    "groups": (MemorySettings("block", 2), False),
    "compiled": (MemorySettings("attention-kept"), True),
}


def counted(model, settings, compiled):
    """(the footprint, a tape of the whole model's step)."""
    subject = subject_of(model, "bf16-mixed", settings, compiled)
    graphs = Graphs(Tape()) if compiled else None
    whole = dry_run.step(
        lambda: model.planning_copy(model.depth), lambda: subject.batch(TOKENS), subject.precision, settings, graphs
    )
    return footprint(subject, (3072, 4096)), whole.pieces


def layer_of(place):
    """The part of the step of the whole model."""
    part = place.moment.part
    return part if place.start is None else (part[0], place.start + part[2])


#: those that CI runs
QUICK = {
    ("both differ", "none"),
    ("one of four has", "block"),
    ("half have", "none"),
    ("the first of four recurs", "block"),
}


@pytest.mark.parametrize("name, settings", [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in itertools.product(MODELS, SETTINGS)
])  # fmt: skip
def test_the_peak_is_exact(name, settings):
    model = ld.LongNetLM(PATTERN, dim=64, depth=6, num_heads=4, num_kv_heads=2, **MODELS[name])
    found, pieces = counted(model, *SETTINGS[settings])
    places = list(found.places(6, gradients=True))
    assert max(found.held_at(x, 6, TOKENS) for x in places) == max(x.peak - x.static for x in pieces)
    of_parts, static = defaultdict(list), {x.part: x.static for x in pieces}
    for piece in pieces:
        of_parts[piece.part].append(piece.peak - piece.static)
    for part in {layer_of(x) for x in places}:
        here = [x for x in places if layer_of(x) == part]
        held = max(found.held_at(x, 6, TOKENS) for x in here)
        # a layer without positions is planned as if tables were still held
        assert max(of_parts[part]) * 0.99 <= held <= max(of_parts[part]) * 1.01 + 2 * TOKENS * 16 * 4, part
        assert {found.static_at(x, 6) for x in here[-1:]} == {static[part]}, part


def test_kinds_of_layers():
    """As few as there are, in the order in which layers have them; values that parameters begin with are no difference."""
    recurrences = [{"gate_init": 0.5}, None, {}]
    model = ld.LongNetLM(PATTERN, dim=32, depth=6, num_heads=2, recurrence=recurrences, rotary_base=[1e4, "none"])
    subject = subject_of(model, "bf16-mixed")
    assert subject.layers == (0, 1, 0, 2, 3, 2) and len(subject.kinds) == 4
    alike = [{*zip(kind(2).rotary_bases, kind(2).recurrences, strict=True)} for kind in subject.kinds]
    assert [len(x) for x in alike] == [1] * 4 and len(set.union(*alike)) == 4
