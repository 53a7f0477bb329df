"""With cpu_offload, ring_dilated_fsdp computes the same numbers, and refuses unsupported cases before training."""

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.strategy import parallelize

from .runs import PATTERN, Record, Run, full, launched, make, trainer

pytestmark = pytest.mark.full

RUN = Run(fsdp=True, double=True, steps=3, masked=0.3, batch_size=2, model={"depth": 3, "num_kv_heads": 2})
HOST = {"cpu_offload": True}
EVERYTHING = {"policy": "block", "every": 2, "offload": 1, "tile": 5, "head_chunks": 2}
FUSED = functools.partial(torch.optim.AdamW, fused=True)
GPU = torch.device("cuda", 0)


# -- the same numbers --------------------------------------------------------------------------------------------------
class Gradients(Record):
    """A recorder that also stores the gradients of every step."""

    def __init__(self):
        super().__init__()
        self.grads = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self.grads.append([full(p.grad).clone() for p in pl_module.parameters()])


def fit(rank, group, run, options=None):
    """Return, by name: losses, norms, gradients of all steps, validation loss, parameters, whether they are offloaded."""
    recorder = Gradients()
    built, model, data, record = make(run, launched(rank), callbacks=[recorder], limit_val_batches=3, **(options or {}))
    built.fit(model, data)
    built.validate(model, data, verbose=False)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return {
        "losses": record.losses,
        "norms": record.norms,
        "gradients": recorder.grads,
        "val_loss": float(built.callback_metrics["val_loss"]),
        "parameters": [full(p).detach().clone() for p in model.parameters()],
        "offloaded": {isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups if g is not None},
    }


WAYS = {
    "plain": (2, RUN),
    "clipped": (2, RUN.but(clip=0.05)),
    "clipped by value": (2, RUN.but(clip=1e-3), {"gradient_clip_algorithm": "value"}),
    "data 2": (4, RUN.but(strategy={"sequence_size": 2}, clip=0.05)),
    "fused": (2, RUN.but(model={**RUN.model, "optimizer": FUSED}, clip=0.05)),
    "tied": (2, RUN.but(model={**RUN.model, "tie_embeddings": True})),
    "recomputed, tiles": (2, RUN.but(memory=EVERYTHING, clip=0.05)),
    "attention kept, tiles": (2, RUN.but(memory={**EVERYTHING, "policy": "attention-kept", "every": 1})),
    "first batch checked": (2, RUN.but(strategy={"check_first_batch": True})),
    "32-true": (2, RUN.but(double=False, precision="32-true", clip=0.05)),
    "bf16-mixed": (2, RUN.but(double=False, precision="bf16-mixed", clip=0.05)),
    "bf16-true": (2, RUN.but(double=False, precision="bf16-true", clip=0.05)),
}


#: slow tests; the other cases cover the same features
SLOW = ("plain", "clipped", "data 2", "attention kept, tiles", "32-true")


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.slow) if w in SLOW else w for w in WAYS])
def test_nothing_changes(pools, way):
    """Results are equal bit by bit, because on a CPU the arithmetic is the same."""
    ranks, run, *options = WAYS[way]
    want = pools(ranks).run(ranks, fit, run, *options)[0]
    for got in pools(ranks).run(ranks, fit, run.but(strategy={**run.strategy, **HOST}), *options):
        assert got.pop("offloaded") == {True}
        for name in got:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)
    assert want["offloaded"] == {False} and len(want["gradients"]) == 3 and min(want["norms"]) > 0


def reductions(rank, group, run):
    """Return (number of reduce-scatters in a run, results of the run)."""
    real, calls = param_group.foreach_reduce, []
    with mock.patch.object(param_group, "foreach_reduce", lambda *a, **k: calls.append(1) or real(*a, **k)):
        results = fit(rank, group, run)
    return len(calls), results


def test_accumulation_keeps_no_whole_gradients(pools):
    """Gradients are reduced after each micro-batch. Their sum is the same as with one reduction, up to rounding."""
    run = RUN.but(accumulate=2, clip=0.05)
    once, want = pools(2).run(2, reductions, run)[0]
    twice, got = pools(2).run(2, reductions, run.but(strategy=HOST))[0]
    assert twice == 2 * once
    for name in ("norms", "gradients", "parameters"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


# -- checkpoints -------------------------------------------------------------------------------------------------------
def part(rank, group, folder, stop, ckpt, options, how):
    """Train up to step `stop`, from `ckpt` or from the start. Return (parameters, checkpoint, steps, number of states)."""
    sharded, save = how == "sharded", {} if how != "file" or options is None else {"save_distributed_checkpoint": False}
    path = str(Path(folder) / f"{stop}.ckpt")
    saver = {"callbacks": [ShardedCheckpoint(path)], "enable_checkpointing": True} if sharded else {}
    run = RUN.but(steps=stop, strategy={**(options or {}), **save}, fsdp=options is not None, clip=0.05)
    built, model, data, record = make(run, launched(rank), **saver)
    built.fit(model, data, ckpt_path=ckpt)
    if not sharded:
        built.save_checkpoint(path)
    states = [t for s in built.optimizers[0].state.values() for t in s.values()]
    return torch.cat([full(p).detach().flatten() for p in model.parameters()]), path, len(record.losses), len(states)


def first_half(pools, folder, before, how):
    """Train two steps with the options `before`. Return the checkpoint."""
    _, path, _, states = pools(2).run(2, part, str(folder / "a"), 2, None, before, how)[0]
    assert Path(path).is_file() == (how == "file") and states > 0
    return path


def second_half(pools, folder, path, after, how):
    """Train two more steps with the options `after` (None: unsharded parameters). Return the parameters."""
    parameters, _, steps, _ = pools(2).run(2, part, str(folder / "b"), 4, path, after, how)[0]
    assert steps == 2
    return parameters


@pytest.mark.parametrize("how", ["folder", *(pytest.param(x, marks=pytest.mark.slow) for x in ("file", "sharded"))])
def test_checkpoints_are_the_same(pools, tmp_path, how):
    """A checkpoint that was saved with offloading loads without it, and vice versa."""
    within, without = (first_half(pools, tmp_path / name, x, how) for name, x in (("in", HOST), ("out", {})))
    want = second_half(pools, tmp_path / "neither", without, {}, how)
    for name, path, after in (("before", within, {}), ("after", without, HOST), ("both", within, HOST)):
        torch.testing.assert_close(second_half(pools, tmp_path / name, path, after, how), want, rtol=0, atol=0)


def test_goes_on_with_whole_parameters(pools, tmp_path):
    """The checkpoints of ring_dilated and ring_dilated_fsdp have the same format."""
    path = first_half(pools, tmp_path / "in", HOST, "folder")
    want = second_half(pools, tmp_path / "sharded", path, {}, "folder")
    got = second_half(pools, tmp_path / "whole", path, None, "folder")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


# -- what is refused ---------------------------------------------------------------------------------------------------
class Lists(LongNetLM):
    """A model with an optimizer that offloading does not support."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), capturable=True)


def capturable(rank, group):
    model = Lists(pattern=PATTERN, vocab_size=11, dim=16, depth=1)
    built = trainer(RingDilatedFSDPStrategy(cpu_offload=True), launched(rank), max_steps=1)
    try:
        built.fit(model, make(RUN, dist.get_world_size())[2])
    except ValueError as error:
        return str(error), built.global_step


def test_optimizers_that_need_a_gpu(pools):
    for message in pools(2).run(2, capturable):
        assert message and message[1] == 0 and "Adam(capturable=True) steps on tensors of a GPU only" in message[0]
    theirs = type("Adam8bit", (torch.optim.Adam,), {"__module__": "bitsandbytes.optim.adam"})
    with pytest.raises(ValueError, match=r"bitsandbytes's Adam8bit .*take torch.optim.AdamW"):
        parallelize.keep_optimizers([theirs([torch.nn.Parameter(torch.ones(2))])])


# -- in processes of its own -------------------------------------------------------------------------------------------
ROOT = Path(__file__).parents[2]


def job(folder, **settings):
    """Return the report of offload_job.py, which runs on two ranks."""
    usual = {
        "precision": "32-true",
        "strategy": {},
        "model": {},
        "steps": 4,
        "memory": None,
        "resume": None,
        "save": None,
        "fused": False,
    }
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(Path(__file__).with_name("offload_job.py")), json.dumps({**usual, **settings})]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return json.loads(next(x for x in ran.stdout.splitlines() if x.startswith("told")).removeprefix("told"))


@pytest.mark.slow
def test_as_users_start_it(tmp_path):
    """Run the script of the GPU tests on a CPU."""
    run = {"accelerator": "cpu", "memory": {"policy": "block", "tile": 512}}
    plain, host = (job(tmp_path, strategy=x, **run) for x in ({}, HOST))
    assert len(host["norms"]) == 4 and len(host["losses"]) == 8
    for name in ("losses", "norms"):
        assert host[name] == pytest.approx(plain[name], rel=1e-4)  # micro-batches are summed in a different order


# -- parts of what only a GPU can run as a whole -----------------------------------------------------------------------
def test_backends():
    """gloo is needed because NCCL cannot reduce norms on the host."""
    strategy = RingDilatedFSDPStrategy(**HOST)
    strategy.parallel_devices, strategy.cluster_environment = [GPU], types.SimpleNamespace(local_rank=lambda: 0)
    for _ in range(2):
        strategy._process_group_backend = strategy._get_process_group_backend()
        assert strategy._process_group_backend == "cpu:gloo,cuda:nccl"
    assert parallelize.with_host("gloo", GPU) == "gloo"
    plain = RingDilatedFSDPStrategy()
    plain.parallel_devices, plain.cluster_environment = strategy.parallel_devices, strategy.cluster_environment
    assert plain._get_process_group_backend() == "nccl"


def test_process_group_of_somebody_else():
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        pytest.raises(ValueError, match=r"backend is 'cuda:nccl'.*init_process_group\('cpu:gloo,cuda:nccl'\)"),
    ):
        parallelize.join_host(GPU, True)


@pytest.mark.parametrize("threads, told", [(1, 1), (4, 0)])
def test_few_threads_are_told_of(monkeypatch, recwarn, threads, told):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(parallelize.os, "cpu_count", lambda: 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        parallelize.join_host(GPU, True)
    assert sum("Set OMP_NUM_THREADS=8." in str(w.message) for w in recwarn) == told


def test_memory_is_page_locked_beside_a_gpu():
    cpu = torch.device("cpu")
    assert parallelize.policy_for(CPUOffloadPolicy(), GPU).pin_memory
    assert not parallelize.policy_for(CPUOffloadPolicy(pin_memory=False), GPU).pin_memory
    assert not parallelize.policy_for(CPUOffloadPolicy(), cpu).pin_memory
    assert parallelize.policy_for(None, GPU) is None


class Elsewhere(torch.nn.Module):
    """A module that claims to have a parameter on a GPU."""

    def named_parameters(self, *args, **kwargs):
        yield "x", types.SimpleNamespace(device=GPU, is_meta=False)


def test_modules_that_were_sharded_otherwise():
    with pytest.raises(ValueError, match=r"weight, bias were sharded with a CPUOffloadPolicy.*cpu_offload=True"):
        parallelize.place_parameters(torch.nn.Linear(2, 2), GPU, offload=False)
    with pytest.raises(ValueError, match=r"x were sharded without it.*leave all sharding to the strategy"):
        parallelize.place_parameters(Elsewhere(), GPU, offload=True)
    parallelize.place_parameters(Elsewhere(), GPU, offload=False)


def test_parameters_without_memory_get_the_hosts():
    """Parameters on the meta device are allocated on the host. Lightning would allocate them on the GPU."""
    layer = torch.nn.Linear(2, 2, device="meta")
    parallelize.place_parameters(layer, GPU, offload=True)
    assert layer.weight.device.type == "cpu" and layer.weight.abs().max() > 0


def moved(rank, group):
    """Return devices of the tensors after everything but sharded parameters was moved to a fake device."""
    built, model, data, _ = make(RUN.but(strategy=HOST, steps=1), launched(rank))
    model.register_buffer("seen", torch.zeros(3))
    built.fit(model, data)
    parallelize.unsharded_to_device(model, torch.device("meta"))
    parameters = {p.device.type for p in model.parameters()}
    return (
        parameters,
        all(isinstance(p, DTensor) for p in model.parameters()),
        model.seen.device.type,
        str(model.device),
    )


def test_all_but_parameters_moves(pools):
    assert pools(2).run(2, moved) == [({"cpu"}, True, "meta", "meta")] * 2
