"""ShortConvolution: a depthwise convolution over a few neighbouring tokens, within documents and on any number of ranks.

One rank uses Triton kernels where they serve, else plain torch operations, which torch.compile fuses; several use a custom
op, which exchanges rows between ranks, and so do chunks of a stream, which leave rows for the next one.
Shape letters: B batch, L tokens of this rank, C channels, W taps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_dilated import kernels
from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.attention.stream import ChunkLayer, Stream, find_stream
from lightning_dilated.sequence.group import SequenceGroup, active_sequence, find_sequence
from lightning_dilated.sequence.halo import HaloRoute, chunk_halo_route, chunk_wire, halo_route, halo_wire

if TYPE_CHECKING:
    from lightning_dilated.kernels.convolution import Neighbours

NAME = "lightning_dilated::short_convolution"
#: what the kernels take: dtypes, and the most taps, which are unrolled
DTYPES, MOST_TAPS = (torch.bfloat16, torch.float16, torch.float32), 8
#: tokens over which a program of their backward sums the gradient of the weight, a power of two
ROWS = 256


def unsupported(dtype: torch.dtype, taps: int) -> str | None:
    """None where the kernels are written for rows of a dtype, else the reason."""
    if dtype not in DTYPES:
        return (
            f"takes {', '.join(str(x).removeprefix('torch.') for x in DTYPES)}, not {str(dtype).removeprefix('torch.')}"
        )
    return f"takes up to {MOST_TAPS} taps, not {taps}" if taps > MOST_TAPS else None


def why_not(device: torch.device, dtype: torch.dtype, taps: int) -> str | None:
    """None where the kernels serve rows of a dtype on a device, else the reason."""
    return unsupported(dtype, taps) or kernels.why_not(device)


@torch.compiler.assume_constant_result
def serves(device: torch.device, dtype: torch.dtype, taps: int) -> bool:
    """Whether the kernels compute a call of one rank."""
    return why_not(device, dtype, taps) is None


class ShortConvolution(nn.Module):
    """y_p = x_p + sum over taps i of weight_i x_(p - left + i), a weight for each tap and channel; initially the identity.

    Neighbours in other documents and beyond the sequence count as 0. Based (arXiv 2402.18668) and Canon layers (arXiv
    2512.17351) put such a step before attention, so that a token carries information about its neighbours.

    Args:
        channels: C.
        taps: W, at least 2.
        causal: if True a token sees itself and the W - 1 before it, else (W - 1) // 2 before it and the rest after it.

    Raises:
        TypeError, ValueError: for `taps` that is not an integer of at least 2; the message calls it kv_conv.
    """

    def __init__(self, channels: int, taps: int, causal: bool, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.taps, self.causal = integer(taps, "kv_conv", 2), causal
        self.right = 0 if causal else taps - 1 - (taps - 1) // 2
        self.weight = nn.Parameter(torch.zeros(taps, channels, device=device, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        chunk: ChunkLayer | None = None,
    ) -> Tensor:
        """(B, L, C) from x (B, L, C), this rank's tokens within an active `SequenceGroup`, or a chunk's of a stream.

        Args:
            lengths: (B,) on the CPU, number of real tokens of each right-padded sample, of the whole sequence.
            cu_seqlens: (documents + 1,), bounds of the documents packed into one sample, of the whole sequence.
            chunk: the layer's place in a stream; causal only.
        """
        return self.together([x], lengths, cu_seqlens, chunk)[0]

    def together(
        self,
        parts: Sequence[Tensor],
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        chunk: ChunkLayer | None = None,
    ) -> Sequence[Tensor]:
        """`forward` of tensors (B, L, C_i) whose channels stand side by side and are C together: a tensor for each."""
        x, lengths = parts[0], None if self.causal else lengths  # no token before the padding sees it
        if chunk is None and active_sequence() is None and serves(x.device, x.dtype, self.taps):
            return torch.ops.lightning_dilated.local_convolution(parts, self.weight, lengths, cu_seqlens, self.right)
        if len(parts) == 1:
            return (self._joint(x, lengths, cu_seqlens, chunk),)
        return self._joint(torch.cat(parts, -1), lengths, cu_seqlens, chunk).split([x.shape[-1] for x in parts], -1)

    def _joint(self, x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, chunk: ChunkLayer | None) -> Tensor:
        """`forward` by torch and the ops of ranks and streams."""
        group, weight = active_sequence(), self.weight.to(x.dtype)
        if chunk is not None:
            return torch.ops.lightning_dilated.chunk_convolution(x, weight, chunk.place, cu_seqlens, chunk.stream)[0]
        if group is not None:
            grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            return torch.ops.lightning_dilated.short_convolution(
                x, weight, lengths, cu_seqlens, self.right, group.name, grad
            )[0]
        left = self.taps - 1 - self.right
        same = None
        if lengths is not None or cu_seqlens is not None:  # the number of tokens may be a symbol otherwise
            same = _same_document(range(x.shape[1]), left, self.right, lengths, cu_seqlens, x.device)
        return _convolved(nn.functional.pad(x, (0, 0, left, self.right)), weight, left, same)

    def continued(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """The causal convolution of new tokens x (B, n, C) that follow `before` (B, W - 1, C), None at the start.

        Returns:
            (B, n, C), and the rows (B, W - 1 + n, C) of both.
        """
        before = x.new_zeros(x.shape[0], self.taps - 1, x.shape[2]) if before is None else before
        rows = torch.cat([before, x], 1)
        return _convolved(rows, self.weight.to(x.dtype), self.taps - 1, None), rows

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[1]}, taps={self.taps}, causal={self.causal}"


def _same_document(
    positions: range, left: int, right: int, lengths: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor | None:
    """(B or 1, n, W) bool: whether the neighbour is in the token's document or sample; None where all are."""
    if lengths is None and cu_seqlens is None:
        return None
    at = torch.arange(positions.start, positions.stop, device=device)
    offset = torch.arange(-left, right + 1, device=device)
    seen = at[:, None] + offset
    if cu_seqlens is None:
        end = send(lengths, device)[:, None, None]
        return (at[:, None] >= end) | (seen < end)
    bounds = send(cu_seqlens, device).to(torch.int64)
    # the attention that follows rejects wrong bounds; here they must not lead to an index out of range
    document = torch.searchsorted(bounds, at, right=True).clamp(max=len(bounds) - 1)[:, None]
    return ((seen >= bounds[document - 1]) & (seen < bounds[document]))[None]


def _convolved(rows: Tensor, weight: Tensor, left: int, same: Tensor | None) -> Tensor:
    """(B, n, C) from (B, left + n + right, C)."""
    n = rows.shape[1] - len(weight) + 1
    y = rows[:, left : left + n]
    for i, w in enumerate(weight):
        part = rows[:, i : i + n] * w
        y = y + (part if same is None else torch.where(same[..., i : i + 1], part, 0))
    return y


def _gradients(grad: Tensor, rows: Tensor, weight: Tensor, left: int, same: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the rows (B, left + n + right, C) and of the weight (W, C), at least fp32."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    n, grad = grad.shape[1], grad.to(wide)
    d_rows, d_weight = torch.zeros_like(rows, dtype=wide), torch.empty_like(weight, dtype=wide)
    d_rows[:, left : left + n] = grad
    for i, w in enumerate(weight):
        masked = grad if same is None else torch.where(same[..., i : i + 1], grad, 0)
        d_rows[:, i : i + n] += masked * w
        d_weight[i] = (masked * rows[:, i : i + n]).sum((0, 1))
    return d_rows, d_weight


@dataclass(frozen=True)
class Seen:
    """Which rows of consecutive positions see each other as neighbours.

    Attributes:
        documents: (B or 1, rows) int32, the number of each row's document; None: no documents.
        lengths: (B,) rows before the padding of each sample; None: no padding.
    """

    documents: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, positions: range, lengths: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> Seen:
        """Of some positions of a sequence, which may lie outside of it."""
        documents = None
        if cu_seqlens is not None:
            at = torch.arange(positions.start, positions.stop, dtype=torch.int32, device=device)
            bounds = send(cu_seqlens, device).to(torch.int32)
            documents = torch.searchsorted(bounds, at, right=True, out_int32=True)[None]
        return cls(documents, None if lengths is None else send(lengths, device) - positions.start)

    def neighbours(self, weight: Tensor, right: int) -> Neighbours:
        """As the kernels take it."""
        from lightning_dilated.kernels.convolution import Neighbours

        return Neighbours(len(weight) - 1 - right, self.documents, self.lengths)

    def table(self, n: int, left: int, right: int, device: torch.device) -> Tensor | None:
        """(B or 1, n, W) bool: which neighbours the rows after the first `left`, before the last `right`, see; None: all."""
        if self.documents is not None:
            return self.documents.unfold(1, left + 1 + right, 1) == self.documents[:, left : left + n, None]
        if self.lengths is None:
            return None
        source = torch.arange(n, device=device)[:, None] + torch.arange(left + 1 + right, device=device)
        end = self.lengths[:, None, None]
        return (source[:, left : left + 1] >= end) | (source < end)


def _run(rows: Tensor, weight: Tensor, right: int, seen: Seen) -> Tensor:
    """(B, n, C) from (B, left + n + right, C)."""
    left = len(weight) - 1 - right
    n = rows.shape[1] - left - right
    if n == 0:  # a rank's piece without a token
        return rows[:, :0].contiguous()
    if not serves(rows.device, rows.dtype, len(weight)):
        return _convolved(rows, weight, left, seen.table(n, left, right, rows.device))
    from lightning_dilated.kernels.convolution import forward

    return forward(rows, weight, seen.neighbours(weight, right), (left, right))


def _run_backward(grad: Tensor, rows: Tensor, weight: Tensor, right: int, seen: Seen) -> tuple[Tensor, Tensor]:
    """The gradients of the rows (B, left + n + right, C) and of the weight (W, C), at least fp32."""
    left = len(weight) - 1 - right
    if not grad.shape[1]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return torch.zeros_like(rows, dtype=wide), torch.zeros_like(weight, dtype=wide)
    if not serves(rows.device, rows.dtype, len(weight)):
        return _gradients(grad, rows, weight, left, seen.table(grad.shape[1], left, right, rows.device))
    from lightning_dilated.kernels.convolution import backward

    grad, sums = nn.functional.pad(grad, (0, 0, left, right)), _sums(rows, weight)
    neighbours = seen.neighbours(weight, right)
    return backward(grad, rows, weight, neighbours, sums, ROWS, torch.float32), sums.sum(0)


# -- one rank, by kernels ----------------------------------------------------------------------------------------------
@torch.library.custom_op("lightning_dilated::local_convolution", mutates_args=())
def local_convolution(
    parts: Sequence[Tensor], weight: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, right: int
) -> list[Tensor]:
    """y (B, L, C_i), contiguous, of each part (B, L, C_i) of x, whose channels are side by side; weight (W, C) of all."""
    from lightning_dilated.kernels.convolution import forward

    parts, neighbours = [_dense(x) for x in parts], _seen(parts[0], lengths, cu_seqlens).neighbours(weight, right)
    return [forward(x, w, neighbours) for x, w in zip(parts, _split(weight, parts), strict=True)]


@local_convolution.register_fake
def _(parts, weight, lengths, cu_seqlens, right):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]


@torch.library.custom_op("lightning_dilated::local_convolution_backward", mutates_args=())
def local_convolution_backward(
    grads: Sequence[Tensor],
    parts: Sequence[Tensor],
    weight: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    right: int,
) -> list[Tensor]:
    """The gradient of each part, and (n, W, C) fp32 whose sum over n is that of the weight."""
    from lightning_dilated.kernels.convolution import backward

    parts, neighbours = [_dense(x) for x in parts], _seen(parts[0], lengths, cu_seqlens).neighbours(weight, right)
    sums = _sums(parts[0], weight)
    every = zip(grads, parts, _split(weight, parts), _split(sums, parts), strict=True)
    return [*(backward(_dense(grad), x, w, neighbours, into, ROWS) for grad, x, w, into in every), sums]


@local_convolution_backward.register_fake
def _(grads, parts, weight, *rest):
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts), _sums(parts[0], weight)]


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """(n, W, C) of the backward's programs, uninitialised."""
    return x.new_empty((x.shape[0] * (-(-x.shape[1] // ROWS)), *weight.shape), dtype=torch.float32)


def _seen(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> Seen:
    """Of a whole sequence x (B, L, C)."""
    return Seen.of(range(x.shape[1]), lengths, cu_seqlens, x.device)


def _split(x: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """x (..., C) by the channels of the parts."""
    return x.split([y.shape[-1] for y in parts], -1)


def _dense(x: Tensor) -> Tensor:
    """x with adjacent channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _setup_local(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    parts, *others, ctx.right = inputs
    ctx.save_for_backward(*parts, *others)


def _local_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *parts, weight, lengths, cu_seqlens = ctx.saved_tensors
    *gradients, sums = torch.ops.lightning_dilated.local_convolution_backward(
        grads, parts, weight, lengths, cu_seqlens, ctx.right
    )
    return gradients, sums.sum(0).to(weight.dtype), None, None, None


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "a layer's short convolution has no double backward by kernels: its gradient was asked to be differentiated again. "
        "Leave out create_graph=True, or compute in float64, which torch's own operations serve."
    )


local_convolution.register_autograd(_local_backward, setup_context=_setup_local)
local_convolution_backward.register_autograd(_refuse)


# -- many ranks --------------------------------------------------------------------------------------------------------
def _route(
    group: SequenceGroup,
    x: Tensor,
    weight: Tensor,
    right: int,
    documents: tuple[Tensor | None, ...],
    grad: bool,
    turn: Any,
) -> tuple[HaloRoute, int]:
    """The route of the call and its number, after all ranks agreed on the call."""
    digests = [
        None if t is None else hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest() for t in documents
    ]
    facts = {
        "call": "kv_conv",
        "pass": "forward" if turn is None else "backward",
        "batch": x.shape[0],
        "dtype": x.dtype,
        "taps and channels": tuple(weight.shape),
        "right": right,
        "requires grad": grad,
        "lengths, cu_seqlens (digests)": digests,
    }
    agreed = group.agree(facts, x.shape[1], 0, turn, later=grad)
    shard = group.shard(agreed.seq_len)
    return halo_route(shard, group.rank, len(weight) - 1 - right, right), agreed.number


def _runs(
    route: HaloRoute, x: Tensor, halo: Tensor, documents: tuple[Tensor | None, ...]
) -> Iterator[tuple[Tensor, Seen, slice]]:
    """(rows with their halo, which of them see each other, local tokens) of each run of consecutive positions."""
    start = 0
    for run, rows in zip(route.chunks, route.surround(x, halo), strict=True):
        seen = Seen.of(range(run.start - route.left, run.stop + route.right), *documents, x.device)
        yield rows, seen, slice(start, start + len(run))
        start += len(run)


def _flat(x: Tensor) -> Tensor:
    """(L, B C) from (B, L, C)."""
    return x.movedim(1, 0).reshape(x.shape[1], x.shape[0] * x.shape[2])


@torch.library.custom_op(NAME, mutates_args=())
def short_convolution(
    x: Tensor, weight: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, right: int, sequence: str, grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, L, C), halo rows received (rows, B, C), number of the call) on the ranks of the group named `sequence`."""
    group, documents = find_sequence(sequence), (lengths, cu_seqlens)
    route, number = _route(group, x, weight, right, documents, grad, None)
    halo = route.fetch(_flat(x), halo_wire(group, group.forward_traffic)).view(route.rows, x.shape[0], x.shape[2])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, seen, local in _runs(route, x, halo, documents):
        y[:, local] = _run(rows, weight, right, seen)
    return y, halo, torch.tensor(number, dtype=torch.int64, device="cpu")


@short_convolution.register_fake
def _(x, weight, lengths, cu_seqlens, right, sequence, grad):
    halo = x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[0], x.shape[2]))
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(x, memory_format=torch.contiguous_format), halo, number


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def short_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    halo: Tensor,
    number: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    right: int,
    sequence: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of weight as far as this rank's tokens contribute to it."""
    group, documents = find_sequence(sequence), (lengths, cu_seqlens)
    route, _ = _route(group, x, weight, right, documents, needs_grad, f"backward of call {int(number)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    dx, d_weight = torch.empty_like(x, dtype=wide), torch.zeros_like(weight, dtype=wide)
    around = []
    for rows, seen, local in _runs(route, x, halo, documents):
        d_rows, part = _run_backward(grad[:, local], rows, weight, right, seen)
        d_weight += part
        before, dx[:, local], after = d_rows.split([route.left, local.stop - local.start, route.right], 1)
        around += [_flat(before), _flat(after)]
    d_halo, total = torch.cat([_flat(dx)[:0], *around]), _flat(dx)
    route.give_back(d_halo, total, halo_wire(group, group.backward_traffic))
    dx = total.view(x.shape[1], x.shape[0], x.shape[2]).movedim(0, 1)
    return dx.to(x.dtype).contiguous(), d_weight.to(weight.dtype)


@short_convolution_backward.register_fake
def _(grad, x, weight, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, lengths, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, *output[1:], lengths, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    gradients = torch.ops.lightning_dilated.short_convolution_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *gradients, *[None] * 5


short_convolution.register_autograd(_backward, setup_context=_setup)


# -- a chunk of a stream -----------------------------------------------------------------------------------------------
def _seen_in_stream(stream: Stream, chunk: int, left: int, cu_seqlens: Tensor | None, device: torch.device) -> Seen:
    """Of this rank's piece of a chunk and the `left` rows before it, by the stream's documents or by `cu_seqlens`."""
    piece = stream.tokens(chunk)
    positions = range(piece.start - left, piece.stop)
    if stream.documents is None:
        return Seen.of(positions, None, cu_seqlens, device)
    starts: dict[int, list[int]] = {}
    for document in stream.documents:
        starts.setdefault(document.sample, []).append(document.start)
    if all(x == [0] for x in starts.values()):
        return Seen()
    at = torch.arange(positions.start, positions.stop)
    numbers = [torch.searchsorted(torch.tensor(x), at, right=True, out_int32=True) for x in starts.values()]
    return Seen(send(torch.stack(numbers), device))


def _halo_route(stream: Stream, x: Tensor, weight: Tensor, layer: int, chunk: int, run: str) -> HaloRoute | None:
    """The route of a piece of a chunk, after the ranks that share the chunk agreed on the call; None on one rank."""
    group = stream.group
    if group is None:
        return None
    facts = {
        "call": "kv_conv",
        "pass": run,
        "batch": x.shape[0],
        "dtype": x.dtype,
        "taps and channels": tuple(weight.shape),
    }
    tokens = len(stream.shard.positions(chunk))
    group.agree(facts, x.shape[1], turn=f"layer {layer}, chunk {chunk}", later=True, chunk=tokens)
    return chunk_halo_route(stream.shard, stream.number(chunk), len(weight) - 1)


@torch.library.custom_op("lightning_dilated::chunk_convolution", mutates_args=())
def chunk_convolution(
    x: Tensor, weight: Tensor, place: Tensor, cu_seqlens: Tensor | None, stream: str
) -> tuple[Tensor, Tensor]:
    """(y (B, L, C), the rows before x (B, W - 1, C)) of a chunk x whose (layer, chunk) is `place`; causal."""
    (layer, chunk), left = place.tolist(), len(weight) - 1
    owner = find_stream(stream)
    tails = owner.tails_of(layer)
    carried = tails.before(chunk)
    before = x.new_zeros(len(x), left, x.shape[2]) if carried is None else carried.to(x.device, x.dtype)
    own = torch.cat([before, x], 1)  # rows that this rank computed
    if owner.rising:
        tails.leave(chunk, own[:, x.shape[1] :].clone())
    route = _halo_route(owner, x, weight, layer, chunk, "forward")
    if route is not None:
        wire = chunk_wire(owner.group, owner.shard, owner.number(chunk), owner.group.forward_traffic)
        before = route.fetch(_flat(own), wire).view(left, x.shape[0], x.shape[2]).movedim(1, 0)
    seen = _seen_in_stream(owner, chunk, left, cu_seqlens, x.device)
    return _run(torch.cat([before, x], 1), weight, 0, seen), before.clone(memory_format=torch.contiguous_format)


@chunk_convolution.register_fake
def _(x, weight, place, cu_seqlens, stream):
    before = x.new_empty(x.shape[0], weight.shape[0] - 1, x.shape[2])
    return torch.empty_like(x, memory_format=torch.contiguous_format), before


@torch.library.custom_op("lightning_dilated::chunk_convolution_backward", mutates_args=())
def chunk_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, place: Tensor, cu_seqlens: Tensor | None, before: Tensor, stream: str
) -> tuple[Tensor, Tensor]:
    """The gradients of x, with what later chunks left for it, and of weight."""
    (layer, chunk), left = place.tolist(), len(weight) - 1
    owner = find_stream(stream)
    tails = owner.tails_of(layer)
    seen = _seen_in_stream(owner, chunk, left, cu_seqlens, x.device)
    d_made, d_weight = _run_backward(grad, torch.cat([before, x], 1), weight, 0, seen)
    route = _halo_route(owner, x, weight, layer, chunk, "backward")
    if route is not None:  # several ranks computed the rows before x
        d_before, d_x = d_made.split([left, x.shape[1]], 1)
        total = _flat(torch.cat([torch.zeros_like(d_before), d_x], 1))
        wire = chunk_wire(owner.group, owner.shard, owner.number(chunk), owner.group.backward_traffic)
        route.give_back(_flat(d_before), total, wire)
        d_made = total.view(d_made.shape[1], x.shape[0], x.shape[2]).movedim(0, 1)
    if owner.exact:
        later = tails.take_grad(chunk)
        if later is not None:
            d_made[:, x.shape[1] :] += later
        tails.leave_grad(chunk, d_made[:, :left].clone())
    return d_made[:, left:].to(x.dtype).contiguous(), d_weight.to(weight.dtype)


@chunk_convolution_backward.register_fake
def _(grad, x, weight, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))


def _setup_chunk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.stream = inputs
    ctx.save_for_backward(*tensors, output[1])


def _chunk_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    gradients = torch.ops.lightning_dilated.chunk_convolution_backward(grad, *ctx.saved_tensors, ctx.stream)
    return *gradients, None, None, None


chunk_convolution.register_autograd(_chunk_backward, setup_context=_setup_chunk)
