"""Facts: the numbers of a model that its time follows from, and what of them is trained.

Subjects: what to count of a model, found from the model itself.

Shape letters: E embedding dim, V vocabulary, L tokens of a rank, H query heads, K kv heads, D head dim, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._validation import one_of
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.longnet.classifier import LongNetClassifier
from lightning_dilated.models.longnet.lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet.mlm import LongNetMLM
from lightning_dilated.models.longvit.model import LongViT
from lightning_dilated.models.pooled_model import PooledModule
from lightning_dilated.models.slides.encoder import SlideEncoder
from lightning_dilated.models.slides.mae import SlidePretrainer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.cycle import in_turns, shortest_cycle
from lightning_dilated.planning.counting.dry_run import PRECISIONS, real
from lightning_dilated.planning.counting.footprint import Decoder, Subject
from lightning_dilated.planning.counting.workspace import OpCall

#: arguments of a model that change nothing of its memory, or that a plan sets by itself
LEFT_OUT = ("pretrained", "optimizer", "lr_scheduler", "compile_blocks")
#: patches in a row of the images that are counted
WIDE = 1024


def subject_of(
    model: DilatedModule,
    precision: str = "bf16-mixed",
    memory: MemorySettings | None = None,
    compile_blocks: bool | None = None,
    capability: tuple[int, int] = (9, 0),
) -> Subject:
    """What to count of a model; only its hyperparameters are looked at.

    Args:
        model: a LongNetLM, LongNetMLM (counted as if all tokens had a loss), LongNetClassifier, SlideEncoder,
            SlidePretrainer (tokens are the rows of a slide: its tiles and the class token's; as many are hidden as in the
            mean) or LongViT (tokens are the patches of an image, in batches of `patches` and `grid`).
        precision: the Trainer's.
        memory: settings; None: all is kept.
        compile_blocks: None: as the model has it.
        capability: of the GPU.

    Raises:
        ValueError: for another precision, or a model that cannot be counted.
    """
    one_of(precision, "precision", PRECISIONS)
    _check_trained(model)
    make = _make(model, {k: v for k, v in model.hparams.items() if k not in LEFT_OUT})
    dtype, products = PRECISIONS[precision]
    heads = model.num_heads
    kv, causal = getattr(model, "num_kv_heads", None) or heads, getattr(model, "causal", False)
    options = getattr(model, "options", None)
    first, *others = shortest_cycle(model.patterns)
    call = OpCall(
        first, heads, kv, model.dim // heads, causal, 1, products or dtype,
        dropout=getattr(options, "attention_dropout", 0.0) > 0, engine=getattr(options, "engine", "auto"),
        capability=capability, others=tuple(others),
    )  # fmt: skip
    compiled = getattr(model, "compile_blocks", False) if compile_blocks is None else compile_blocks
    if compiled and getattr(model, "lora_rank", None) is not None:
        raise ValueError("blocks with low-rank updates are not compiled: leave --compile out beside lora_rank.")
    return Subject(
        make, partial(_batch, model, dtype), precision, memory or MemorySettings(), bool(compiled), call, _grain(model),
        _decoder(model, make, call),
    )  # fmt: skip


def blank(make: Callable[[int], DilatedModule]) -> DilatedModule:
    """A model of one block, built without memory."""
    with torch.device("meta"):
        found = make(1)
        found.configure_model()
    return found


def _check_trained(model: DilatedModule) -> None:
    """Raise where not all of the model is trained."""
    if not isinstance(model, PooledModule):
        return
    name = type(model).__name__
    if model.task is None:
        raise ValueError(f"this {name} has no task, so it is not trained: give it a task to plan for.")
    if model.freeze_encoder:
        raise ValueError(
            f"a {name} with freeze_encoder trains only some of its weights, and a step is counted as it goes back through "
            "all blocks: it would be told too high. Leave freeze_encoder out of the recipe to plan full training, which "
            "takes more."
        )


def _make(model: DilatedModule, given: dict[str, Any]) -> Callable[[int], DilatedModule]:
    """How to make the model at a depth."""

    def plain(depth: int) -> DilatedModule:
        return type(model)(**{**given, **_layers_of(model, depth), "depth": depth})

    if isinstance(model, LongNetMLM):
        return _as_lm(model)
    if isinstance(model, SlidePretrainer):
        return lambda depth: _hiding(plain(depth))
    if isinstance(model, (TokenModel, LongNetClassifier, SlideEncoder, LongViT)):
        return plain
    raise ValueError(
        "memory is counted for LongNetLM, LongNetMLM, LongNetClassifier, SlideEncoder, SlidePretrainer and LongViT, not for "
        f"{type(model).__name__}. Give --dim, --depth, --heads and --segments of its transformer instead of --config."
    )


def _layers_of(model: DilatedModule, depth: int) -> dict[str, Any]:
    """What the model's layers are made by, for a model of another depth."""
    if not isinstance(model, (TokenModel, LongNetClassifier)):
        released = model.hparams.get("pattern") is None
        return {} if released else {"pattern": in_turns(model.patterns, depth)}
    # all layers are counted as if they had positions where some do: those hold more
    usual = next((base for base in model.rotary_bases if base is not None), "none")
    bases = [usual if base is None else base for base in in_turns(model.rotary_bases, depth)]
    shifts = {"shift_layers": "none", "shift_below": None} if isinstance(model, TokenModel) else {}
    return {"pattern": in_turns(model.patterns, depth), "rotary_base": bases, **shifts}


def _hiding(model: SlidePretrainer) -> SlidePretrainer:
    """The model, hiding as many tiles as it does in the mean: which ones follows from values, which fake tensors do not
    have."""

    def rows(hidden: Tensor) -> Tensor:
        return torch.zeros(round(model.hiding.p * hidden.numel()), dtype=torch.int64)

    model.hidden_rows = rows
    return model


def _decoder(model: DilatedModule, make: Callable[[int], DilatedModule], call: OpCall) -> Decoder | None:
    if not isinstance(model, SlidePretrainer):
        return None
    own = replace(call, head_dim=model.decoder_dim // model.num_heads, dropout=False)
    block = sum(p.numel() for p in blank(make).decoder.blocks[0].parameters())
    return Decoder("decoder", model.decoder_depth, own, block)


def _as_lm(model: LongNetMLM) -> Callable[[int], DilatedModule]:
    """A language model of the same sizes: which tokens are masked depends on values, which fake tensors do not have."""

    def make(depth: int) -> DilatedModule:
        names = "vocab_size", "dim", "num_heads", "num_kv_heads", "ffn_dim", "tie_embeddings"
        options = {k: v for k, v in vars(model.options).items() if k != "drop_path"}
        sizes = {n: getattr(model, n) for n in names}
        found = LongNetLM(**{**options, **sizes, **_layers_of(model, depth), "depth": depth})
        found.causal = model.causal
        return found

    return make


def _batch(model: DilatedModule, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """A batch of one sequence; features are in the dtype that Lightning's precision plugins give them."""
    whole = lambda *shape: torch.zeros(1, *shape, dtype=torch.int64)  # noqa: E731
    if isinstance(model, TokenModel):
        return {"tokens": whole(tokens), "labels": whole(tokens)}
    rows = lambda width: torch.zeros(1, tokens, width, dtype=dtype)  # noqa: E731
    if isinstance(model, SlidePretrainer):
        return {"features": rows(model.feature_dim), "coords": whole(tokens, 2), "index": whole()}
    label = torch.zeros(1, model.num_classes or 1) if model.task == "regression" else whole()
    if isinstance(model, SlideEncoder):
        return {"features": rows(model.feature_dim), "coords": whole(tokens, 2), "label": label}
    if isinstance(model, LongViT):
        with real():  # stays on the host, where it is read
            grid = torch.tensor([[tokens // _grain(model), _grain(model)]])
        return {"patches": rows(model.in_channels * model.patch_size**2), "grid": grid, "label": label}
    return (
        {"tokens": whole(tokens), "label": label}
        if model.input == "tokens"
        else {"features": rows(model.width), "label": label}
    )


def _grain(model: DilatedModule) -> int:
    """Tokens that a length is a multiple of. Of an image: patches in a row, not those of its table of positions, which are
    then interpolated as for images of any other size; that holds no less than taking the table as it is."""
    if not isinstance(model, LongViT):
        return 1
    return 2 * WIDE if model.image_size // model.patch_size == WIDE else WIDE


def language_model(pattern: DilatedPattern, **sizes: Any) -> LongNetLM:
    """A LongNetLM of given sizes, not built."""
    return LongNetLM(pattern, **sizes)


#: numbers that a low-rank update beside a layer reads and writes, for each number that goes into the layer and that comes
#: out of it: peft's forward (product, scale, sum) and backward (likewise, and the sum of the input's two gradients)
UPDATE_FORWARD, UPDATE_BACKWARD = (1, 6), (5, 4)


@dataclass(frozen=True)
class Trained:
    """What learns.

    Attributes:
        block, edge: numbers of trained parameters, of a block and outside of all blocks.
        weights: numbers of a block that activations are multiplied with: all but an update that is added to a weight before.
        gradients: numbers of a block whose gradients are summed over tokens: the trained ones, and in place of such an
            update the weight that it is added to.
        forward, backward: numbers a token that low-rank updates read and write.
    """

    block: int
    edge: int
    weights: int
    gradients: int
    forward: int = 0
    backward: int = 0

    @classmethod
    def of(cls, block: TransformerBlock, edge: int) -> Trained:
        """Of a block, with so many numbers elsewhere."""
        own, whole = _numbers(block, True), _numbers(block)
        if own == whole:
            return cls(own, edge, own, own)
        around, inner = block.attention, block.attention_layer
        added = 0 if around is inner else _numbers(around, True) - _numbers(inner, True)
        layers = [m.base_layer for m in block.modules() if isinstance(getattr(m, "base_layer", None), nn.Linear)]
        wide = sum(x.in_features for x in layers), sum(x.out_features for x in layers)
        passes = [of[0] * wide[0] + of[1] * wide[1] for of in (UPDATE_FORWARD, UPDATE_BACKWARD)]
        return cls(own, edge, whole - added, own - added + (inner.in_proj_weight.numel() if added else 0), *passes)

    @property
    def backward_products(self) -> float:
        """Products of a block's backward, over the two of each weight where all of them are trained."""
        return (self.weights + self.gradients) / (2 * self.weights)


@dataclass(frozen=True)
class Facts:
    """What a model's time follows from.

    Attributes:
        dim, depth, hidden, vocab: E, blocks, features of the feed-forward, V (outputs of the head; of a model of features or
            patches, the numbers that a token brings or is told by).
        block_parameters, edge_parameters: numbers of a block, and outside of all blocks.
        projection, feed_forward: parameters of a block's joint projection, and of its feed-forward.
        call: the op's.
        precision: the Trainer's.
        trained: what of it learns.
        logits: whether a token's loss goes over V logits.
        decoder: of a second stack of blocks, if the model has one.
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
    decoder: Facts | None = None

    @property
    def stacks(self) -> list[Facts]:
        """Of each stack of blocks."""
        return [replace(self, decoder=None), *([self.decoder] if self.decoder else [])]

    @property
    def parameters(self) -> int:
        """Numbers of all parameters."""
        return sum(x.depth * x.block_parameters + x.edge_parameters for x in self.stacks)

    @property
    def trained_parameters(self) -> int:
        """Numbers of those that are trained."""
        return sum(x.depth * x.trained.block + x.trained.edge for x in self.stacks)

    @property
    def whole(self) -> bool:
        """Whether all of it is trained."""
        return self.trained_parameters == self.parameters

    @property
    def windows(self) -> int:
        """Heads that windows are made of: of keys; all in one where low-rank updates go with the weights."""
        return self.call.kv_heads if self.whole else 1

    @classmethod
    def of(cls, model: DilatedModule, subject: Subject) -> Facts:
        """Of a model; its layers are made without memory, one of each stack."""
        built = blank(subject.make)
        edge = [_numbers(built, x) - _numbers(built.transformer.blocks, x) for x in (False, True)]
        widths, decoder = [_width(model)], None
        if subject.decoder is not None:
            inner = built.decoder
            edge = [n - _numbers(inner.blocks, x) for n, x in zip(edge, (False, True), strict=True)]
            widths = [model.feature_dim + model.decoder_dim, round(model.hiding.p * model.feature_dim)]
            decoder = cls._of_block(
                inner.blocks[0], subject.decoder.depth, widths[1], [0, 0], subject, subject.decoder.call
            )
        made = cls._of_block(built.transformer.blocks[0], model.depth, widths[0], edge, subject, subject.call)
        return replace(made, logits=isinstance(model, TokenModel), decoder=decoder)

    @classmethod
    def _of_block(
        cls, block: TransformerBlock, depth: int, vocab: int, edge: list[int], subject: Subject, call: OpCall
    ) -> Facts:
        """Of a stack; `edge`: numbers outside of its blocks, and those of them that are trained."""
        attention = block.attention_layer.in_proj_weight
        return cls(
            attention.shape[1], depth, block.ffn.fc1.out_features, vocab, _numbers(block), edge[0], attention.numel(),
            _numbers(block.ffn), call, subject.precision, Trained.of(block, edge[1]),
        )  # fmt: skip


def _numbers(module: nn.Module, trained: bool = False) -> int:
    """Of all parameters, or of those that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _width(model: DilatedModule) -> int:
    """What a token brings, or what it is told by."""
    if isinstance(model, LongViT):
        return model.in_channels * model.patch_size**2
    if isinstance(model, LongNetClassifier):
        return model.width if model.input == "features" else 1
    return getattr(model, "feature_dim", None) or model.vocab_size
