"""The planned peak against the allocator's peak in real steps, on the GPUs of this machine."""

import json

import pytest
import torch
import yaml

from benchmarks.find_max import Trials
from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import GIB
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings

pytestmark = pytest.mark.gpu
TOKENS = 1 << 20  # long enough that memory which DDP frees 0.1 s after its first step is free again at the peak
PATTERN = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
#: one branch crosses the shards of two ranks, which exchange its rows
WIDE = {"segment_lengths": [2048, 8192, 2 * TOKENS], "dilation_rates": [1, 4, 64]}
SIZES = {"dim": 512, "depth": 12, "num_heads": 8, "residual_dtype": "bfloat16"}
SETTINGS = MemorySettings("block", every=2, offload=1, tile=16384, head_chunks=4)
WAYS = [
    ("single", 1, PATTERN),
    ("ring_dilated", 2, PATTERN),
    ("ring_dilated_fsdp", 2, PATTERN),
    ("ring_dilated", 2, WIDE),
]


def planned(strategy, ranks, pattern, precision="bf16-mixed", optimizer="adamw", **options):
    """Return the planned memory of one rank."""
    model = LongNetLM(DilatedPattern.from_dict(pattern), **SIZES, **options)
    gpu = find_gpu("H200")
    subject = counted_model_of(model, precision, None, None, gpu.capability)
    case = Case(subject, Facts.of(model, subject), Setup(strategy, ranks, optimizer=optimizer), gpu, host=64.0)
    plan = case.memory(SETTINGS, TOKENS * ranks)
    assert (plan.exchange.name is not None) == (pattern == WIDE)
    return plan


FUSED = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4, "fused": True}}
EIGHT = {"class_path": "torchao.optim.AdamW8bit", "init_args": {"lr": 1e-4}}


def measured(folder, strategy, ranks, pattern, precision="bf16-mixed", optimizer=FUSED, **options):
    """Run and measure two steps. Return the result of the rank with the highest peak."""
    recompute = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": vars(SETTINGS)}
    settings = {
        "trainer": {"precision": precision, "callbacks": [recompute]},
        "model": {
            "class_path": "LongNetLM",
            "init_args": {"pattern": pattern, **SIZES, **options, "optimizer": optimizer},
        },
        "data": {"class_path": "lightning_dilated.data.ByteDataModule", "init_args": {"seq_len": 4096}},
    }
    if strategy != "single":
        settings["trainer"]["strategy"] = strategy
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    trial = Trials(["--config", str(path)], ranks, 200)(TOKENS * ranks)
    assert trial.fits, trial.message
    return trial


def alone(ranks):
    """Skip unless this machine has the planned GPUs."""
    pytest.importorskip("jsonargparse")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the plan is that of a GPU of capability 9.0")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


#: bytes of a rank's tokens, labels and small tables in pinned memory
BATCH = 2 * 8 * TOKENS + 4096


def agrees(trial, want):
    """Compare the GPU's peak and host memory. The host may use four more batches, and 5 GiB for libraries."""
    print(f"{trial}; planned {want.peak / GIB:.1f} GiB, {want.host / GIB:.1f} of the host")
    assert trial.allocated == pytest.approx(want.peak, rel=0.03)
    assert 0.99 * want.host <= trial.pinned <= want.host + 4 * BATCH and trial.host < want.host + 5 * GIB


@pytest.mark.parametrize(("strategy", "ranks", "pattern"), WAYS, ids=["one", "ddp", "fsdp", "ddp, rows"])
def test_peak(tmp_path, strategy, ranks, pattern):
    """Block inputs must be freed after their last use, on two GPUs as on one."""
    alone(ranks)
    agrees(measured(tmp_path, strategy, ranks, pattern), planned(strategy, ranks, pattern))


@pytest.mark.parametrize("compiled", [False, True])
def test_peak_of_a_model_in_16_bits(tmp_path, compiled):
    """0.2 billion parameters in 16 bits, most of them in the embedding. Nothing is offloaded."""
    pytest.importorskip("torchao")
    alone(1)
    options = {"vocab_size": 1 << 17, "tie_embeddings": False, "precision": "bf16-true", "compile_blocks": compiled}
    agrees(
        measured(tmp_path, "single", 1, PATTERN, optimizer=EIGHT, **options),
        planned("single", 1, PATTERN, optimizer="adamw8bit", **options),
    )
