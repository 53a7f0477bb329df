"""Compare many ranks with one rank on the first batch, for a strategy with `check_first_batch=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_dilated._compat.lightning import set_update_count
from lightning_dilated.sequence import SequenceGroup, SequenceSpec, sequence_sum

#: maximum number of compared tokens, which are the first tokens of the sequence (the head)
HEAD = 2048

#: largest allowed difference of a loss or gradient, relative to its largest value
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def check_first_batch(
    module: pl.LightningModule, batch: Any, spec: SequenceSpec | None, group: SequenceGroup, dtype: torch.dtype
) -> None:
    """Raise on every rank if the loss or gradients on many ranks differ from the results on one rank.

    The comparison finds code that mixes tokens, uses local positions, or averages over a shard.

    Args:
        module: the module; it runs in eval mode, so without dropout, and logs nothing.
        batch: this rank's part of the batch, a mapping.
        spec: the batch entries that are sequences.
        group: the ranks of the sequence.
        dtype: the dtype in which the module computes.

    Raises:
        ValueError: if the batch is not a mapping, optimization is manual, or the ranks' parts cannot be joined.
        RuntimeError: if the loss or a gradient differs; the message names the first one that does, and the difference.
    """
    if spec is None or not isinstance(batch, Mapping):
        raise ValueError(
            "check_first_batch needs a sequence_spec and batches that are mappings; without these set it to False."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "check_first_batch runs training_step, which would train under manual optimization; set it to False."
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
        # a gradient that is 0 except for rounding, such as the gradient of a key bias, is compared with the largest one
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
    """Return {name: (largest difference, largest value)}. All ranks return the same numbers, so all raise or none."""
    pairs = []
    for name, expected in one.items():
        actual = many[name]
        if isinstance(expected, DTensor):  # a sharded gradient is the mean over ranks, not the sum
            actual, expected = actual.to_local() * group.ranks, expected.to_local()
        else:
            dist.all_reduce(actual, group=group.group)
        pairs.append([x.abs().max().item() if x.numel() else 0.0 for x in (actual - expected, expected)])
    worst = torch.tensor(pairs, dtype=torch.float64, device=one["loss"].device)
    worst = worst.nan_to_num(nan=torch.inf)  # the maximum over ranks might drop NaN
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group.loss_group)
    return {name: (float(a), float(b)) for name, (a, b) in zip(one, worst.tolist(), strict=True)}


def _head(batch: Mapping[str, Any], spec: SequenceSpec, group: SequenceGroup) -> dict[str, Any]:
    """Return the batch with only the first tokens of the whole sequence, the same on every rank."""
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
    """Remove documents, and their per-document values, that begin after the head or have only one token in it."""
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
    """Return the first tokens along `dim` of the whole sequence. Each rank contributes its own tokens."""
    local = x.movedim(dim, 0)
    facts = {"call": "check_first_batch", "shape": tuple(local.shape[1:]), "dim": dim, "dtype": x.dtype}
    shard = group.shard(group.agree(facts, len(local)).seq_len)
    head, start = local.new_zeros(min(HEAD, shard.seq_len), *local.shape[1:]), 0
    for positions in shard.ranges(group.rank):
        count = min(len(positions), len(range(positions.start, len(head), positions.step)))
        head[positions.start :: positions.step][:count] = local[start : start + count]
        start += len(positions)
    # a sum of bytes works for any dtype, because all ranks but one add zeros
    whole = sequence_sum(head.reshape(-1).view(torch.uint8), group)
    return whole.view(x.dtype).view(head.shape).movedim(0, dim).contiguous()


def _losses(module: pl.LightningModule, batch: Any) -> dict[str, Tensor]:
    """Return {"loss": ..., "gradient of NAME": ...}, in fp32 or a wider dtype."""
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
    """Return the gradients of a loss. Sharded parameters need `backward`, which averages gradients over all ranks.
    If no parameter is sharded, `backward` is not called, because it would run DDP's hooks."""
    if not any(isinstance(p, DTensor) for p in parameters):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return grads


@contextmanager
def _without_effects(module: pl.LightningModule, group: SequenceGroup) -> Iterator[None]:
    """Use eval mode, no logging and only this sequence's loss; then restore all state, including the random state."""
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
