"""Count a training step of a real model, piece by piece, under fake tensors, which have sizes but no memory.

`step` counts the step's memory; `BlockWork` counts its FLOPs and the bytes that it moves. The fake tensors are CPU
tensors that imitate a GPU, because without a GPU, fake GPU tensors have no backward. While a step is counted, functions
of torch and of the models that differ on a GPU are replaced in the whole process. Use a separate process for counting,
as `lightning-dilated plan` and `planning.advice` do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dilated._device import ASSUMED
from lightning_dilated.ext._compat import torch as compat
from lightning_dilated.ext.planning.counting.compiled import Graphs, Pieces
from lightning_dilated.ext.planning.counting.memory_tracker import GRADIENTS, OPS, PARAMETERS, Tape
from lightning_dilated.ext.planning.counting.repeats import shorten
from lightning_dilated.memory import chunked_loss, token_chunks
from lightning_dilated.memory.block_memory import StackMemory
from lightning_dilated.memory.recompute import default_dtype
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.sequence.group import no_sequence


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Allocate memory as on a GPU. Every number that is read from a fake tensor is 1.

    The package calls its GPU kernels (`ASSUMED`), and functions that it compiles run as one kernel. A norm is one
    kernel in the forward and one in the backward, in the dtype that autocast uses on a GPU. One kernel casts fp16 (not
    bf16) logits and computes log-probabilities.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch, "rms_norm", _rms_norm),
            (torch, "layer_norm", _wide_layer_norm),
            (torch, "log_softmax", _wide_log_softmax),
            (chunked_loss, "_compiled", _in_one_pass),
        ):
            stack.enter_context(compat.replaced(owner, name, value))
        stack.enter_context(_ConstantScalars())
        ASSUMED.append(True)
        stack.callback(ASSUMED.pop)
        yield


#: the original functions that `as_on_gpu` replaces
_RMS_NORM, _LAYER_NORM, _LOG_SOFTMAX = torch.rms_norm, torch.layer_norm, torch.log_softmax


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        return _RMS_NORM(x, shape, weight, eps)
    return compat.fused_rms_norm(x, shape, weight, eps) if compat.is_traced() else _RMSNorm.apply(x, weight)


def _wide_layer_norm(x: Tensor, *arguments: Any) -> Tensor:
    narrow = torch.is_autocast_enabled("cpu") and x.dtype in (torch.bfloat16, torch.float16)
    return _LAYER_NORM(x.float() if narrow else x, *arguments)


def _wide_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    fused = dtype is not None and x.dtype == torch.float16 and not torch.is_grad_enabled()
    return x.new_empty(x.shape, dtype=dtype) if fused else _LOG_SOFTMAX(x, dim, dtype=dtype)


def _in_one_pass(run: Callable) -> Callable:
    return _sizes_of_sums if run is chunked_loss._sums else lambda logits, *_: torch.empty_like(logits)


def _sizes_of_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    each = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    return each, torch.empty_like(each)


class _ConstantScalars(compat.TorchDispatchMode):
    """Return 1 for a number that is read from a fake tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not compat.reads_number(func):
            return func(*args, **(kwargs or {}))
        if args[0].dtype == torch.bool:
            return True
        return 1.0 if args[0].is_floating_point() else 1


class _RMSNorm(torch.autograd.Function):
    """Allocate the tensors of RMSNorm, without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


#: for each precision of the Trainer: (dtype of parameters, dtype of autocast); None: no autocast
PRECISIONS = {
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "32-true": (torch.float32, None),
}
#: name of the main stack of blocks; the names of its parts on the tape have no prefix
MAIN = "transformer"


class _Marks:
    """Mark on the tape where the forward and the backward of block `number` begin; `stack`: name of its stack."""

    def __init__(self, number: int, tape: Tape, stack: str) -> None:
        self.number, self.tape, self.stack = number, tape, stack

    def put_on(self, block: nn.Module) -> None:
        """Mark all runs of the block except recomputation."""
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._behind)

    def _enter(self, *part: Any) -> None:
        self.tape.enter(*(() if self.stack == MAIN else (self.stack,)), *part)

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if self.tape.returning:
            return
        if self.number == 0:
            x = args[0]
            self.tape.hidden[self.stack] = x.nbytes
            if x.requires_grad:
                x.register_hook(lambda grad: self._enter("first"))
        self._enter("forward", self.number)

    def _behind(self, block: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if self.tape.returning:
            return
        self._enter("behind", self.number)
        if y.requires_grad:
            y.register_hook(lambda grad: self._enter("backward", self.number))


def step(
    make: Callable[[], DilatedModule],
    batch: Callable[[], Any],
    precision: str,
    memory: MemorySettings,
    graphs: Graphs | None = None,
    tape: Tape | None = None,
) -> Tape:
    """Count a step that starts with the gradients of the previous step in memory. Optimizer states are not counted.

    Args:
        make: a function that returns the model, of any depth, neither built nor compiled.
        batch: a function that returns a batch of the model; it is called under fake tensors.
        precision: the Trainer's precision.
        memory: memory settings; `offload` is ignored.
        graphs: cache of compiled blocks; None: blocks run uncompiled.
        tape: the tape that counts the step; None: a new tape.

    Raises:
        RuntimeError: if called inside `with torch.device(...)` or another TorchFunctionMode.
    """
    if compat.function_modes():
        # with torch 2.13, the process crashed in a garbage collection some time after counting inside a mode
        raise RuntimeError(
            "memory cannot be counted inside `with torch.device(...)` or another TorchFunctionMode: count outside."
        )
    dtype, products = PRECISIONS[precision]
    tape, gpu = tape or Tape(), as_on_gpu()
    with compat.fake_tensors(), _alone(), gpu, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        for message in ("Accessing the data pointer of FakeTensor", "Mismatch dtype between input and weight"):
            warnings.filterwarnings("ignore", message=message)
        with default_dtype(dtype), _not_moved():
            model = make()
            model.configure_model()
        model.train()
        model.compile_blocks = graphs is not None  # the model's loss reads this attribute
        data, parts = batch(), stacks(model)
        repeats = shorten(parts[MAIN], memory.every)
        for stack in parts.values():
            stack.memory = memory
        context = torch.autocast("cpu", products) if products else contextlib.nullcontext()
        if graphs is not None:
            graphs.tape = tape
            _compile(model, data, context, graphs)
        for name, stack in parts.items():
            for i, block in enumerate(stack.blocks):
                _Marks(i, tape, name).put_on(block)
        tape.blocks = [_bytes(block) for block in parts[MAIN].blocks]
        tape.whole = _bytes(model)
        with contextlib.nullcontext() if tape.every_tile else compat.replaced(token_chunks, "cuts", _few):
            _run(model, data, context, tape)
    del tape.pieces[0]
    for repeat in reversed(repeats):
        repeat.lengthen(tape)
    return tape


def _bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of a module's parameters, and of its trained parameters."""
    parameters = list(module.parameters())
    return sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if p.requires_grad)


#: a stack of blocks with `attentions` and `sizes`: a DilatedTransformer, or the layers of another library's decoder
Stack = StackMemory


def stacks(model: DilatedModule) -> dict[str, Any]:
    """Return the stacks of blocks of a built model by attribute name, in the order of construction."""
    return {name: m for name, m in model.named_children() if isinstance(m, Stack)}


def _compile(model: DilatedModule, data: Any, context: contextlib.AbstractContextManager, graphs: Graphs) -> None:
    """Replace the blocks' methods by pieces that are compiled for this batch."""
    named = [(block, name) for name, stack in stacks(model).items() for block in stack.blocks]
    pieces = [Pieces(block, graphs, name) for block, name in named]
    key = model.transformer.memory, tuple(x.shape for x in compat.leaves(data) if isinstance(x, Tensor))
    if key not in graphs.ready:
        with context, torch.no_grad():
            model.token_mean(data)
    with context:
        for piece in pieces:
            piece.trace()
    graphs.ready.add(key)


def _run(model: DilatedModule, data: Any, context: contextlib.AbstractContextManager, tape: Tape) -> None:
    """Run the forward and the backward of a step in Lightning's order."""
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


def _few(length: int, step: int, cuts: Callable[[int, int], Iterator[slice]] = token_chunks.cuts) -> Iterator[slice]:
    return (tile for i, tile in enumerate(cuts(length, step)) if i < 2 or tile.stop == length)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Ignore the sequence ranks and the gradient mode of a surrounding run."""
    with no_sequence(), torch.inference_mode(False), torch.enable_grad():
        yield


def _not_moved() -> contextlib.AbstractContextManager[Any]:
    """Disable `Module.to`: torch cannot move modules of fake tensors, and peft calls it for updates that already have
    the dtype and device of their weights."""
    return compat.replaced(nn.Module, "to", lambda self, *where, **how: self)


# -- work of blocks, kernel by kernel ----------------------------------------------------------------------------------
# A kernel reads its inputs once and writes its results once; views cost nothing. Without compilation, each operator is
# a kernel. Calls of attention, of recurrences and of hashed heads are not counted.
#: number of tokens in a step that counts work; casts of weights are a fixed amount, 1 % of its work
TOKENS = 1 << 16
#: maximum number of tiles in a step that counts work
TILES = 16
#: products with fewer FLOPs per byte than this are limited by memory: a GPU reaches 700 TFLOP/s and 2.9 to 4.1 TB/s
RIDGE = 200
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Work(NamedTuple):
    """Work per token: FLOPs of large products, and bytes that all other kernels read and write."""

    flops: float
    moved: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Return the seconds that this work takes at `flops` FLOP/s and `bandwidth` bytes/s."""
        return self.flops / flops + self.moved / bandwidth

    def beyond(self, other: Work) -> Work:
        """Return this work minus `other`."""
        return Work(self.flops - other.flops, self.moved - other.moved)


@dataclass(frozen=True)
class BlockWork:
    """Work of a block: its forward, its backward, and the part of the forward that recomputation repeats."""

    forward: Work
    backward: Work
    again: Work

    @classmethod
    def of(
        cls,
        make: Callable[[int], DilatedModule],
        batch: Callable[[int], Any],
        precision: str,
        tile: int | None = None,
    ) -> BlockWork:
        """Count a block of a model in two steps: one saves everything, and one recomputes blocks.

        Args:
            make, batch, precision: see `passes`.
            tile: number of tokens in a feed-forward tile, which the backward recomputes; None: all tokens in one call.
        """
        each = (MemorySettings(policy, tile=tile) for policy in ("none", "block"))
        (forward, backward), (_, recomputing) = (passes(make, batch, precision, settings) for settings in each)
        return cls(forward, backward, recomputing.beyond(backward))


def passes(
    make: Callable[[int], DilatedModule],
    batch: Callable[[int], Any],
    precision: str,
    settings: MemorySettings,
    compiled: bool = False,
) -> tuple[Work, Work]:
    """Count the work of a block's forward, and of its backward including all recomputation.

    Args:
        make: a function that returns the model with a given depth, not yet built.
        batch: a function that returns a batch with a given number of tokens; it is called under fake tensors.
        precision: the Trainer's precision.
        settings: memory settings.
        compiled: whether the blocks are compiled.
    """
    tile = settings.tile
    tokens = TOKENS if tile is None else min(max(TOKENS, 2 * tile), TILES * tile)
    tape = WorkTape(tokens)
    graphs = Graphs(tape) if compiled else None
    # count the second of two blocks: the first block's backward does less if nothing before it is trained
    step(partial(make, 2), partial(batch, tokens), precision, settings, graphs, tape)
    return tape.work(("forward", 1)), tape.work(("backward", 1))


class WorkTape(Tape):
    """A tape that adds up the work of each part of a step, except the loss."""

    every_tile = True

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        self._tokens = tokens
        self._flops: Counter[tuple] = Counter()
        self._moved: Counter[tuple] = Counter()

    def work(self, part: tuple) -> Work:
        """Return the work per token of a part of the step."""
        return Work(self._flops[part] / self._tokens, self._moved[part] / self._tokens)

    def _after(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
        if _is_kernel(func):
            self.launched(func, inputs, results)
        return super()._after(func, inputs, results)

    def launched(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        moved = sum(x.nbytes for x in (*inputs, *results))
        flops = 0 if func is None else _flops(func, inputs)
        if flops > RIDGE * moved:
            self._flops[self.part] += flops
        else:
            self._moved[self.part] += moved


def _is_kernel(func: Any) -> bool:
    """Return whether an operator moves memory and is none of the ops in `OPS`."""
    if func in OPS or "empty" in func.overloadpacket.__name__:
        return False
    return compat.changes_inputs(func) or not compat.returns_view(func)


def _flops(func: Any, inputs: Sequence[Tensor]) -> int:
    """Return the FLOPs of an operator that multiplies its last two tensors; 0 for other operators."""
    if func.overloadpacket.__name__ not in PRODUCTS:
        return 0
    left, right = inputs[-2:]
    return 2 * left.numel() * right.shape[-1]
