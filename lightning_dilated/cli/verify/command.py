"""The command `verify`: options, the table of the largest errors, and the exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from lightning_dilated.cli.verify.cases import ALLOWED, Check, Verdict, alone, by_definition, compare, matrix, parts
from lightning_dilated.cli.verify.workers import RanksFailed, run_ranks


def parser() -> argparse.ArgumentParser:
    """The options of `verify`."""
    p = argparse.ArgumentParser(
        "lightning-dilated verify",
        description="Small random calls on many ranks of this machine against one rank's definition, with gradients.",
    )
    p.add_argument("--devices", type=int, default=4, help="ranks (default %(default)s)")
    p.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto takes GPUs where there are enough"
    )
    p.add_argument("--dtypes", nargs="+", choices=list(ALLOWED), help="(default float64, on GPUs float64 and bfloat16)")
    p.add_argument("--quick", action="store_true", help="a small part of the matrix")
    p.add_argument(
        "--timeout", type=float, default=300.0, help="seconds until ranks are given up (default %(default)g)"
    )
    return p


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The options with their defaults; raises ValueError for what this machine does not have."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {args.devices}.")
    if not args.timeout > 0:
        raise ValueError(f"--timeout must be a positive number of seconds, got {args.timeout:g}.")
    if args.device == "cuda" and args.devices > gpus:
        raise ValueError(f"--devices {args.devices}: this machine has {gpus} GPUs; lower it, or use --device cpu.")
    if args.device == "auto":
        args.device = "cuda" if 0 < args.devices <= gpus else "cpu"
    args.dtypes = args.dtypes or (["float64", "bfloat16"] if args.device == "cuda" else ["float64"])
    return args


def judge(checks: Sequence[Check], found: list[list[tuple]]) -> list[Verdict]:
    """Every check's verdict, from what each rank gave."""
    return [compare(check, by_definition(check), list(each)) for check, *each in zip(checks, *found, strict=True)]


def one_rank(checks: Sequence[Check], device: str) -> list[Verdict]:
    """The engine of this machine on one rank, for each call that is in the matrix."""
    calls = dict.fromkeys(
        Check(c.pattern, c.seq_len, c.causal, "", "", 1, c.dtype) for c in checks if c.names[0] == "out"
    )
    return [compare(c, by_definition(c), [(list(range(c.seq_len)), alone(c, device))]) for c in calls]


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """One row for each way to exchange: the largest errors over patterns, lengths and directions."""
    rows: dict[tuple[str, ...], list[Verdict]] = {}
    for v in verdicts:
        c = v.check
        way = (c.exchange or "one rank", c.layout, str(c.head_size) if c.exchange else "")
        rows.setdefault((c.names[0], c.dtype, *way), []).append(v)
    lines = [f"{'exchange':<10} {'layout':<11} {'head_size':>9}  {'dtype':<9} {'checks':>6}   largest errors"]
    for (_, dtype, exchange, layout, head_size), found in rows.items():
        names = found[0].check.names
        worst = {n: max((v.errors.get(n, torch.inf) for v in found), key=lambda x: (x != x, x)) for n in names}
        errors = "  ".join(f"{name} {value:.1e}" for name, value in worst.items())
        mark = "" if all(v.agrees for v in found) else "   DIFFERS"
        place = f"{exchange:<10} {layout:<11} {head_size:>9}  {dtype:<9} {len(found):>6}"
        lines.append(f"{place}   {errors}{mark}")
    return lines


def report(verdicts: Sequence[Verdict]) -> int:
    """Print the table and the last line; the exit code."""
    print("\n".join([*table(verdicts), ""]))
    wrong = [v for v in verdicts if not v.agrees]
    for v in wrong[:10]:
        print(f"differs: {v.check}: {v.note or v.errors}, allowed {ALLOWED[v.check.dtype]:.0e}")
    print(f"{len(wrong)} of {len(verdicts)} checks do not agree" if wrong else f"all {len(verdicts)} checks agree")
    return 1 if wrong or not verdicts else 0


def run(argv: list[str]) -> None:
    """Parse, run the ranks, print; exits with 1 where a check does not agree or a rank failed."""
    args, began = checked(parser().parse_args(argv)), time.monotonic()
    where = "GPUs, NCCL" if args.device == "cuda" else "processes of the CPU, gloo"
    checks = matrix(args.devices, args.dtypes, args.quick)
    print(f"{args.devices} ranks ({where}), {len(checks)} checks; torch {torch.__version__}", flush=True)
    try:
        found = run_ranks(args.devices, parts, checks, device=args.device, timeout=args.timeout)
    except RanksFailed as error:
        print(f"{error}. Checks that ran are not compared.", file=sys.stderr)
        raise SystemExit(1) from None
    verdicts = [*one_rank(checks, args.device), *judge(checks, found)]
    print(f"compared after {time.monotonic() - began:.0f} s\n")
    code = report(verdicts)
    if code:
        raise SystemExit(code)
