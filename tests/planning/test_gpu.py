"""The plan's peak beside the allocator's, of true steps on the GPUs that are here."""

import json

import pytest
import torch
import yaml

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.find_max import Trials
from lightning_dilated.models.memory import MemorySettings
from lightning_dilated.planning.counting.subjects import subject_of
from lightning_dilated.planning.estimate import Facts
from lightning_dilated.planning.gpus import find_gpu
from lightning_dilated.planning.longest import Case
from lightning_dilated.planning.memory import Setup

pytestmark = pytest.mark.gpu
TOKENS = 1 << 20  # enough that what DDP lets go 0.1 s after its first step is gone at the peak
PATTERN = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
#: and a branch over the shards of two ranks, for which rows are exchanged
WIDE = {"segment_lengths": [2048, 8192, 2 * TOKENS], "dilation_rates": [1, 4, 64]}
SIZES = {"dim": 512, "depth": 12, "num_heads": 8, "residual_dtype": "bfloat16"}
SETTINGS = MemorySettings("block", every=2, offload=1, tile=16384, head_chunks=4)
WAYS = [
    ("single", 1, PATTERN),
    ("ring_dilated", 2, PATTERN),
    ("ring_dilated_fsdp", 2, PATTERN),
    ("ring_dilated", 2, WIDE),
]


def planned(strategy, ranks, pattern):
    """Bytes of a rank."""
    model = LongNetLM(DilatedPattern.from_dict(pattern), **SIZES)
    gpu = find_gpu("H200")
    subject = subject_of(model, "bf16-mixed", None, False, gpu.capability)
    case = Case(subject, Facts.of(model, subject), Setup(strategy, ranks), gpu, host=64.0)
    found = case.memory(SETTINGS, TOKENS * ranks)
    assert (found.exchange.name is not None) == (pattern == WIDE)
    return found.peak


def measured(folder, strategy, ranks, pattern):
    """Bytes of the rank with most, of two steps."""
    told = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": vars(SETTINGS)}
    fused = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4, "fused": True}}
    settings = {
        "trainer": {"precision": "bf16-mixed", "callbacks": [told]},
        "model": {"class_path": "LongNetLM", "init_args": {"pattern": pattern, **SIZES, "optimizer": fused}},
        "data": {"class_path": "lightning_dilated.data.ByteDataModule", "init_args": {"seq_len": 4096}},
    }
    if strategy != "single":
        settings["trainer"]["strategy"] = strategy
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    found = Trials(["--config", str(path)], ranks, 200)(TOKENS * ranks)
    assert found.fits, found.message
    return found.allocated


@pytest.mark.parametrize(("strategy", "ranks", "pattern"), WAYS, ids=["one", "ddp", "fsdp", "ddp, rows"])
def test_peak(tmp_path, strategy, ranks, pattern):
    """On two GPUs block inputs once stayed that were done with."""
    pytest.importorskip("jsonargparse")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the plan is that of a GPU of capability 9.0")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    want = planned(strategy, ranks, pattern)
    assert measured(tmp_path, strategy, ranks, pattern) == pytest.approx(want, rel=0.03)
