"""HFCausalLM on one, two and four ranks: equal losses, and checkpoints that any number of ranks can load."""

import pytest
import torch

from lightning_dilated.callbacks.sharded_checkpoint import ShardedCheckpoint

from ...strategy.runs import Run, launched, make

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from .test_hf_causal_lm import HYBRID, Small

pytestmark = pytest.mark.slow

LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
MODELS = {
    "own attention": {"family": "gemma3", "depth": 3},
    "lora, hybrid": {"lora": LORA, "own": HYBRID},
}


def train(rank, group, run, save=None, load=None, sharded=None):
    """Losses of a run that begins with a checkpoint, or anew, and saves one at its end."""
    callbacks = [] if sharded is None else [ShardedCheckpoint(sharded, at_end=True)]
    options = {"enable_checkpointing": True} if callbacks else {}
    built, model, data, record = make(run, launched(rank), callbacks=callbacks, **options)
    built.fit(model, data, ckpt_path=load)
    if save is not None:
        built.save_checkpoint(save)
    return record.losses


def everywhere(pools, ranks, *args):
    """The losses, which are equal on all ranks."""
    first, *others = pools(ranks).run(ranks, train, *args)
    assert all(losses == first for losses in others)
    return torch.tensor(first)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)  # rotary tables are fp32


def lora_or_skip(name):
    if "lora" in name:
        pytest.importorskip("peft", reason="needs the extra lora")


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_on_one_two_and_four_ranks(pools, name):
    lora_or_skip(name)
    run = Run(cls=Small, model=MODELS[name], steps=10)
    want = everywhere(pools, 1, run)
    assert len(want) == 10 and want[-1] != want[0]
    for ranks in (2, 4):
        same(everywhere(pools, ranks, run), want)


@pytest.mark.parametrize("how", ["a file", "a folder of the callback", "sharded parameters"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_two_ranks_goes_on_on_others(pools, tmp_path, name, how):
    lora_or_skip(name)
    run = Run(cls=Small, model={**MODELS[name], "vocab_size": 256}, steps=6, schedule={0: 40})  # bytes, read on
    sharded = how == "sharded parameters"
    whole = everywhere(pools, 1, run.but(double=sharded))
    run = run.but(fsdp=sharded, double=sharded)
    path = str(tmp_path / "saved")
    begun = everywhere(pools, 2, run.but(steps=3), *((None, None, path) if "callback" in how else (path,)))
    same(begun, whole[:3])
    for ranks in (1, 2, 4):
        same(everywhere(pools, ranks, run, None, path), whole[3:])
