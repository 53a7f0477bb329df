"""Facts: the numbers of a model that its time follows from, and what of them is trained.

Shape letters: E embedding dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_dilated.models import DilatedModule
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.longnet.classifier import LongNetClassifier
from lightning_dilated.models.longnet.lm import TokenModel
from lightning_dilated.models.longvit.model import LongViT
from lightning_dilated.planning.counting.footprint import Subject
from lightning_dilated.planning.counting.model_specs import blank
from lightning_dilated.planning.counting.workspace import OpCall

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
