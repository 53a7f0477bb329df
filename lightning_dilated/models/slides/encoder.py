"""What chosen queries attend to in the layers of a transformer, while it runs: exact, and without an N x N matrix.

SlideEncoder: LongNet over the tile features of whole slides (GigaPath's architecture), for embeddings and fine-tuning.

Shape letters: B batch, N tokens, Q chosen queries, H query heads, E embedding dim, T tiles, F features.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal, overload

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_dilated._validation import integer
from lightning_dilated.attention import DilatedAttention, attention_weights
from lightning_dilated.models.blocks import BlockOptions
from lightning_dilated.models.pooled_model import PooledModule, check_lengths, first_token, guarded, mean_token
from lightning_dilated.models.pretrained import check_depth, missing_file, without_training
from lightning_dilated.models.slides.backbone import SlideBackbone
from lightning_dilated.models.slides.weights import (
    PUBLISHED,
    load_backbone,
    own_weights,
    read_file,
    read_weights,
    sizes_of,
    to_released,
)
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceSpec, active_sequence


@torch.no_grad()
def layer_weights(
    transformer: DilatedTransformer,
    x: Tensor,
    queries: Sequence[int],
    layers: Sequence[int],
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """The weights that some layers give every token for some queries; the layers above the last one are not run.

    They are read where the op gets q and k, so that whatever changes these (low-rank updates, autocast) is part of them.

    Args:
        transformer: without rotary positions, in eval mode.
        x: (B, N, E), its input.
        queries: Q positions in [0, N).
        layers: numbers in [0, depth), rising.
        lengths: (B,), as the transformer takes them.

    Returns:
        For each layer (B, H, Q, N), as `attention_weights` returns it.
    """
    found: list[Tensor] = []

    def look(core: nn.Module, args: Any, kwargs: Any) -> None:
        options = {name: kwargs[name] for name in ("causal", "lengths", "cu_seqlens")}
        found.append(attention_weights(*args[:2], core.pattern, queries, scale=core.scale, **options))

    with torch.compiler.set_stance("force_eager"):  # a hook in a compiled block would compile it anew
        for i, block in enumerate(transformer.blocks[: max(layers) + 1]):
            cores = [m for m in block.modules() if isinstance(m, DilatedAttention)] if i in layers else []
            hooks = [core.register_forward_pre_hook(look, with_kwargs=True) for core in cores]
            try:
                x = block(x, lengths=lengths)
            finally:
                for hook in hooks:
                    hook.remove()
    return found


def chosen_layers(layer: Any, depth: int) -> list[int]:
    """The numbers of the layers that `layer` names: "all", or one from -depth to depth - 1.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(layer, str) and layer == "all":
        return list(range(depth))
    if isinstance(layer, bool) or not hasattr(layer, "__index__") or not -depth <= index(layer) < depth:
        raise ValueError(
            f"layer must be 'all' or a number from {-depth} to {depth - 1} (-1 is the last), got {layer!r}."
        )
    return [index(layer) % depth]


def tile_rows(queries: Any, tiles: int) -> list[int]:
    """The rows of tiles: one further on, after the class token's.

    Raises:
        TypeError, ValueError: for what is no list of tiles in [0, `tiles`).
    """
    given = queries.tolist() if isinstance(queries, Tensor) else queries
    if not isinstance(given, (list, tuple, range)):
        raise TypeError(f"queries must be a list of tiles such as [0], or None for the class token; got {queries!r}.")
    found = [integer(tile, f"queries[{i}]", 0) for i, tile in enumerate(given)]
    if any(tile >= tiles for tile in found):
        raise ValueError(f"queries holds tile {max(found)}, but there are {tiles} tiles (0..{tiles - 1}).")
    return [tile + 1 for tile in found]


class SlideEncoder(SlideBackbone, PooledModule):
    """The slide encoder of GigaPath (doi 10.1038/s41586-024-07441-w): tile features and coordinates to one embedding.

    Called with tiles it returns embeddings, see `forward`. Trained, its batches are mappings with `features` (B, N, F) whose
    first row is blank, `coords` (B, N, 2) with -1 in that row, `lengths` (B,) that count it, and `label`.

    Args:
        feature_dim: F, of the tile encoder.
        dim, depth, num_heads, ffn_dim: sizes; ffn_dim None is 4 dim. The defaults are GigaPath's 12l768d.
        segment_lengths, dilation_rates: of the branches; None: GigaPath's, 2^linspace(10, log2 of the most tiles, 5).
        max_wsi_size: pixels along an axis of the largest slide, which the segments follow from; None: 1024 tiles.
        tile_size: pixels of a tile, in the pixels that coords count.
        grid: cells of the positions along an axis; fixed by the weights (GigaPath: 1000).
        padding: "masked", the exact attention, or "attended", what released weights were trained with (zero pads of the
            last segment take part in the softmax).
        dropout, drop_path, attention_dropout, engine: see `models.blocks.BlockOptions`.
        pool: "class", the class token, or "mean" over the tiles; either is then normalised.
        task, num_classes, regression_loss, layer_decay, freeze_encoder, lora_rank, lora_alpha: see
            `models.pooled.PooledModule`.
        compile_blocks: compile every block by torch.compile when it is first run.
        pretrained: a file to start from: a release, or a checkpoint of this class or of `SlidePretrainer`.
        pattern: another pattern than the released branches, as `models.longnet_lm.TokenModel` takes it, also a list with one
            a layer; in place of segment_lengths, dilation_rates and padding.
        optimizer, lr_scheduler: see `DilatedModule`.

    Raises:
        ValueError, TypeError: when made, naming the argument.
    """

    sequence_spec = SequenceSpec({"features": 1, "coords": 1}, whole=["label", "lengths", "index", "slide_id"])

    def __init__(
        self,
        feature_dim: int = 1536,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 16,
        ffn_dim: int | None = None,
        segment_lengths: list[int] | None = None,
        dilation_rates: list[int] | None = None,
        max_wsi_size: int | None = None,
        tile_size: int = 256,
        grid: int = 1000,
        padding: Literal["masked", "attended"] = "masked",
        dropout: float = 0.25,
        drop_path: float = 0.1,
        attention_dropout: float = 0.0,
        engine: str = "auto",
        pool: Literal["class", "mean"] = "class",
        task: Literal["classification", "regression", "ordinal"] | None = None,
        num_classes: int | None = None,
        regression_loss: Literal["mse", "smooth_l1"] = "mse",
        layer_decay: float = 1.0,
        freeze_encoder: bool = False,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        compile_blocks: bool = False,
        pretrained: str | None = None,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(
            dim, depth, task, num_classes, regression_loss, layer_decay, freeze_encoder, lora_rank, lora_alpha,
            optimizer, lr_scheduler,
        )  # fmt: skip
        self.save_hyperparameters(ignore=["pattern", "optimizer", "lr_scheduler", "compile_blocks", "pretrained"])
        if pool not in ("class", "mean"):
            raise ValueError(f"pool must be class or mean, got {pool!r}.")
        self.pool, self.compile_blocks, self.pretrained = pool, self._compiled(compile_blocks), pretrained
        self._configure_slide(
            feature_dim, dim, depth, num_heads, ffn_dim, segment_lengths, dilation_rates, max_wsi_size, tile_size, grid,
            padding, slide_options(dropout, attention_dropout, drop_path, engine), pattern,
        )  # fmt: skip
        if pretrained is not None and not Path(pretrained).is_file():
            raise FileNotFoundError(f"pretrained {missing_file(pretrained, 'weights')}")

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """A random slide of N rows, and its label."""
        return {**self.example_rows(tokens), **self.example_label()}

    @classmethod
    def from_gigapath(
        cls, path: str | Path, compat: bool = True, num_heads: int = 16, grid: int = 1000, **options: Any
    ) -> SlideEncoder:
        """An encoder in eval mode with released weights; its sizes are read from the tensors.

        Args:
            path: `{"model": state_dict}` or a bare state dict of a GigaPath layout (12l768d, 24l1024d, 12l1536d, 12l384d),
                alone or inside a fine-tuned model; loaded with `weights_only=True`.
            compat: the released attention, whose zero pads take part (`padding="attended"`); False masks them.
            num_heads, grid: which leave no trace in weights; every release has 16 heads and 1000 cells.
            options: other arguments of `SlideEncoder`. With `depth`, the file has to have as many layers; without, as
                many as GigaPath's encoder of its width, if there is one.

        Raises:
            FileNotFoundError, ValueError: naming what the file lacks. Entries of no use are reported in one line.
        """
        sizes = sizes_of(own_weights(read_weights(path), str(path), grid), str(path))
        known = PUBLISHED.get((sizes["feature_dim"], sizes["dim"]))
        check_depth(sizes["depth"], options.get("depth"), known, path, "GigaPath's encoder")
        padding = "attended" if compat else "masked"
        model = cls(
            **{**sizes, "num_heads": num_heads, "grid": grid, "padding": padding, **options}, pretrained=str(path)
        )
        model.configure_model()
        return model.eval()

    @classmethod
    def from_pretrained_mae(cls, path: str | Path, **options: Any) -> SlideEncoder:
        """An encoder in eval mode from a checkpoint that training `SlidePretrainer` wrote, with its settings.

        Args:
            path: a Lightning checkpoint.
            options: arguments of `SlideEncoder` that are to differ, or that the pretraining did not have (`task`, say).

        Raises:
            FileNotFoundError, ValueError: for other files.
        """
        stored = read_file(path)
        settings = stored.get("hyper_parameters") if isinstance(stored, Mapping) else None
        if not settings:
            raise ValueError(
                f"{path} is no Lightning checkpoint, so it has no settings. SlideEncoder(pretrained=...) reads its weights, "
                "from_gigapath those of a release."
            )
        names = inspect.signature(cls).parameters
        known = {name: value for name, value in without_training(settings).items() if name in names}
        segments = ("segment_lengths", "dilation_rates", "max_wsi_size", "padding")
        replaced = segments if "pattern" in options else ("pattern",) if set(segments) & set(options) else ()
        known = {name: value for name, value in known.items() if name not in replaced}
        model = cls(**{**known, **options}, pretrained=str(path))
        model.configure_model()
        return model.eval()

    def released_state_dict(self) -> dict[str, Tensor]:
        """The encoder's weights in the names of a GigaPath release; without the table of positions, which is computed."""
        if self.lora_rank is not None:
            raise ValueError("a release has no place for low-rank updates: call merge_lora() first.")
        return to_released(self.state_dict())

    def build(self) -> None:
        """The encoder and the head, with fresh weights or those of `pretrained`."""
        self._build_backbone()
        self.head = self._make_head()
        init_weights(self, self.depth, self.dim)
        if self.pretrained is not None:
            load_backbone(self, self.pretrained)
        if self.compile_blocks:
            self.transformer.compile_blocks()

    def forward(
        self, features: Tensor, coords: Tensor, lengths: Tensor | None = None, all_layers: bool = False
    ) -> Tensor | list[Tensor]:
        """Embeddings of slides from their tiles.

        Args:
            features: (B, T, F), any floating dtype; padded on the right.
            coords: (B, T, 2), whole pixels x, y of each tile's upper left corner.
            lengths: (B,), tiles of each slide; None where none is padded. A slide's embedding is that of the slide alone.
            all_layers: return a list: of the input to the first layer, and of each layer's output.

        Returns:
            (B, E), or a list of depth + 1 of these.

        Raises:
            TypeError, ValueError: for shapes, or coordinates that would give wrong positions.
        """
        _one_rank("tiles alone are encoded on one rank; on several give batches with a blank row to `embed`.")
        x, rows = self._tiles(features, coords, lengths)
        return self._pooled(x, torch.arange(x.shape[1]), rows, all_layers)

    @torch.no_grad()
    def attention_map(
        self,
        features: Tensor,
        coords: Tensor,
        lengths: Tensor | None = None,
        *,
        layer: int | str = -1,
        heads: Literal["mean", "all"] = "mean",
        queries: Sequence[int] | None = None,
    ) -> Tensor:
        """How much the class token attends to each tile, exactly and without an N x N matrix: a heat map of the slide.

        Memory beyond that of encoding the slides is O(B H T) a layer (times the number of `queries`).

        Args:
            features, coords, lengths: as `forward` takes them.
            layer: 0 to depth - 1, or -1 for the last, and so on; "all" for every layer.
            heads: "mean" over them, or "all".
            queries: Q tiles to ask for in place of the class token, such as [5].

        Returns:
            (B, T) fp32 (fp64 for such weights), without a gradient: column t is tile t in the order of `features`, 0 in the
            padding and where no branch of the pattern reaches. Up to three dims more, in this order: layers in front for
            layer="all", (.., B, H, T) for heads="all", (.., Q, T) for `queries`; a query beyond its slide's length has 0.
            A row sums to 1 less the class token's own weight (and, with padding="attended", that of the zero pads).
            Of slide b `heat_map(found[b, :n], coords[b, :n], tile_size)` is a picture and `write_attention(path,
            found[b, :n])` writes into its file, n being its tiles (both in `lightning_dilated.data`).

        Raises:
            TypeError, ValueError: as `forward`, for other arguments, in training mode, and while ranks share a sequence.
        """
        _one_rank("attention_map takes whole slides on one rank: call it outside of the steps that share a sequence.")
        layers = chosen_layers(layer, self.depth)
        if heads not in ("mean", "all"):
            raise ValueError(f"heads must be mean or all, got {heads!r}.")
        if self.training:
            raise ValueError("attention_map is for a model in eval mode, as dropout changes it: call .eval() before.")
        x, rows = self._tiles(features, coords, lengths)
        asked = [0] if queries is None else tile_rows(queries, features.shape[1])
        found = layer_weights(self.transformer, x, asked, layers, rows)
        maps = torch.stack([(w.mean(1) if heads == "mean" else w)[..., 1:] for w in found])
        maps = maps[..., 0, :] if queries is None else maps
        return maps if layer == "all" else maps[0]

    def _tiles(self, features: Tensor, coords: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(class token and tiles (B, 1 + T, E), lengths (B,) that count both)."""
        self.configure_model()
        if isinstance(features, Tensor) and features.ndim == 3 and not features.shape[1]:
            raise ValueError("a slide has at least one tile; got features of none.")
        tiles = check_lengths(lengths, features.shape[1], 1, "a slide has at least one tile")
        return self.tile_tokens(features, coords, tiles), None if tiles is None else tiles + 1

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, E) from a batch as training has it: this rank's rows, the first of the whole slide blank."""
        self.configure_model()
        guarded(self._check_entries, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 2, "it counts the class token's row and at least one tile")
        x, positions = self.row_tokens(batch["features"], batch["coords"], lengths)
        return self._pooled(x, positions, lengths, False)

    @overload
    def _pooled(self, x: Tensor, positions: Tensor, lengths: Tensor | None, all_layers: Literal[False]) -> Tensor: ...

    @overload
    def _pooled(
        self, x: Tensor, positions: Tensor, lengths: Tensor | None, all_layers: bool
    ) -> Tensor | list[Tensor]: ...

    def _pooled(self, x: Tensor, positions: Tensor, lengths: Tensor | None, all_layers: bool) -> Tensor | list[Tensor]:
        """Through the blocks, pooled and normalised; with `all_layers` every layer's, before the encoder's own last norm."""

        def pool(y: Tensor) -> Tensor:
            found = first_token(y, positions) if self.pool == "class" else mean_token(y, positions, lengths, start=1)
            return self.norm(found)

        layers: list[Tensor] = []
        watch = (lambda y: layers.append(pool(y))) if all_layers else None
        out = self.transformer(self.dropout(x), lengths=lengths, watch=watch)
        return layers if all_layers else pool(out)


def _one_rank(message: str) -> None:
    """Raise ValueError while several ranks share a sequence."""
    group = active_sequence()
    if group is not None and group.ranks > 1:
        raise ValueError(message)


def slide_options(dropout: float, attention_dropout: float, drop_path: float, engine: str) -> BlockOptions:
    """The blocks of released slide encoders."""
    return BlockOptions(
        norm="layernorm",
        ffn="gelu",
        bias=True,
        dropout=dropout,
        attention_dropout=attention_dropout,
        sub_layernorm=True,
        position_encoding="none",
        engine=engine,
        drop_path=drop_path,
    )
