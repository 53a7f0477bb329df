"""Advice: which settings would make a run fit, from the Trainer's model, the sequence's length and the strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.planning.counting.dry_run import PRECISIONS
from lightning_dilated.planning.counting.model_specs import subject_of
from lightning_dilated.planning.estimate import Case, Facts, candidates, in_words
from lightning_dilated.planning.gpus import GIB, GPUS, Gpu
from lightning_dilated.planning.memory import Setup


def advise(trainer: pl.Trainer, pl_module: pl.LightningModule, tokens: int | None = None) -> str | None:
    """Settings of ActivationRecompute (and more GPUs, where none do) with which a step would fit; None where that cannot be
    told: for models that are not counted, and lengths that nobody named. Takes up to half a minute, and no GPU.

    Args:
        trainer: of the run.
        pl_module: its module.
        tokens: of a sequence; None: the longest that the strategy has seen, or the data's `seq_len`.
    """
    tokens = tokens or _tokens(trainer)
    precision = str(trainer.precision)
    if not isinstance(pl_module, DilatedModule) or precision not in PRECISIONS or not tokens:
        return None
    gpu, setup = _gpu(trainer), _setup(trainer, pl_module)
    try:
        subject = subject_of(pl_module, precision, capability=gpu.capability)
    except ValueError:  # no model that can be counted
        return None
    case = Case(subject, Facts.of(pl_module, subject), setup, gpu)
    now = getattr(getattr(pl_module, "transformer", None), "memory", MemorySettings())
    able = candidates(case.facts.windows, 0.0, case.facts.depth)
    best = next((x for x in able if case.fits(x, tokens)), None)  # the fastest first, and none is counted in vain
    needs = case.memory(now, tokens).peak / GIB
    said = f"planned: {tokens:,} tokens on {setup.ranks} GPU(s) take {needs:.1f} GiB of each with {in_words(now)}"
    if best is not None and best != now:
        peak = case.memory(best, tokens).peak / GIB
        return f"{said}, and {peak:.1f} with ActivationRecompute({_arguments(best)})."
    return f"{said}.{_otherwise(case, able, now, tokens, pl_module)}" if best is None else None


def _otherwise(case: Case, able: list[MemorySettings], now: MemorySettings, tokens: int, model: DilatedModule) -> str:
    """What helps where no settings do."""
    if now.offload and replace(case, host=float("inf")).fits(now, tokens):
        return " By the plan that fits, if the host has room for the block inputs."
    longest = {x: case.longest(x) for x in able}
    most = max(longest, key=longest.__getitem__)
    if not longest[most]:
        dealt = case.setup.strategy == "ring_dilated_fsdp"
        take = "RingDilatedFSDPStrategy(cpu_offload=True), or" if dealt else "strategy='ring_dilated_fsdp', or"
        return f" Parameters and states alone do not fit: take {'' if case.setup.cpu_offload else f'{take} '}more GPUs."
    ways = [f"about {-(-tokens * case.setup.ranks // longest[most])} GPUs", *_by_host(case, able, tokens)]
    narrow = model.hparams.get("residual_dtype", "bfloat16") is None
    return (
        f" At most {longest[most]:,} fit, with ActivationRecompute({_arguments(most)}). Take {' or '.join(ways)}."
        f"{' Less is needed with residual_dtype=bfloat16 of the model.' if narrow else ''}"
    )


def _by_host(case: Case, able: list[MemorySettings], tokens: int) -> list[str]:
    """Whether block inputs on the host would help, and how much of it that takes; how much there is is not asked, since what
    machines tell of it grows as it is used."""
    away = [replace(x, offload=1.0) for x in able if x.policy == "block"]
    roomy = replace(case, host=float("inf"))
    needs = {x: roomy.memory(x, tokens).host / GIB for x in away if roomy.fits(x, tokens)}
    if not needs:
        return []
    best = min(needs, key=needs.__getitem__)
    room = f"{needs[best]:.1f} GiB"
    return [f"ActivationRecompute({_arguments(best)}), for which the host keeps {room} of each rank's block inputs"]


def _arguments(settings: MemorySettings) -> str:
    usual = MemorySettings()
    names = ("every", "tile", "head_chunks", "offload")
    more = [f"{n}={getattr(settings, n)}" for n in names if getattr(settings, n) != getattr(usual, n)]
    return ", ".join([repr(settings.policy), *more])


def _tokens(trainer: pl.Trainer) -> int | None:
    """The sequence's length."""
    agreed = getattr(_sequence(trainer), "agreed", None)
    data: Any = getattr(trainer, "datamodule", None)
    found = agreed.seq_len if agreed is not None else getattr(data, "seq_len", None)
    return found if isinstance(found, int) and found > 0 else None


def _sequence(trainer: pl.Trainer) -> Any:
    """The ranks that share a sequence; None before they are known."""
    try:
        return getattr(trainer.strategy, "sequence", None)
    except RuntimeError:  # not yet
        return None


def _gpu(trainer: pl.Trainer) -> Gpu:
    """The GPU of this rank; an H200 where there is none."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return GPUS["H200"]
    found = torch.cuda.get_device_properties(device)
    known = next((g for g in GPUS.values() if g.name.split("-")[0] in found.name.replace(" ", "")), GPUS["H200"])
    return Gpu(found.name, found.total_memory, known.flops, (found.major, found.minor))


def _setup(trainer: pl.Trainer, module: pl.LightningModule) -> Setup:
    """How the Trainer runs it."""
    sequence = _sequence(trainer)
    shares = hasattr(type(trainer.strategy), "sequence")
    ranks = sequence.ranks if sequence is not None else trainer.world_size if shares else 1
    deals = getattr(trainer.strategy, "shards_parameters", False)
    ddp = isinstance(trainer.strategy, pl.strategies.DDPStrategy)
    optimizers = [type(x).__name__.lower() for x in trainer.optimizers or ()]
    return Setup(
        "ring_dilated_fsdp" if deals else "ring_dilated" if ddp or ranks > 1 else "single",
        ranks,
        max(1, ranks // max(1, trainer.num_nodes)),
        "adamw8bit" if any("8bit" in x for x in optimizers) else "adamw",
        cpu_offload=deals and getattr(trainer.strategy, "_offload", None) is not None,
    )
