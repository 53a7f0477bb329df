"""Memory of models whose layers differ in positions and recurrences, beside a count of the whole model."""

import itertools

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
def test_each_piece_is_exact(name, settings):
    model = ld.LongNetLM(PATTERN, dim=64, depth=6, num_heads=4, num_kv_heads=2, **MODELS[name])
    planned, pieces = counted(model, *SETTINGS[settings])
    for moment, piece in zip(planned.moments, pieces, strict=True):
        assert (planned.held(moment, TOKENS), moment.static) == (piece.peak - piece.static, piece.static), piece
