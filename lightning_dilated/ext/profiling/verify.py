"""Implement `lightning-dilated verify`: compare small calls on many ranks of this machine with one rank's reference.

`run_ranks` runs a job on several ranks, each in a process. Each result is sent as soon as it is computed.

Shape letters: N tokens of the sequence, H query heads, K kv heads, D head dim, R ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_dilated._validation import integer, real
from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.models import LongNetLM
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence import SequenceGroup, SequenceSpec, loss_sum, make_problem, plan

#: by name: (pattern, number of query heads, number of kv heads)
PATTERNS = {
    "nested": (DilatedPattern.geometric(8, 64), 8, 4),
    "ragged": (DilatedPattern([(7, 1), Branch(30, 3, shift=9), (None, 5)]), 6, 3),
    "blocked": (DilatedPattern.longnet([12, 50], [1, 4], offsets="blocked"), 4, 4),
    "head groups": (DilatedPattern.head_groups([16, 96], [1, 3], num_heads=6), 6, 2),
    "one head": (DilatedPattern([(16, 1), (None, 3)]), 1, 1),  # some ranks of a head group have no head
}
LENGTHS = (64, 61)
EXCHANGES = ("gather", "ring", "switch", "butterfly", "auto")
HEAD_DIM = 16
#: largest error at which results count as equal, relative to the largest value, for each dtype of q, k and v
ALLOWED = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
ATTENTION = ("out", "dq", "dk", "dv")
MODEL = ("loss", "gradients")
#: arguments of a training step's model
STEP = {
    "pattern": DilatedPattern.longnet([8, 16, 64], [1, 2, 4]),
    "vocab_size": 11,
    "dim": 16,
    "depth": 2,
    "num_heads": 4,
}


@dataclass(frozen=True)
class Check:
    """One attention call, or, with the pattern "LongNetLM", the loss and gradients of one training step."""

    pattern: str
    seq_len: int
    causal: bool = True
    exchange: str = "auto"
    layout: str = "contiguous"
    head_size: int = 1
    dtype: str = "float64"

    @property
    def names(self) -> tuple[str, ...]:
        return MODEL if self.pattern == "LongNetLM" else ATTENTION

    def settings(self) -> dict[str, Any]:
        return {"exchange": self.exchange, "layout": self.layout, "head_size": self.head_size}

    def served(self, ranks: int) -> bool:
        """Return whether the exchange serves the call on R ranks; if not, the call would raise an error."""
        if ranks % self.head_size:
            return False
        pattern, heads, kv_heads = PATTERNS[self.pattern]
        sizes = {"ranks": ranks, "layout": self.layout, "causal": self.causal, "head_size": self.head_size}
        try:
            plan(make_problem(pattern, self.seq_len, heads, kv_heads, **sizes), self.exchange, head_dim=HEAD_DIM)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Verdict:
    """Errors by name, relative to the largest value; `note` describes the problem if no error can be computed."""

    check: Check
    errors: dict[str, float]
    note: str = ""

    @property
    def agrees(self) -> bool:
        """True if all errors are present and within the dtype's limit; NaN is outside the limit."""
        within = [self.errors.get(name, torch.inf) <= ALLOWED[self.check.dtype] for name in self.check.names]
        return not self.note and all(within)


def matrix(ranks: int, dtypes: Sequence[str], quick: bool = False) -> list[Check]:
    patterns = list(PATTERNS)[:2] if quick else list(PATTERNS)
    exchanges = ("ring", "butterfly", "auto") if quick else EXCHANGES
    modes = [("contiguous", e, h) for e, h in itertools.product(exchanges, (1, 2, 4))]
    modes += (
        [] if quick else [(layout, e, 1) for layout, e in itertools.product(("zigzag", "strided"), ("ring", "auto"))]
    )
    checks = [
        Check(pattern, n, causal, exchange, layout, head_size, dtype)
        for dtype, pattern, n, causal in itertools.product(dtypes, patterns, LENGTHS[quick:], (True, False))
        for layout, exchange, head_size in modes
    ]
    steps = [Check("LongNetLM", 61, layout=layout) for layout in ("contiguous", "zigzag")[: 1 if quick else 2]]
    return [check for check in checks if check.served(ranks)] + steps


def tensors(check: Check, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random (q, k, v, grad), each (1, N, H or K, D) and the same on all ranks."""
    generator = torch.Generator().manual_seed(check.seq_len)
    _, heads, kv_heads = PATTERNS[check.pattern]
    rows = (torch.randn(1, check.seq_len, h, HEAD_DIM, generator=generator) for h in (heads, kv_heads, kv_heads, heads))
    return tuple(x.to(device, getattr(torch, check.dtype)).to(dtype) for x in rows)


def _gradients(check: Check, out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    tensors = (out, *torch.autograd.grad(out, leaves, grad))
    return {name: x.detach().double().cpu() for name, x in zip(check.names, tensors, strict=True)}


def _batch(check: Check) -> dict[str, Tensor]:
    tokens = torch.randint(STEP["vocab_size"], (2, check.seq_len + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "index": torch.arange(2)}


def _step(batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Return the loss of all ranks and this rank's part of all gradients; the model is the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LongNetLM(**STEP)
        model.configure_model()
    model = model.double().to(device)
    share, _ = model.token_mean({name: x.to(device) for name, x in batch.items()})
    grads = torch.autograd.grad(share, list(model.parameters()))
    return {"loss": loss_sum(share).cpu(), "gradients": torch.cat([g.flatten() for g in grads]).cpu()}


def by_definition(check: Check) -> dict[str, Tensor]:
    """Compute the reference on one rank, with the oracle or with a training step."""
    if check.pattern == "LongNetLM":
        return _step(_batch(check), "cpu")
    *leaves, grad = tensors(check, torch.float64, "cpu")
    leaves = [x.requires_grad_() for x in leaves]
    out, _ = oracle(*leaves, PATTERNS[check.pattern][0], causal=check.causal)
    return _gradients(check, out, leaves, grad)


def alone(check: Check, device: str) -> dict[str, Tensor]:
    """Compute a call on one rank with this machine's engine."""
    *leaves, grad = tensors(check, getattr(torch, check.dtype), device)
    leaves = [x.requires_grad_() for x in leaves]
    return _gradients(check, dilated_attention(*leaves, PATTERNS[check.pattern][0], causal=check.causal), leaves, grad)


def parts(rank: int, device: str, checks: Sequence[Check]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """For each check, yield (global positions, results) of this rank's part."""
    for check in checks:
        group = SequenceGroup(**check.settings())
        try:
            ranges = group.shard(check.seq_len).ranges(group.rank)
            positions = [p for x in ranges for p in x]
            with group.active():
                yield positions, _part(check, positions, group, device)
        finally:
            group.close()


def _part(check: Check, positions: list[int], group: SequenceGroup, device: str) -> dict[str, Tensor]:
    if check.pattern == "LongNetLM":
        spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"])
        return _step(spec.cut(_batch(check), group.place), device)
    *leaves, grad = (x[:, positions].contiguous() for x in tensors(check, getattr(torch, check.dtype), device))
    leaves = [x.requires_grad_() for x in leaves]
    out = dilated_attention(*leaves, PATTERNS[check.pattern][0], causal=check.causal)
    return _gradients(check, out, leaves, grad)


def compare(check: Check, expected: dict[str, Tensor], parts: Sequence[tuple[list[int], dict[str, Tensor]]]) -> Verdict:
    """Join the parts of all ranks, and compare them with the reference."""
    positions = [p for at, _ in parts for p in at]
    if sorted(positions) != list(range(check.seq_len)):
        return Verdict(check, {}, "the ranks' positions are not those of the sequence, each once")
    order = torch.tensor(positions).argsort()
    whole = {}
    for name in check.names:
        each = [part[name] for _, part in parts]
        if name == "loss":  # every rank has the loss of all ranks
            whole[name] = max(each, key=lambda x: float((x - expected["loss"]).abs().nan_to_num(nan=torch.inf)))
        else:
            whole[name] = sum(each) if name == "gradients" else torch.cat(each, 1)
        if whole[name].shape != expected[name].shape:
            return Verdict(
                check, {}, f"{name} is {tuple(whole[name].shape)} and should be {tuple(expected[name].shape)}"
            )
        whole[name] = whole[name] if check.names == MODEL else whole[name][:, order]
    return Verdict(check, {name: _error(whole[name], expected[name].detach()) for name in check.names})


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-2))


# -- ranks in processes ------------------------------------------------------------------------------------------------
#: how long the other ranks may take to report after one rank has failed, in seconds
GRACE = 3.0
_DONE = "done"


class RanksFailed(RuntimeError):
    """Raised if ranks raised, died or did not finish in time; the message names them and counts their results."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    results: list[Any] = field(default_factory=list)
    trouble: str | None = None
    done: bool = False


def run_ranks(
    ranks: int, job: Callable[..., Iterator[Any]], *args: Any, device: str = "cpu", timeout: float = 300.0
) -> list[list[Any]]:
    """Run job(rank, device, *args) on R ranks, a torch.distributed world, and return the values that each rank yields.

    Args:
        ranks: R.
        job: a function that processes can import from its module; its results must be picklable.
        device: "cpu", with gloo, or "cuda", with NCCL and a GPU for each rank.
        timeout: seconds for the whole job.

    Raises:
        RanksFailed: if a rank fails or is late; all processes have ended by then.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started: list[_Rank] = []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, ranks, device, str(Path(folder) / "store"), timeout, sender, job, args)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                sender.close()
                started.append(_Rank(process, receiver))
            _collect(started, time.monotonic() + timeout, timeout)
        finally:
            for started_rank in started:
                if not started_rank.done:
                    started_rank.process.kill()
                started_rank.process.join()
                started_rank.pipe.close()
    return [started_rank.results for started_rank in started]


def _collect(ranks: list[_Rank], end: float, timeout: float) -> None:
    """Read results until all ranks are done; raise RanksFailed if a rank fails or is late."""
    late = False
    while waiting := [rank for rank in ranks if not rank.done and rank.trouble is None]:
        ready = wait([rank.pipe for rank in waiting], max(0.0, end - time.monotonic()))
        if not ready:
            late = True
            break
        for rank in waiting:
            if rank.pipe in ready:
                _read(rank)
                if rank.trouble:
                    end = min(end, time.monotonic() + GRACE)
    failed = {i: rank for i, rank in enumerate(ranks) if rank.trouble}
    if not failed and not late:
        return
    reports = [f"rank {i} {rank.trouble} (after {len(rank.results)} results)" for i, rank in failed.items()]
    silent = [i for i, rank in enumerate(ranks) if not rank.done and not rank.trouble]
    if silent:
        after = "then" if failed else f"within {timeout:g} s"
        counts = ", ".join(str(len(ranks[i].results)) for i in silent)
        reports.append(f"ranks {silent} did not finish {after} (after {counts} results)")
    raise RanksFailed("; ".join(reports))


def _read(rank: _Rank) -> None:
    try:
        kind, value = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        rank.process.join(GRACE)
        rank.trouble = f"died with exit code {rank.process.exitcode}"
        return
    if kind == _DONE:
        rank.done = True
    elif kind == "error":
        rank.trouble = f"raised {value}"
    else:
        rank.results.append(value)


def _work(
    rank: int, ranks: int, device: str, store: str, timeout: float, pipe: Connection, job: Callable[..., Any], args: Any
) -> None:
    """Run one rank: join the other ranks, run the job, and send the values that it yields."""
    send = lambda *message: pipe.send_bytes(pickle.dumps(message))  # noqa: E731
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        joined = {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout), **joined)
        for value in job(rank, device, *args):
            send("value", value)
        dist.barrier()
        send(_DONE, None)
        dist.destroy_process_group()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        send("error", f"{type(error).__name__}: {error} [{last.filename}:{last.lineno}]")


# -- the command -------------------------------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "lightning-dilated verify",
        description="Compare small random calls and gradients on many ranks of this machine with those on one rank.",
    )
    p.add_argument("--devices", type=int, default=4, help="number of ranks (default %(default)s)")
    p.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if there are enough, else the CPU"
    )
    p.add_argument("--dtypes", nargs="+", choices=list(ALLOWED), help="(default float64, on GPUs float64 and bfloat16)")
    p.add_argument("--quick", action="store_true", help="run a small part of the checks")
    p.add_argument(
        "--timeout", type=float, default=300.0, help="stop the ranks after this many seconds (default %(default)g)"
    )
    return p


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults of the options; raise ValueError for devices that this machine does not have."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    integer(args.devices, "--devices", 1)
    real(args.timeout, "--timeout", above=0, hint=" It is in seconds.")
    if args.device == "cuda" and args.devices > gpus:
        raise ValueError(f"--devices {args.devices}: this machine has {gpus} GPUs; lower it, or use --device cpu.")
    if args.device == "auto":
        args.device = "cuda" if 0 < args.devices <= gpus else "cpu"
    args.dtypes = args.dtypes or (["float64", "bfloat16"] if args.device == "cuda" else ["float64"])
    return args


def judge(checks: Sequence[Check], results: list[list[tuple]]) -> list[Verdict]:
    """Return the verdict of each check, from the results of each rank."""
    return [compare(check, by_definition(check), list(each)) for check, *each in zip(checks, *results, strict=True)]


def of_one_rank(checks: Sequence[Check]) -> list[Check]:
    """List the distinct calls of the checks, for one rank."""
    calls = (Check(c.pattern, c.seq_len, c.causal, "", "", 1, c.dtype) for c in checks if c.names[0] == "out")
    return list(dict.fromkeys(calls))


def one_rank(checks: Sequence[Check], device: str) -> list[Verdict]:
    """Check this machine's engine on one rank, for each distinct call of the checks."""
    calls = of_one_rank(checks)
    return [compare(c, by_definition(c), [(list(range(c.seq_len)), alone(c, device))]) for c in calls]


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a row with the largest errors for each exchange, layout, head size and dtype."""
    rows: dict[tuple[str, ...], list[Verdict]] = {}
    for v in verdicts:
        c = v.check
        mode = (c.exchange or "one rank", c.layout, str(c.head_size) if c.exchange else "")
        rows.setdefault((c.names[0], c.dtype, *mode), []).append(v)
    lines = [f"{'exchange':<10} {'layout':<11} {'head_size':>9}  {'dtype':<9} {'checks':>6}   largest errors"]
    for (_, dtype, exchange, layout, head_size), group in rows.items():
        names = group[0].check.names
        worst = {n: max((v.errors.get(n, torch.inf) for v in group), key=lambda x: (x != x, x)) for n in names}
        errors = "  ".join(f"{name} {value:.1e}" for name, value in worst.items())
        mark = "" if all(v.agrees for v in group) else "   DIFFERS"
        place = f"{exchange:<10} {layout:<11} {head_size:>9}  {dtype:<9} {len(group):>6}"
        lines.append(f"{place}   {errors}{mark}")
    return lines


def report(verdicts: Sequence[Verdict]) -> int:
    """Print the table and the last line; return the exit code."""
    print("\n".join([*table(verdicts), ""]))
    different = [v for v in verdicts if not v.agrees]
    for v in different[:10]:
        print(f"differs: {v.check}: {v.note or v.errors}, allowed {ALLOWED[v.check.dtype]:.0e}")
    print(
        f"{len(different)} of {len(verdicts)} checks do not agree" if different else f"all {len(verdicts)} checks agree"
    )
    return 1 if different or not verdicts else 0


def run(argv: list[str]) -> None:
    """Run the command and print the results; exit with 1 if a check does not agree or a rank fails."""
    args, began = checked(parser().parse_args(argv)), time.monotonic()
    where = "GPUs, NCCL" if args.device == "cuda" else "processes of the CPU, gloo"
    checks = matrix(args.devices, args.dtypes, args.quick)
    number = len(checks) + len(of_one_rank(checks))
    print(f"{args.devices} ranks ({where}), {number} checks; torch {torch.__version__}", flush=True)
    try:
        results = run_ranks(args.devices, parts, checks, device=args.device, timeout=args.timeout)
    except RanksFailed as error:
        print(f"{error}. Checks that ran are not compared.", file=sys.stderr)
        raise SystemExit(1) from None
    verdicts = [*one_rank(checks, args.device), *judge(checks, results)]
    print(f"compared after {time.monotonic() - began:.0f} s\n")
    code = report(verdicts)
    if code:
        raise SystemExit(code)


__all__ = ["run"]
