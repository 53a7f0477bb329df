"""`lightning-dilated plan --find-max`: options, a line for each trial, and what to write into the recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from lightning_dilated.cli.find_max.search import longest
from lightning_dilated.cli.find_max.trials import Outcome, Trials

#: tokens of each rank that a search begins with, and that lengths are multiples of
START, MULTIPLE = 65536, 1024


def parser() -> argparse.ArgumentParser:
    """The options; all others are those of fit."""
    p = argparse.ArgumentParser(
        "lightning-dilated plan --find-max",
        description="Trains two steps of ever longer sequences of random tokens (or of slides or images, as the recipe's "
        "model takes them) on the GPUs that are here, until they do not fit, and bisects. Options that are not listed "
        "(--model.dim 768, --trainer.strategy ring_dilated) go to fit.",
        allow_abbrev=False,
    )
    p.add_argument("--config", "-c", action="append", required=True, help="the recipe")
    p.add_argument("--gpus", type=int, help="ranks (default: all GPUs that are here)")
    p.add_argument(
        "--tokens",
        type=_number,
        help=f"tried first (default {START:,} a rank): of a text, rows of a slide (its tiles and the "
        "class token's), patches of an image; K, M and G are powers of two",
    )
    p.add_argument("--most", type=_number, help="never try more tokens")
    p.add_argument("--multiple", type=_number, default=MULTIPLE, help="of a rank's tokens (default %(default)s)")
    p.add_argument("--within", type=float, default=0.03, help="gap that is left between what fits and what does not")
    p.add_argument("--timeout", type=float, default=900.0, help="seconds of a trial (default %(default)g)")
    p.add_argument("--limit", type=float, help="GiB of host memory of each rank: makes a CPU's memory end")
    return p


def _number(text: str) -> int:
    """8M is 8 * 2**20."""
    powers = {"K": 10, "M": 20, "G": 30}
    digits, power = (text[:-1], powers[text[-1].upper()]) if text and text[-1].upper() in powers else (text, 0)
    try:
        return int(float(digits) * 2**power) if power else int(digits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 65536, 64K or 8M") from None


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The options with their defaults.

    Raises:
        ValueError: where there is nothing that could run out of memory, or are fewer GPUs than asked for.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not here and args.limit is None:
        raise ValueError(
            "--find-max trains on GPUs until their memory ends, and here is none. Leave it out for an estimate (--gpu H200 "
            "names the kind), or give --limit GiB to try on the CPU."
        )
    args.gpus = (here or 1) if args.gpus is None else args.gpus
    if args.gpus < 1 or (args.limit is None and args.gpus > here):
        raise ValueError(f"--gpus {args.gpus}: this machine has {here}.")
    for name, value in (("timeout", args.timeout), ("multiple", args.multiple), ("limit", args.limit)):
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be positive, got {value:g}.")
    return args


def run(argv: list[str]) -> None:
    """Search, and print what was found."""
    args, others = parser().parse_known_args(argv)
    args = checked(args)
    arguments = [word for path in args.config for word in ("--config", path)] + others
    trials, best = Trials(arguments, args.gpus, args.timeout, args.limit), []
    start, multiple = args.tokens or START * args.gpus, args.multiple * args.gpus
    try:
        found = longest(_told(trials, best), start, multiple, args.within, args.most)
    except (RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    end = "not tried beyond" if found.fails is None else f"{found.fails:,} do not fit"
    most = max(best, key=lambda outcome: outcome.tokens)
    print(f"\nlongest: {found.fits:,} tokens on {args.gpus} rank(s) ({end}; {found.times} trials)\n{most}")
    print(f"in the recipe: {most.line.format(found.fits)}")


def _told(trials: Trials, best: list[Outcome]) -> Callable[[int], bool]:
    def fits(tokens: int) -> bool:
        outcome = trials(tokens)
        print(outcome, flush=True)
        if outcome.fits:
            best.append(outcome)
        return outcome.fits

    return fits
