"""Define the public function `recurrent_attention`, which checks all arguments before any computation.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, E value dim, S samples or packed documents.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lightning_dilated._compat.torch import is_fake, transformed
from lightning_dilated._validation import flag, integer, one_of
from lightning_dilated.attention.functional import check_rows, group_of
from lightning_dilated.ext._compat.torch import is_traced
from lightning_dilated.ext.recurrence import triton_chunks
from lightning_dilated.ext.recurrence.compute import Computation, Inputs, Output, pieces
from lightning_dilated.ext.recurrence.runs import Call, Document
from lightning_dilated.ext.recurrence.scan import Scan
from lightning_dilated.ext.recurrence.state import RecurrentState, empty_state
from lightning_dilated.pattern.rows import check_bounds
from lightning_dilated.recurrence.description import KINDS, SEGMENTED
from lightning_dilated.sequence.group import SequenceGroup


@overload
def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    *,
    kind: str = ...,
    segment: int | None = ...,
    causal: bool = ...,
    state: RecurrentState | None = ...,
    return_state: Literal[False] = ...,
    lengths: Tensor | Sequence[int] | None = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    sequence: SequenceGroup | None = ...,
) -> Tensor: ...


@overload
def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    *,
    kind: str = ...,
    segment: int | None = ...,
    causal: bool = ...,
    state: RecurrentState | None = ...,
    return_state: Literal[True],
    lengths: Tensor | Sequence[int] | None = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    sequence: SequenceGroup | None = ...,
) -> tuple[Tensor, RecurrentState]: ...


def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    kind: str = "gated_delta",
    segment: int | None = None,
    causal: bool = True,
    state: RecurrentState | None = None,
    return_state: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    sequence: SequenceGroup | None = None,
) -> Tensor | tuple[Tensor, RecurrentState]:
    """Compute attention to a memory of constant size: a matrix S (D, E) for each kv head, which tokens write and read.

    `kind` is the rule that updates S. Below, phi(x) = elu(x) + 1, S sums phi(k) v^T, and z sums phi(k):

    - "gated_delta" (Gated DeltaNet, arXiv 2412.06464): with q and k of unit norm, S_t = a_t (I - b_t k_t k_t^T) S_{t-1}
      + b_t k_t v_t^T and out_t = S_t^T q_t, where a = exp(log_decay) and b = beta.
    - "linear" (Infini-attention, arXiv 2404.07143): memory segments have `segment` tokens. The output of a token is
      phi(q) S / phi(q) z, where S and z sum over earlier segments (if not causal, all others), or 0 if there are none.
    - "delta" (the same paper): a segment adds Phi^T (V - D Phi S) instead of Phi^T V. The paper divides by Phi z of
      earlier segments. Here, D = 1 / max(Phi z, Phi Phi^T 1) divides by the segment's own sum if that is larger;
      otherwise a segment with more keys than all earlier segments could expand the state.

    Pass q and k without rotary positions. Products are computed in fp32 (fp64 for float64), even under autocast; on
    GPUs leave `torch.backends.cuda.matmul.allow_tf32` off. Memory is O(N). For tensors without values (meta,
    FakeTensorMode) results have no values.

    Triton kernels compute gated_delta on NVIDIA GPUs of compute capability 8.0 and later, for D and E up to 128, except
    in float64. If D or E is at most 16, they take only 16-bit rows with D and E up to 64. Torch's operations compute
    all other calls. The kernels multiply 16-bit rows in TF32, or in bf16 if both factors are bf16, and sum in fp32. For
    bf16 rows, intermediate results and gradients of gates have the precision of bf16. fp32 rows take three TF32
    products each, which keep 22 of 24 bits. The kernels' gradients cannot be differentiated again.

    Args:
        q: (B, N, H, D), any floating dtype.
        k: (B, N, K, D), where K divides H; query head h reads the memory of kv head h // (H / K).
        v: (B, N, K, E).
        log_decay: (B, N, K), finite and at most 0, for gated_delta.
        beta: (B, N, K), between 0 and 1 (up to 2 for negative eigenvalues), for gated_delta.
        segment: m, for linear and delta.
        causal: whether tokens read only earlier tokens; False is allowed only for linear.
        state: the state that an earlier call returned, with an entry for each sample, or for each document of
            `cu_seqlens`. Its gradient flows to the earlier call; `state.detach()` stops it.
        return_state: also return the state after the last token of each sample or document.
        lengths: (B,) integers, the number of tokens of each right-padded sample; padding adds nothing, its output is 0.
        cu_seqlens: (documents + 1,) rising integers from 0 to N; each document has a separate memory, and B must be 1.
        sequence: the ranks that share the sequence; None: the active group, or one rank if there is none. On several
            ranks, q, k, v, log_decay and beta are this rank's tokens; `lengths`, `cu_seqlens` and `state` are global,
            and every rank makes the same call. Every rank returns the state; its gradient is the sum over ranks. If
            ranks cut memory segments, they also exchange keys and values of up to m - 1 tokens.

    Returns:
        out (B, N, H, E) in v's dtype; with `return_state` also a `RecurrentState` in fp32 (fp64).

    Raises:
        TypeError, ValueError: on every rank, if an argument is invalid on one rank or differs between ranks. The
            message names the argument, its value and the allowed values."""
    out, after = recur(
        *(q, k, v, log_decay, beta), kind=kind, segment=segment, causal=causal, state=state, return_state=return_state,
        lengths=lengths, cu_seqlens=cu_seqlens, sequence=sequence,
    )  # fmt: skip
    return out if after is None else (out, after)


def recur(
    *rows: Any, output: Output = Output.READ, return_state: bool = False, sequence: Any = None, **settings: Any
) -> tuple[Tensor, RecurrentState | None]:
    """Compute `recurrent_attention`, but always return two values: the output (see `Output`), and the state or None."""
    group = group_of(sequence)
    check = partial(_checked, return_state=return_state, group=group, **settings)
    checked = check(*rows) if group is None else group.guard(check, *rows)
    if _without_values(checked.inputs.q) and not is_traced():
        return _shapes(checked, return_state)
    with torch.autocast(checked.inputs.q.device.type, enabled=False):
        return _compute(checked, group, return_state, output)


def _without_values(x: Tensor) -> bool:
    return x.is_meta or is_fake(x)


def _readable(x: Tensor) -> bool:
    """Return whether the host can read values; it cannot during tracing or in a transform of torch.func."""
    return not (is_fake(x) or is_traced() or transformed())


def _shapes(checked: _Checked, return_state: bool) -> tuple[Tensor, RecurrentState | None]:
    """Return the results of a call on tensors without values. They have no values either, but require gradients."""
    q, k, v = checked.inputs.all[:3]
    anchor = torch.stack([x.sum().to(checked.dtype) for x in checked.tensors()]).sum()
    out = (v.new_zeros(*q.shape[:3], v.shape[3], dtype=checked.dtype) + anchor).to(v.dtype)
    if not return_state:
        return out, None
    bounds, lengths = checked.bounds, checked.lengths or (q.shape[1],) * len(q)
    counts = [b - a for a, b in pairwise(bounds)] if bounds is not None else list(lengths)
    like = (*k.shape[2:], v.shape[3])
    state = checked.state or empty_state(checked.kind, checked.segment or 1, len(counts), like, q, checked.dtype)
    after = state.with_tensors([x + anchor for x in state.floating()])
    return out, replace(after, tokens=state.tokens + torch.tensor(counts, dtype=torch.int64))


@dataclass(frozen=True)
class _Checked:
    """The checked arguments of a call; `bounds`: its `cu_seqlens`; `dtype`: the dtype of the state."""

    kind: str
    segment: int | None
    causal: bool
    inputs: Inputs
    dtype: torch.dtype
    state: RecurrentState | None
    lengths: tuple[int, ...] | None
    bounds: tuple[int, ...] | None

    def facts(self, return_state: bool) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks."""
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors())
        return {
            "call": "recurrent_attention",
            "kind": self.kind,
            "segment": self.segment,
            "causal": self.causal,
            "shapes": [(x.shape[0], *x.shape[2:]) for x in self.inputs.all],
            "dtype": self.dtype,
            "lengths": self.lengths,
            "cu_seqlens": self.bounds,
            "tokens of the state": None if self.state is None else self.state.tokens.tolist(),
            "return_state": return_state,
            "requires grad": grad,
        }

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.inputs.all, *(() if self.state is None else self.state.floating()))

    def documents(self, seq_len: int) -> tuple[Document, ...]:
        """Return all documents of a sequence of N tokens."""
        if self.bounds is not None:
            check_bounds(list(self.bounds), seq_len)
            every = [(0, a, b) for a, b in pairwise(self.bounds)]
        else:
            batch = self.inputs.q.shape[0]
            lengths = (seq_len,) * batch if self.lengths is None else self.lengths
            if any(not 0 <= n <= seq_len for n in lengths):
                raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got {list(lengths)[:8]}.")
            every = [(sample, 0, n) for sample, n in enumerate(lengths)]
        tokens_read = [0] * len(every) if self.state is None else self.state.tokens.tolist()
        before = [n % self.segment if self.segment else 0 for n in tokens_read]
        return tuple(Document(*bounds, n) for bounds, n in zip(every, before, strict=True))


def _compute(
    checked: _Checked, group: SequenceGroup | None, return_state: bool, output: Output
) -> tuple[Tensor, RecurrentState | None]:
    inputs, kind = checked.inputs, checked.kind
    batch, length = inputs.q.shape[:2]
    owned: list[tuple[range, ...]] = [(range(length),)]
    number, seq_len = 0, length
    if group is not None:
        agreed = group.agree(checked.facts(return_state), length)
        number, seq_len = agreed.number, agreed.seq_len
        shard = group.shard(seq_len)
        owned = [shard.ranges(rank) for rank in range(group.ranks)]
    documents = checked.documents(seq_len)
    call = Call(documents, batch, pieces(owned), checked.segment, kind == "delta", not checked.causal)
    scan = None
    wide = _widened(checked)
    if group is not None and group.ranks > 1:
        scan = Scan(group, tuple(rank for rank, _ in call.pieces), number, wide.tensors(), checked.dtype)
    state = wide.state
    if state is None:
        shape = (*inputs.k.shape[2:], inputs.v.shape[3])
        state = empty_state(kind, checked.segment or 1, len(documents), shape, inputs.q, checked.dtype)
    out, after = Computation(kind, wide.inputs, call, state, scan).run(return_state, output)
    return out.to(inputs.v.dtype), after


def _widened(checked: _Checked) -> _Checked:
    """Cast all tensors to the state's dtype, except the rows that kernels read; move gates and state to q's device."""
    x, state = checked.inputs, checked.state
    device, dtype = x.q.device, checked.dtype
    log_decay, beta = (None if gate is None else gate.to(device, dtype) for gate in (x.log_decay, x.beta))
    served = triton_chunks.serves(checked.kind, x.q, x.k, x.v)
    q, k, v = (row if served else row.to(dtype) for row in (x.q, x.k, x.v))
    inputs = Inputs(q, k, v, log_decay, beta, kernels=served)
    return replace(checked, inputs=inputs, state=None if state is None else state.to(device, dtype))


# -- checks ------------------------------------------------------------------------------------------------------------
def _checked(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    *,
    kind: Any,
    segment: Any,
    causal: Any = True,
    state: Any = None,
    return_state: Any,
    lengths: Any = None,
    cu_seqlens: Any = None,
    group: SequenceGroup | None,
) -> _Checked:
    one_of(kind, "kind", KINDS)
    check_rows(q, k, v)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have the same B, N and heads, got {tuple(k.shape)} and {tuple(v.shape)}.")
    _check_gates(kind, k, log_decay, beta)
    _check_segment(kind, segment)
    flag(causal, "causal")
    flag(return_state, "return_state")
    if not causal and (kind != "linear" or state is not None or return_state):
        raise ValueError(
            f"causal=False goes with kind='linear' alone, without state and return_state; got kind={kind!r}. Other "
            "kinds, and states, depend on the order of tokens: set causal=True."
        )
    if group is not None and group.layout == "strided" and group.ranks > 1:
        raise ValueError(
            "layout='strided' has no recurrent attention: neighbouring tokens are on different ranks, so the state "
            "would pass between ranks at every token. Set layout='contiguous' or 'zigzag'."
        )
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("give lengths (right-padded samples) or cu_seqlens (packed documents), not both.")
    shapes = _without_values(q)
    counts, bounds = _integers(lengths, "lengths", shapes), _integers(cu_seqlens, "cu_seqlens", shapes)
    if counts is not None and len(counts) != q.shape[0]:
        raise ValueError(f"lengths must have one entry a sample, {q.shape[0]}; got {len(counts)}.")
    if bounds is not None and (q.shape[0] != 1 or len(bounds) < 2):
        raise ValueError(
            f"cu_seqlens takes a batch of 1 and at least [0, N], got B={q.shape[0]} and {len(bounds)} bounds; pack "
            "documents into one row."
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    samples = q.shape[0] if bounds is None else len(bounds) - 1
    if state is not None:
        _check_state(state, empty_state(kind, segment or 1, samples, (*k.shape[2:], v.shape[3]), q[:0], dtype))
    return _Checked(kind, segment, causal, Inputs(q, k, v, log_decay, beta), dtype, state, counts, bounds)


def _check_gates(kind: str, k: Tensor, log_decay: Any, beta: Any) -> None:
    for name, x, least, most in (("log_decay", log_decay, -torch.inf, 0.0), ("beta", beta, 0.0, 2.0)):
        if kind != "gated_delta":
            if x is not None:
                raise ValueError(f"{name} belongs to kind='gated_delta', not to kind={kind!r}; leave it out.")
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"kind='gated_delta' needs {name}, a torch.Tensor (B, N, K); got {type(x).__name__}.")
        if x.shape != k.shape[:3] or not x.is_floating_point() or x.device != k.device:
            raise ValueError(
                f"{name} must be a floating tensor {tuple(k.shape[:3])} on {k.device}, a number for each token and kv "
                f"head; got {x.dtype} {tuple(x.shape)} on {x.device}."
            )
        # values are checked only on the CPU, because reading them from another device would wait for it
        if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling() and _readable(x):
            low, high = (float(edge) for edge in x.detach().aminmax())
            if low < least or high > most or low == -torch.inf:
                limits = "finite and at most 0" if name == "log_decay" else "between 0 and 2"
                raise ValueError(f"{name} must be {limits}, got values from {low:g} to {high:g}.")


def _check_segment(kind: str, segment: Any) -> None:
    if kind in SEGMENTED:
        if segment is None:
            raise ValueError(f"kind={kind!r} needs segment, the tokens per memory segment, such as segment=2048.")
        integer(segment, "segment", 1)
    elif segment is not None:
        raise ValueError(f"segment={segment!r} belongs to kinds {', '.join(SEGMENTED)}, not to {kind!r}; leave it out.")


def _check_state(state: Any, like: RecurrentState) -> None:
    if not isinstance(state, RecurrentState):
        raise TypeError(f"state must be a RecurrentState that an earlier call returned, got {type(state).__name__}.")
    shapes = [[tuple(x.shape) for x in (*each.floating(), each.tokens)] for each in (state, like)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"state has tensors of shapes {shapes[0]}; this call has {shapes[1]}: an entry for each sample (or document of "
            "cu_seqlens), of the same kind, segment and heads."
        )


def _integers(values: Any, name: str, shapes: bool) -> tuple[int, ...] | None:
    """Return the values as a tuple. A tensor without values counts as zeros if q has none (`shapes`), else raise."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers in one dimension, got {values.dtype} {tuple(values.shape)}.")
        if not _without_values(values):
            return tuple(values.tolist())
        if not shapes:
            raise ValueError(
                f"{name} has no values ({type(values).__name__} on {values.device}), but q has values; give a list."
            )
        return (0,) * len(values)
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be an integer tensor or a list of integers, got {values!r}.")
    for x in values:
        if isinstance(x, bool) or not hasattr(x, "__index__"):
            raise TypeError(f"{name} must hold integers only, got {x!r}.")
    return tuple(operator.index(x) for x in values)
