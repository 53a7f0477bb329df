"""dilated_attention: the public function, which checks every argument and calls the op.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_dilated._validation import flag, one_of, real
from lightning_dilated.attention import op as _flops  # noqa: F401 - registers the op and its FLOP formulas
from lightning_dilated.attention.backends import engine_names
from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.attention.spec import encode
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.group import SequenceGroup, active_sequence

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: evaluated at import, because some versions of torch.compile cannot trace the check
AUTOCAST_DEVICES = frozenset(d for d in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(d))


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    dropout: float = ...,
    lengths: Tensor | Sequence[int] | None = ...,
    cu_seqlens: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    engine: str = ...,
    sequence: SequenceGroup | None = ...,
) -> Tensor: ...


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    dropout: float = ...,
    lengths: Tensor | Sequence[int] | None = ...,
    cu_seqlens: Tensor | None = ...,
    return_lse: Literal[True],
    engine: str = ...,
    sequence: SequenceGroup | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    dropout: float = ...,
    lengths: Tensor | Sequence[int] | None = ...,
    cu_seqlens: Tensor | None = ...,
    return_lse: bool,
    engine: str = ...,
    sequence: SequenceGroup | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    engine: str = "auto",
    sequence: SequenceGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute dilated attention (LongNet, arXiv 2307.02486): one softmax over the keys of all branches.

    A key that a query sees in several branches counts once for each of these branches.

    Args:
        q: (B, N, H, D) queries, any floating dtype; strided views, as from a fused projection, are read in place.
        k, v: (B, N, K, D), where K divides H; query head h reads kv head h // (H / K).
        pattern: the pattern of attention.
        causal: whether a query sees no later keys.
        scale: scale of the scores; 1/sqrt(D) if None.
        dropout: probability with which a (query, key) pair of a branch is dropped. This function has no eval mode: pass
            0.0 outside training. torch's CPU generator seeds the mask, so `torch.manual_seed` reproduces it.
        lengths: (B,) integers, the number of real tokens of each right-padded sample. Output rows of padding are 0. The
            kernels read lengths on q's GPU, even in a CUDA graph, without making the host wait, and clamp them to 0..N.
        cu_seqlens: int32 (documents + 1,), bounds of documents packed into one sample (B = 1). Segments restart at each
            document, and attention does not cross its bounds. Bounds on the CPU must rise from 0 to N. With one rank,
            they can be on q's GPU, where the kernels clamp them to 0..N, and output rows after the last bound are 0.
            One CUDA graph then serves all rows of up to N tokens with this number of documents, empty ones included. If
            the kernels do not serve the call, for example with other engines, `lengths` and `cu_seqlens` on a GPU are
            copied to the host, which waits for them and raises ValueError for values that would be clamped.
        return_lse: whether to return lse, the natural logarithm of the softmax denominator, which has no gradient.
        engine: "auto", "sdpa", or the name of an engine; `DilatedAttention.engine_choice` explains "auto"'s choice.
        sequence: the ranks that share the sequence. q, k and v contain this rank's N tokens (0 on an empty shard).
            `lengths` and `cu_seqlens` describe the whole sequence. Every rank must make the same call. None means the
            `active` group, or one rank if no group is active.

    Returns:
        out (B, N, H, D) in q's dtype, 0 for rows without a key; with `return_lse` also lse (B, H, N), fp32 (fp64 for
        float64 inputs), -inf for rows without a key.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states its value and the allowed values.
        RuntimeError: in a double backward.
    """
    arguments = op_arguments(
        q, k, v, pattern, causal, scale, dropout, lengths, cu_seqlens, return_lse, engine, sequence
    )
    out, lse, *_ = torch.ops.lightning_dilated.attention(*arguments)
    return (out, lse.detach()) if return_lse else out


def op_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    engine: str = "auto",
    sequence: SequenceGroup | None = None,
    window: tuple[int, ...] = (),
    needs_grad: bool | None = None,
    chunk: LayerPlace | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, str, Tensor | None]:
    """Return the arguments of `torch.ops.lightning_dilated.attention`, after all checks that need no other rank.

    `window` and `needs_grad`: see `CallSpec`; if `needs_grad` is None, q, k and v determine it. `chunk`: the layer's
    place in a stream; `lengths` and `cu_seqlens` then describe the whole sequence.
    """
    group = group_of(sequence) if chunk is None or chunk.shared else None
    q, k, v = autocast(q, k, v)
    arguments = (q, k, v, pattern, causal, scale, dropout, lengths, cu_seqlens, return_lse, engine, window)
    lengths, cu_seqlens, scale = check_call(*arguments) if group is None else group.guard(check_call, *arguments)
    seed = None
    if dropout > 0:
        seed = torch.randint(2**62, (), dtype=torch.int64) if chunk is None else chunk.seed
    name = "" if group is None else group.name
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    context, place = ("", None) if chunk is None else (chunk.context, chunk.place)
    spec = encode(pattern, causal, scale, dropout, engine, name, needs_grad, window, context)
    return q, k, v, lengths, cu_seqlens, seed, spec, place


def group_of(sequence: Any) -> SequenceGroup | None:
    """Return the group of a call: `sequence`, else the active group, else None."""
    if sequence is None:
        return active_sequence()
    if not isinstance(sequence, SequenceGroup):
        raise TypeError(f"sequence must be a SequenceGroup, or None for the active one; got {sequence!r}.")
    return sequence


def check_call(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any,
    causal: Any,
    scale: Any,
    dropout: Any,
    lengths: Any,
    cu_seqlens: Any,
    return_lse: Any,
    engine: Any,
    window: tuple[int, ...] = (),
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return (lengths, cu_seqlens, scale) for the op, after all checks that need no other rank."""
    check_rows(q, k, v)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    _refuse_forward_mode(q, k, v)
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(
            f"pattern must be a DilatedPattern, got {pattern!r}. DilatedPattern.longnet([2048], [1]) makes one, "
            "DilatedPattern.from_dict reads a mapping."
        )
    pattern.check_heads(*(window[1:] or (q.shape[2], k.shape[2])))
    _check_options(causal, dropout, engine, return_lse)
    lengths, cu_seqlens = check_documents(q, lengths, cu_seqlens)
    return lengths, cu_seqlens, check_scale(scale, q)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """If autocast is on, cast floating tensors except float64 to its dtype, as torch's attention does."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    kind = tensors[0].device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise RuntimeError for tangents, because forward-mode derivatives would silently be zero."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "dilated_attention has no forward-mode derivative (jvp, dual tensors). Use reverse mode, or take "
            "lightning_dilated.attention.oracle.oracle for short sequences."
        )


def check_rows(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k, v are (B, N, heads, D) of one dtype and device, and q and k agree in B, N and head dim."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor of shape (B, N, heads, D), got {type(x).__name__}.")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions (B, N, heads, D), got shape {tuple(x.shape)}.")
        if x.dtype not in DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(
                f"{name} must be floating point ({names}), got {x.dtype}; convert it: {name}.to(torch.bfloat16)."
            )
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must share one dtype: q is {q.dtype}, {name} is {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device: q is on {q.device}, {name} on {x.device}.")
        if x.device.type == "mps":  # no engine has been tested on MPS
            raise ValueError(
                f"{name} is on {x.device}, and attention is not tested on Apple's MPS. Run on the CPU: "
                f"{name}.cpu(), or Trainer(accelerator='cpu')."
            )
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q and k must have the same B and N, got {tuple(q.shape[:2])} and {tuple(k.shape[:2])}: tokens attend to their "
            "own sequence (for new tokens after others, see new_cache of MultiheadDilatedAttention, or state= of "
            "recurrent_attention)."
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim D, got {q.shape[3]} and {k.shape[3]}.")
    if min(*q.shape[2:], k.shape[2], v.shape[3]) == 0:
        raise ValueError(f"heads and head dims must be at least 1, got {[tuple(x.shape) for x in (q, k, v)]}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the {k.shape[2]} kv heads must divide the {q.shape[2]} query heads (grouped-query attention)."
        )


def _check_options(causal: Any, dropout: Any, engine: Any, return_lse: Any) -> None:
    for name, value in (("causal", causal), ("return_lse", return_lse)):
        flag(value, name)
    real(dropout, "dropout", least=0, below=1)
    one_of(engine, "engine", engine_names())


def check_scale(scale: Any, q: Tensor) -> float:
    """Return the scale of scores for q (B, N, H, D); raise ValueError if it is not a finite number in their type."""
    if scale is None:
        return q.shape[3] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None (1/sqrt(D)), got {scale!r}.")
    if q.dtype != torch.float64 and abs(float(scale)) > torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be finite in float32, because scores of {q.dtype} have this type; got {scale!r}.")
    return float(scale)


def check_documents(x: Tensor, lengths: Any, cu_seqlens: Any) -> tuple[Tensor | None, Tensor | None]:
    """Check the shapes of lengths and cu_seqlens for x (B, N, ...); return both. The op checks or clamps the values."""
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("give lengths (right-padded samples) or cu_seqlens (packed documents), not both.")
    if lengths is not None:
        lengths = _integers(lengths, "lengths")
        if lengths.shape != x.shape[:1]:
            raise ValueError(
                f"lengths must have one entry a sample, shape ({x.shape[0]},); got {tuple(lengths.shape)}."
            )
        # ranks that share the sequence compare the values on the CPU
        lengths = lengths if lengths.device == x.device and active_sequence() is None else lengths.cpu()
    if cu_seqlens is not None:
        cu_seqlens = _integers(cu_seqlens, "cu_seqlens")
        read_by_kernels = cu_seqlens.device == x.device and active_sequence() is None
        if cu_seqlens.dtype != torch.int32 or not (cu_seqlens.device.type == "cpu" or read_by_kernels):
            raise ValueError(
                f"cu_seqlens must be an int32 tensor on the CPU, or, with one rank, on the tokens' {x.device}; got "
                f"{cu_seqlens.dtype} on {cu_seqlens.device}. Use cu_seqlens.to('cpu', torch.int32), outside a training "
                "step if it is on a GPU."
            )
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens must be (documents + 1,), at least [0, N]; got shape {tuple(cu_seqlens.shape)}."
            )
        if x.shape[0] != 1:
            raise ValueError(
                f"packed documents (cu_seqlens) take a batch of 1, got B={x.shape[0]}; pack them into one row."
            )
    return lengths, cu_seqlens


def _integers(values: Any, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
            raise TypeError(f"{name} must be an integer tensor or a list of integers, got {values!r}.")
        for x in values:
            if isinstance(x, bool) or not hasattr(x, "__index__"):
                raise TypeError(f"{name} must hold integers only, got {x!r}.")
        values = torch.tensor([operator.index(x) for x in values], dtype=torch.int64)
        values = values if values.numel() and values.abs().max() > 2**31 - 1 else values.to(torch.int32)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got dtype {values.dtype}.")
    return values
