"""Models are planned through their hooks: a user's model, a model with its own __init__, layers without positions."""

import pytest
import torch
import yaml

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.memory_tracker import PARAMETERS, Meter
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of, example_of
from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.plan import run
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import DilatedTransformer

from .users_model import OwnInit, Signals

pytestmark = pytest.mark.full

PATTERN = ld.DilatedPattern.longnet([64, 128], [1, 2])


def saved(model, batch):
    """Return the bytes that are allocated after the forward, without the parameters."""
    model.train().configure_model()
    with Meter() as meter:
        parameters = meter.track(model.parameters(), PARAMETERS)
        loss, _ = model.token_mean(batch)
        return meter.live - parameters + 0 * loss.ndim


def planned(model, tokens):
    plan = footprint(counted_model_of(model, "32-true", compile_blocks=False), (1024, 2048))
    (between,) = (m for m in plan.moments if m.part == ("between",))
    return plan.held(between, tokens)


@pytest.mark.parametrize("make", [Signals, OwnInit])
def test_a_users_model(make):
    """Compare a user's model: its parameters, the bytes that a real step saves, and the longest sequence."""
    model = make()
    subject = counted_model_of(model, "32-true", compile_blocks=False)
    facts = Facts.of(model, subject)
    assert facts.parameters == sum(p.numel() for p in make().parameters()) and facts.depth == 3
    assert planned(model, 4096) == pytest.approx(saved(make(), example_of(model, 4096)), rel=0.002)
    case = Case(subject, facts, Setup("ring_dilated", 2, 2), GPUS["H200"])
    assert case.longest(MemorySettings("block")) > case.longest(MemorySettings()) > 1 << 20
    assert case.time(MemorySettings(), 1 << 20).seconds > 0
    assert not model._built  # planning did not build the model itself


def test_a_built_model_stays_as_it_is():
    """After an error in a run the model is already built. The planned copy must not share its weights."""
    model = OwnInit()
    model.configure_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    planned_copy = model.planning_copy(5)
    planned_copy.configure_model()
    assert len(planned_copy.transformer.blocks) == 5 and len(model.transformer.blocks) == 3
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert not set(before.values()) & {p.data_ptr() for p in planned_copy.parameters()}


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe for the user's model, which is defined in another module."""
    path = tmp_path / "users.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"class_path": f"{Signals.__module__}.Signals", "init_args": {"channels": 5}},
        "trainer": {"accelerator": "cpu"},
    }))  # fmt: skip
    return path


def test_the_command_plans_a_users_model(capsys, recipe):
    run(["--config", str(recipe), "--tokens", "64K", "--policy", "block", "--no-compile"])
    out = capsys.readouterr().out
    assert "model: Signals, " in out and "3 blocks of 16, 2 heads of 8" in out


class Other(ld.DilatedModule):
    """A model that lacks the attributes for planning."""

    depth = 2

    def example_batch(self, tokens):
        return {"tokens": torch.zeros(1, tokens, dtype=torch.int64)}

    def build(self):
        self.stack = DilatedTransformer(16, [PATTERN], 2, causal=True)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"Other.build\(\) must make self.transformer, .*depth=2.* stack of 1"):
        counted_model_of(Other())
    Other.depth = None
    with pytest.raises(ValueError, match="Other has no depth"):
        counted_model_of(Other())
