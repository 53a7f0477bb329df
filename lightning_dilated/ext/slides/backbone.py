"""SlideBackbone: from tile features of slides to hidden states, shared by the slide encoder and its pretraining.

This module also computes positions of tiles: it checks coordinates, and has the fixed 2-D sin-cos embedding of cells.

Shape letters: B batch, N rows (tiles and the class token), E embedding dim, T tiles, L rows of this rank, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import flag, integer
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.ext.pooled.pooled_model import checked_by_all
from lightning_dilated.ext.pooled.samples import check_documents
from lightning_dilated.models.documents import Documents, check_form, check_mapping
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.models.transformer_model import TransformerModel
from lightning_dilated.pattern import DilatedPattern, Global
from lightning_dilated.sequence import SequenceSpec

#: coordinates of rows that are not tiles: class token and padding
BLANK = -1
#: the reason for the minimum number of rows of a slide, for errors
ROWS = "a slide has the class token's row and at least one tile"
_EXACT = {torch.float32: 2**24, torch.float64: 2**53}


class GridPositions(nn.Module):
    """The sin-cos table of a `grid` x `grid` slide (as ViT-MAE, arXiv 2111.06377), computed for the requested cells.

    A cell (x, y) gets [sin(y w), cos(y w), sin(x w), cos(x w)] with w = 10000^(-4 i / E), i < E / 4. This is row 1 + x
    grid + y of a released GigaPath table. The module has no parameters and no state.
    """

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.dim, self.grid = integer(dim, "dim", 1), integer(grid, "grid", 1)
        if dim % 4:
            raise ValueError(f"dim must be a multiple of 4 for a 2-D sin-cos embedding, got {dim}.")
        self._axes: dict[torch.device, Tensor] = {}

    def axis(self, device: torch.device) -> Tensor:
        """Return the embedding of one coordinate, (grid, E / 2) fp32, computed in fp64."""
        if device not in self._axes:
            quarter = torch.arange(self.dim // 4, dtype=torch.float64, device="cpu") / (self.dim / 4)
            angle = torch.arange(self.grid, dtype=torch.float64, device="cpu")[:, None] / 10000**quarter
            axis = torch.cat([angle.sin(), angle.cos()], 1).float().to(device)
            if torch.compiler.is_compiling():  # tensors of a traced graph cannot be cached
                return axis
            self._axes[device] = axis
        return self._axes[device]

    def forward(self, cells: Tensor) -> Tensor:
        """Return (B, N, E) fp32 for cells (B, N, 2), integers in [0, grid)."""
        axis = self.axis(cells.device)
        return torch.cat([axis[cells[..., 1]], axis[cells[..., 0]]], -1)


def check_coords(coords: Tensor, counted: Tensor, tile_size: int, grid: int) -> None:
    """Raise if coordinates would silently give wrong positions.

    Args:
        coords: (B, N, 2), x and y of a tile's upper left corner, in pixels at the magnification of the tiles.
        counted: (B, N) bool, the rows that are tiles.
        tile_size: pixels of a tile.
        grid: cells along an axis.

    Raises: TypeError or ValueError for half precision, fractions, negative values or cells outside the grid.
    """
    if coords.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"coords are {coords.dtype}, which rounds pixels above 2,048: keep them int64.")
    if coords.is_complex() or coords.dtype == torch.bool:
        raise TypeError(f"coords must be integers (int64), got {coords.dtype}.")
    pixels = _filled(coords, counted)
    whole = not coords.is_floating_point() or ((pixels == pixels.floor()) & (pixels.abs() < _EXACT[coords.dtype])).all()
    if not whole:
        raise ValueError(
            f"coords hold fractions, NaN or values too large for {coords.dtype}: they must be whole pixels. Coordinates in "
            "micrometres or in fractions of the slide have to be converted first: (coords / unit).round().long()."
        )
    if not coords.numel():
        return
    low, high = (int(x) for x in torch.stack([pixels.amin(), pixels.amax()]).tolist())
    if low < 0:
        raise ValueError(f"coords must not be negative for a tile, got {low}: shift the slide's corner to (0, 0).")
    if high // tile_size >= grid:
        raise ValueError(
            f"a tile lies at {high}, cell {high // tile_size} of {tile_size} pixels, but the positions have {grid} cells "
            f"along an axis (0 to {grid - 1}). If tiles are {tile_size} pixels wide, set the model's grid to at least "
            f"{high // tile_size + 1}. Else set tile_size to their width in the pixels that coords count, at least "
            f"{high // grid + 1} here (level-0 coordinates of tiles cut at another level need the width at level 0), or "
            "scale coords to the level of the tiles."
        )


def cells_of(coords: Tensor, counted: Tensor, tile_size: int) -> Tensor:
    """Return cells (B, N, 2) int64 of tiles; (0, 0) for other rows."""
    return torch.div(_filled(coords, counted), tile_size, rounding_mode="floor").long()


@torch.library.custom_op("lightning_dilated::checked_cells", mutates_args=())
def checked_cells(coords: Tensor, counted: Tensor, tile_size: int, grid: int) -> Tensor:
    """Return `cells_of` after `check_coords` as one graph node, so that compiled models also check coordinates."""
    if not (coords.is_cuda and torch.cuda.is_current_stream_capturing()):  # a captured graph cannot read values
        check_coords(coords, counted, tile_size, grid)
    return cells_of(coords, counted, tile_size)


@checked_cells.register_fake
def _(coords: Tensor, counted: Tensor, tile_size: int, grid: int) -> Tensor:
    return torch.empty_like(coords, dtype=torch.int64, memory_format=torch.contiguous_format)


def _filled(coords: Tensor, counted: Tensor) -> Tensor:
    """Set rows that are not tiles to 0; integers become int64, because torch fully supports few other types."""
    return (coords if coords.is_floating_point() else coords.long()).masked_fill(~counted[..., None], 0)


RELEASED_RATES = (1, 2, 4, 8, 16)
#: number of tiles along an axis of the largest slide that GigaPath's segments are designed for
RELEASED_SIDE = 1024


def released_segments(max_wsi_size: int, tile_size: int, branches: int = 5) -> list[int]:
    """Return segment lengths as in GigaPath: 2^linspace(10, floor(log2 T), branches), rounded down.

    Args:
        max_wsi_size: pixels along an axis of the largest slide; T = (max_wsi_size // tile_size)^2 tiles.
        tile_size: pixels of a tile.
    """
    side = integer(max_wsi_size, "max_wsi_size", 1) // integer(tile_size, "tile_size", 1)
    if side < 32:
        raise ValueError(
            f"max_wsi_size={max_wsi_size} with tiles of {tile_size} pixels has {side} tiles along an axis, but the first "
            "segment of 1,024 tiles needs 32. Raise max_wsi_size, or give segment_lengths."
        )
    steps = max(1, branches - 1)
    last = int(math.log2(side * side))
    return [int(2 ** (10 + (last - 10) * i / steps)) for i in range(branches)]


def released_pattern(
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    max_wsi_size: int | None,
    tile_size: int,
    padding: str,
    global_class_token: bool = False,
) -> DilatedPattern:
    """Return GigaPath's pattern for the arguments of a slide model; None is the released value. Raises ValueError."""
    rates = list(RELEASED_RATES if dilation_rates is None else dilation_rates)
    if segment_lengths is None:
        size = RELEASED_SIDE * tile_size if max_wsi_size is None else max_wsi_size
        segment_lengths = released_segments(size, tile_size, len(rates))
    elif max_wsi_size is not None:
        raise ValueError("give segment_lengths or max_wsi_size, not both: each determines the segment lengths.")
    pattern = DilatedPattern.longnet(list(segment_lengths), rates, offsets="blocked", padding=padding)
    if not flag(global_class_token, "global_class_token"):
        return pattern
    if padding != "masked":
        raise ValueError(
            f"global_class_token=True needs padding='masked', got {padding!r}, the padding of released weights, which "
            "were trained without a global class token."
        )
    return replace(pattern, branches=(*pattern.branches, Global(1)))


class SlideBackbone(TransformerModel):
    """The part of GigaPath's slide models that `SlideEncoder` and `SlidePretrainer` share.

    Its blocks are torchscale's as released: LayerNorm, GELU, sub-layer norms, and no embedding of positions.

    Parameters: `patch_embed` (F to E), `cls_token`, `transformer` and a final `norm` (eps 1e-6).

    Args:
        feature_dim: F, number of features of the tile encoder.
        dim: E; the defaults of the sizes are GigaPath's 12l768d.
        depth: number of layers.
        num_heads: attention heads.
        segment_lengths: tokens per segment in each branch; None: 2^linspace(10, log2 T, 5) for at most T tiles.
        dilation_rates: dilation rate of each branch; None: GigaPath's 1, 2, 4, 8, 16.
        max_wsi_size: pixels along an axis of the largest slide, which determine the segments; None: 1024 tiles.
        tile_size: side of a tile, in the pixels of coords.
        grid: cells of the positions along an axis; fixed by the weights (GigaPath: 1000).
        padding: "masked", exact attention, or "attended", as released weights were trained (the softmax includes zero
            pads of the last segment).
        global_class_token: whether the class token sees all tiles of its slide, and all tiles see it, in every layer
            (`Global(1)` next to the other branches). For new models only; released weights were trained without it.
        pattern: a pattern as in `TransformerModel`, in place of segment_lengths, dilation_rates, max_wsi_size, padding
            and global_class_token.
        options: ffn_dim, dropout, attention_dropout, drop_path, engine and the options of training.
    """

    sequence_spec = SequenceSpec(
        {"features": 1, "coords": 1}, whole=["label", "lengths", "cu_seqlens", "index", "slide_id"]
    )
    input_layers: tuple[str, ...] = ("patch_embed.", "cls_token")

    def __init__(
        self,
        feature_dim: int = 1536,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 16,
        segment_lengths: list[int] | None = None,
        dilation_rates: list[int] | None = None,
        max_wsi_size: int | None = None,
        tile_size: int = 256,
        grid: int = 1000,
        padding: Literal["masked", "attended"] = "masked",
        global_class_token: bool = False,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern] | None = None,
        **options: Any,
    ) -> None:
        integer(tile_size, "tile_size", 1)
        settings = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "max_wsi_size": max_wsi_size}
        replaced = {**settings, "global_class_token": global_class_token or None}
        names = [name for name, value in replaced.items() if value is not None]
        if pattern is not None and (names or padding != "masked"):
            raise ValueError(f"pattern takes the place of {' and '.join(names or ['padding'])}: leave one of them out.")
        self.released_pattern = pattern is None
        if pattern is None:
            pattern = released_pattern(*settings.values(), tile_size, padding, global_class_token)  # type: ignore[assignment]
        super().__init__(
            pattern=pattern, dim=dim, depth=depth, num_heads=num_heads, norm="layernorm", ffn="gelu", bias=True,
            sub_layernorm=True, position_encoding="none", num_kv_heads=None, rotary_base=None, max_seq_len=None,
            xpos_scale_base=512.0, kv_conv=None, recurrence=None, hashed=None, residual_dtype=None,
            shift_layers="none", shift_below=None, global_rotary=True, **options,
        )  # fmt: skip
        self.feature_dim = integer(feature_dim, "feature_dim", 1)
        self.tile_size, self.grid = tile_size, integer(grid, "grid", 1)
        GridPositions(dim, grid)

    def setup(self, stage: str) -> None:
        """Check that features and tiles of the data fit the model, and that its grid contains all tiles."""
        super().setup(stage)
        for name in ("feature_dim", "tile_size"):
            value, own_value = self._data_setting(name), getattr(self, name)
            if value is not None and value != own_value:
                raise ValueError(
                    f"the model has {name}={own_value}, but the data's is {value}: set the model's {name} to {value}."
                )
        check_places = self._data_setting("check_places")  # SlideDataModule's
        if callable(check_places):
            check_places(self.tile_size, self.grid)

    #: coordinates are checked on the CPU; reading them from a GPU would wait for it
    host_entries = (*DilatedModule.host_entries, "coords")
    token_meaning: str | None = "a row of a slide: a tile, or the class token's"

    def example_rows(self, rows: int) -> dict[str, Any]:
        """Return the features and coords of a random slide with a blank first row, for `example_batch`."""
        place = torch.arange(rows - 1)
        cells = torch.stack([place % self.grid, place // self.grid % self.grid], 1) * self.tile_size
        coords = torch.cat([torch.full((1, 2), BLANK, dtype=cells.dtype), cells])[None]
        return {"features": torch.randn(1, rows, self.feature_dim), "coords": coords}

    def _documents(self, batch: Any) -> Documents | None:
        bounds = batch.get("cu_seqlens")
        return None if bounds is None else Documents.of(bounds, batch["features"].shape[1])

    def _check_entries(self, batch: Any) -> None:
        check_mapping(self, batch, "features (B, N, F) and coords (B, N, 2)", "features", "coords")
        missing = [name for name in ("features", "coords") if name not in batch]
        if missing:
            raise ValueError(
                f"the batch holds {list(batch)}, but no {' and no '.join(missing)}, which a slide encoder needs (a "
                "LongNetClassifier needs no coords)."
            )
        check_form(self, batch, features=("(B, N, F)", "floats"), coords=("(B, N, 2)", "numbers"))
        check_documents(batch, len(batch["features"]), 2, ROWS)

    def _build_backbone(self) -> None:
        self.patch_embed = nn.Linear(self.feature_dim, self.dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.dim))
        self.grid_positions = GridPositions(self.dim, self.grid)
        self.dropout = nn.Dropout(self.options.dropout)
        self.transformer = self._transformer(self.depth)
        self.norm = nn.LayerNorm(self.dim, eps=1e-6)

    # -- rows ----------------------------------------------------------------------------------------------------------
    def _placed(self, x: Tensor, coords: Tensor, counted: Tensor) -> Tensor:
        """Check coordinates, and return projected tiles (B, L, E) plus their positions, in the parameters' dtype."""
        counted = counted.to(coords.device)
        if torch.compiler.is_compiling():
            cells = torch.ops.lightning_dilated.checked_cells(coords, counted, self.tile_size, self.grid)
        else:
            checked_by_all(check_coords, coords, counted, self.tile_size, self.grid)
            cells = cells_of(coords, counted, self.tile_size)
        return x + self.grid_positions(send(cells, x.device)).to(self.cls_token.dtype)

    def _project(self, features: Tensor) -> Tensor:
        return self.patch_embed(features.to(self.patch_embed.weight.dtype))

    def tile_tokens(self, features: Tensor, coords: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the class token and the tiles, (B, 1 + T, E), from tiles (B, T, F); `lengths` (B,) count the tiles."""
        self._check_shapes(features, coords)
        counted = _within(torch.arange(features.shape[1]), lengths, len(features))
        x = self._placed(self._project(features), coords, counted)
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x], 1)

    def row_tokens(
        self,
        features: Tensor,
        coords: Tensor,
        lengths: Tensor | None,
        change: Callable[[Tensor, Tensor], Tensor] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (B, L, E) and their positions (L,) in the slide, from a rank's rows; slides begin with a blank.

        Args:
            features: (B, L, F).
            coords: (B, L, 2), -1 in the blank row.
            lengths: (B,), number of rows of the whole slides, including the blank row.
            change: a function that replaces projected tiles (B, L, E) at positions (L,), before positions are added.
            documents: the slides packed into one row (B = 1), each with a blank row in front.
        """
        checked_by_all(self._check_shapes, features, coords)
        positions = token_positions(0, features.shape[1]) if documents is None else documents.position
        checked_by_all(_check_blank, coords, positions, documents is not None)
        counted = _within(positions, lengths, len(features)) & (positions > 0)
        x = self._project(features)
        x = self._placed(x if change is None else change(x, positions), coords, counted)
        # torch.where gives ranks without the class token a zero gradient for it
        return torch.where(send(positions == 0, x.device)[None, :, None], self.cls_token.to(x.dtype), x), positions

    def _check_shapes(self, features: Any, coords: Any) -> None:
        for name, x in (("features", features), ("coords", coords)):
            if not isinstance(x, Tensor) or x.ndim != 3:
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"{name} must be a tensor (slides, tiles, {'F' if name == 'features' else 2}), got {shape}."
                )
        if not features.is_floating_point():
            raise TypeError(f"features must be floating point, got {features.dtype}.")
        if coords.shape != (*features.shape[:2], 2):
            raise ValueError(
                f"coords must be {(*features.shape[:2], 2)}, an (x, y) for each tile of features "
                f"{tuple(features.shape)}; got {tuple(coords.shape)}."
            )
        if features.shape[2] != self.feature_dim:
            raise ValueError(
                f"the features are {features.shape[2]} wide, but the model takes feature_dim={self.feature_dim}: set it to "
                f"{features.shape[2]}, or give features of the tile encoder that the weights were trained with."
            )


def _check_blank(coords: Tensor, positions: Tensor, packed: bool) -> None:
    """Raise ValueError if a slide's first row is not blank. Without `packed`, only this rank's first row can be one."""
    if torch.compiler.is_compiling():  # a graph must work for any values
        return
    at = (positions == 0).nonzero()[:, 0] if packed else torch.arange(int((positions[:1] == 0).any()))
    in_front = coords[:, send(at, coords.device)]
    if not len(at) or bool((in_front.double() == BLANK).all()):
        return
    row, slide = (in_front.double() != BLANK).any(-1).nonzero()[0].tolist()
    raise ValueError(
        "batches carry one blank row in front of the tiles, for the class token: features 0, coords (-1, -1), counted in "
        f"lengths (or cu_seqlens). A slide's first row has coords {in_front[row, slide].tolist()}. SlideDataModule adds it; "
        "the model also adds it if it is called with tiles alone."
    )


def _within(positions: Tensor, lengths: Tensor | None, samples: int) -> Tensor:
    """Return a mask (B, L) bool of the rows inside the slides' lengths."""
    if lengths is None:
        return torch.ones(samples, positions.shape[0], dtype=torch.bool)
    return positions < lengths[:, None]
