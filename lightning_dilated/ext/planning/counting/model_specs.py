"""Describe a model as a `CountedModel`, for counting its memory, and as `Facts`, for computing its time.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._validation import one_of
from lightning_dilated.ext._compat.torch import map_tree
from lightning_dilated.ext.planning.counting.dry_run import MAIN, PRECISIONS, BlockWork, Stack, Work, passes, stacks
from lightning_dilated.ext.planning.counting.footprint import CountedModel, Decoder
from lightning_dilated.ext.planning.counting.hashed import HashedSizes
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.machine import measured_rules
from lightning_dilated.ext.recurrence.triton_chunks import LARGEST
from lightning_dilated.memory.block_memory import BlockSizes
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.transformer import DilatedTransformer
from lightning_dilated.pattern import Hashed
from lightning_dilated.pattern.rows import shortest_cycle
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.recurrence.description import without_starts


def counted_model_of(
    model: DilatedModule,
    precision: str = "bf16-mixed",
    memory: MemorySettings | None = None,
    compile_blocks: bool | None = None,
    capability: tuple[int, int] = (9, 0),
) -> CountedModel:
    """Describe a model for counting, from its `example_batch`, its `planning_copy` and the stacks that `build` makes.

    Args:
        model: a model, built or not; it is not changed.
        precision: the Trainer's precision.
        memory: memory settings; None: the built model's settings, such as gradient checkpointing of a decoder.
        compile_blocks: whether blocks are compiled; None: the model's setting.
        capability: compute capability of the GPU.

    Raises:
        ValueError, TypeError: for an unknown precision, or a model that cannot be counted.
    """
    one_of(precision, "precision", PRECISIONS)
    dtype, products = PRECISIONS[precision]
    example_of(model, 2)  # raise errors of the model's `example_batch` first
    built = _checked(model)
    main, *further = stacks(built).items()
    call = partial(_call, dtype=products or dtype, capability=capability)
    compiled = getattr(model, "compile_blocks", False) if compile_blocks is None else compile_blocks
    if compiled and getattr(model, "lora_rank", None) is not None:
        raise ValueError(
            "blocks with low-rank updates are not compiled: if the model has a lora_rank, leave --compile out."
        )
    native = isinstance(main[1], DilatedTransformer)
    by_operator = not (compiled or native)
    compiled = compiled and native  # other stacks are counted uncompiled, which takes more memory
    decoder = None
    for name, stack in further:
        decoder = Decoder(name, len(stack.blocks), call(stack), _parameters(stack.blocks[0]))
    return CountedModel(
        partial(_counted_copy, model), partial(_batch, model, dtype), precision, memory or main[1].memory, bool(compiled),
        call(main[1]), model.depth, decoder, by_operator,
    )  # fmt: skip


def example_of(model: DilatedModule, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Return the model's `example_batch`, seeded with `seed`; torch's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return model.example_batch(tokens)


def blank(make: Callable[[int], DilatedModule], depth: int = 1) -> DilatedModule:
    """Build a model on the meta device, so that its weights take no memory."""
    with torch.device("meta"):
        model = make(depth)
        model.configure_model()
    return model


def _checked(model: DilatedModule) -> DilatedModule:
    """Build the model on the meta device; raise if it cannot be counted."""
    name, depth = type(model).__name__, getattr(model, "depth", None)
    if not isinstance(depth, int):
        raise ValueError(f"{name} has no depth, the number of blocks that its build() makes.")
    built = blank(model.planning_copy, depth)
    by_name = stacks(built)
    if next(iter(by_name), None) != MAIN or len(by_name) > 2 or len(by_name[MAIN].blocks) != depth:
        raise ValueError(
            f"{name}.build() must make self.{MAIN}, a DilatedTransformer of self.depth={depth} blocks, and at most one more "
            f"stack after it; it makes {', '.join(f'{n} of {len(x.blocks)}' for n, x in by_name.items()) or 'none'}."
        )
    if not any(p.requires_grad for p in by_name[MAIN].blocks.parameters()):
        raise ValueError(
            f"the blocks of this {name} are frozen, but a plan counts a backward through all blocks, so it would be "
            "too high. To plan full training, which takes more memory, leave freeze_encoder out of the recipe."
        )
    return built


def _call(stack: Stack, dtype: torch.dtype, capability: tuple[int, int]) -> OpCall:
    """Describe the calls of the attention op in a stack's blocks."""
    layers = stack.attentions()
    first, *patterns = shortest_cycle([layer.pattern for layer in layers])
    a = layers[0]
    return OpCall(
        first, a.num_heads, a.num_kv_heads, a.head_dim, a.causal, 1, dtype,
        dropout=a.dropout > 0, engine=a.engine, capability=capability, others=tuple(patterns),
    )  # fmt: skip


def _counted_copy(model: DilatedModule, depth: int) -> DilatedModule:
    """Return a planning copy. Its hashed heads look up codes at any length, also below their `soft_until`."""
    copy = model.planning_copy(depth)
    if layers := getattr(copy, "hashed", ()):
        copy.hashed = tuple(x and replace(x, soft_until=0) for x in layers)
    return copy


def _alike(
    model: DilatedModule, depth: int = 1, recurrence: Recurrence | None = None, hashed: Hashed | None = None
) -> DilatedModule:
    """Return a copy of the model in which all `depth` layers have `recurrence` and `hashed`; None: no layer has one."""
    shallow = model.planning_copy(depth)
    if getattr(model, "recurrences", ()):
        shallow.recurrences = (recurrence,) * depth
    if layers := getattr(model, "hashed", ()):
        shallow.hashed = (hashed and replace(hashed, soft_until=0),) * depth
        if hashed is not None:  # another layer's pattern may not fit heads that are not hashed
            shallow._patterns = (model.patterns[layers.index(hashed)],) * depth
    return shallow


def _batch(model: DilatedModule, dtype: torch.dtype, tokens: int) -> Any:
    """Return a batch of one sequence, with floats in the dtype to which Lightning's precision plugin converts them."""
    convert = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    return map_tree(convert, model.example_batch(tokens))


#: elements that a layer's low-rank update reads and writes, for each element of (the layer's input, its output).
#: In peft, forward and backward run a product, a scale and a sum; the backward also sums the input's two gradients
UPDATE_FORWARD, UPDATE_BACKWARD = (1, 6), (5, 4)


@dataclass(frozen=True)
class Trained:
    """Numbers of trained parameters.

    Attributes:
        block, edge: trained parameters in a block, and outside all blocks.
        weights: parameters in a block that multiply activations; updates that are first added to a weight do not.
        gradients: parameters in a block that have gradients summed over tokens: all trained ones, except that an
            update that is first added to a weight counts as that weight.
        forward, backward: number of elements that low-rank updates read and write for each token.
    """

    block: int
    edge: int
    weights: int
    gradients: int
    forward: int = 0
    backward: int = 0

    @classmethod
    def of(cls, block: nn.Module, sizes: BlockSizes, edge: int) -> Trained:
        """Count a block; `edge`: trained parameters outside all blocks."""
        trained, whole = _parameters(block, True), _parameters(block)
        if trained == whole:
            return cls(trained, edge, trained, trained)
        updated, added = sizes.updated
        layers = [m.base_layer for m in block.modules() if isinstance(getattr(m, "base_layer", None), nn.Linear)]
        features = sum(x.in_features for x in layers), sum(x.out_features for x in layers)
        passes = [each[0] * features[0] + each[1] * features[1] for each in (UPDATE_FORWARD, UPDATE_BACKWARD)]
        return cls(trained, edge, whole - added, trained - added + updated, *passes)

    @property
    def backward_products(self) -> float:
        """FLOPs of a block's backward, divided by the FLOPs if all weights were trained."""
        return (self.weights + self.gradients) / (2 * self.weights)


@dataclass(frozen=True)
class RecurrentLayer:
    """The work that a layer's recurrence adds to its block.

    Attributes:
        flops: FLOPs of the recurrence's rule in the forward, for one token.
        element_size: bytes of an element of the recurrence's rows.
        forward, backward: work of the recurrence's convolution, gates and norms.
    """

    description: Recurrence
    flops: int
    head_dim: int
    element_size: int
    forward: Work
    backward: Work

    @property
    def unmeasured(self) -> str | None:
        """The reason why the time of this rule is unknown; None if the time is known."""
        kinds = measured_rules().rules
        if self.description.kind not in kinds:
            return f"only {' and '.join(kinds)} was measured on a GPU"
        if self.head_dim > LARGEST:
            return f"no kernel serves heads of more than {LARGEST}"
        return None if self.element_size == 2 else "only rows of 16 bits were measured"

    @classmethod
    def of_layers(cls, model: DilatedModule, subject: CountedModel) -> tuple[RecurrentLayer | None, ...]:
        """Return the recurrences that layers cycle through (None: a layer without one), counted in compiled blocks."""
        layers = shortest_cycle(without_starts(getattr(model, "recurrences", ())))
        if not any(layers):
            return ()
        call, known = subject.call, {}
        plain = _compiled_work(model, subject)
        for x in dict.fromkeys(layers):
            if x is not None:
                work = _beyond(_compiled_work(model, subject, {"recurrence": x}), plain)
                flops = x.flops(call.heads, call.kv_heads, call.head_dim)
                known[x] = cls(x, flops, call.head_dim, call.dtype.itemsize, *work)
        return tuple(known.get(x) for x in layers)


@dataclass(frozen=True)
class HashedLayer:
    """The work that a layer's hashed heads add to its block.

    Attributes:
        parameters: number of parameters.
        lookups: FLOPs of the lookups in the forward, for one token.
        products: FLOPs of products with the heads' own weights in the forward, for one token.
        forward, backward: work of the heads' convolutions and projections.
        sizes, dtype: of the op's calls.
    """

    description: Hashed
    parameters: int
    lookups: int
    products: int
    forward: Work
    backward: Work
    sizes: HashedSizes
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """FLOPs of the forward, for one token."""
        return self.lookups + self.products

    @classmethod
    def of_layers(cls, model: DilatedModule, subject: CountedModel) -> tuple[HashedLayer | None, ...]:
        """Return the hashed heads of all layers (None: a layer without them), counted in compiled blocks."""
        layers = getattr(model, "hashed", ())
        description = next(filter(None, layers), None)
        if description is None:
            return ()
        mixer = blank(partial(_alike, model, hashed=description)).transformer.blocks[0].attention_layer.hashed
        work = _beyond(_compiled_work(model, subject, {"hashed": description}), _compiled_work(model, subject))
        products = 2 * sum(p.numel() for p in mixer.parameters() if p.ndim >= 2)
        sizes = HashedSizes(mixer.num_heads, mixer.head_dim, mixer.kv_heads, description.groups, description.codes)
        calls = sizes, subject.call.dtype
        counted = cls(description, _parameters(mixer), mixer.token_flops, products, *work, *calls)
        return tuple(x and counted for x in layers)


def _beyond(full: Iterable[Work], base: Iterable[Work]) -> tuple[Work, ...]:
    """Return the work, (forward, backward), of one block in addition to that of another block."""
    return tuple(x.beyond(y) for x, y in zip(full, base, strict=True))


def _compiled_work(
    model: DilatedModule, subject: CountedModel, mixers: Mapping[str, Any] | None = None, **changed: Any
) -> tuple[Work, ...]:
    """Return the work of a compiled block, forward and backward.

    Args:
        mixers: the mixers of all layers, as arguments of `_alike`; None: no layer has one.
        changed: attributes of the model that replace the model's own.
    """
    bases = getattr(model, "rotary_bases", None) or ()
    usual = next((base for base in bases if base is not None), None)

    def make(depth: int) -> DilatedModule:
        shallow = _alike(model, depth, **(mixers or {}))
        if usual is not None:  # if some layers have rotary positions, count all layers with them
            shallow.rotary_bases = [base or usual for base in shallow.rotary_bases]
        shallow.__dict__.update(changed)
        return shallow

    return passes(make, subject.batch, subject.precision, MemorySettings(), compiled=True)


def _convolution(model: DilatedModule, subject: CountedModel) -> tuple[Work, ...]:
    """Return the work that the short convolution, including its copies of rows, adds to a compiled block."""
    options: Any = getattr(model, "options", None)
    if getattr(options, "kv_conv", None) is None:
        return ()
    plain = _compiled_work(model, subject, options=replace(options, kv_conv=None))
    return _beyond(_compiled_work(model, subject), plain)


@dataclass(frozen=True)
class Facts:
    """The numbers from which a model's time is computed.

    Attributes:
        hidden, vocab: features of the feed-forward, and V, from the model's `token_features`.
        block_parameters, edge_parameters: parameters of a block without its recurrence and hashed heads, and all other
            parameters.
        projection, feed_forward: parameters of a block's joint projection, and of its feed-forward.
        logits: whether the loss of a token reads V logits.
        windows: maximum number of head windows: number of kv heads, or 1 if blocks have low-rank updates or no windows.
        tiles: whether feed-forwards can run in tiles.
        work: work of a block in which each operator is a kernel; None for other blocks.
        convolution: work of a block's short convolution, (forward, backward); empty if there is none.
        recurrences: the recurrences that the layers cycle through; empty if no layer has one.
        hashed: the hashed heads of each layer; empty if no layer has them.
    """

    dim: int
    depth: int
    hidden: int
    vocab: int
    block_parameters: int
    edge_parameters: int
    projection: int
    feed_forward: int
    call: OpCall
    precision: str
    trained: Trained
    logits: bool = False
    windows: int = 1
    tiles: bool = True
    decoder: Facts | None = None
    work: BlockWork | None = None
    convolution: tuple[Work, ...] = ()
    recurrences: tuple[RecurrentLayer | None, ...] = ()
    hashed: tuple[HashedLayer | None, ...] = ()

    @property
    def stacks(self) -> list[Facts]:
        """The facts of each stack of blocks."""
        return [replace(self, decoder=None), *([self.decoder] if self.decoder else [])]

    @property
    def parameters(self) -> int:
        return sum(x.depth * x.block_parameters + x.edge_parameters for x in self.stacks)

    @property
    def trained_parameters(self) -> int:
        return sum(x.depth * x.trained.block + x.trained.edge for x in self.stacks)

    @property
    def whole(self) -> bool:
        return self.trained_parameters == self.parameters

    @classmethod
    def of(cls, model: DilatedModule, subject: CountedModel) -> Facts:
        """Build the model on the meta device, and count it. If `subject.by_operator`, also run steps of two layers."""
        built, alone = blank(subject.make, model.depth), blank(partial(_alike, model))
        by_name, features = stacks(alone), built.token_features()
        depths = {name: len(stack.blocks) for name, stack in stacks(built).items()}
        outside = [
            _parameters(built, trained)
            - sum(depths[name] * _parameters(stack.blocks[0], trained) for name, stack in by_name.items())
            for trained in (False, True)
        ]
        decoder = None
        if subject.decoder is not None:
            x = subject.decoder
            decoder = cls._of_stack(by_name[x.name], x.depth, features[1], [0, 0], subject, x.call)
        main = cls._of_stack(by_name[MAIN], model.depth, features[0], outside, subject, subject.call)
        work = BlockWork.of(subject.make, subject.batch, subject.precision) if subject.by_operator else None
        main = replace(
            main, logits=built.reads_logits(), decoder=decoder, work=work, convolution=_convolution(model, subject),
            recurrences=RecurrentLayer.of_layers(model, subject), hashed=HashedLayer.of_layers(model, subject),
        )  # fmt: skip
        sizes = stacks(built)[MAIN].sizes()
        return replace(main, windows=main.call.kv_heads if main.whole and sizes.windows else 1, tiles=sizes.tiles)

    @classmethod
    def _of_stack(
        cls, stack: Stack, depth: int, vocab: int, edge: list[int], subject: CountedModel, call: OpCall
    ) -> Facts:
        """Count a stack; `edge`: [all parameters, trained parameters] outside its blocks."""
        block, sizes = stack.blocks[0], stack.sizes()
        return cls(
            sizes.dim, depth, sizes.hidden, vocab, _parameters(block), edge[0], sizes.projection,
            sizes.feed_forward, call, subject.precision, Trained.of(block, sizes, edge[1]),
        )  # fmt: skip


def _parameters(module: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
