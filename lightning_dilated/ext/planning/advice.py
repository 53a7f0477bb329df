"""Advise settings with which a run fits into memory, given its model, sequence length and strategy.

Counting replaces functions of torch (see `planning.counting.dry_run`), so a separate process makes the plan. It reads
the question from a pickle without tensors: `python -m lightning_dilated.ext.planning.advice QUESTION ANSWER`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dilated.data import StreamDataModule
from lightning_dilated.ext.planning.candidates import candidates_of, in_words
from lightning_dilated.ext.planning.counting.dry_run import PRECISIONS
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import GRAIN, Case, Facts
from lightning_dilated.ext.planning.gpus import GIB, GPUS, Gpu
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule

#: the command of the planning process, and its time limit in seconds; it usually takes half a minute
COMMAND = (sys.executable, "-m", "lightning_dilated.ext.planning.advice")
TIMEOUT = 120.0


@dataclass(frozen=True)
class Question:
    """A run to plan: the model without weights, the length of a sequence, the memory settings and the machine."""

    model: DilatedModule
    tokens: int
    precision: str
    compile_blocks: bool
    settings: MemorySettings
    gpu: Gpu
    setup: Setup
    streams: Streams | None = None


class Streams(NamedTuple):
    """The streams on which a rank trains step by step: their number, and the number of tokens of each."""

    count: int
    length: int


def advise(trainer: pl.Trainer, pl_module: pl.LightningModule, tokens: int | None = None) -> str | None:
    """Return a text: settings of ActivationRecompute that fit, or the number of GPUs that is needed if no settings fit.

    Runs a separate process, usually for half a minute and at most for `TIMEOUT`; it uses no GPU. Returns None if the
    length is unknown, the model cannot be planned, or the run's own settings are the best that fit.

    Args:
        trainer: the run's trainer.
        pl_module: its module.
        tokens: length of a sequence; None: the longest that the strategy has seen, or the data's `seq_len`.

    Raises:
        RuntimeError, TimeoutError: if the process fails (for example, cannot import a class) or takes too long.
    """
    question = question_of(trainer, pl_module, tokens)
    if question is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "question").write_bytes(_pickled(question))
        _run(place)
        return pickle.loads((place / "answer").read_bytes())


def question_of(trainer: pl.Trainer, pl_module: pl.LightningModule, tokens: int | None = None) -> Question | None:
    """Describe a run as a `Question`; None if the run cannot be planned."""
    tokens, precision = tokens or _tokens(trainer), str(trainer.precision)
    if not isinstance(pl_module, DilatedModule) or precision not in PRECISIONS or not tokens:
        return None
    if type(pl_module).example_batch is DilatedModule.example_batch or not isinstance(
        getattr(pl_module, "depth", None), int
    ):
        return None
    compiled = bool(getattr(pl_module, "compile_blocks", False))
    now = getattr(getattr(pl_module, "transformer", None), "memory", MemorySettings())
    run = _gpu(trainer), _setup(trainer, pl_module), _streams(trainer)
    return Question(pl_module, tokens, precision, compiled, now, *run)


def answer(question: Question) -> str | None:
    """Count the model in this process, and return the text that `advise` returns."""
    model, tokens, now = question.model, question.tokens, question.settings
    try:
        subject = counted_model_of(model, question.precision, None, question.compile_blocks, question.gpu.capability)
    except (TypeError, ValueError):  # the model cannot be planned
        return None
    case = Case(subject, Facts.of(model, subject), question.setup, question.gpu)
    able = candidates_of(case.facts)
    if question.streams is not None:
        return _answer_for_steps(
            case, [x for x in able if x.head_chunks == now.head_chunks], now, tokens, question.streams
        )
    best = next((x for x in able if case.fits(x, tokens)), None)  # the fastest is first, so few are counted
    needs = case.memory(now, tokens).peak / GIB
    usage = f"planned: {tokens:,} tokens on {case.setup.ranks} GPU(s) take {needs:.1f} GiB of each with {in_words(now)}"
    if best is not None and best != now:
        peak = case.memory(best, tokens).peak / GIB
        return f"{usage}, and {peak:.1f} with ActivationRecompute({_arguments(best)})."
    return f"{usage}.{_otherwise(case, able, now, tokens, model)}" if best is None else None


def _answer_for_steps(
    case: Case, able: list[MemorySettings], now: MemorySettings, step: int, streams: Streams
) -> str | None:
    """Return the text of `advise` for streams, where the model carries states from step to step."""
    tokens = min(step, now.stream or step)
    planned, room = case.step_memory(now, tokens, *streams), case.gpu.usable(case.setup.ranks)
    if planned.peak <= room:
        return None
    usage = (
        f"planned: {tokens:,} tokens at a time of {streams.count} stream(s) take {planned.peak / GIB:.1f} GiB of each GPU "
        f"with {in_words(now)}, up to {planned.carried / GIB:.1f} of it for what is carried from step to step"
    )
    halves = [tokens >> i for i in range(max(1, (tokens // GRAIN).bit_length()))] if planned.carried < room else []
    for size in halves:
        for settings in able:
            peak = case.step_memory(settings, size, *streams).peak
            if peak <= room:
                best = replace(settings, stream=size if size < step else None)
                ends = f", which ends gradients every {size:,} tokens" if size < tokens else ""
                return f"{usage}. It is {peak / GIB:.1f} with ActivationRecompute({_arguments(best)}){ends}."
    return f"{usage}. Fewer tokens do not help: lower data.streams, or take more GPUs, which share the streams."


# -- the process -------------------------------------------------------------------------------------------------------
def _run(folder: Path) -> None:
    """Run the planning process, and kill its process group at the end."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "output").open("w") as out:
        process = subprocess.Popen(
            [*COMMAND, str(folder / "question"), str(folder / "answer")],
            env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no plan was ready after {TIMEOUT:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code or not (folder / "answer").is_file():
        lines = (folder / "output").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"the process that plans ended with exit code {code}: {lines[-1] if lines else 'no output'}")


class _Pickler(pickle.Pickler):
    """Refuse to pickle tensors: a full GPU has no room to copy them, and the plan needs none."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            raise pickle.PicklingError("a tensor")
        return NotImplemented


def _dumped(value: Any) -> bytes | None:
    """Return the value's pickle; None if it cannot be pickled or contains tensors."""
    out = io.BytesIO()
    try:
        _Pickler(out).dump(value)
    except Exception:  # pickling may call code of any class, and raise any error
        return None
    return out.getvalue()


def _pickled(question: Question) -> bytes:
    """Pickle the question. Its copy of the model has no layers, Trainer, optimizer or unpicklable attributes."""
    model = DilatedModule.planning_copy(question.model, question.model.depth)
    for name, value in [*model.named_children(), *vars(model).items()]:
        if _dumped(value) is None and name != "_modules":
            delattr(model, name)
    pickled = _dumped(replace(question, model=model))
    if pickled is None:
        raise RuntimeError(f"{type(question.model).__name__} cannot be pickled, so no other process can plan it")
    return pickled


def _otherwise(case: Case, able: list[MemorySettings], now: MemorySettings, tokens: int, model: DilatedModule) -> str:
    """Describe the remedies if the run fits with none of the settings."""
    if now.offload and replace(case, host=float("inf")).fits(now, tokens):
        return " By the plan that fits, if the host has room for the block inputs."
    longest = {x: case.longest(x) for x in able}
    best = max(longest, key=longest.__getitem__)
    if not longest[best]:
        sharded = case.setup.strategy == "ring_dilated_fsdp"
        take = "RingDilatedFSDPStrategy(cpu_offload=True), or" if sharded else "strategy='ring_dilated_fsdp', or"
        return f" Parameters and states alone do not fit: take {'' if case.setup.cpu_offload else f'{take} '}more GPUs."
    remedies = [f"about {-(-tokens * case.setup.ranks // longest[best])} GPUs", *_by_host(case, able, tokens)]
    wide = model.hparams.get("residual_dtype", "bfloat16") is None
    return (
        f" At most {longest[best]:,} fit, with ActivationRecompute({_arguments(best)}). Take {' or '.join(remedies)}."
        f"{' Less is needed with residual_dtype=bfloat16 of the model.' if wide else ''}"
    )


def _by_host(case: Case, able: list[MemorySettings], tokens: int) -> list[str]:
    """Return a list of one text, which advises offloading block inputs and names the host memory that this needs. The
    list is empty if this does not help. Free host memory is not checked: the limit that machines report may grow."""
    offloading = [replace(x, offload=1.0) for x in able if x.policy == "block"]
    roomy = replace(case, host=float("inf"))
    needs = {x: roomy.memory(x, tokens).host / GIB for x in offloading if roomy.fits(x, tokens)}
    if not needs:
        return []
    best = min(needs, key=needs.__getitem__)
    room = f"{needs[best]:.1f} GiB"
    return [f"ActivationRecompute({_arguments(best)}), for which the host keeps {room} of each rank's block inputs"]


def _arguments(settings: MemorySettings) -> str:
    defaults = MemorySettings()
    names = ("every", "tile", "head_chunks", "offload", "stream")
    named = [f"{n}={getattr(settings, n)}" for n in names if getattr(settings, n) != getattr(defaults, n)]
    return ", ".join([repr(settings.policy), *named])


def _tokens(trainer: pl.Trainer) -> int | None:
    agreed = getattr(_sequence(trainer), "agreed", None)
    data: Any = getattr(trainer, "datamodule", None)
    tokens = agreed.seq_len if agreed is not None else getattr(data, "seq_len", None)
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _streams(trainer: pl.Trainer) -> Streams | None:
    """Return the rank's streams; None if the data are separate sequences."""
    data: Any = getattr(trainer, "datamodule", None)
    if not isinstance(data, StreamDataModule):
        return None
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    return Streams(data.per_rank(replicas), data.dataset("train").length)


def _sequence(trainer: pl.Trainer) -> Any:
    """Return the ranks that share a sequence, or None if they are not known yet."""
    try:
        return getattr(trainer.strategy, "sequence", None)
    except RuntimeError:
        return None


def _gpu(trainer: pl.Trainer) -> Gpu:
    """Return the GPU of this rank, or an H200 if the rank has no GPU."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return GPUS["H200"]
    properties = torch.cuda.get_device_properties(device)
    known = next((g for g in GPUS.values() if g.name.split("-")[0] in properties.name.replace(" ", "")), GPUS["H200"])
    capability = properties.major, properties.minor
    return replace(known, name=properties.name, memory=properties.total_memory, capability=capability)


def _setup(trainer: pl.Trainer, module: pl.LightningModule) -> Setup:
    sequence = _sequence(trainer)
    shares = hasattr(type(trainer.strategy), "sequence")
    ranks = sequence.ranks if sequence is not None else trainer.world_size if shares else 1
    sharded = getattr(trainer.strategy, "shards_parameters", False)
    ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    optimizers = [type(x).__name__.lower() for x in trainer.optimizers or ()]
    return Setup(
        "ring_dilated_fsdp" if sharded else "ring_dilated" if ddp or ranks > 1 else "single",
        ranks,
        max(1, ranks // max(1, trainer.num_nodes)),
        "adamw8bit" if any("8bit" in x for x in optimizers) else "adamw",
        cpu_offload=sharded and getattr(trainer.strategy, "_offload", None) is not None,
        data_ranks=max(1, trainer.world_size // ranks) if ddp else 1,
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(answer(pickle.loads(Path(sys.argv[1]).read_bytes()))))
