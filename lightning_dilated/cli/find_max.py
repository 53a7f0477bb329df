"""The longest sequence that really trains on the devices that are here: true steps, each in processes of its own.

Doubling and halving for the largest number that fits; knows nothing of what is tried.

One trial: ranks of a job train two steps of so many tokens, and say whether that fitted, what it took and how long.

Each trial has processes of its own, so that a rank which runs out of memory leaves no others waiting for it, and the next
trial finds memory as it was.

Random samples of one length for the models of this package, equal on all ranks.

A rank of a trial: the recipe's model, strategy and memory settings on random samples, two steps.

Run by `find_max.trials`: python -m lightning_dilated.cli.find_max JSON --config RECIPE ...

`lightning-dilated plan --find-max`: options, a line for each trial, and what to write into the recipe.

Shape letters: N tokens, F features, C classes, P pixels of a patch's side.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dilated._device import expandable_segments
from lightning_dilated._validation import integer
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.callbacks.memory.probe import host_memory
from lightning_dilated.models import DilatedModule
from lightning_dilated.planning.counting.model_specs import example_of

GIB = 2**30
#: lines of a failed rank's output that are shown
SHOWN = 15


@dataclass(frozen=True)
class Outcome:
    """Of a trial: whether it fitted; the most bytes that a rank had allocated and reserved (0 where unknown); seconds of the
    second step; who ran out of memory and how, if one did; what a recipe says of a length, {} standing for it; the most
    bytes of the host that a rank had resident, libraries' with them; those page-locked in the end."""

    tokens: int
    fits: bool
    allocated: int = 0
    reserved: int = 0
    seconds: float = 0.0
    message: str = ""
    line: str = DilatedModule.length_setting
    host: int = 0
    pinned: int = 0

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.tokens:>14,} tokens: out of memory ({self.message[:100]})"
        peak = (
            f", {self.allocated / GIB:.1f} GiB allocated, {self.reserved / GIB:.1f} reserved" if self.allocated else ""
        )
        peak += f", {self.host / GIB:.1f} GiB of the host a rank" if self.host else ""
        peak += f" ({self.pinned / GIB:.1f} page-locked)" if self.host and self.pinned else ""
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
        return f"{self.tokens:>14,} tokens: fits{peak}, {self.seconds:.2f} s a step{rate}"


@dataclass
class Trials:
    """Trials of a recipe.

    Args:
        arguments: of `fit`: --config and options.
        ranks: processes, each with a device of its own.
        timeout: seconds that a trial may take.
        limit: GiB of memory that each process may have (of the host's; for a CPU); None: all.
    """

    arguments: Sequence[str]
    ranks: int
    timeout: float = 600.0
    limit: float | None = None

    def __call__(self, tokens: int) -> Outcome:
        """Train two steps.

        Raises:
            RuntimeError: where a rank ends with anything else than success or lack of memory, with its last lines.
            TimeoutError: where the ranks take too long.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks: list[subprocess.Popen] = []
            try:
                port = _free_port()
                for rank in range(self.ranks):  # one may fail to start, or be interrupted, with others there already
                    ranks.append(self._start(Path(folder), tokens, rank, port))
                return self._watch(Path(folder), tokens, ranks)
            finally:
                for process in ranks:
                    process.kill()
                for process in ranks:
                    process.wait()

    def _start(self, folder: Path, tokens: int, rank: int, port: int) -> subprocess.Popen:
        told = {
            "folder": str(folder),
            "tokens": tokens,
            "limit": self.limit,
            "ranks": self.ranks,
            "parent": os.getpid(),
        }
        env = dict(os.environ)
        expandable_segments(env)
        if self.ranks > 1:  # as torchrun sets them, so that Lightning starts no further processes
            own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": self.ranks}
            own |= {"LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env |= {name: str(value) for name, value in own.items()} | {"TORCHELASTIC_RUN_ID": "find-max"}
        out = (folder / f"{rank}.txt").open("w")
        command = [sys.executable, "-m", "lightning_dilated.cli.find_max", json.dumps(told), *self.arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _watch(self, folder: Path, tokens: int, ranks: list[subprocess.Popen]) -> Outcome:
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            found = [_read(folder / f"{rank}.json") for rank in range(self.ranks)]
            for rank, said in enumerate(found):
                if said and "missing" in said:
                    return Outcome(tokens, False, message=f"rank {rank}: {said['missing']}")
            if all(found):
                names = ("allocated", "reserved", "seconds", "host", "pinned")
                most = {name: max(said[name] for said in found) for name in names}
                return Outcome(tokens, True, **most, line=found[0]["line"])
            # a killed rank's connections end the others with errors of their own: it is looked for before these
            gone = [process.poll() for process in ranks]
            silent = [rank for rank, code in enumerate(gone) if code is not None and not _read(folder / f"{rank}.json")]
            killed = [rank for rank in silent if gone[rank] == -signal.SIGKILL]
            if killed:
                return Outcome(tokens, False, message=f"rank {killed[0]}: killed, as by a host without memory left")
            if silent and not any("missing" in (_read(folder / f"{rank}.json") or {}) for rank in range(self.ranks)):
                raise RuntimeError(self._failed(folder, tokens, silent[0], gone[silent[0]]))
            time.sleep(0.1)
        raise TimeoutError(
            f"a trial of {tokens:,} tokens took more than {self.timeout:g} s. Allow more by --timeout, or begin with fewer."
        )

    def _failed(self, folder: Path, tokens: int, rank: int, code: int) -> str:
        lines = (folder / f"{rank}.txt").read_text().splitlines()[-SHOWN:]
        return (
            f"rank {rank} ended with exit code {code} in a trial of {tokens:,} tokens, and not for want of memory. Its last "
            "lines:\n  " + "\n  ".join(lines)
        )


def _read(path: Path) -> dict | None:
    """What a rank said; it renames the file into its place."""
    return json.loads(path.read_text()) if path.is_file() else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass(frozen=True)
class Tried:
    """What a search found: the most tokens that fit, the fewest that did not (None: never met), and how many were tried."""

    fits: int
    fails: int | None
    times: int


def longest(
    fits: Callable[[int], bool],
    start: int,
    multiple: int = 1,
    within: float = 0.03,
    most: int | None = None,
) -> Tried:
    """The largest multiple of `multiple` that fits, to a part of `within`: doubles (or halves) from `start`, then bisects.

    Args:
        fits: whether so many tokens fit; more never fit where fewer do not.
        start: first tried; rounded up to a multiple.
        multiple: of all that is tried.
        within: bound of the found gap, as a part of what fits; 0: to the last multiple.
        most: never try more.

    Raises:
        ValueError: for numbers that are not positive, or where even `multiple` tokens do not fit.
    """
    for name, value in (("start", start), ("multiple", multiple), ("most", most)):
        if value is not None:
            integer(value, name, 1)
    if not 0 <= within < 1:
        raise ValueError(f"within must be a part from 0 to below 1, got {within!r}.")
    limit = None if most is None else most // multiple
    if limit == 0:
        raise ValueError(f"most={most} is below {multiple}, the fewest tokens that can be tried.")
    low, high, times = 0, None, 0
    at = -(-start // multiple)
    at = at if limit is None else min(at, limit)
    while high is None or high - low > max(1, within * low):
        times += 1
        if fits(at * multiple):
            low = at
            if low == limit:
                break
        else:
            high = at
        if high is None:
            at = 2 * low if limit is None else min(2 * low, limit)
        else:
            at = (low + high) // 2 if low else max(1, high // 2)
        if high == 1:
            raise ValueError(
                f"not even {multiple:,} tokens fit: make the model smaller, or keep less for the backward."
            )
    return Tried(low * multiple, None if high is None else high * multiple, times)


class Samples(Dataset):
    """Two batches of one random sequence of N tokens, as the model's `example_batch` makes them, alike on all ranks."""

    def __init__(self, model: DilatedModule, tokens: int) -> None:
        self.model, self.tokens = model, tokens

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return example_of(self.model, self.tokens, index)


__all__ = ["Outcome", "Trials", "Tried", "longest"]


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


#: how torch, CUDA, NCCL and cuBLAS say, besides by torch.OutOfMemoryError, that a GPU's or the host's memory is at its end
WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "cudaerrormemoryallocation",
    "out of memory",
    "alloc_failed",
)
#: of a trial: the first has no optimizer states yet
STEPS = 2


class _Steps(pl.Callback):
    """Seconds of each step; on a GPU they wait for the device. After the second, or where memory is at its end, the process
    leaves: past Lightning's teardown, which moves model, gradients and optimizer states to the host.

    Args:
        leave: is told how it went.
    """

    def __init__(self, leave: Callable[[dict[str, Any]], None]) -> None:
        self.leave = leave

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock stops."""
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if trainer.global_step < STEPS:
            return
        host = host_memory()
        found = {"seconds": seconds, "host": host["host_peak"], "pinned": host["pinned"] or 0}
        found |= {"allocated": torch.cuda.max_memory_allocated() if on_gpu else 0}
        found |= {"reserved": torch.cuda.max_memory_reserved() if on_gpu else 0}
        trainer.strategy.barrier()  # a rank that is gone would end those which still compute
        self.leave(found)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Say what was missing."""
        if (words := _missing(exception)) is not None:
            self.leave({"missing": words})


def train(told: dict[str, Any], arguments: list[str]) -> None:
    """Two steps; what they took, and what a recipe says of the length, is left in a file."""
    from lightning_dilated.cli.lightning_cli import DilatedCLI

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {
        "max_steps": STEPS,
        "max_epochs": None,
        "max_time": None,
        "fast_dev_run": False,
        "limit_train_batches": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "devices": told["ranks"],
    }

    class Attempt(DilatedCLI):
        """The recipe's classes, its Trainer with these options and no other callbacks than those of memory."""

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            """Without what writes files."""
            callbacks = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
            kept = [c for c in callbacks if isinstance(c, ActivationRecompute)]
            return super().instantiate_trainer(**{**kwargs, **options, "callbacks": [steps, *kept]})

        def check_data(self) -> None:
            """The recipe's own are not read, and may be too short for its sequences."""

    steps = _Steps(lambda said: _leave(told, {"line": cli.model.length_setting, **said}))
    cli = Attempt(run=False, args=arguments, save_config_callback=None)
    data = Samples(cli.model, told["tokens"])
    cli.trainer.fit(cli.model, DataLoader(data, batch_size=1, collate_fn=operator.itemgetter(0)))


def _leave(told: dict[str, Any], said: dict[str, Any]) -> None:
    """Leave a file that says how it went, and this process."""
    place = Path(told["folder"]) / f"{os.environ.get('RANK', 0)}.json"
    place.with_suffix(".part").write_text(json.dumps(said))
    place.with_suffix(".part").rename(place)
    sys.stdout.flush()
    os._exit(0)  # past destructors that would wait for ranks which are no longer there


def _missing(error: BaseException) -> str | None:
    """What an error says of memory at its end; None of any other."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS):
        return f"{str(error).splitlines()[0]} (in {_where(error)}{_free()})"
    return None


def _where(error: BaseException) -> str:
    """The last line of ours that an error passed: torch's own words do not say what was being done."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "lightning_dilated" in Path(f.filename).parts] or frames
    return f"{Path(mine[-1].filename).name}:{mine[-1].lineno}, {mine[-1].name}"


def _free() -> str:
    """What the GPU had left; torch's allocator says so by itself, others do not."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        free, held = torch.cuda.mem_get_info()[0] / 2**30, torch.cuda.memory_reserved() / 2**30
    except RuntimeError:  # after some errors CUDA answers nothing but the same error
        return ""
    return f"; {free:.2f} GiB of the GPU were free, {held:.2f} GiB were with torch's allocator"


def _end_with(parent: int) -> None:
    """Leave when the process that started this one is gone, however it went: a GPU would stay full for nobody."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(told: dict[str, Any], arguments: list[str]) -> None:
    """Train; a file says how it went."""
    if told["limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(told["limit"] * 2**30),) * 2)
    try:
        train(told, arguments)
    except (RuntimeError, MemoryError) as error:
        if (words := _missing(error)) is None:
            raise
        _leave(told, {"missing": words})
    raise RuntimeError(f"training ended before {STEPS} steps were done.")


if __name__ == "__main__":
    given, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI is told its arguments, and warns of any others
    asked = json.loads(given[1])
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()
    main(asked, given[2:])
