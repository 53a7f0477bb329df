"""SlideEncoder: GigaPath's LongNet over tile features of whole slides, for embeddings, fine-tuning and heat maps.

Shape letters: B batch, N tokens, Q chosen queries, H query heads, E embedding dim, T tiles, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.attention import DilatedAttention, attention_weights
from lightning_dilated.ext.pooled.pooled_model import PooledModule, check_lengths, checked_by_all, first_token
from lightning_dilated.ext.slides.backbone import SlideBackbone
from lightning_dilated.ext.slides.weights import (
    PUBLISHED,
    check_depth,
    load_backbone,
    missing_file,
    own_weights,
    read_file,
    read_weights,
    sizes_of,
    to_released,
)
from lightning_dilated.models.documents import Documents, mean_token
from lightning_dilated.models.pretrained import file_arguments, make_values
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.sequence import active_sequence


@torch.no_grad()
def layer_weights(
    transformer: DilatedTransformer,
    x: Tensor,
    queries: Sequence[int],
    layers: Sequence[int],
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """Return exact attention weights of chosen queries and layers, without an N x N matrix; later layers do not run.

    The weights are computed from the q and k that the op gets, after low-rank updates and autocast.

    Args:
        transformer: a stack without rotary positions, in eval mode.
        x, lengths: (B, N, E) and (B,), the stack's inputs.
        queries: Q positions in [0, N).
        layers: numbers in [0, depth), in increasing order.

    Returns:
        For each layer (B, H, Q, N), as from `attention_weights`.
    """
    weights: list[Tensor] = []

    def look(core: Any, args: Any, kwargs: Any) -> None:
        options = {name: kwargs[name] for name in ("causal", "lengths", "cu_seqlens")}
        q, k = args[:2]
        weights.append(attention_weights(q, k, core.pattern, queries, scale=core.scale, **options))

    with torch.compiler.set_stance("force_eager"):  # otherwise torch would recompile the block, because it has a hook
        for i, block in enumerate(transformer.blocks[: max(layers) + 1]):
            cores = [m for m in block.modules() if isinstance(m, DilatedAttention)] if i in layers else []
            hooks = [core.register_forward_pre_hook(look, with_kwargs=True) for core in cores]
            try:
                x = block(x, lengths=lengths)
            finally:
                for hook in hooks:
                    hook.remove()
    return weights


def chosen_layers(layer: Any, depth: int) -> list[int]:
    """Return the numbers of the layers that `layer` names: "all", or a number from -depth to depth - 1."""
    if isinstance(layer, str) and layer == "all":
        return list(range(depth))
    if isinstance(layer, bool) or not hasattr(layer, "__index__") or not -depth <= index(layer) < depth:
        raise ValueError(f"layer must be 'all' or a number from {-depth} to {depth - 1} (-1: the last), got {layer!r}.")
    return [index(layer) % depth]


def tile_rows(queries: Any, tiles: int) -> list[int]:
    """Return the rows of tiles, which follow the class token's row.

    Raises: TypeError or ValueError unless `queries` is a list of tiles in [0, `tiles`).
    """
    numbers = queries.tolist() if isinstance(queries, Tensor) else queries
    if not isinstance(numbers, (list, tuple, range)):
        raise TypeError(f"queries must be a list of tiles such as [0], or None for the class token; got {queries!r}.")
    numbers = [integer(tile, f"queries[{i}]", 0) for i, tile in enumerate(numbers)]
    if any(tile >= tiles for tile in numbers):
        raise ValueError(f"queries holds tile {max(numbers)}, but there are {tiles} tiles (0..{tiles - 1}).")
    return [tile + 1 for tile in numbers]


#: options of a SlidePretrainer that an encoder does not have
PRETRAINING = ("mask_ratio", "normalise", "decoder_dim", "decoder_depth", "mask_seed")


class SlideEncoder(SlideBackbone, PooledModule):
    """The slide encoder of GigaPath (doi 10.1038/s41586-024-07441-w): tile features and coordinates to one embedding.

    Called with tiles it returns embeddings, see `forward`. For training, batches are mappings with `features` (B, N, F)
    with a blank first row, `coords` (B, N, 2) with -1 in that row, `lengths` (B,) that count it, and `label`. For D
    slides packed into one row, B = 1, each slide has a blank row in front, `cu_seqlens` is (D + 1,) int32 on the CPU,
    and `label` is (D,); predictions are then (D,).

    Args:
        pool: "class", the class token, or "mean" over the tiles; the result is then normalised.
        pretrained: a file of initial weights: a release, or a checkpoint of this class or of `SlidePretrainer`.
        feature_dim, dim, depth, num_heads: see `SlideBackbone`.
        dropout: see `BlockOptions`.
        drop_path: see `BlockOptions`.
        options: other options of `SlideBackbone` and `PooledModule`.

    Raises:
        FileNotFoundError: if there is no file `pretrained`.
        ValueError, TypeError: for an invalid argument; the message names it.
    """

    def __init__(
        self,
        feature_dim: int = 1536,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 16,
        *,
        pool: Literal["class", "mean"] = "class",
        pretrained: str | None = None,
        dropout: float = 0.25,
        drop_path: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(feature_dim, dim, depth, num_heads, dropout=dropout, drop_path=drop_path, **options)
        if pool not in ("class", "mean"):
            raise ValueError(f"pool must be class or mean, got {pool!r}.")
        self.pool, self.pretrained = pool, pretrained
        if pretrained is not None and not Path(pretrained).is_file():
            raise FileNotFoundError(f"pretrained {missing_file(pretrained, 'weights')}")

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Return a random slide of N rows, and its label."""
        return {**self.example_rows(tokens), **self.example_label()}

    export_rows = 1

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Return features (B, T, F) and coords (B, T, 2)."""
        rows, device = self.example_rows(1 + length), self.cls_token.device
        features = torch.randn(batch_size, length, self.feature_dim, device=device)
        return {"features": features, "coords": rows["coords"][:, 1:].repeat(batch_size, 1, 1)}

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return embeddings (B, E), and logits (B, C) if the model has a task."""
        return self._exported(self(inputs["features"], inputs["coords"]))

    @classmethod
    def from_gigapath(
        cls, path: str | Path, compat: bool = True, num_heads: int = 16, grid: int = 1000, **options: Any
    ) -> SlideEncoder:
        """Load released weights into an encoder in eval mode; its sizes follow from the tensors.

        Args:
            path: `{"model": state_dict}` or a bare state dict of a GigaPath layout (12l768d, 24l1024d, 12l1536d,
                12l384d), alone or inside a fine-tuned model; loaded with `weights_only=True`.
            compat: attention as released, which attends to zero pads (`padding="attended"`); False masks them.
            num_heads, grid: not determined by weights; every release has 16 heads, and 1000 cells along an axis.
            options: other arguments of `SlideEncoder`. If `depth` is given, the file must have that number of layers.
                Otherwise it must have at least the layers of GigaPath's encoder of its width, if any.

        Raises:
            FileNotFoundError, ValueError: with the missing parts of the file. Unused entries are logged in one line.
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
        """Load weights and settings of a `SlidePretrainer` checkpoint into an encoder in eval mode.

        Args:
            path: a Lightning checkpoint.
            options: arguments of `SlideEncoder` that differ from the checkpoint's or are new, such as `task`.

        Raises: FileNotFoundError or ValueError for other files.
        """
        stored = read_file(path)
        settings = stored.get("hyper_parameters") if isinstance(stored, Mapping) else None
        if not settings:
            raise ValueError(
                f"{path} is not a Lightning checkpoint, so it has no settings. SlideEncoder(pretrained=...) reads its "
                "weights; from_gigapath reads the weights of a release."
            )
        settings = file_arguments(settings, path, options)
        known = {name: make_values(value) for name, value in settings.items() if name not in PRETRAINING}
        segments = ("segment_lengths", "dilation_rates", "max_wsi_size", "padding", "global_class_token")
        replaced = segments if "pattern" in options else ("pattern",) if set(segments) & set(options) else ()
        known = {name: value for name, value in known.items() if name not in replaced}
        model = cls(**{**known, **options}, pretrained=str(path))
        model.configure_model()
        return model.eval()

    def released_state_dict(self) -> dict[str, Tensor]:
        """Return the encoder's weights with the names of a GigaPath release, without the table of positions.

        Raises: ValueError while the model has low-rank updates.
        """
        if self.lora_rank is not None:
            raise ValueError("a release cannot contain low-rank updates: call merge_lora() first.")
        return to_released(self.state_dict())

    def build(self) -> None:
        """Build the encoder and the head, with fresh weights or the weights of `pretrained`."""
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
        """Return embeddings of slides from their tiles.

        Args:
            features: (B, T, F), any floating dtype; padded on the right.
            coords: (B, T, 2), x and y in whole pixels of each tile's upper left corner.
            lengths: (B,), number of tiles of each slide; None: no padding. Padding does not change a slide's embedding.
            all_layers: return a list, with embeddings from the first layer's input and from each layer's output.

        Returns:
            (B, E), or a list of depth + 1 of these.

        Raises: TypeError or ValueError for wrong shapes, or coordinates that would give wrong positions.
        """
        _one_rank("tiles alone are encoded on one rank; on several give batches with a blank row to `embed`.")
        x, rows = self._tiles(features, coords, lengths)
        layers: list[Tensor] = []  # pooled before the stack's own last norm
        pool = partial(self._pool, positions=torch.arange(x.shape[1]), lengths=rows)
        watch = (lambda y: layers.append(pool(y))) if all_layers else None
        out = self.transformer(self.dropout(x), lengths=rows, watch=watch)
        return layers if all_layers else pool(out)

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
        """Return the exact attention of the class token to each tile, without an N x N matrix: a slide's heat map.

        Memory beyond encoding the slides is O(B H T) per layer (times the number of `queries`).

        Args:
            features, coords, lengths: as in `forward`.
            layer: 0 to depth - 1, or -1 for the last, and so on; "all" for every layer.
            heads: "mean" over heads, or "all".
            queries: Q tiles in place of the class token, such as [5].

        Returns:
            (B, T) fp32 (fp64 for fp64 weights), without a gradient: column t is tile t in the order of `features`, 0 in
            the padding and for tiles that no branch of the pattern reaches. Up to three more dims, in this order:
            layers in front for layer="all", (.., B, H, T) for heads="all", (.., Q, T) for `queries`; a query beyond its
            slide has weights 0. A row sums to 1 minus the class token's own weight (and, with padding="attended", the
            weight of zero pads). For slide b with n tiles, `heat_map(weights[b, :n], coords[b, :n], tile_size)` is a
            picture and `write_attention(path, weights[b, :n])` writes into its file (both in `lightning_dilated.data`).

        Raises:
            TypeError, ValueError: as in `forward`; for bad arguments, in training mode, or if ranks share a sequence.
        """
        _one_rank("attention_map takes whole slides on one rank: call it outside of the steps that share a sequence.")
        layers = chosen_layers(layer, self.depth)
        if heads not in ("mean", "all"):
            raise ValueError(f"heads must be mean or all, got {heads!r}.")
        if self.training:
            raise ValueError("attention_map is for a model in eval mode, without dropout: call .eval() first.")
        x, rows = self._tiles(features, coords, lengths)
        query_rows = [0] if queries is None else tile_rows(queries, features.shape[1])
        weights = layer_weights(self.transformer, x, query_rows, layers, rows)
        maps = torch.stack([(w.mean(1) if heads == "mean" else w)[..., 1:] for w in weights])
        maps = maps[..., 0, :] if queries is None else maps
        return maps if layer == "all" else maps[0]

    def _tiles(self, features: Tensor, coords: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return class token and tiles (B, 1 + T, E), and lengths (B,), which count both."""
        self.configure_model()
        if isinstance(features, Tensor) and features.ndim == 3 and not features.shape[1]:
            raise ValueError("a slide has at least one tile; got features without tiles.")
        tiles = check_lengths(lengths, features.shape[1], 1, "a slide has at least one tile")
        return self.tile_tokens(features, coords, tiles), None if tiles is None else tiles + 1

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Return (B, E), or (D, E) for packed slides, from this rank's rows of a batch with blank first rows."""
        self.configure_model()
        checked_by_all(self._check_entries, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 2, "it counts the class token's row and at least one tile")
        documents = self._documents(batch)
        x, positions = self.row_tokens(batch["features"], batch["coords"], lengths, documents=documents)
        y = self.transformer(self.dropout(x), lengths=lengths, cu_seqlens=batch.get("cu_seqlens"))
        return self._pool(y, positions, lengths, documents)

    def _pool(self, x: Tensor, positions: Tensor, lengths: Tensor | None, documents: Documents | None = None) -> Tensor:
        """Pool hidden states (B, L, E) to (B, E), normalised."""
        if self.pool == "class":
            return self.norm(first_token(x, positions, documents))
        return self.norm(mean_token(x, positions, lengths, start=1, documents=documents))


def _one_rank(message: str) -> None:
    group = active_sequence()
    if group is not None and group.ranks > 1:
        raise ValueError(message)
