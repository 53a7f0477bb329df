"""TransformerModel: the constructor that all models around one `DilatedTransformer` share.

A subclass names its own options, passes other options to this class as `**options`, and sets options that it does not
offer. The command line finds all options by following `super().__init__(..., **options)`; checkpoints store them all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, Self

import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_dilated._compat.lightning import given_hyperparameters
from lightning_dilated._extensions import hook
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.models.blocks import BlockOptions, default_hidden
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.models.transformer import DilatedTransformer, layer_bases, rotary_hint, stored_bases
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.pattern.layers import layer_patterns, plain_patterns, read_patterns
from lightning_dilated.pattern.pattern import LAYERS
from lightning_dilated.pattern.rows import dense_kv_heads
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.recurrence.description import layer_recurrences, plain_recurrences

#: maximum number of features of a hidden state; a feed-forward may have 8 times this number
WIDTH = 1 << 20
#: arguments that are not saved, because they are not part of the model or are saved in another form
NOT_SAVED = (
    "pattern",
    "optimizer",
    "lr_scheduler",
    "compile_blocks",
    "cuda_graphs",
    "graph_padding",
    "linear_dtype",
    "pretrained",
    "predict_embeddings",
)


@functools.cache
def options_of(cls: type) -> dict[str, Any]:
    """Return {argument: default} of a class, including the arguments that it passes to its bases."""
    parser = ArgumentParser(exit_on_error=False)
    keys = parser.add_class_arguments(cls, "model", fail_untyped=False)
    return {key.partition(".")[2]: parser.get_default(key) for key in keys}


class _NamedArguments:
    """Stores arguments by name, and refuses unknown names. A separate class: jsonargparse reads a model's own `__new__`."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        self = super().__new__(cls)
        if args or options:  # copies are made without arguments
            _check_names(cls, options.keys())
            self.__dict__["_arguments"] = {**dict(zip(_positional(cls), args, strict=False)), **options}
        return self


def _constructors(cls: type) -> tuple[list[inspect.Signature], type]:
    """Return the signatures of user classes' constructors, and the first class of this package with a constructor."""
    owners = [base for base in cls.__mro__ if "__init__" in vars(base)]
    first = next(i for i, base in enumerate(owners) if base.__module__.startswith("lightning_dilated."))
    return [inspect.signature(vars(base)["__init__"]) for base in owners[:first]], owners[first]


def _positional(cls: type) -> Iterator[str]:
    """Yield the names of a constructor's positional arguments; if it takes `*args`, add the next constructor's names."""
    signatures, package_class = _constructors(cls)
    for signature in [*signatures, inspect.signature(vars(package_class)["__init__"])]:
        parameters = list(signature.parameters.values())[1:]
        yield from (p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return


def _check_names(cls: type, names: Collection[str]) -> None:
    """Raise TypeError for a keyword that this package's constructor does not take.

    If a user's class has a constructor, unknown keywords are accepted, unless a class of this package sets them.
    """
    signatures, package_class = _constructors(cls)
    known = options_of(package_class).keys() | {name for signature in signatures for name in signature.parameters}
    for name in sorted(names - known):
        is_set = any(name in options_of(base) for base in package_class.__mro__ if issubclass(base, TransformerModel))
        if is_set or not signatures:
            raise _no_argument(cls, name, known, "The class sets it itself." if is_set else None)


def _no_argument(cls: type, name: str, known: Collection[str], hint: str | None = None) -> TypeError:
    """Return the error for an unknown keyword; without a hint, the error suggests the most similar keyword."""
    if hint is None:
        near = get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]!r}?" if near else "If a checkpoint names it, load by the class that wrote it."
    return TypeError(f"{cls.__name__} has no argument {name!r}. {hint}")


def _defaults(cls: type) -> dict[str, Any]:
    """Return {argument: default} of the arguments that a checkpoint stores even if they are not given.

    If a user's class has a constructor, these are its own arguments. With `*args`, add the package class's arguments.
    """
    signatures, package_class = _constructors(cls)
    parameters = list(signatures[0].parameters.values()) if signatures else []
    passes_all_on = not signatures or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = {p.name: p.default for p in parameters if p.default is not p.empty}
    return options_of(package_class) | named if passes_all_on else named


class TransformerModel(_NamedArguments, DilatedModule):
    """A DilatedModule around one `DilatedTransformer`; checks its sizes, patterns and block options, and saves them.

    Args:
        pattern: a DilatedPattern, or a mapping with segment_lengths and dilation_rates, or with branches; or a list of them
            for layers 0, 1, ..., which repeats; or {"hybrid": options} for `DilatedPattern.hybrid` with the model's depth
            and heads.
        dim: E, features of a hidden state; a multiple of num_heads.
        depth: number of layers.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads; None: num_heads.
        ffn_dim: hidden features of the feed-forward; None: 4 dim (GELU), or about 8/3 dim (SwiGLU).
        rotary_base: a number; or "length": the base for `max_seq_len` tokens, max(1e4, 0.0424 N^1.628) rounded up to a power
            of ten (the bound of arXiv 2405.14591); or "none": no positions; or a list of these for layers 0, 1, ..., which
            repeats. None: "length" if `max_seq_len` is set, else 10,000, enough for 2,000 tokens.
        max_seq_len: the length of the longest sequence that the model is made for; checkpoints store it and the rotary
            bases. If a recipe sets neither this nor `rotary_base`, the command line takes the data's length. In Python
            code, None stays None.
        recurrence: a memory of constant size, in addition to the pattern, that compresses all earlier tokens: a `Recurrence`
            or its mapping ({"kind": "gated_delta"}); or a list of these for layers 0, 1, ..., which repeats, with None for
            a layer without memory. None: no layer has one.
        hashed: heads that read rows with the query's learned code, at a cost almost linear in the sequence length: a
            `Hashed` or its mapping ({"layers": [3, 7]}). The last kv heads of these layers do not follow the pattern.
            None: no layer has such heads.
        shift_layers: "odd" shifts the segments of layers 1, 3, ... by half their length, so that tokens also attend across
            the boundaries of nested segments (see `pattern.explain`).
        shift_below: shift only segments of fewer tokens than this; None: every finite segment.
        compile_blocks: compile every block with torch.compile on its first run; on a GPU also compile the loss if the
            vocabulary has at least 1,024 tokens. Generation compiles only the part of a block after attention.
        cuda_graphs: record the blocks' training step on a GPU as CUDA graphs, one for each shape of a batch, and replay
            them. Use it for short sequences, if launching kernels takes longer than running them. It needs one rank for
            each sequence, and no recomputation or attention dropout.
        graph_padding: maximum padding, as a share of the tokens, of batches with `lengths` and of packed rows, to
            reduce the number of graphs. Padding of fewer than 64 tokens a row is always allowed. The share is logged.
        linear_dtype: "float8": linear layers of the blocks, except the projection to q, k and v, multiply in float8 by
            torchao, on an H100 or later; for wide models with `compile_blocks`. None: the precision of the run.
        optimizer, lr_scheduler: see `DilatedModule`.
        options: options of `BlockOptions`.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    #: whether a token attends only to itself and earlier tokens
    causal = False
    takes_any_layout = True

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        ffn_dim: int | None = None,
        rotary_base: float | str | list[float | str] | None = None,
        max_seq_len: int | None = None,
        recurrence: dict[str, Any] | Recurrence | list[dict[str, Any] | Recurrence | None] | None = None,
        hashed: dict[str, Any] | Hashed | None = None,
        shift_layers: Literal["none", "odd"] = "none",
        shift_below: int | None = None,
        compile_blocks: bool = False,
        cuda_graphs: bool = False,
        graph_padding: float = 0.125,
        linear_dtype: Literal["float8"] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if unknown := options.keys() - {field.name for field in fields(BlockOptions)}:
            raise _no_argument(type(self), min(unknown), options_of(TransformerModel))
        self.options = BlockOptions(**options)
        encoding, dropout = self.options.position_encoding, self.options.attention_dropout
        self.dim = integer(dim, "dim", 1, most=WIDTH)
        self.depth = integer(depth, "depth", 1, most=LAYERS)
        self.num_heads = integer(num_heads, "num_heads", 1)
        self.pattern = read_patterns(pattern, depth, num_heads, num_kv_heads)
        self._patterns = layer_patterns(self.pattern, depth, shift_layers, shift_below)
        _, self.num_kv_heads = self._patterns[0].check_heads(num_heads, num_kv_heads)
        heads = num_heads, self.num_kv_heads
        self.hashed = (None,) * depth if hashed is None else Hashed.from_dict(hashed).in_layers(depth, self.causal)
        layers = zip(self._patterns, self.hashed, strict=True)
        self._patterns = tuple(x if h is None else h.without_heads(x, *heads) for x, h in layers)
        self._check_dense_heads()
        self.recurrences = layer_recurrences(recurrence, depth, self.causal)
        self.max_seq_len = max_seq_len
        self.rotary_bases = layer_bases(rotary_base, max_seq_len, depth, encoding)
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}.")
        self.ffn_dim = (
            default_hidden(dim, self.options.ffn) if ffn_dim is None else integer(ffn_dim, "ffn_dim", 1, most=8 * WIDTH)
        )
        self.compile_blocks = flag(compile_blocks, "compile_blocks")
        self.cuda_graphs = flag(cuda_graphs, "cuda_graphs")
        self.graph_padding = real(graph_padding, "graph_padding", least=0, most=1)
        if linear_dtype not in (None, "float8"):
            raise ValueError(f'linear_dtype must be "float8" or null, got {linear_dtype!r}.')
        self.linear_dtype = linear_dtype
        if cuda_graphs and dropout:
            raise ValueError(
                f"cuda_graphs cannot record attention_dropout={dropout}, whose mask follows a seed of the host. "
                "Set one of them only; dropout and drop_path are recorded."
            )
        if cuda_graphs and any((*self.recurrences, *self.hashed)):
            raise ValueError(
                "cuda_graphs cannot record layers with a recurrence or hashed heads, because the host prepares tables for "
                "them. Leave out cuda_graphs, or recurrence and hashed."
            )
        rotary = encoding == "rotary"
        positions = self.rotary_bases, self.patterns, None, max_seq_len, self.options.global_rotary
        if hint := rotary and rotary_hint(*positions):
            rank_zero_warn(f"{type(self).__name__}: {hint}")
        with torch.device("meta"):  # make one layer without storage, so that wrong sizes and options raise errors here
            self._transformer(depth=1)
        self._save_arguments()

    def _check_dense_heads(self) -> None:
        """With global_rotary=False, raise ValueError if no layer has dense heads, or if others share their kv heads."""
        heads = self.num_heads, self.num_kv_heads
        if self.options.global_rotary or any([dense_kv_heads(x, *heads) for x in dict.fromkeys(self._patterns)]):
            return
        raise ValueError(
            "global_rotary=False leaves dense heads without positions, and no layer has a dense head. Take "
            'a hybrid pattern, or global_rotary=True; rotary_base="none" leaves all heads without positions.'
        )

    def _save_arguments(self) -> None:
        arguments = _defaults(type(self)) | self.__dict__.pop("_arguments", {}) | given_hyperparameters()
        saved = {name: value for name, value in arguments.items() if name not in NOT_SAVED}
        if "pattern" in arguments and not self.released_pattern:
            saved["pattern"] = plain_patterns(self.pattern)
        if "recurrence" in saved:
            saved["recurrence"] = plain_recurrences(self.recurrences)
        if saved.get("hashed") is not None:
            saved["hashed"] = Hashed.from_dict(saved["hashed"]).to_dict()
        if "rotary_base" in saved and self.options.position_encoding != "none":
            # save numbers, so that loading with a different max_seq_len does not change the trained bases
            saved["rotary_base"] = stored_bases(self.rotary_bases)
        self.save_hyperparameters(saved)

    def _training_terms(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return the `loss_terms` of a batch in training, with the gradients of the hashed heads' own losses."""
        self.configure_model()
        layers = [block.attention_layer.hashed for block in self.transformer.blocks] if any(self.hashed) else []
        first, run = next(filter(None, layers), None), super()._training_terms
        return run(batch) if first is None else first.train_codes(layers, self, batch, run)

    def _transformer(self, depth: int) -> DilatedTransformer:
        """Make the first `depth` layers, with initial weights."""
        transformer = DilatedTransformer(
            self.dim, self.patterns[:depth], self.num_heads,
            causal=self.causal, hidden=self.ffn_dim, num_kv_heads=self.num_kv_heads, options=self.options,
            rotary_bases=self.rotary_bases[:depth], recurrences=self.recurrences[:depth],
            hashed=self.hashed[:depth],
        )  # fmt: skip
        if self.linear_dtype is not None:
            hook("float8 layers")(transformer.blocks)
        transformer.graphs = hook("cuda graphs")(self.graph_padding) if self.cuda_graphs else None
        return transformer
