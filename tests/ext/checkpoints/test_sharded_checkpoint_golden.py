"""Folders of an earlier version still load, and training continues from them with the recorded losses.

`tests/golden/checkpoint_folder` has checkpoints that two ranks wrote at step 2. `expected.json` has results of steps 3
and 4. To record new ones next to them: `python -m tests.ext.checkpoints.test_sharded_checkpoint_golden FOLDER`.
"""

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightning_dilated import LongNetLM
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint.folder import read_whole
from lightning_dilated.checkpoint.reader import read_metadata
from lightning_dilated.checkpoint.state import flatten_low_bit, unflatten_low_bit

from ...distributed.pool import Pool
from .checkpoint_runs import run, with_options, write_text

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint_folder"
STEPS = 4


class EightBit(LongNetLM):
    """A model that is wide enough for 8-bit states of torchao."""

    def __init__(self, pattern, dim, **options):
        optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")
        options["optimizer"] = functools.partial(optim.AdamW8bit, lr=3e-3)
        super().__init__(pattern, dim=64, ffn_dim=64, vocab_size=263, **options)

    def double(self):
        return self  # torchao's kernels compute in fp32


DDP, FSDP = {"strategy": "ring_dilated"}, {"strategy": "ring_dilated_fsdp"}
CASES = {"ring_dilated": DDP, "ring_dilated_fsdp": FSDP, "eightbit": {**DDP, "model": EightBit}}
#: name of a recorded folder -> the other strategy that loads it; FSDP cannot load unsharded 8-bit states
OTHERS = {"ring_dilated": FSDP, "ring_dilated_fsdp": DDP}
#: largest allowed relative difference of a loss, because machines may differ
ALLOWED = {"ring_dilated": 1e-9, "ring_dilated_fsdp": 1e-9, "eightbit": 1e-3}


def in_eager(rank, group, *args):
    """Call `with_options` without torchao's compilation."""
    with torch.compiler.set_stance("force_eager"):
        return with_options(rank, group, *args)


def go_on(pool, text, folder, options):
    """Return the results of two ranks that resume from a checkpoint, without saving."""
    run_options = {"ckpt_path": str(folder), "begun": 2, "enable_checkpointing": False, **options}
    return pool.run(2, in_eager, text, STEPS, None, run_options)[0]


def check(name, result):
    want = json.loads((GOLDEN / "expected.json").read_text())[name]
    assert result["step"] == STEPS and float(result["rate"]) == pytest.approx(want["rate"])
    assert result["losses"] == pytest.approx(want["losses"], rel=ALLOWED[name])
    norm = float(result["parameters"].double().norm())
    assert norm == pytest.approx(want["norm"], rel=ALLOWED[name])


@pytest.mark.full
@pytest.mark.parametrize("name, options", [*CASES.items(), *OTHERS.items()], ids=str)
def test_goes_on_from_an_earlier_folder(pool, text, tmp_path, name, options):
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    check(name, go_on(pool, text, folder, options))


@pytest.mark.parametrize("name", ["ring_dilated", "ring_dilated_fsdp"])
def test_one_rank_goes_on_from_an_earlier_folder(text, tmp_path, name):
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    saver = ShardedCheckpoint(str(folder), resume="must", at_end=False)
    check(name, run(text, STEPS, saver, begun=2))


@pytest.mark.parametrize("name", CASES)
def test_what_an_earlier_folder_holds(name):
    if name == "eightbit":
        pytest.importorskip("torchao.optim", reason="needs the extra eightbit")
    stored = read_whole(GOLDEN / name / "step-00000002")
    (states,) = stored["optimizer_states"]
    names, shapes = list(stored["state_dict"]), {x.shape for x in stored["state_dict"].values()}
    assert stored["global_step"] == 2 and len(stored["lr_schedulers"]) == 1 and "loops" in stored
    numbers = [i for group in states["param_groups"] for i in group["params"]]
    assert numbers == sorted(states["state"]) == list(range(len(names) - 1))  # two tied weights are one parameter
    assert {s["exp_avg"].shape for s in states["state"].values()} == shapes
    kinds = {type(s["exp_avg"]).__name__ for s in states["state"].values()}
    assert ("OptimState8bit" in kinds) == (name == "eightbit")


def test_low_bit_attributes_are_read_from_the_old_key():
    """The golden folder stores low-bit attributes under the old key `told`. New states use the key `attributes`."""
    pytest.importorskip("torchao.optim", reason="needs the extra eightbit")
    folder = GOLDEN / "eightbit" / "step-00000002"
    assert any(key.endswith(".OptimState8bit.told") for key in read_metadata(folder).state_dict_metadata)
    (states,) = read_whole(folder)["optimizer_states"]
    state = next(s["exp_avg"] for s in states["state"].values() if type(s["exp_avg"]).__name__ == "OptimState8bit")
    flat = flatten_low_bit({"exp_avg": state})
    assert flat["exp_avg"]["OptimState8bit"].keys() == {"codes", "scale", "qmap", "attributes"}
    assert torch.equal(unflatten_low_bit(flat)["exp_avg"].dequantize(), state.dequantize())


def record(folder):
    """Write the folders and the expected results with the current code."""
    expected, pool = {}, Pool(2)
    text = write_text(folder)
    for name, options in CASES.items():
        saved = {"folder": str(folder / name), "every_n_train_steps": None}
        pool.run(2, in_eager, text, 2, saved, options)
        result = go_on(pool, text, folder / name, options)
        norm = float(result["parameters"].double().norm())
        expected[name] = {"losses": result["losses"], "rate": float(result["rate"]), "norm": norm}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    pool.close()
    shutil.rmtree(folder / "text")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
