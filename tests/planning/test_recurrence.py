"""Models with a recurrence, planned: what the op holds is that of its own code, and layers have to be alike."""

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.planning.counting import recurrence
from lightning_dilated.planning.counting.memory_tracker import Meter
from lightning_dilated.planning.counting.model_specs import subject_of
from lightning_dilated.recurrence import op

SPECS = {"gated_delta": None, "linear": 40, "delta": 48}


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", SPECS)
def test_workspace_is_that_of_a_longer_call(kind, forward):
    """Counted at two short lengths, and held at a longer one, to a few percent."""
    spec = op.encode(kind, SPECS[kind], True)
    sizes, tokens = (4, 2, 16), 3000
    q, k, v = (torch.zeros(1, tokens, n, 16) for n in (4, 2, 2))
    func = op.RECURRENCE if forward else op.RECURRENCE_BACKWARD
    args = ([] if forward else [q]) + [q, k, v, None, None, None, None, spec]
    counted = recurrence.recurrence_workspace(func, args, Meter)
    held = recurrence._held(forward, tokens, sizes, torch.float32, spec, Meter())
    assert counted == pytest.approx(held, rel=0.03)
    assert counted > q.nbytes


def test_layers_that_differ_are_refused():
    model = ld.LongNetLM(ld.DilatedPattern.dense(64), dim=32, depth=2, num_heads=2, recurrence=[{}, None])
    with pytest.raises(ValueError, match=r"plan counts a recurrence that all layers have alike.*Plan it with one in all"):
        subject_of(model, "bf16-mixed")
