"""Train on a sequence chunk by chunk, with the gradients of one pass but memory for only one chunk and carried rows.

The first pass computes the chunks in rising order without a graph; each layer keeps the keys and values that later
chunks read. The second pass computes the chunks again in falling order and differentiates them. Later chunks have then
computed the gradients of a chunk's keys and values. Parameter gradients are summed in fp32 or a wider dtype and
returned once, so that their hooks, such as DDP's, run once.

Shape letters: B batch, N tokens, C tokens of a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_dilated._compat.torch import hooks_paused
from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.ext.streams.state import StreamState
from lightning_dilated.ext.streams.stream import Stream
from lightning_dilated.memory.recompute import forget_casts
from lightning_dilated.memory.settings import check_shared
from lightning_dilated.memory.token_chunks import added, check_whole, only_once, trained
from lightning_dilated.sequence.group import SequenceGroup, active_sequence

#: a function that computes a chunk, or this rank's piece of it, from its index and the place of each layer
RunChunk = Callable[[int, list[LayerPlace]], Tensor]


class Chunks(NamedTuple):
    """The settings of a streamed sequence.

    Attributes:
        seq_len, chunk: N and C.
        depth: number of layers.
        dropout: whether attention weights are dropped; the masks are the same as in one pass.
        truncate: whether gradients end at the bounds of chunks.
        before: the state of earlier calls, without gradients; if given, the stream sets `left`. None: a new sequence.
        starts: with `before`: for each sample, the positions at which documents begin; see `Stream.resume`.
        group: the ranks that share each chunk; None: this rank computes whole chunks.
    """

    seq_len: int
    chunk: int
    depth: int
    dropout: bool = False
    truncate: bool = False
    before: StreamState | None = None
    starts: Sequence[Sequence[int]] = ()
    group: SequenceGroup | None = None

    @contextlib.contextmanager
    def begun(self, stream: Stream, store: bool) -> Iterator[None]:
        """Start these chunks on the stream, and end them at the end of the `with` block."""
        if self.before is None:
            stream.begin(self.seq_len, self.chunk, store, self.group)
        else:
            stream.resume(self.before, self.starts, self.seq_len, self.chunk)
        try:
            yield
            if self.before is not None:
                stream.left = stream.state()
        finally:
            stream.end()

    def seeds(self) -> list[Tensor | None]:
        """Draw a seed of attention dropout for each layer, with the same random numbers as one pass."""
        return [torch.randint(2**62, (), dtype=torch.int64) if self.dropout else None for _ in range(self.depth)]


def sharing() -> SequenceGroup | None:
    """Return the ranks that share the sequence; None if this rank has all of it."""
    group = active_sequence()
    return None if group is None or group.ranks == 1 else group


def check_streamed(modules: Sequence[nn.Module], dtype: torch.dtype, chunk: int) -> None:
    """Raise if a stream's result or gradients would differ from one pass over the whole sequence.

    Raises:
        ValueError: for FSDP, fp16, and ranks that share the sequence in a layout that does not match its chunks.
    """
    group = sharing()
    if group is not None:
        check_shared(chunk, group.layout, group.stream)
    if any(isinstance(m, FSDPModule) for module in modules for m in module.modules()):
        raise ValueError(
            f"stream={chunk} is not offered with FSDP, which would gather all weights for every chunk. Take "
            'strategy="ring_dilated", where each rank has all weights, or leave stream out.'
        )
    if dtype == torch.float16:
        raise ValueError(
            f"stream={chunk} is not offered in fp16: gradients are computed with the loss, before it is scaled. Take "
            'precision="bf16-mixed".'
        )
    check_whole(modules)


def streamed_sum(stream: Stream, run: RunChunk, chunks: Chunks, modules: Sequence[nn.Module], like: Tensor) -> Tensor:
    """Return the sum of run(number, layers) over the chunks, with its gradients.

    Args:
        run: computes a number from this rank's piece of a chunk. It must be deterministic; random states are restored.
        modules: the modules with the parameters that `run` uses.
        like: a tensor on the device of the computation.
    """
    leaves = trained(modules)
    if torch.is_grad_enabled() and leaves:
        return _Streamed.apply(stream, run, chunks, like, *leaves)
    total = None
    for part in streamed(stream, run, chunks):
        total = added(total, part)
    return total


@torch.no_grad()
def streamed(stream: Stream, run: Callable[[int, list[LayerPlace]], Any], chunks: Chunks) -> Iterator[Any]:
    """Yield run(number, layers) for each chunk in rising order, without gradients."""
    seeds = chunks.seeds()
    with chunks.begun(stream, store=False):
        for i in _watched(stream, "forward", range(stream.chunks)):
            yield run(i, stream.layers(i, seeds))


def _watched(stream: Stream, name: str, chunks: range) -> Iterator[int]:
    """Yield the chunks of a pass; call `stream.watch` at its start and after each chunk."""
    watch = stream.watch or (lambda *unused: None)
    watch(name, 0, len(chunks))
    for done, i in enumerate(chunks, 1):
        yield i
        watch(name, done, len(chunks))


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, run, chunks, like, *leaves):
        # saved-tensor hooks of a checkpoint or an offload around this call must not be applied inside it
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        try:
            with plain, chunks.begun(stream, store=not chunks.truncate):
                total, sums = (_truncated if chunks.truncate else _exact)(stream, run, chunks, like, leaves)
        finally:
            forget_casts()
        ctx.dtypes = [x.dtype for x in leaves]
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    @only_once
    def backward(ctx, grad):
        sums = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, None, None, *(None if x is None else (x * grad).to(dtype) for x, dtype in sums)


Sums = list[Tensor | None]


def _exact(
    stream: Stream, run: RunChunk, chunks: Chunks, like: Tensor, leaves: Sequence[Tensor]
) -> tuple[Tensor, Sums]:
    """Return (the sum, gradients of the leaves), equal to the results of one pass."""
    seeds, last = chunks.seeds(), stream.chunks - 1
    total, states, sums = None, [], [None] * len(leaves)
    for i in _watched(stream, "forward", range(last)):  # the last chunk is computed once, with its graph
        states.append(_RandomState.of(like))
        total = added(total, run(i, stream.layers(i, seeds)))
    stream.descend()
    end = None
    for i in _watched(stream, "backward", range(last, -1, -1)):
        if i < last:
            states[i].restore()
        part = _differentiate(run, stream, i, seeds, leaves, sums)
        if end is None:
            total, end = added(total, part), _RandomState.of(like)
    end.restore()
    return total, sums


def _truncated(
    stream: Stream, run: RunChunk, chunks: Chunks, like: Tensor, leaves: Sequence[Tensor]
) -> tuple[Tensor, Sums]:
    """Return (the sum, gradients of the leaves) of one pass that treats carried rows as constants: truncated BPTT."""
    seeds, total, sums = chunks.seeds(), None, [None] * len(leaves)
    for i in _watched(stream, "chunk", range(stream.chunks)):
        total = added(total, _differentiate(run, stream, i, seeds, leaves, sums))
    return total, sums


def _differentiate(
    run: RunChunk, stream: Stream, i: int, seeds: list[Tensor | None], leaves: Sequence[Tensor], sums: Sums
) -> Tensor:
    """Return the sum of chunk i, and add its gradients to `sums`."""
    forget_casts()
    with torch.enable_grad():
        part = run(i, stream.layers(i, seeds))
    with hooks_paused(leaves):  # autograd calls the hooks later, with the gradient of all chunks
        grads = torch.autograd.grad(part, leaves, allow_unused=True)
    forget_casts()
    for k, grad in enumerate(grads):
        sums[k] = added(sums[k], grad)
    return part.detach()


class _RandomState(NamedTuple):
    """States of the random generators that a chunk's dropout uses."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    kind: str

    @classmethod
    def of(cls, like: Tensor) -> _RandomState:
        return cls(torch.get_rng_state(), *get_device_states(like), like.device.type)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.kind)
