"""Checks of ranks: one against many on the first batch, equal settings, data and parameters on all, callbacks and modules
that would go wrong on shards.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_dilated._compat.lightning import combined_loaders, saves_by_time, set_update_count
from lightning_dilated._compat.torch import ADAPTIVE_POOLS, CONVOLUTION, POOLS, TOKEN_NORMS, own_parameters
from lightning_dilated.checkpoint.ranks import Peers
from lightning_dilated.checkpoint.state import bits, plain_tensors, unlike_replicas
from lightning_dilated.models.metrics import batches_in
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs_of_part
from lightning_dilated.sequence import SequenceGroup, SequenceSpec, sequence_sum
from lightning_dilated.sequence.consensus import differing
from lightning_dilated.sequence.ranges import clip
from lightning_dilated.sequence.shard import Shard
from lightning_dilated.strategy.mesh import MeshSizes

#: tokens of the head
HEAD = 2048
#: largest difference of a loss or gradient, of its largest value
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def check_first_batch(
    module: pl.LightningModule, batch: Any, spec: SequenceSpec | None, group: SequenceGroup, dtype: torch.dtype
) -> None:
    """Raise on every rank where loss or gradients of many ranks are not those of one.

    Finds what no list of modules can: user code that mixes tokens, uses local positions, or takes a mean over its own shard.

    Args:
        module: it is run in eval mode, so dropout plays no part; nothing is logged.
        batch: this rank's part, a mapping.
        spec: which entries are sequences.
        group: the ranks of the sequence.
        dtype: that the module computes in.

    Raises:
        ValueError: if the batch cannot be put together again.
        RuntimeError: naming the loss, or the first parameter whose gradient differs, and by how much.
    """
    if spec is None or not isinstance(batch, Mapping):
        raise ValueError(
            "check_first_batch needs a sequence_spec and batches that are mappings; set it to False without."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "check_first_batch runs training_step, which under manual optimization trains; set it to False."
        )
    head = _head(batch, spec, group)
    place = group.place
    with _without_effects(module, group):
        one = _losses(module, head)
        with group.active():
            many = _losses(module, SequenceSpec(spec.dims, spec.whole).cut(head, place))
    tokens = head[next(n for n in spec.dims if n in head)].shape
    differences = _differences(one, many, group)
    largest = max((size for name, (_, size) in differences.items() if name != "loss"), default=0.0)
    for name, (worst, size) in differences.items():
        # a gradient that is 0 but for rounding, such as that of a key's bias, is measured against the largest gradient
        if not worst <= ALLOWED[dtype] * max(size, 1e-6, 0.0 if name == "loss" else 1e-3 * largest):
            raise RuntimeError(
                f"{group.ranks} ranks do not compute what one rank does: the {name} of the first {tuple(tokens)} tokens "
                f"differs by {worst:.3g}, its largest value is {size:.3g}. Something in {type(module).__name__} mixes "
                "tokens, uses local positions, or takes a mean over this rank's tokens: see lightning_dilated.sequence for "
                "sums, means and gathers over the whole sequence."
            )


def _differences(
    one: dict[str, Tensor], many: dict[str, Tensor], group: SequenceGroup
) -> dict[str, tuple[float, float]]:
    """{name: (largest difference, largest value)}, the same on all ranks of the job, so that all of them raise or none."""
    pairs = []
    for name, want in one.items():
        got = many[name]
        if isinstance(want, DTensor):  # sharded: the mean over all ranks of what each computed
            got, want = got.to_local() * group.ranks, want.to_local()
        else:
            dist.all_reduce(got, group=group.group)
        pairs.append([x.abs().max().item() if x.numel() else 0.0 for x in (got - want, want)])
    worst = torch.tensor(pairs, dtype=torch.float64, device=one["loss"].device)
    worst = worst.nan_to_num(nan=torch.inf)  # a maximum over ranks may lose it
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group.loss_group)
    return {name: (float(a), float(b)) for name, (a, b) in zip(one, worst.tolist(), strict=True)}


def _head(batch: Mapping[str, Any], spec: SequenceSpec, group: SequenceGroup) -> dict[str, Any]:
    """The first tokens of the whole sequence, on every rank."""
    head = dict(batch)
    for name, dim in spec.dims.items():
        if name in head:
            head[name] = _first(head[name], dim, group)
            length = head[name].shape[dim]
    if head.get("lengths") is not None:
        head["lengths"] = head["lengths"].clamp(max=length)
    if head.get("cu_seqlens") is not None:
        head = _first_documents(head, spec, length)
    return head


def _first_documents(head: dict[str, Any], spec: SequenceSpec, length: int) -> dict[str, Any]:
    """The head without the documents that begin behind it, or that it cuts to one token; entries with one value a document
    likewise."""
    bounds = head["cu_seqlens"]
    count = max(1, int((bounds[:-1] < length - 1).sum()))
    bounds = bounds[: count + 1].clamp(max=length)
    for name, dim in spec.dims.items():
        if name in head:
            head[name] = head[name].narrow(dim, 0, int(bounds[-1]))
    for name in spec.whole:
        x = head.get(name)
        if name != "cu_seqlens" and isinstance(x, (Tensor, list, tuple)) and len(x) == len(head["cu_seqlens"]) - 1:
            head[name] = x[:count]
    return {**head, "cu_seqlens": bounds}


def _first(x: Tensor, dim: int, group: SequenceGroup) -> Tensor:
    """The first tokens along `dim` of the whole sequence, to which each rank contributes those that it holds."""
    local = x.movedim(dim, 0)
    facts = {"call": "check_first_batch", "shape": tuple(local.shape[1:]), "dim": dim, "dtype": x.dtype}
    shard = group.shard(group.agree(facts, len(local)).seq_len)
    head, start = local.new_zeros(min(HEAD, shard.seq_len), *local.shape[1:]), 0
    for positions in shard.ranges(group.rank):
        count = min(len(positions), len(range(positions.start, len(head), positions.step)))
        head[positions.start :: positions.step][:count] = local[start : start + count]
        start += len(positions)
    # bytes of any dtype can be summed, since all but one rank add zeros
    whole = sequence_sum(head.reshape(-1).view(torch.uint8), group)
    return whole.view(x.dtype).view(head.shape).movedim(0, dim).contiguous()


def _losses(module: pl.LightningModule, batch: Any) -> dict[str, Tensor]:
    """{"loss": ..., "gradient of NAME": ...}, in fp32 at least."""
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    loss = module.training_step(batch, *([0] if numbered else []))
    loss = loss["loss"] if isinstance(loss, Mapping) else loss
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    grads = _gradients(loss, [p for _, p in named])
    if all(g is None for g in grads):
        raise RuntimeError(f"check_first_batch: the loss of {type(module).__name__} has no gradient for any parameter.")
    results = {"loss": loss.detach()}
    results |= {
        f"gradient of {n}": torch.zeros_like(p) if g is None else g for (n, p), g in zip(named, grads, strict=True)
    }
    return {
        name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous() for name, x in results.items()
    }


def _gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """Of one loss. Those of sharded parameters come by `backward` only, averaged over all ranks; of others, DDP must not see
    a backward."""
    if not any(isinstance(p, DTensor) for p in parameters):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return grads


@contextmanager
def _without_effects(module: pl.LightningModule, group: SequenceGroup) -> Iterator[None]:
    """Within: eval mode, no logging, losses of this sequence only. Afterwards all is as before, random numbers too."""
    modes = {m: m.training for m in module.modules()}
    metrics = [(m, copy.deepcopy(m.metric_state), m.update_count) for m in module.modules() if isinstance(m, Metric)]
    silent: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    losses, group.loss_group = group.loss_group, group.group
    module.log = module.log_dict = silent  # type: ignore[method-assign]
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        del module.log, module.log_dict
        group.loss_group = losses
        for m, training in modes.items():
            m.training = training
        for m, state, count in metrics:
            for name, value in state.items():
                setattr(m, name, value)
            set_update_count(m, count)


def computed_in(module: torch.nn.Module, device: str) -> torch.dtype:
    """The dtype of a step: autocast's, else that of the parameters."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next((p.dtype for p in module.parameters()), torch.float32)


#: numbers of a tensor that an error shows; of longer ones, a digest
SHOWN = 16


def loader_facts(loader: Any) -> dict[str, str]:
    """What has to be equal on all ranks of a sequence, as far as it is known without reading samples.

    A dataset may have a `fingerprint()`: a string that differs where its samples do.
    """
    if not isinstance(loader, DataLoader):
        return {"loader": type(loader).__name__}
    data = loader.dataset
    samples, fingerprint = sized_len(data), getattr(data, "fingerprint", None)
    return {
        "loader": f"{type(loader).__name__} of {type(data).__name__}",
        "samples": "unknown" if samples is None else str(samples),
        "seq_len": str(getattr(data, "seq_len", "unknown")),
        "batch_size": str(loader.batch_size),
        "fingerprint": str(fingerprint()) if callable(fingerprint) else "unknown",
    }


def batch_facts(batch: Any, spec: SequenceSpec) -> dict[str, str]:
    """The entries of a batch of which every rank of a sequence has the whole."""
    entries = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}
    )
    return {str(name): _described(entries[name]) for name in spec.whole if name in entries}


def _described(value: Any) -> str:
    """A string that is equal where the value is; of an object of unknown type, the type's name."""
    if isinstance(value, (enum.Enum, np.generic)):
        return f"{type(value).__qualname__} {value.name if isinstance(value, enum.Enum) else value.item()!r}"
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(
        value, type
    ):  # a repr may name addresses, which no ranks share
        fields = {x.name: getattr(value, x.name, None) for x in dataclasses.fields(value) if x.compare}
        return f"{type(value).__qualname__}({', '.join(f'{name}={_described(x)}' for name, x in fields.items())})"
    if isinstance(value, functools.partial):
        return f"{_described(value.func)}(*{_described(value.args)}, **{_described(value.keywords)})"
    if isinstance(value, (type, torch.dtype, torch.device, FunctionType, PurePath)):
        return getattr(value, "__qualname__", None) or repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_described(k)}: {_described(v)}' for k, v in value.items()))}}}"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return type(value).__name__
    if value.numel() <= SHOWN:
        return str(value.tolist())
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


# -- settings ----------------------------------------------------------------------------------------------------------
#: settings of a Trainer by which ranks would make other steps, or wait for each other in vain
TRAINER = (
    "max_steps", "max_epochs", "min_steps", "min_epochs", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
    "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "overfit_batches", "log_every_n_steps",
    "reload_dataloaders_every_n_epochs", "fast_dev_run",
)  # fmt: skip
#: the same of callbacks that save, which ranks do together
SAVING = ("every_n_train_steps", "every_n_minutes", "at_end", "asynchronous")


def settings_of(module: pl.LightningModule, options: Mapping[str, Any]) -> dict[str, str]:
    """What has to be equal on all ranks of a job before its parameters are shared: precision, Trainer, hyperparameters.

    Args:
        options: of the strategy.
    """
    trainer = module.trainer
    plugin = trainer.precision_plugin
    facts: dict[str, Any] = {
        "run": str(trainer.state.fn),
        "precision": f"{plugin.precision} ({type(plugin).__name__})",
        **{name: getattr(trainer, name, None) for name in TRAINER},
        **{f"strategy {name}": value for name, value in options.items()},
    }
    for number, saver in enumerate(x for x in trainer.callbacks if isinstance(x, callbacks.Checkpoint)):  # type: ignore[attr-defined]
        settings = {name: getattr(saver, name) for name in SAVING if hasattr(saver, name)}
        facts[f"saving callback {number}"] = [saver.state_key, settings]
    facts |= {"model": type(module), "automatic_optimization": module.automatic_optimization}
    facts |= {f"hyperparameter {name}": value for name, value in dict(module.hparams).items()}
    facts["linear_dtype"] = getattr(module, "linear_dtype", None)
    return {name: _described(value) for name, value in facts.items()}


def parameters_of(module: nn.Module) -> dict[str, str]:
    """Shapes and dtypes of a module's parameters that all ranks share, and whether they are trained."""
    ignored = own_parameters(module)
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored and not is_lazy(p)]
    return {f"parameter {n}": f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}" for n, p in named}


def optimizers_of(strategy: Any) -> dict[str, str]:
    """Classes, groups and schedules of a strategy's optimizers."""
    facts: dict[str, Any] = {"optimizers": len(strategy.optimizers)}
    for i, optimizer in enumerate(strategy.optimizers):
        facts[f"optimizer {i}"] = type(optimizer)
        for j, group in enumerate(optimizer.param_groups):
            values = {**group, "params": len(group["params"])}
            facts |= {f"{name} of group {j} of optimizer {i}": x for name, x in values.items()}
    for i, config in enumerate(strategy.lr_scheduler_configs):
        settings = {name: getattr(config, name) for name in ("interval", "frequency", "monitor", "strict")}
        facts[f"scheduler {i}"] = [type(config.scheduler), settings]
        states = getattr(config.scheduler, "state_dict", dict)()
        facts |= {f"{name} of scheduler {i}": x for name, x in states.items()}
    return {name: _described(value) for name, value in facts.items()}


def compare_settings(read: Callable[..., dict[str, str]], *args: Any) -> None:
    """Compare `read(*args)` over all ranks of the job, which have to call this together.

    Raises:
        ValueError: on every rank, naming ranks, names and values.
        Exception: of `read`, where it raised the same on all ranks.
    """
    facts, error = {}, None
    try:
        facts = read(*args)
    except Exception as raised:  # the other ranks, who wait to compare, have to know
        facts, error = {"error": f"{type(raised).__name__}: {raised}"}, raised
    peers = Peers(dist.get_rank(), dist.get_world_size())
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
    if len(set(peers.gather(digest))) == 1:  # so that many ranks send few bytes
        if error is not None:
            raise error
        return
    lines = list(differing(peers.gather(facts)).values())
    raise ValueError(
        f"the ranks of the job were set up differently, so nothing was trained. {'. '.join(lines[:SHOWN])}. Start every "
        "rank with the same script, configuration and versions; a hyperparameter that is each rank's own is left out by "
        "save_hyperparameters(ignore=[...])."
    ) from error


class Replicas:
    """Compares the bits of parameters of which every rank holds the whole; the host waits for no GPU.

    Ranks that train alike hold the same bits. They no longer do where something differs between them that no setting says:
    a callback that changes a learning rate, a package's version, memory that fails. Sharded parameters and buffers, of which
    each rank may have its own, are not compared.

    Args:
        module: with the parameters.
        every: optimizer steps between two comparisons; None: only where a checkpoint is made.
        group: the ranks that hold the same parameters.
    """

    def __init__(self, module: nn.Module, every: int | None, group: dist.ProcessGroup) -> None:
        self.module, self.every, self.group = module, every, group
        self._steps = 0
        #: names, this rank's bits, the largest and smallest of all ranks, and what a GPU signals once these are there
        self._posted: tuple[list[str], Tensor, Tensor, torch.cuda.Event | None] | None = None

    def step(self) -> None:
        """After each optimizer step, on every rank.

        Raises:
            RuntimeError: on every rank, for what was sent `every` steps before; on CPUs for what is sent now.
        """
        self._steps += 1
        if self.every is not None and self._steps % self.every == 0:
            self.settle()
            self._post()
            if self._posted is not None and self._posted[3] is None:
                self.settle()

    def compare(self) -> None:
        """Compare at once, on every rank, as before a checkpoint; raises as `step`."""
        self.settle()
        self._post()
        self.settle()

    def settle(self) -> None:
        """Read what was sent last, on every rank; raises as `step`."""
        if self._posted is None:
            return
        (names, own, both, event), self._posted = self._posted, None
        if event is not None:
            event.synchronize()
        largest, smallest = both.chunk(2)
        if not torch.equal(largest, ~smallest):
            raise RuntimeError(self._difference(dict(zip(names, own.tolist(), strict=True))))

    def _named(self) -> dict[str, Tensor]:
        ignored = own_parameters(self.module)
        return plain_tensors((name, p) for name, p in self.module.named_parameters() if name not in ignored)

    def _post(self) -> None:
        """Send the bits of all parameters: the largest and the smallest of a parameter are those of equal ranks."""
        named = self._named()
        if not named:
            return
        own = torch.stack([bits(p) for p in named.values()])
        both = torch.cat([own, ~own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)  # on a GPU its stream waits, and not the host
        if both.device.type != "cuda":
            self._posted = [*named], own, both, None
            return
        host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = [*named], own, host, event

    def _difference(self, own: dict[str, int]) -> str:
        """Which ranks held other values of which parameters, in words; a collective call.

        Args:
            own: this rank's bits as they were sent: later steps may have changed the parameters.
        """
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, own, group=self.group)
        return unlike_replicas(every, dist.get_process_group_ranks(self.group))


# -- balance -----------------------------------------------------------------------------------------------------------
#: how many times the mean of the ranks the busiest one computes, from which a layout is named
UNBALANCED = 1.1


def balance_hint(module: Any, group: SequenceGroup, batch: Any) -> str | None:
    """The layout to set where contiguous shards of causal sequences give ranks unequally many pairs; None elsewhere.

    Args:
        module: has run on the ranks of the group.
        batch: this rank's part; its documents and lengths count where it is a mapping.
    """
    plan, patterns = group.plan, Counter(getattr(module, "patterns", ()))
    if plan is None or group.agreed is None or group.layout != "contiguous" or not getattr(module, "causal", False):
        return None
    ranks = group.ranks // plan.head_size
    if ranks == 1 or not patterns or plan.exchange == "switch":  # which trade work, too
        return None
    parts = _documents(batch, group.agreed.seq_len)
    heads = module.num_heads, getattr(module, "num_kv_heads", None)
    busiest = {}
    for layout in ("contiguous", "zigzag"):
        shard = Shard(group.agreed.seq_len, ranks, layout)
        each = [sum(_pairs(x, shard.ranges(r), parts, heads) * n for x, n in patterns.items()) for r in range(ranks)]
        busiest[layout] = max(each) * ranks / max(1, sum(each))
    if busiest["contiguous"] < UNBALANCED or busiest["zigzag"] > busiest["contiguous"] / UNBALANCED:
        return None
    return (
        f"the busiest of {ranks} ranks with layout='contiguous' computes {busiest['contiguous']:.2f} times the mean rank's "
        "(query, key) pairs, since the last ones of a causal sequence see most keys, and the others wait for it. With "
        f"layout='zigzag' each rank has an early and a late part, and the busiest computes {busiest['zigzag']:.2f} times "
        "the mean. Set it as the strategy's layout, in YAML trainer.strategy.init_args.layout: zigzag."
    )


def _documents(batch: Any, seq_len: int) -> list[range]:
    """The positions of each document, or sample, of a batch."""
    entries = batch if isinstance(batch, Mapping) else {}
    if isinstance(bounds := entries.get("cu_seqlens"), Tensor):
        return [range(a, b) for a, b in itertools.pairwise(bounds.tolist()) if a < b]
    if isinstance(lengths := entries.get("lengths"), Tensor):
        return [range(n) for n in lengths.tolist() if n]
    return [range(seq_len)]


def _pairs(
    pattern: DilatedPattern, pieces: Iterable[range], documents: Iterable[range], heads: tuple[int, int | None]
) -> int:
    """Causal (query, key) pairs of the queries at some positions of documents."""
    total = 0
    for piece, document in itertools.product(pieces, documents):
        if part := clip(piece, document.start, document.stop):
            own = range(part.start - document.start, part.stop - document.start)
            total += sum(pairs_of_part(pattern, own, *heads))
    return total


def compare_loader(
    loader: Any, shard: Callable[[], Any], trainer: Any, stage: str, sizes: MeshSizes, shards_parameters: bool
) -> tuple[Any, str | None]:
    """Shard a loader and compare it over all ranks of the job, also where `shard` fails on this one.

    Returns:
        The sharded loader, and why losses cannot be added over ranks in each step of the stage; None where they can.

    Raises:
        ValueError: on every rank, as `compare_loaders` and `unlike_batches`; on a rank where `shard` raised, its error.
    """
    sharded, facts, error = loader, {}, None
    try:
        facts, sharded = loader_facts(loader), shard()
    except Exception as raised:  # the other ranks, who wait to compare, have to know
        facts, error = {"error": f"{type(raised).__name__}: {raised}"}, raised
    try:
        batches = compare_loaders(facts, number_of_batches(sharded, trainer, stage), sizes)
    except ValueError as differs:
        raise (error or differs) from None
    # how many batches several training loaders make together shows at the first step
    compared = stage != "train" or 0 in batches
    return sharded, unlike_batches(batches, stage, sizes, shards_parameters) if compared else None


def compare_loaders(facts: dict[str, str], batches: int | None, sizes: MeshSizes) -> list[int | None]:
    """The numbers of batches of all ranks of the job, once their facts are compared; `facts` may hold an "error".

    Raises:
        ValueError: on every rank of the job, naming the ranks of a sequence that read different data, or the rank in error.
    """
    gathered: list[Any] = [None] * sizes.world
    dist.all_gather_object(gathered, (facts, batches))
    errors = [f"rank {rank}: {other['error']}" for rank, (other, _) in enumerate(gathered) if "error" in other]
    if errors:
        raise ValueError(f"a loader could not be shared. {'; '.join(errors)}")
    for first in range(0, sizes.world, sizes.sequence_size):
        ranks = range(first, first + sizes.sequence_size)
        for name in facts:
            values = [gathered[rank][0].get(name) for rank in ranks]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {rank} has {value}" for rank, value in zip(ranks, values, strict=True))
                raise ValueError(
                    f"the ranks of a sequence read different data, so nothing was computed. {name}: {listed}. Give every "
                    "rank the same dataset; the strategy shards it."
                )
    return [batches for _, batches in gathered]


def number_of_batches(loader: Any, trainer: Any, stage: str) -> int | None:
    """How many batches of a loader a Trainer takes in a stage; None where the loader has no length."""
    batches, limit = sized_len(loader), getattr(trainer, f"limit_{stage}_batches", None)
    if batches is None or limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def unlike_batches(batches: list[Any], stage: str, sizes: MeshSizes, shards_parameters: bool) -> str | None:
    """Why losses cannot be added over all ranks in each step of a stage, as some have fewer batches; None if they can.

    Raises:
        ValueError: where all ranks meet in each step: in training, and with sharded parameters in every stage; and where
            some have no batch of an evaluation: Lightning would leave them out where the others reduce metrics.
    """
    if len(set(batches)) == 1:
        return None
    text = f"the ranks have {batches} batches of the stage {stage!r}"
    multiple = f"Let the number of samples be a multiple of batch_size x {sizes.data} data ranks"
    if shards_parameters:
        raise ValueError(f"{text}, but with sharded parameters all need as many. {multiple}, or use 'ring_dilated'.")
    if stage == "train":
        raise ValueError(f"{text}, but each step takes all ranks. {multiple}, or drop the last batch.")
    if stage != "predict" and 0 in batches:
        raise ValueError(
            f"{text}, and ranks without any would be waited for at its end in vain. Give the stage at least batch_size x "
            f"{sizes.data} samples, or none (limit_{stage}_batches=0)."
        )
    return (
        f"{text}, so losses cannot be added over all ranks in each step. {multiple}; or keep sums and counts of this rank "
        "in a torchmetrics metric, which adds them up at the end of the epoch."
    )


def compare_training(trainer: Any, sizes: MeshSizes, shards_parameters: bool) -> None:
    """Compare numbers of training batches at the first step: those of all loaders together, up to the last step.

    Raises:
        ValueError: on every rank.
    """
    left = float("inf")
    if trainer.max_steps >= 0:
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    batches: list[Any] = [None] * sizes.world
    dist.all_gather_object(batches, min(trainer.num_training_batches, left))
    unlike_batches(batches, "train", sizes, shards_parameters)


def batches_of_loaders(trainer: Any, batch: Any) -> list[Any]:
    """The batches of several loaders that come together, each as its own; that of one loader as it is."""
    return batches_in(batch, combined_loaders(trainer))


def refuse_callbacks(trainer: pl.Trainer, strategy: str, sizes: MeshSizes, shards_parameters: bool) -> None:
    """Raise for a callback that would wait for other ranks, copy shards of parameters, or count a sequence once a rank.

    Args:
        strategy: its name, for the message.
        shards_parameters: whether each rank holds a shard of the parameters only.

    Raises:
        ValueError: naming the callback, and what to take instead.
    """
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        reason = _callback_reason(callback, sizes.world, sizes.sequence_size, shards_parameters)
        reason = reason or (_region_reason(callback) if sizes.regions > 1 else None)
        if reason:
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # or the error would set it off
            raise ValueError(f"the callback {type(callback).__name__} does not go with {strategy} here: {reason}")


def _callback_reason(callback: Any, world: int, sequence_size: int, shards_parameters: bool) -> str | None:
    saves = isinstance(callback, callbacks.OnExceptionCheckpoint)
    if world > 1 and (saves or getattr(callback, "save_on_exception", False)):
        return (
            "a rank that raised would wait for all others to save with it, until the timeout. Take "
            "ModelCheckpoint(every_n_train_steps=..., save_last=True), and torchrun --max-restarts to go on from it."
        )
    if isinstance(callback, callbacks.WeightAveraging) and shards_parameters:
        return (
            "it averages a copy of the whole model, while every rank trains a part of the parameters. Take "
            "strategy='ring_dilated', or average over module.parameters() in on_train_batch_end."
        )
    if type(callback) is callbacks.ThroughputMonitor and sequence_size > 1:
        return (
            f"it multiplies by all ranks, and would report {sequence_size} times as many sequences as there are. Take "
            "lightning_dilated.callbacks.ThroughputMonitor."
        )
    return None


def _region_reason(callback: Any) -> str | None:
    """Why a callback does not go with regions that train apart."""
    if isinstance(callback, callbacks.WeightAveraging):
        return (
            "it averages the parameters of one region, and would validate and save these. Leave it out: validations and "
            "checkpoints take the mean of the regions."
        )
    if isinstance(callback, callbacks.Timer) or saves_by_time(callback):
        return (
            "after each batch all regions would wait for rank 0 to tell the time. Count steps (max_steps, "
            "every_n_train_steps), or take ShardedCheckpoint(every_n_minutes=...), which asks at outer steps."
        )
    return None


HALO = (
    "use lightning_dilated.sequence.SequenceConv1d, or sequence_halo and allow=[...], or gather the sequence first "
    "(lightning_dilated.sequence.sequence_gather)"
)
GATHER = "gather the sequence first (lightning_dilated.sequence.sequence_gather)"
MEAN = "use lightning_dilated.sequence.sequence_mean"
ATTENTION = "use lightning_dilated.MultiheadDilatedAttention (DilatedPattern.dense() is full attention)"
NORM = "use LayerNorm or RMSNorm, which look at one token"
#: (kinds of modules, why, what to do)
MIXING: tuple[tuple[tuple[type, ...], str, str], ...] = (
    (TOKEN_NORMS, "takes statistics over tokens", NORM),
    ((nn.MultiheadAttention, nn.Transformer), "attends to this rank's tokens only", ATTENTION),
    ((nn.RNNBase,), "runs along the sequence", GATHER),
    (POOLS, "pools neighbouring tokens", GATHER),
    (ADAPTIVE_POOLS, "pools over this rank's tokens only", MEAN),
)


def _mixing_reason(module: nn.Module) -> tuple[str, str] | None:
    wide = isinstance(module, CONVOLUTION) and any(size > 1 for size in module.kernel_size)
    if wide and not getattr(module, "reads_neighbours", False):
        return "reaches over the edge of a shard", HALO
    for kinds, why, remedy in MIXING:
        if isinstance(module, kinds):
            return why, remedy
    return None


def refuse_mixing(root: nn.Module, allow: tuple[str, ...]) -> None:
    """Raise for modules below `root` that would silently compute something else on a part of the sequence.

    Args:
        allow: names of modules (with everything below them) that see no tokens of a sharded sequence.

    Raises:
        ValueError: naming every such module.
    """
    refused = []
    for name, module in root.named_modules():
        reason = _mixing_reason(module)
        allowed = any(name == a or name.startswith(a + ".") for a in allow)
        if reason and not allowed:
            refused.append(f"{name or 'the module'} ({type(module).__name__}) {reason[0]}: {reason[1]}")
    if refused:
        raise ValueError(
            "modules that mix tokens or samples cannot run on parts of a sequence. "
            + "; ".join(refused)
            + ". One that never sees a cut sequence may be named in the strategy's allow=[...]."
        )
