"""Find the longest sequence that trains on the devices of this machine, with real steps.

    python benchmarks/find_max.py --config recipes/longest.yaml --gpus 4

`longest` doubles and bisects the length. Each trial (`Trials`) starts a process per rank, so that a rank without memory
leaves no rank waiting and frees its memory for the next trial. A process runs `python benchmarks/find_max.py JSON
--config RECIPE ...`: two steps of the recipe's model, strategy and memory settings on its `example_batch`.

Shape letters: N tokens.
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
from lightning_dilated.ext.planning.counting.model_specs import example_of
from lightning_dilated.ext.planning.host import host_memory
from lightning_dilated.models import DilatedModule

GIB = 2**30
#: number of lines, from the end of a failed rank's output, that an error contains
SHOWN = 15


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        fits: whether no rank ran out of memory.
        allocated, reserved: largest bytes on a GPU of any rank, 0 if unknown.
        seconds: time of the second step.
        message: the rank that ran out of memory, and its error.
        host, pinned: largest bytes of a rank's process on the host: resident, with libraries, and pinned at the end.
    """

    tokens: int
    fits: bool
    allocated: int = 0
    reserved: int = 0
    seconds: float = 0.0
    message: str = ""
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
        arguments: arguments of `fit`: --config and options.
        ranks: number of processes, each with its own device.
        timeout: seconds that a trial may take.
        limit: GiB of host memory for each process, to test on a CPU; None: no limit.
    """

    arguments: Sequence[str]
    ranks: int
    timeout: float = 600.0
    limit: float | None = None

    def __call__(self, tokens: int) -> Outcome:
        """Train two steps.

        Raises:
            RuntimeError: with a rank's last lines of output, if it fails for a reason other than memory.
            TimeoutError: if the ranks take too long.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks: list[subprocess.Popen] = []
            try:
                port = _free_port()
                for rank in range(self.ranks):  # a process may fail to start after others have started
                    ranks.append(self._start(Path(folder), tokens, rank, port))
                return self._watch(Path(folder), tokens, ranks)
            finally:
                for process in ranks:
                    process.kill()
                for process in ranks:
                    process.wait()

    def _start(self, folder: Path, tokens: int, rank: int, port: int) -> subprocess.Popen:
        job = {
            "folder": str(folder),
            "tokens": tokens,
            "limit": self.limit,
            "ranks": self.ranks,
            "parent": os.getpid(),
        }
        env = dict(os.environ)
        expandable_segments(env)
        if self.ranks > 1:  # as torchrun sets them, so that Lightning does not start processes
            variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": self.ranks}
            variables |= {"LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env |= {name: str(value) for name, value in variables.items()} | {"TORCHELASTIC_RUN_ID": "find-max"}
        out = (folder / f"{rank}.txt").open("w")
        command = [sys.executable, __file__, json.dumps(job), *self.arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _watch(self, folder: Path, tokens: int, ranks: list[subprocess.Popen]) -> Outcome:
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            reports = [_read(folder / f"{rank}.json") for rank in range(self.ranks)]
            for rank, report in enumerate(reports):
                if report and "missing" in report:
                    return Outcome(tokens, False, message=f"rank {rank}: {report['missing']}")
            if all(reports):
                names = ("allocated", "reserved", "seconds", "host", "pinned")
                most = {name: max(report[name] for report in reports) for name in names}
                return Outcome(tokens, True, **most)
            # a killed rank breaks the connections of other ranks, so look for killed ranks before errors
            codes = [process.poll() for process in ranks]
            silent = [
                rank for rank, code in enumerate(codes) if code is not None and not _read(folder / f"{rank}.json")
            ]
            killed = [rank for rank in silent if codes[rank] == -signal.SIGKILL]
            if killed:
                return Outcome(tokens, False, message=f"rank {killed[0]}: killed, as by a host without memory left")
            if silent and not any("missing" in (_read(folder / f"{rank}.json") or {}) for rank in range(self.ranks)):
                raise RuntimeError(self._failed(folder, tokens, silent[0], codes[silent[0]]))
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
    """Return the report of a rank, or None before the rank has written one."""
    return json.loads(path.read_text()) if path.is_file() else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass(frozen=True)
class Tried:
    """Result of a search: the most tokens that fit, the fewest that do not (None: all fit), the number of trials."""

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
    """Return the largest multiple of `multiple` that fits, to a fraction `within`: double or halve `start`, then
    bisect.

    Args:
        fits: function that returns whether a number of tokens fits. It must be monotone.
        start: the first number, rounded up to a multiple.
        multiple: divisor of all numbers that are tried.
        within: the largest remaining gap as a fraction of the result; 0 means exact.
        most: upper bound of the search.

    Raises:
        ValueError: for numbers that are not positive, or if even `multiple` tokens do not fit.
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
    """Two batches of one random sequence of N tokens from the model's `example_batch`, equal on all ranks."""

    def __init__(self, model: DilatedModule, tokens: int) -> None:
        self.model, self.tokens = model, tokens

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return example_of(self.model, self.tokens, index)


#: first number of tokens per rank; divisor of numbers that are tried
START, MULTIPLE = 65536, 1024


def parser() -> argparse.ArgumentParser:
    """Return a parser for the options of the search. All other options are passed to fit."""
    p = argparse.ArgumentParser(
        "find_max.py",
        description="Trains two steps of ever longer random sequences (of the recipe's model) on the GPUs of this "
        "machine until they do not fit, and bisects. Options that are not listed "
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
    """Read "8M" as 8 * 2**20."""
    powers = {"K": 10, "M": 20, "G": 30}
    digits, power = (text[:-1], powers[text[-1].upper()]) if text and text[-1].upper() in powers else (text, 0)
    try:
        return int(float(digits) * 2**power) if power else int(digits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 65536, 64K or 8M") from None


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with defaults filled in.

    Raises:
        ValueError: if there is neither a GPU nor a memory limit, or fewer GPUs than requested.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not here and args.limit is None:
        raise ValueError(
            "this trains on GPUs until their memory ends, and here is none. Take `lightning-dilated plan` for an estimate, "
            "or give --limit GiB to try on the CPU."
        )
    args.gpus = (here or 1) if args.gpus is None else args.gpus
    if args.gpus < 1 or (args.limit is None and args.gpus > here):
        raise ValueError(f"--gpus {args.gpus}: this machine has {here}.")
    for name, value in (("timeout", args.timeout), ("multiple", args.multiple), ("limit", args.limit)):
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be positive, got {value:g}.")
    return args


def run(argv: list[str]) -> None:
    args, fit_arguments = parser().parse_known_args(argv)
    args = checked(args)
    arguments = [word for path in args.config for word in ("--config", path)] + fit_arguments
    trials, best = Trials(arguments, args.gpus, args.timeout, args.limit), []
    start, multiple = args.tokens or START * args.gpus, args.multiple * args.gpus
    try:
        result = longest(_printed(trials, best), start, multiple, args.within, args.most)
    except (RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    end = "not tried beyond" if result.fails is None else f"{result.fails:,} do not fit"
    most = max(best, key=lambda outcome: outcome.tokens)
    print(f"\nlongest: {result.fits:,} tokens on {args.gpus} rank(s) ({end}; {result.times} trials)\n{most}")


def _printed(trials: Trials, best: list[Outcome]) -> Callable[[int], bool]:
    def fits(tokens: int) -> bool:
        outcome = trials(tokens)
        print(outcome, flush=True)
        if outcome.fits:
            best.append(outcome)
        return outcome.fits

    return fits


#: messages of torch, CUDA, NCCL and cuBLAS about lack of memory, in errors other than torch.OutOfMemoryError
WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "cudaerrormemoryallocation",
    "out of memory",
    "alloc_failed",
)
#: steps of a trial: two, because optimizer states exist from the second step on
STEPS = 2


class _Steps(pl.Callback):
    """Times each step, waiting for the GPU. After the second step or an out-of-memory error, the process exits without
    Lightning's teardown, which moves model, gradients and optimizer states to the host.

    Args:
        leave: function that is called with the result.
    """

    def __init__(self, leave: Callable[[dict[str, Any]], None]) -> None:
        self.leave = leave

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if trainer.global_step < STEPS:
            return
        host = host_memory()
        result = {"seconds": seconds, "host": host["host_peak"], "pinned": host["pinned"] or 0}
        result |= {"allocated": torch.cuda.max_memory_allocated() if on_gpu else 0}
        result |= {"reserved": torch.cuda.max_memory_reserved() if on_gpu else 0}
        trainer.strategy.barrier()  # an exit would break the connections of ranks that are still computing
        self.leave(result)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if (words := _missing(exception)) is not None:
            self.leave({"missing": words})


def train(job: dict[str, Any], arguments: list[str]) -> None:
    """Train two steps and write the result to a file."""
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
        "devices": job["ranks"],
    }

    class Attempt(DilatedCLI):
        """A CLI for the recipe's model and Trainer with these options, and only with callbacks that affect memory."""

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            callbacks = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
            of_memory = [c for c in callbacks if isinstance(c, ActivationRecompute)]
            return super().instantiate_trainer(**{**kwargs, **options, "callbacks": [steps, *of_memory]})

        def check_data(self) -> None:
            """Skip the check of the data, which are not read and may be too short."""

    steps = _Steps(lambda result: _leave(job, result))
    cli = Attempt(run=False, args=arguments, save_config_callback=None)
    data = Samples(cli.model, job["tokens"])
    cli.trainer.fit(cli.model, DataLoader(data, batch_size=1, collate_fn=operator.itemgetter(0)))


def _leave(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result, then exit."""
    place = Path(job["folder"]) / f"{os.environ.get('RANK', 0)}.json"
    place.with_suffix(".part").write_text(json.dumps(result))
    place.with_suffix(".part").rename(place)
    sys.stdout.flush()
    os._exit(0)  # skip destructors, which would wait for ranks that have exited


def _missing(error: BaseException) -> str | None:
    """Return the message of an out-of-memory error, or None for other errors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS):
        return f"{str(error).splitlines()[0]} (in {_where(error)}{_free()})"
    return None


def _where(error: BaseException) -> str:
    """Return the last line of this package in the traceback, because torch's message does not name the operation."""
    frames = traceback.extract_tb(error.__traceback__)
    package = [f for f in frames if "lightning_dilated" in Path(f.filename).parts] or frames
    return f"{Path(package[-1].filename).name}:{package[-1].lineno}, {package[-1].name}"


def _free() -> str:
    """Return the free memory of the GPU, because only errors of torch's allocator contain it."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        free, held = torch.cuda.mem_get_info()[0] / 2**30, torch.cuda.memory_reserved() / 2**30
    except RuntimeError:  # after some errors, every CUDA call fails
        return ""
    return f"; {free:.2f} GiB of the GPU were free, {held:.2f} GiB were with torch's allocator"


def _end_with(parent: int) -> None:
    """Exit when the parent process has exited, so that the GPU is free."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(job: dict[str, Any], arguments: list[str]) -> None:
    if job["limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(job["limit"] * 2**30),) * 2)
    try:
        train(job, arguments)
    except (RuntimeError, MemoryError) as error:
        if (words := _missing(error)) is None:
            raise
        _leave(job, {"missing": words})
    raise RuntimeError(f"training ended before {STEPS} steps were done.")


if __name__ == "__main__":
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI gets its own arguments by name, and warns about others
    if argv[1:] and argv[1].startswith("{"):
        job = json.loads(argv[1])
        threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
        main(job, argv[2:])
    else:
        run(argv[1:])
