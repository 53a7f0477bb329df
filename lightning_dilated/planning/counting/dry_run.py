"""Fake tensors of the CPU that take the ways of a GPU's: fake ones of a GPU have no backward where there is none.

Shape letters: L positions.

Trial: a training step of a real model under fake tensors, which have sizes but no memory, counted piece by piece.

Shape letters: B batch, L tokens of a rank, E embedding dim.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_dilated.attention import rotary
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.memory import chunked_loss, head_chunks, token_chunks
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.transformer import DilatedTransformer
from lightning_dilated.planning.counting.compiled import Graphs, Pieces
from lightning_dilated.planning.counting.memory_tracker import (
    GRADIENTS,
    PARAMETERS,
    Tape,
)
from lightning_dilated.sequence import group

#: by its name: the package of models has a function of that name
image_patches = importlib.import_module("lightning_dilated.models.longvit.image_patches")


@contextlib.contextmanager
def as_on_gpu(compiled: bool = False) -> Iterator[None]:
    """Within, tensors are made as a GPU makes them, and checks of values pass.

    Args:
        compiled: whether the model's blocks and loss are; this is about the loss.

    Rotary positions are turned by their kernel; norms are one kernel each way, in the dtype that autocast has on a GPU, and
    logarithms of probabilities of fp16 (not of bf16) one that casts as it reads; positions of patches are told for a whole
    sequence; a number that is read off a tensor is 1.
    """

    def split(table: RotaryTable, joint: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        return rotary.turn(joint, table.cos, table.sin, table.scale, heads)

    plain, layer_norm = torch.rms_norm, torch.layer_norm

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return plain(x, shape, weight, eps)
        if _traced() and hasattr(torch.ops.aten, "_fused_rms_norm"):
            return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
        return plain(x, shape, weight, eps) if _traced() else _RMSNorm.apply(x, weight)

    def wide_layer_norm(x: Tensor, *rest: Any) -> Tensor:
        narrow = torch.is_autocast_enabled("cpu") and x.dtype in (torch.bfloat16, torch.float16)
        return layer_norm(x.float() if narrow else x, *rest)

    log_softmax = torch.log_softmax

    def wide_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        fused = dtype is not None and x.dtype == torch.float16 and not torch.is_grad_enabled()
        return x.new_empty(x.shape, dtype=dtype) if fused else log_softmax(x, dim, dtype=dtype)

    def in_one_pass(run: Callable) -> Callable:
        return _sizes_of_sums if run is chunked_loss._sums else lambda logits, *_: torch.empty_like(logits)

    places = image_patches.places

    def places_of_all(positions: Tensor, *sizes: int) -> Any:
        with real():
            return places(torch.arange(len(positions)), *sizes)

    with (
        mock.patch.object(image_patches, "places", places_of_all),
        mock.patch.object(RotaryTable, "split", split),
        mock.patch.object(torch, "rms_norm", rms_norm),
        mock.patch.object(torch, "layer_norm", wide_layer_norm),
        mock.patch.object(torch, "log_softmax", wide_log_softmax),
        mock.patch.object(chunked_loss, "_fuses", lambda logits, _: compiled and logits.shape[1] >= chunked_loss.WIDE),
        mock.patch.object(chunked_loss, "_compiled", in_one_pass),
        _Ones(),
    ):
        yield


def real() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors are made with values, also under fake tensors: those of the host that are read."""
    return _disable_current_modes()


def _traced() -> bool:
    """Whether a graph is being made of what runs."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


def _sizes_of_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    each = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    return each, torch.empty_like(each)


class _Ones(TorchDispatchMode):
    """Within, a number that is read off a fake tensor is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if args[0].dtype == torch.bool:
            return True
        return 1.0 if args[0].is_floating_point() else 1


class _RMSNorm(torch.autograd.Function):
    """The sizes of RMSNorm; no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


#: dtype of parameters by the Trainer's precision, and that of products
PRECISIONS = {
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "32-true": (torch.float32, None),
}
#: the stack of blocks whose depth a count varies, and whose parts have no name in front
MAIN = "transformer"
#: loops over tiles, by where they are called
LOOPS = [
    (token_chunks, "forward_tiles"),
    (chunked_loss, "forward_tiles"),
    (token_chunks, "backward_tiles"),
    (chunked_loss, "sum_tiles"),
    (head_chunks, "products"),
    (head_chunks, "products_backward"),
    (head_chunks, "backward_tiles"),
]


class _Marked(nn.Module):
    """A block that tells the tape when its forward and its backward begin; `stack` is the name of its stack."""

    def __init__(self, block: TransformerBlock, number: int, tape: Tape, stack: str) -> None:
        super().__init__()
        self.block, self.number, self.tape, self.stack = block, number, tape, stack

    def _enter(self, *part: Any) -> None:
        self.tape.enter(*(() if self.stack == MAIN else (self.stack,)), *part)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """The block's."""
        if self.tape.returning:  # computed again
            return self.block(x, **options)
        if self.number == 0:
            self.tape.hidden[self.stack] = x.nbytes
            if x.requires_grad:
                x.register_hook(lambda grad: self._enter("first"))
        self._enter("forward", self.number)
        y = self.block(x, **options)
        self._enter("behind", self.number)
        if y.requires_grad:
            y.register_hook(lambda grad: self._enter("backward", self.number))
        return y


def step(
    make: Callable[[], DilatedModule],
    batch: Callable[[], Any],
    precision: str,
    memory: MemorySettings,
    graphs: Graphs | None = None,
) -> Tape:
    """What a step held, with the gradients of the step before, without the optimizer's states.

    Args:
        make: the model, not yet built and not compiled; of any depth.
        batch: its batch, made under fake tensors.
        precision: the Trainer's.
        memory: settings; `offload` is not looked at.
        graphs: of blocks that run compiled, kept for a step of another depth; None: they run uncompiled.

    Raises:
        RuntimeError: within `torch.device(...)`.
    """
    if torch._C._len_torch_function_stack():
        # seen with torch 2.13: the process then ends in a later garbage collection
        raise RuntimeError(
            "memory cannot be counted within `with torch.device(...)` or another TorchFunctionMode: leave it."
        )
    dtype, products = PRECISIONS[precision]
    tape, gpu = Tape(), as_on_gpu(compiled=graphs is not None)
    with FakeTensorMode(), _alone(), gpu, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        for said in ("Accessing the data pointer of FakeTensor", "Mismatch dtype between input and weight"):
            warnings.filterwarnings("ignore", message=said)
        with _default(dtype), _not_moved():
            model = make()
            model.configure_model()
        model.train()
        data, found = batch(), stacks(model)
        for stack in found.values():
            stack.memory = memory
        context = torch.autocast("cpu", products) if products else contextlib.nullcontext()
        if graphs is not None:
            graphs.tape = tape
            _compile(model, data, context, graphs)
        for name, stack in found.items():
            stack.blocks = nn.ModuleList(_Marked(b, i, tape, name) for i, b in enumerate(stack.blocks))
        with _tiles_apart(tape):
            _run(model, data, context, tape)
    del tape.pieces[0]
    return tape


def stacks(model: DilatedModule) -> dict[str, DilatedTransformer]:
    """The stacks of blocks of a model that is built, by name."""
    return {name: m for name, m in model.named_children() if isinstance(m, DilatedTransformer)}


def _compile(model: DilatedModule, data: Any, context: contextlib.AbstractContextManager, graphs: Graphs) -> None:
    """Put compiled pieces into the blocks, made for this batch."""
    named = [(block, name) for name, stack in stacks(model).items() for block in stack.blocks]
    pieces = [Pieces(block, graphs, name) for block, name in named]
    patterns = {block.attention.attention.pattern for block, _ in named}
    key = model.transformer.memory, frozenset(patterns), tuple((k, x.shape) for k, x in data.items())
    if key not in graphs.ready:
        with context, torch.no_grad():
            model.token_mean(data)
    with context:
        for piece in pieces:
            piece.trace()
    graphs.ready.add(key)


def _run(model: DilatedModule, data: Any, context: contextlib.AbstractContextManager, tape: Tape) -> None:
    """Forward and backward, as Lightning has them."""
    tape.parameters = list(model.parameters())
    for p in tape.parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    with tape:
        tape.track(tape.parameters, PARAMETERS)
        tape.track((p.grad for p in tape.parameters), GRADIENTS)
        tape.enter("embedding")
        with context:
            loss, _ = model.token_mean(data)
        tape.enter("between")
        model.zero_grad(set_to_none=True)
        tape.returning = True
        tape.enter("head")
        loss.backward()
        del loss
        tape.enter("after")
    tape.close()


@contextlib.contextmanager
def _tiles_apart(tape: Tape) -> Iterator[None]:
    """Within, each loop over tiles is a piece, and leaves out tiles in the middle, which hold as much as the second."""
    with contextlib.ExitStack() as stack:
        for module in (token_chunks, chunked_loss, token_chunks):
            stack.enter_context(mock.patch.object(module, "cuts", _few))
        for module, name in LOOPS:
            stack.enter_context(mock.patch.object(module, name, tape.around(getattr(module, name))))
        yield


def _few(length: int, step: int, cuts: Callable[[int, int], list[slice]] = token_chunks.cuts) -> list[slice]:
    found = cuts(length, step)
    return found if len(found) < 4 else [*found[:2], found[-1]]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within, nothing of a run that goes on meanwhile is noticed: its sequence, its gradients' mode."""
    with (
        mock.patch.object(group, "_active", []),
        mock.patch.object(group, "_groups", {}),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _not_moved() -> contextlib.AbstractContextManager[Any]:
    """Within, modules stay as they are made, in the default dtype: torch cannot move those of fake tensors, as peft asks to
    where updates and their weights are alike already."""
    return mock.patch.object(nn.Module, "to", lambda self, *where, **how: self)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Within, parameters are made in a dtype, as Lightning's precision plugins have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
