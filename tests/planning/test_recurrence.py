"""Models with a recurrence, planned: what the op holds is that of its own code, and layers have to be alike."""

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.planning.counting import workspace
from lightning_dilated.planning.counting.memory_tracker import Meter
from lightning_dilated.planning.counting.model_specs import subject_of
from lightning_dilated.planning.counting.workspace import OpCall
from lightning_dilated.recurrence import op, triton_chunks

SPECS = {"gated_delta": None, "linear": 40, "delta": 48}


def call(tokens, whole=None):
    return OpCall(ld.DilatedPattern.dense(64), 4, 2, 16, True, tokens, torch.float32, whole=whole)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", SPECS)
def test_workspace_is_that_of_a_longer_call(kind, forward, monkeypatch):
    """Counted at two short lengths, and held at a longer one, to a few percent; in windows no more than that of one and what
    passes between them."""
    spec, tokens = op.encode(kind, SPECS[kind], True), 3000
    counted = workspace.recurrence_workspace(forward, call(tokens), spec, Meter)
    held = workspace._recurrence_held(forward, tokens, (4, 2, 16), torch.float32, spec, Meter())
    assert counted == pytest.approx(held, rel=0.03)
    monkeypatch.setattr(op, "WINDOW", 1000)
    monkeypatch.setattr(triton_chunks, "window", lambda *unused: 1000)
    less = workspace.recurrence_workspace(forward, call(tokens), spec, Meter)
    held = workspace._recurrence_held(forward, tokens, (4, 2, 16), torch.float32, spec, Meter())
    assert less == pytest.approx(held, rel=0.15) and less < 0.45 * counted
    assert workspace.recurrence_workspace(forward, call(tokens, 2 * tokens), spec, Meter) == counted  # ranks share it


def test_layers_that_differ_are_refused():
    model = ld.LongNetLM(ld.DilatedPattern.dense(64), dim=32, depth=2, num_heads=2, recurrence=[{}, None])
    with pytest.raises(
        ValueError, match=r"plan counts a recurrence that all layers have alike.*Plan it with one in all"
    ):
        subject_of(model, "bf16-mixed")
