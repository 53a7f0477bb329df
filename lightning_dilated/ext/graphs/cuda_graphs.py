"""Record the forward and backward of a stack of blocks as CUDA graphs, once for each shape, and replay them.

A replay takes two launches on the host, one for all forward kernels and one for all backward kernels. Ragged batches
and packed rows are padded to a few lengths, so that few graphs serve them. The padding changes no result, because
kernels read the lengths of samples, or the bounds of documents, on the device.
Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import has_hooks, is_fake
from lightning_dilated._device import send
from lightning_dilated._validation import real
from lightning_dilated.attention.backends import environment
from lightning_dilated.attention.executors.fused import captured
from lightning_dilated.attention.executors.tables import bits_of
from lightning_dilated.attention.functional import check_documents
from lightning_dilated.attention.resolve import check_lengths
from lightning_dilated.ext._compat import torch as compat
from lightning_dilated.memory.recompute import forget_casts
from lightning_dilated.models.transformer import Inputs
from lightning_dilated.pattern.rows import check_bounds
from lightning_dilated.sequence.group import active_sequence, no_sequence

#: maximum number of graphs that are kept; each has its own inputs and outputs, and all share intermediate memory
MAX_GRAPHS = 64
#: lengths of recorded sequences are multiples of this number of tokens
STEP = 64
#: attributes of modules that users may change during training; a replay would ignore the change
SETTINGS = ("p", "pattern", "causal", "dropout", "scale", "engine")

_log = logging.getLogger(__name__)


def documents_of(inputs: Inputs) -> int:
    """Return the number of documents for which a record of these inputs has room; 0 if there are no bounds."""
    return 0 if inputs.cu_seqlens is None else 2 ** bits_of(len(inputs.cu_seqlens) - 1)


def padded_to(inputs: Inputs, length: int) -> Inputs:
    """Return the inputs on x's device, padded for a record of `length` tokens; x itself is not padded.

    Padding belongs to no document, and added documents are empty. Lengths and bounds are clamped to 0..N.
    """
    device, tokens = inputs.x.device, inputs.x.shape[1]
    lengths, bounds = (
        None if x is None else x.clamp(0, tokens).to(torch.int32) for x in (inputs.lengths, inputs.cu_seqlens)
    )
    if bounds is not None:
        bounds = torch.cat([bounds, bounds[-1:].expand(documents_of(inputs) + 1 - len(bounds))])
    lengths, bounds = (None if x is None else send(x, device) for x in (lengths, bounds))
    positions, drops = inputs.positions, inputs.drops
    if positions is not None:
        positions = nn.functional.pad(send(positions, device), (0, length - tokens))
    if drops is not None and bounds is not None:
        drops = nn.functional.pad(drops, (0, 0, 0, length - tokens))
    return Inputs(inputs.x, lengths, bounds, positions, drops)


#: a function that runs the blocks and returns hidden states (B, N, E)
Compute = Callable[[Inputs], Tensor]


@functools.lru_cache(maxsize=65536)
def padded_length(tokens: int, most: float) -> int:
    """Return the padded length of N tokens. Padding is below the share `most` of N, or below `STEP` tokens."""
    length = STEP
    while length < tokens:
        length = max(length + STEP, int(length * (1 + most)) // STEP * STEP)
    return length


@dataclass(frozen=True)
class Recorded:
    """One forward and its backward, as functions that read and write the same tensors in every call.

    Attributes:
        inputs: the tensors from which the blocks read their inputs.
        out, grad: the result, and its gradient.
        x_grad: the gradient of x; None if x needs no gradient.
        used: for each trained parameter, whether it has a gradient.
        forward, backward: functions that compute `out`, and `x_grad` with the parameters' gradients (`Shared.grads`).
    """

    inputs: Inputs
    out: Tensor
    grad: Tensor
    x_grad: Tensor | None
    used: tuple[bool, ...]
    forward: Callable[[], None]
    backward: Callable[[], None]

    def fill(self, inputs: Inputs) -> None:
        """Copy a call's inputs to the record's inputs; a shorter x is padded with 0."""
        for to, value in zip(self.inputs[1:], inputs[1:], strict=True):
            if to is not None and value is not None:
                to.copy_(value)
        _fill(self.inputs.x.detach(), inputs.x)


def _fill(to: Tensor, x: Tensor) -> None:
    to[:, : x.shape[1]].copy_(x)
    if x.shape[1] < to.shape[1]:
        to[:, x.shape[1] :].zero_()


@dataclass(frozen=True)
class Shared:
    """Tensors and memory that all records of a stack share.

    Attributes:
        grads: tensors to which the recorded backwards write the gradients of trained parameters.
        stream, pool: the stream of the recording, and the pool for intermediate tensors; None on a CPU.
    """

    grads: list[Tensor]
    stream: Any = None
    pool: Any = None

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], device: torch.device) -> Shared:
        grads = [torch.zeros_like(p) for p in parameters]
        if device.type != "cuda":
            return cls(grads)
        return cls(grads, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


def record(compute: Compute, inputs: Inputs, parameters: Sequence[Tensor], shared: Shared) -> Recorded:
    """Record `compute` for inputs of these shapes; replays read the memory of `inputs`.

    Args:
        parameters: the trained parameters, as leaves of this record only. An autograd node of the model's own parameter
            might belong to another stream, which must not wait for a recording stream.
    """
    x = inputs.x
    trained = [*([x] if x.requires_grad else []), *parameters]
    stream, current = shared.stream, torch.cuda.current_stream(x.device)
    # disable autocast's cache, because a cached cast of a weight would be freed with the graph's memory
    cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    autocast = functools.partial(torch.autocast, "cuda", cast[1], enabled=cast[0], cache_enabled=False)
    stream.wait_stream(current)
    with torch.cuda.stream(stream), autocast():
        for _ in range(3):  # before recording, compile kernels, send tables and let libraries choose kernels
            out = compute(inputs)
            torch.autograd.grad(out, trained, torch.zeros_like(out), allow_unused=True)
            del out
    current.wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with autocast(), compat.recording(forward, stream, shared.pool):
        out = compute(inputs)
    grad = torch.zeros_like(out)
    with compat.recording(backward, stream, shared.pool):
        gradients = torch.autograd.grad(out, trained, grad, allow_unused=True)
        of_parameters = gradients[len(gradients) - len(parameters) :]
        pairs = [(to, value) for to, value in zip(shared.grads, of_parameters, strict=True) if value is not None]
        compat.copy_all([to for to, _ in pairs], [value for _, value in pairs])
    x_grad = gradients[0] if x.requires_grad else None
    used = tuple(value is not None for value in of_parameters)
    return Recorded(inputs, out.detach(), grad, x_grad, used, forward.replay, backward.replay)


class CudaGraphs:
    """Record a stack of blocks in the first call with a shape, and replay the record in later calls.

    Args:
        padding: maximum padding of a batch with lengths or documents, as a share of its tokens; padding below `STEP`
            tokens per row is always allowed.

    Attributes:
        tokens, padded: number of tokens in all batches since the last `free`, without padding and with padding.
    """

    def __init__(self, padding: float) -> None:
        self.padding = real(padding, "graph_padding", least=0, most=1)
        self.tokens = self.padded = 0
        self._records: OrderedDict[tuple, Recorded] = OrderedDict()
        self._weights: tuple = ()
        self._shared = Shared([])
        #: number of the last replayed forward, and a weak reference to its token until the backward runs
        self._turn, self._open = 0, lambda: None
        #: number of the last replay with a finished backward
        self._done = 0
        self._said: set[str] = set()
        self._refused: set[tuple] = set()

    def why_not(self, blocks: nn.Module, x: Tensor) -> str | None:
        """Return the reason why a call cannot be replayed; None if it can; "" if there is no need to log the reason."""
        group = active_sequence()
        if not torch.is_grad_enabled() or is_fake(x) or compat.is_traced() or torch.compiler.is_compiling():
            return ""
        if group is not None and group.ranks > 1:
            return "ranks share its sequence, and what they exchange is planned on the host"
        if any(map(has_hooks, compat.modules_of(blocks))):
            return "a module of it has hooks, which a replay would leave out"
        if self._open() is not None or not any(p.requires_grad for p in blocks.parameters()):
            return ""  # a backward still needs tensors of the last replay, or nothing is trained
        if compat.packs_saved_tensors():
            return "hooks pack the tensors that it saves, of a checkpoint or an offload around it"
        if captured(x.device):
            return "another CUDA graph records it"
        return None if x.device.type == "cuda" else f"it runs on {x.device.type}"

    def log_reason(self, reason: str) -> None:
        """Log why a stack is not replayed; each reason is logged once."""
        if reason and reason not in self._said:
            self._said.add(reason)
            _log.warning("CUDA graphs are not used for a stack, since %s.", reason)

    def __call__(self, compute: Compute, blocks: nn.Module, inputs: Inputs) -> Tensor:
        """Return compute(inputs), with gradients; raise ValueError if lengths or bounds exceed the row."""
        inputs = _checked(inputs)
        modules = compat.modules_of(blocks)
        parameters = self._trained(modules)
        x, documents = inputs.x, documents_of(inputs)
        batch, tokens = x.shape[:2]
        length = tokens if inputs.lengths is None and not documents else padded_length(tokens, self.padding)
        cast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        modes = tuple(m.training for m in modules)
        options = x.dtype, x.requires_grad, inputs.lengths is None, inputs.drops is None, modes, environment(x.device)
        at = inputs.positions
        places = None if at is None else (at.dtype, *at.shape[:-1], at.shape[-1] - tokens)
        key = batch, length, documents, places, *options, *cast
        if key in self._refused:
            return compute(inputs)
        padded = padded_to(inputs, length)
        if new := key not in self._records:
            size = f"{batch} x {length} tokens" + (f" in up to {documents} documents" if documents else "")
            try:
                recorded = self._record(compute, blocks, parameters, padded, length)
            except ValueError as error:  # the kernels that serve the call cannot be recorded
                self._refused.add(key)
                self.log_reason(f"{size} cannot be recorded: {error}")
                return compute(inputs)
            self._records[key] = recorded
            if len(self._records) > MAX_GRAPHS:
                self._records.popitem(last=False)
        self.tokens, self.padded = self.tokens + batch * tokens, self.padded + batch * length
        if new:
            count, share = len(self._records), self._padding_percent()
            _log.info(
                "recorded CUDA graphs of %s (%d of them); padding so far is %.1f %% of the tokens", size, count, share
            )
        self._records.move_to_end(key)
        return _Replay.apply(self, self._records[key], padded, x, *parameters)

    def _record(
        self, compute: Compute, blocks: nn.Module, parameters: list[nn.Parameter], inputs: Inputs, length: int
    ) -> Recorded:
        x = inputs.x
        shape = x.shape[0], length, x.shape[2]
        static = torch.zeros(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
        leaf_of = {p: nn.Parameter(p.detach()) for p in parameters}
        every = blocks.named_parameters(remove_duplicate=False)  # shared parameters have several names
        leaves = {name: leaf_of[p] for name, p in every if p.requires_grad}

        def alone(inputs: Inputs) -> Tensor:
            with no_sequence(), compat.with_parameters(blocks, leaves):
                return compute(inputs)

        forget_casts()
        copies = (None if value is None else value.clone() for value in inputs[1:])
        return record(alone, Inputs(static, *copies), list(leaf_of.values()), self._shared)

    def _trained(self, modules: list[nn.Module]) -> list[nn.Parameter]:
        """Return the trained parameters. Delete all records if tensors, trained parameters or settings changed."""
        parameters, buffers = compat.tensors_of(modules)
        held = [(x.data_ptr(), x.shape, x.dtype, x.requires_grad) for x in (*parameters, *buffers)]
        settings = [[m.__dict__.get(name) for name in SETTINGS] for m in modules]
        weights, trained = (held, settings), [p for p in parameters if p.requires_grad]
        if weights != self._weights:
            self._records.clear()
            self._refused.clear()
            self._weights, self._shared = weights, Shared.of(trained, trained[0].device)
        return trained

    def free(self) -> None:
        """Delete all records to free their memory, and log the padding. Call it only after the last backward."""
        if self.tokens:
            share = self._padding_percent()
            _log.info("CUDA graphs replayed %d tokens; padding was %.1f %% of them", self.tokens, share)
        self.tokens = self.padded = 0
        self._records.clear()
        self._refused.clear()
        self._weights, self._shared = (), Shared([])

    def _padding_percent(self) -> float:
        return 100 * (self.padded - self.tokens) / max(1, self.tokens)

    def begin(self, token: Any) -> int:
        """Return the number of a new replay; until `token` is freed or `backward` runs, `why_not` refuses others."""
        self._turn, self._open = self._turn + 1, weakref.ref(token)
        return self._turn

    def backward(
        self, turn: int, recorded: Recorded, grad: Tensor, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        """Replay a backward with the gradient of the result, and return the gradients of the parameters.

        The next backward writes to the same memory; gradients that are still in use are copied before that.

        Raises:
            RuntimeError: if another forward was replayed in between, or this backward already ran.
        """
        if turn != self._turn or turn == self._done:
            raise RuntimeError(
                "this backward comes a second time, or after another forward of the same stack, so a replay has "
                "overwritten its tensors. Run each backward once and before the next forward, or set cuda_graphs=False."
            )
        self._open, self._done, shared = lambda: None, turn, self._shared.grads
        for p, x in zip(parameters, shared, strict=True):
            if p.grad is not None and p.grad.data_ptr() == x.data_ptr():
                p.grad.data = p.grad.clone()
        earlier = {i: x.clone() for i, x in enumerate(shared) if compat.memory_users(x) > 1}  # for torch.autograd.grad
        _fill(recorded.grad, grad)
        recorded.backward()
        grads = [x.detach() if used else None for x, used in zip(shared, recorded.used, strict=True)]
        for i, x in earlier.items():
            grads[i] = None if grads[i] is None else shared[i].clone()
            shared[i].copy_(x)
        return grads

    def __deepcopy__(self, memo: Any) -> CudaGraphs:
        return CudaGraphs(self.padding)

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[float]]:
        return CudaGraphs, (self.padding,)


def _checked(inputs: Inputs) -> Inputs:
    """Return the inputs with lengths or bounds as tensors. Check their values, which a replay does not check."""
    tokens = inputs.x.shape[1]
    with no_sequence():
        lengths, bounds = check_documents(inputs.x, inputs.lengths, inputs.cu_seqlens)
    if lengths is not None and lengths.device.type == "cpu":
        check_lengths(lengths, tokens)
    if bounds is not None and bounds.device.type == "cpu":
        check_bounds(bounds.tolist(), tokens)
    return inputs._replace(lengths=lengths, cu_seqlens=bounds)


class _Open:
    """A token that is freed with the autograd graph of a replayed forward."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graphs, recorded, inputs, x, *parameters):
        ctx.token = _Open()
        ctx.turn, ctx.graphs, ctx.recorded, ctx.tokens = graphs.begin(ctx.token), graphs, recorded, x.shape[1]
        ctx.save_for_backward(*parameters)  # torch then detects parameters that change before the backward
        recorded.fill(inputs)
        recorded.forward()
        return recorded.out[:, : ctx.tokens].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        recorded = ctx.recorded
        grads = ctx.graphs.backward(ctx.turn, recorded, grad, ctx.saved_tensors)
        x_grad = recorded.x_grad
        dx = x_grad[:, : ctx.tokens].clone() if x_grad is not None and ctx.needs_input_grad[3] else None
        return *itertools.repeat(None, 3), dx, *grads
