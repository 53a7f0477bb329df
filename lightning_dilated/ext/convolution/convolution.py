"""ShortConvolution: a depthwise convolution over a few neighbouring tokens, within documents, on any number of ranks.

On one rank, Triton kernels compute a call if they support it; else torch operations do, which torch.compile fuses.
Several ranks use a custom op that exchanges rows. Chunks of a stream use the same op and store rows for the next chunk.
Shape letters: B batch, L tokens of this rank, C channels, W taps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_dilated import kernels
from lightning_dilated._device import ASSUMED, send
from lightning_dilated._ops import Op
from lightning_dilated._validation import integer
from lightning_dilated.attention.context import LayerPlace, find_context
from lightning_dilated.attention.functional import check_documents
from lightning_dilated.attention.mixer import Mixer
from lightning_dilated.ext.convolution.halo import halo_route, halo_wire
from lightning_dilated.sequence.group import active_sequence, find_sequence

if TYPE_CHECKING:
    from lightning_dilated.ext.convolution.kernels import Neighbours
    from lightning_dilated.ext.decoding.kv_cache import KVCache

#: dtypes that the kernels support, and their maximum number of taps (loops over taps are unrolled)
DTYPES, MOST_TAPS = (torch.bfloat16, torch.float16, torch.float32), 8
#: number of tokens over which a backward program sums the gradient of the weight, a power of two
ROWS = 256


def unsupported(dtype: torch.dtype, taps: int) -> str | None:
    """Return None if there are kernels for this dtype and number of taps, else the reason."""
    if dtype not in DTYPES:
        return (
            f"takes {', '.join(str(x).removeprefix('torch.') for x in DTYPES)}, not {str(dtype).removeprefix('torch.')}"
        )
    return f"takes up to {MOST_TAPS} taps, not {taps}" if taps > MOST_TAPS else None


def why_not(device: torch.device, dtype: torch.dtype, taps: int) -> str | None:
    """Return None if the kernels serve this device, dtype and number of taps, else the reason."""
    return unsupported(dtype, taps) or (None if ASSUMED else kernels.why_not(device))


@torch.compiler.assume_constant_result
def serves(device: torch.device, dtype: torch.dtype, taps: int) -> bool:
    """Return whether the kernels compute a call of one rank."""
    return why_not(device, dtype, taps) is None


class ShortConvolution(Mixer):
    """y_p = x_p + sum over taps i of weight_i x_(p - left + i), with a weight for each tap and channel.

    Neighbours in other documents and outside the sequence count as 0. The architecture Based (arXiv 2402.18668) and
    Canon layers (arXiv 2512.17351) use such a step before attention, so that a token knows its neighbours.

    Args:
        channels: C.
        taps: W, at least 2.
        causal: whether all W - 1 neighbours of a token precede it; if not, (W - 1) // 2 precede it, and others follow.
        starts: (number of channels, W initial weights) of each group of channels; empty: all weights are initially 0.

    Raises:
        TypeError, ValueError: for `taps` that is not an integer of at least 2; the message calls it kv_conv.
    """

    option, mixes, own_start = "kv_conv", True, True

    def __init__(
        self,
        channels: int,
        taps: int,
        causal: bool,
        device: Any = None,
        dtype: Any = None,
        starts: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        super().__init__()
        self.taps, self.causal, self.starts = integer(taps, "kv_conv", 2), causal, starts
        self.right = 0 if causal else taps - 1 - (taps - 1) // 2
        self.weight = nn.Parameter(torch.empty(taps, channels, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial weights."""
        self.weight.zero_()
        parts = self.weight.split([size for size, _ in self.starts], 1) if self.starts else ()
        for part, (_, weights) in zip(parts, self.starts, strict=True):
            part.copy_(part.new_tensor(weights)[:, None].expand_as(part))

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        chunk: LayerPlace | None = None,
    ) -> Tensor:
        """Convolve x (B, L, C): all tokens, or this rank's in an active `SequenceGroup`, or a stream's chunk.

        Args:
            lengths: (B,) on the CPU, number of real tokens of each right-padded sample, in the whole sequence.
            cu_seqlens: (documents + 1,), bounds of the documents packed into one sample, in the whole sequence.
            chunk: the layer's place in a stream; causal only.
        """
        return self.together([x], lengths, cu_seqlens, chunk)[0]

    def together(
        self,
        parts: Sequence[Tensor],
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        chunk: LayerPlace | None = None,
    ) -> Sequence[Tensor]:
        """Apply `forward` to the concatenation of tensors (B, L, C_i) with C channels in total; return the parts."""
        x, lengths = parts[0], None if self.causal else lengths  # causal: no real token reads padding
        if chunk is None and active_sequence() is None and serves(x.device, x.dtype, self.taps):
            return torch.ops.lightning_dilated.local_convolution(parts, self.weight, lengths, cu_seqlens, self.right)
        if len(parts) == 1:
            return (self._joint(x, lengths, cu_seqlens, chunk),)
        return self._joint(torch.cat(parts, -1), lengths, cu_seqlens, chunk).split([x.shape[-1] for x in parts], -1)

    def _joint(self, x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, chunk: LayerPlace | None) -> Tensor:
        """Compute `forward` with torch operations or the op of ranks and streams."""
        group, weight = active_sequence(), self.weight.to(x.dtype)
        if chunk is not None and self.right:
            raise ValueError(
                "a stream computes one chunk after the other, so its convolutions must be causal. Set causal=True."
            )
        if chunk is not None:
            return CONVOLUTION(x, weight, None, cu_seqlens, chunk.place, self.right, chunk.context, False)[0]
        if group is not None:
            grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            return CONVOLUTION(x, weight, lengths, cu_seqlens, None, self.right, group.name, grad)[0]
        n, left, same = x.shape[1], self.taps - 1 - self.right, None
        if lengths is not None or cu_seqlens is not None:  # otherwise n may be symbolic, and there is no table
            seen = Seen.of(range(-left, n + self.right), lengths, cu_seqlens, x.device)
            same = seen.table(n, left, self.right, x.device)
        return _convolved(nn.functional.pad(x, (0, 0, left, self.right)), weight, left, same)

    def mix(self, query: Tensor, lengths: Any, cu_seqlens: Any, place: LayerPlace | None) -> Callable[[Tensor], Tensor]:
        """See `Mixer.mix`."""
        group, documents = active_sequence(), (query, lengths, cu_seqlens)
        lengths, cu_seqlens = check_documents(*documents) if group is None else group.guard(check_documents, *documents)
        return partial(self, lengths=lengths, cu_seqlens=cu_seqlens, chunk=place)

    def mix_new(self, cache: KVCache) -> Callable[[Tensor], Tensor]:
        """See `Mixer.mix_new`; the cache stores the rows that the next tokens need."""

        def continued(x: Tensor) -> Tensor:
            y, rows = self.continued(x, cache.mixer_states.get(self.option))
            cache.remember(self.option, rows, x.shape[1])
            return y

        return continued

    def continued(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve new tokens x (B, n, C) that follow the rows `before` (B, W - 1, C); None at the start.

        Returns:
            outputs (B, n, C), and the rows of both inputs (B, W - 1 + n, C).
        """
        before = x.new_zeros(x.shape[0], self.taps - 1, x.shape[2]) if before is None else before
        rows = torch.cat([before, x], 1)
        return _convolved(rows, self.weight.to(x.dtype), self.taps - 1, None), rows

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[1]}, taps={self.taps}, causal={self.causal}"


def _convolved(rows: Tensor, weight: Tensor, left: int, same: Tensor | None) -> Tensor:
    """Return (B, n, C) from (B, left + n + right, C)."""
    n = rows.shape[1] - len(weight) + 1
    y = rows[:, left : left + n]
    for i, w in enumerate(weight):
        part = rows[:, i : i + n] * w
        y = y + (part if same is None else torch.where(same[..., i : i + 1], part, 0))
    return y


def _gradients(grad: Tensor, rows: Tensor, weight: Tensor, left: int, same: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows (B, left + n + right, C) and of the weight (W, C), at least fp32."""
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
    """Determines which neighbours a row may read, for rows at consecutive positions.

    Attributes:
        documents: (B or 1, rows) int32, the index of each row's document; None: no documents.
        lengths: (B,) number of rows before the padding of each sample; None: no padding.
    """

    documents: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, positions: range, lengths: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> Seen:
        """Make the object for rows at `positions`, which may begin before the sequence and end after it."""
        documents = None
        if cu_seqlens is not None:
            at = torch.arange(positions.start, positions.stop, dtype=torch.int32, device=device)
            bounds = send(cu_seqlens, device).to(torch.int32)
            documents = torch.searchsorted(bounds, at, right=True, out_int32=True)[None]
        return cls(documents, None if lengths is None else send(lengths, device) - positions.start)

    def neighbours(self, weight: Tensor, right: int) -> Neighbours:
        """Convert to the type that the kernels take."""
        from lightning_dilated.ext.convolution.kernels import Neighbours

        return Neighbours(len(weight) - 1 - right, self.documents, self.lengths)

    def table(self, n: int, left: int, right: int, device: torch.device) -> Tensor | None:
        """Return a mask (B or 1, n, W) of the neighbours that the n rows between `left` and `right` read; None: all."""
        if self.documents is not None:
            return self.documents.unfold(1, left + 1 + right, 1) == self.documents[:, left : left + n, None]
        if self.lengths is None:
            return None
        source = torch.arange(n, device=device)[:, None] + torch.arange(left + 1 + right, device=device)
        end = self.lengths[:, None, None]
        return (source[:, left : left + 1] >= end) | (source < end)


def _run(rows: Tensor, weight: Tensor, right: int, seen: Seen) -> Tensor:
    """Return (B, n, C) from (B, left + n + right, C)."""
    left = len(weight) - 1 - right
    n = rows.shape[1] - left - right
    if n == 0:  # a rank's piece without tokens
        return rows[:, :0].contiguous()
    if not serves(rows.device, rows.dtype, len(weight)):
        return _convolved(rows, weight, left, seen.table(n, left, right, rows.device))
    from lightning_dilated.ext.convolution.kernels import forward

    return forward(rows, weight, seen.neighbours(weight, right), (left, right))


def _run_backward(grad: Tensor, rows: Tensor, weight: Tensor, right: int, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows (B, left + n + right, C) and of the weight (W, C), at least fp32."""
    left = len(weight) - 1 - right
    if not grad.shape[1]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return torch.zeros_like(rows, dtype=wide), torch.zeros_like(weight, dtype=wide)
    if not serves(rows.device, rows.dtype, len(weight)):
        return _gradients(grad, rows, weight, left, seen.table(grad.shape[1], left, right, rows.device))
    from lightning_dilated.ext.convolution.kernels import backward

    grad, sums = nn.functional.pad(grad, (0, 0, left, right)), _sums(rows, weight)
    neighbours = seen.neighbours(weight, right)
    return backward(grad, rows, weight, neighbours, sums, ROWS, torch.float32), sums.sum(0)


# -- one rank, with kernels --------------------------------------------------------------------------------------------
@torch.library.custom_op("lightning_dilated::local_convolution", mutates_args=())
def local_convolution(
    parts: Sequence[Tensor], weight: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, right: int
) -> list[Tensor]:
    """Return y (B, L, C_i), contiguous, for each part (B, L, C_i); weight (W, C) has the channels of all parts."""
    from lightning_dilated.ext.convolution.kernels import forward

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
    """Return the gradient of each part, and a tensor (n, W, C) fp32 that sums over n to the gradient of the weight."""
    from lightning_dilated.ext.convolution.kernels import backward

    parts, neighbours = [_dense(x) for x in parts], _seen(parts[0], lengths, cu_seqlens).neighbours(weight, right)
    sums = _sums(parts[0], weight)
    every = zip(grads, parts, _split(weight, parts), _split(sums, parts), strict=True)
    return [*(backward(_dense(grad), x, w, neighbours, into, ROWS) for grad, x, w, into in every), sums]


@local_convolution_backward.register_fake
def _(grads, parts, weight, *extra):
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts), _sums(parts[0], weight)]


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return an uninitialised tensor (n, W, C) for the sums of n backward programs."""
    return x.new_empty((x.shape[0] * (-(-x.shape[1] // ROWS)), *weight.shape), dtype=torch.float32)


def _seen(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> Seen:
    return Seen.of(range(x.shape[1]), lengths, cu_seqlens, x.device)


def _split(x: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return x.split([y.shape[-1] for y in parts], -1)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _setup_local(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    parts, *optional, ctx.right = inputs
    ctx.save_for_backward(*parts, *optional)


def _local_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *parts, weight, lengths, cu_seqlens = ctx.saved_tensors
    *gradients, sums = torch.ops.lightning_dilated.local_convolution_backward(
        grads, parts, weight, lengths, cu_seqlens, ctx.right
    )
    return gradients, sums.sum(0).to(weight.dtype), None, None, None


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the kernels of a layer's short convolution have no double backward: its gradient cannot be differentiated again. "
        "Leave out create_graph=True, or compute in float64, for which torch operations are used."
    )


local_convolution.register_autograd(_local_backward, setup_context=_setup_local)
local_convolution_backward.register_autograd(_refuse)


# -- many ranks, and chunks of a stream -------------------------------------------------------------------------------
def flat(x: Tensor) -> Tensor:
    """Flatten (B, L, C) to (L, B C)."""
    return x.movedim(1, 0).reshape(x.shape[1], x.shape[0] * x.shape[2])


def unflat(x: Tensor, like: Tensor) -> Tensor:
    """Unflatten (L, B C) to (L, B, C), for `like` (B, ..., C)."""
    return x.view(len(x), like.shape[0], like.shape[2])


def call_facts(x: Tensor, weight: Tensor, backward: bool, **extra: Any) -> dict[str, Any]:
    """Return the facts of a call that must be the same on all ranks."""
    facts = {"call": "kv_conv", "pass": "backward" if backward else "forward", "batch": x.shape[0], "dtype": x.dtype}
    return {**facts, "taps and channels": tuple(weight.shape), **extra}


class _Ranks:
    """The neighbours of a rank's tokens x (B, L, C); all ranks of the group named `where` first agree on the call."""

    def __init__(
        self, x: Tensor, weight: Tensor, documents: tuple[Tensor | None, ...], right: int, where: str, grad: bool,
        number: Tensor | None,
    ) -> None:  # fmt: skip
        digests = [
            None if t is None else hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest() for t in documents
        ]
        extra = {"right": right, "requires grad": grad, "lengths, cu_seqlens (digests)": digests}
        self.group, self.documents = find_sequence(where), documents
        name = None if number is None else f"backward of call {int(number)}"
        agreed = self.group.agree(call_facts(x, weight, name is not None, **extra), x.shape[1], 0, name, later=grad)
        self.number, shard = agreed.number, self.group.shard(agreed.seq_len)
        self.route = halo_route(shard, self.group.rank, len(weight) - 1 - right, right)

    def read(self, x: Tensor) -> Tensor:
        """Fetch the rows of other ranks that x's tokens read, (n, B, C)."""
        return unflat(self.route.fetch(flat(x), halo_wire(self.group, self.group.forward_traffic)), x)

    def runs(self, x: Tensor, halo: Tensor) -> Iterator[tuple[Tensor, Seen, slice]]:
        """Yield, per run of consecutive positions, rows with neighbours, their `Seen` and the slice of local tokens."""
        start, route = 0, self.route
        for run, rows in zip(route.chunks, route.surround(x, halo), strict=True):
            seen = Seen.of(range(run.start - route.left, run.stop + route.right), *self.documents, x.device)
            yield rows, seen, slice(start, start + len(run))
            start += len(run)

    def give_back(self, gradients: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the gradient of x from the runs' gradients; gradients of other ranks' rows are sent to those ranks."""
        left, right = self.route.left, self.route.right
        split = [flat(d).split([left, d.shape[1] - left - right, right]) for d in gradients]
        nothing = flat(x)[:0].to(torch.promote_types(x.dtype, torch.float32))  # for a rank without tokens
        total = torch.cat([nothing, *(center for _, center, _ in split)])
        around = [part for before, _, after in split for part in (before, after)]
        self.route.give_back(torch.cat([nothing, *around]), total, halo_wire(self.group, self.group.backward_traffic))
        return unflat(total, x).movedim(0, 1)


def _neighbours(
    x: Tensor, weight: Tensor, documents: tuple[Tensor | None, ...], place: Tensor | None, right: int, where: str,
    grad: bool, number: Tensor | None,
) -> Any:  # fmt: skip
    if place is None:
        return _Ranks(x, weight, documents, right, where, grad, number)
    return find_context(where).neighbours(x, weight, documents, place, number is not None)


def run_forward(
    x: Tensor, weight: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor | None, right: int,
    where: str, grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y (B, L, C), the rows read, and the call's number; `where` names the group of ranks or stream context."""
    near = _neighbours(x, weight, (lengths, cu_seqlens), place, right, where, grad, None)
    read = near.read(x)
    parts = [_run(rows, weight, right, seen) for rows, seen, _ in near.runs(x, read)]
    y = parts[0] if len(parts) == 1 else torch.cat([x[:, :0], *parts], 1)
    return y, read, torch.tensor(near.number, dtype=torch.int64, device="cpu")


def run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, read: Tensor, number: Tensor, lengths: Tensor | None,
    cu_seqlens: Tensor | None, place: Tensor | None, right: int, where: str, needs_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of x, and this rank's part of the gradient of weight."""
    near = _neighbours(x, weight, (lengths, cu_seqlens), place, right, where, needs_grad, number)
    d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    gradients = []
    for rows, seen, local in near.runs(x, read):
        d_rows, part = _run_backward(grad[:, local], rows, weight, right, seen)
        d_weight += part
        gradients.append(d_rows)
    return near.give_back(gradients, x).to(x.dtype).contiguous(), d_weight.to(weight.dtype)


def _fake_forward(x, weight, lengths, cu_seqlens, place, right, where, grad):
    if place is None:
        read = x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[0], x.shape[2]))
    else:
        read = x.new_empty(x.shape[0], weight.shape[0] - 1, x.shape[2])
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(x, memory_format=torch.contiguous_format), read, number


def _fake_backward(grad, x, weight, *others):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))


_EXTRA = "Tensor? lengths, Tensor? cu_seqlens, Tensor? place, int right, str where, bool grad"
CONVOLUTION = Op(
    "short_convolution",
    schemas=(
        f"(Tensor x, Tensor weight, {_EXTRA}) -> (Tensor, Tensor, Tensor)",
        f"(Tensor dy, Tensor x, Tensor weight, Tensor read, Tensor number, {_EXTRA}) -> (Tensor, Tensor)",
    ),
    caller="a layer's short convolution",
    remedy="Leave out create_graph=True, or compute on one rank without a stream in float64.",
    run=(run_forward, run_backward),
    fake=(_fake_forward, _fake_backward),
    saves=lambda args, results: ((*args[:2], *results[1:], *args[2:5]), args[5:]),
    arguments=lambda grad, saved, extra: (grad, *saved, *extra),
).forward
