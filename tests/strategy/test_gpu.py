"""The quickstart gives one GPU's results on two GPUs, up to rounding, for any precision, strategy and launcher."""

import csv
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .test_cpu_offload import HOST, job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

ROOT = Path(__file__).parents[2]
SIZES = ["--trainer.max_steps=20", "--trainer.val_check_interval=20", "--data.seq_len=16384", "--data.val_limit=4"]
#: a loss scale that never overflows: with 65,536, rounding would determine how many of the first steps are skipped
SCALED = json.dumps(
    {
        "class_path": "lightning.pytorch.plugins.MixedPrecision",
        "init_args": {
            "precision": "16-mixed",
            "device": "cuda",
            "scaler": {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cuda", "init_scale": 1024.0}},
        },
    }
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def fit(folder, gpus, strategy, precision, launcher=(), options=()):
    """Return (train_loss, val_loss) after 20 steps."""
    command = [
        sys.executable,
        *launcher,
        "-m",
        "lightning_dilated",
        "fit",
        "--config",
        str(ROOT / "recipes/quickstart.yaml"),
    ]
    command += ["--trainer.accelerator=gpu", f"--trainer.devices={gpus}", f"--trainer.strategy={strategy}", *options]
    command += [
        f"--trainer.plugins={SCALED}" if precision == "16-mixed" else f"--trainer.precision={precision}",
        *SIZES,
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    with (folder / "runs/quickstart/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return tuple(float([r[name] for r in rows if r.get(name)][-1]) for name in ("train_loss", "val_loss"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return functools.cache(lambda s, p: fit(tmp_path_factory.mktemp("alone"), 1, s, p))


WAYS = {
    "mixed": ("ring_dilated", "bf16-mixed", (), ()),
    "torchrun": ("ring_dilated", "bf16-mixed", TORCHRUN, ()),
    "true": ("ring_dilated", "bf16-true", (), ()),
    "scaled": ("ring_dilated", "16-mixed", (), ()),
    "sharded": ("ring_dilated_fsdp", "bf16-mixed", (), ()),
    "sharded, true": ("ring_dilated_fsdp", "bf16-true", (), ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_gpus(tmp_path, alone, way):
    strategy, precision, launcher, options = WAYS[way]
    got, want = fit(tmp_path, 2, strategy, precision, launcher, options), alone(strategy, precision)
    print(f"| {strategy} | {precision} | {way} | {want[0]:.6f} | {got[0]:.6f} | {want[1]:.6f} | {got[1]:.6f} |")
    # bf16 parameters round most of an update away; rounding of a sum decides which updates remain
    assert got == pytest.approx(want, rel=5e-3 if precision == "bf16-true" else 5e-4)


@pytest.mark.parametrize("name", ["RingDilatedStrategy", "RingDilatedFSDPStrategy"])
def test_first_batch_is_checked(tmp_path, name):
    options = ["--trainer.strategy.check_first_batch=true"]
    assert fit(tmp_path, 2, f"lightning_dilated.{name}", "bf16-mixed", options=options)


# -- parameters on the host --------------------------------------------------------------------------------------------
#: tolerances: AdamW rounds differently on a CPU, and bf16 parameters round away most of an update
WITHIN = {"32-true": 1e-4, "bf16-mixed": 1e-3, "bf16-true": 1e-2}
BIG = {"dim": 512, "depth": 6, "num_heads": 8}
TILES = {"policy": "block", "tile": 512, "offload": 1, "head_chunks": 2}
PAGED = {"cpu_offload": {"pin_memory": False}}
#: name: (precision, options of the strategy, model, memory settings, cpu_offload)
OFFLOADED = {
    "tiles": ("bf16-mixed", {"check_first_batch": True}, BIG, TILES, HOST),
    "32-true": ("32-true", {}, {}, None, HOST),
    "paged": ("32-true", {}, {}, None, PAGED),
    "true": ("bf16-true", {}, {}, None, HOST),
    "one rank a sequence": ("32-true", {"sequence_size": 1}, {}, None, HOST),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Run without offloading. Results are cached, because several cases differ only in the offloading."""

    @functools.cache
    def make(run):
        return job(tmp_path_factory.mktemp("plain"), accelerator="gpu", **json.loads(run))

    return lambda **run: make(json.dumps(run))


@pytest.mark.parametrize("way", OFFLOADED)
def test_offloaded(tmp_path, plain, way):
    """Losses and norms are the same as with plain sharding. Only trained tensors are on the host."""
    precision, strategy, model, memory, how = OFFLOADED[way]
    run, within = {"precision": precision, "model": model, "memory": memory, "fused": model == BIG}, WITHIN[precision]
    want = plain(strategy=strategy, **run)
    got = job(tmp_path, accelerator="gpu", strategy={**strategy, **how}, **run)
    print(f"| {way} | {want['losses'][-1]:.6f} | {got['losses'][-1]:.6f} | {want['peak']} | {got['peak']} |")
    for name in ("losses", "norms", "val_loss"):
        assert got[name] == pytest.approx(want[name], rel=within * (10 if name == "norms" else 1)), name
    assert {want[x][0] for x in ("parameters", "gradients", "states")} == {"cuda"} and want["module"] == "cuda"
    assert got["parameters"] == (["cpu"] if how == PAGED else ["cpu", "pinned"])
    assert (got["gradients"][0], got["states"], got["module"]) == ("cpu", ["cpu"], "cuda")
    if model == BIG:  # per rank, fp32 parameters, gradients and AdamW states of 19M parameters are 145 MiB
        assert want["peak"] - got["peak"] > 100 * 2**20


def test_offloaded_checkpoints(tmp_path):
    """Checkpoints that were saved with offloading load without it, and vice versa, as folders and as files."""
    host, folder = {**HOST, "save_distributed_checkpoint": False}, {}
    losses = {}
    for name, before in (("file", host), ("folder", folder)):
        path = str(tmp_path / name)
        job(tmp_path, accelerator="gpu", steps=2, save=path, strategy=before)
        assert Path(path).is_dir() == (name == "folder")
        for after in (host, folder):
            losses[name, str(after)] = job(tmp_path, accelerator="gpu", resume=path, strategy=after)["losses"]
    want = losses["folder", str(folder)]
    for name, after_losses in losses.items():
        assert after_losses == pytest.approx(want, rel=1e-4), name
