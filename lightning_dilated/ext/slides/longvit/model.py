"""LongViT: dilated attention over the patches of whole images (arXiv 2312.03558), for embeddings and fine-tuning.

Shape letters: B images, C channels, H x W pixels, P pixels of a patch's side, N patches, E embedding dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dilated._validation import integer
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.ext.pooled.pooled_model import PooledModule, checked_by_all
from lightning_dilated.ext.slides.backbone import RELEASED_RATES
from lightning_dilated.ext.slides.longvit.image_patches import image_patches, table_positions
from lightning_dilated.ext.slides.longvit.weights import PUBLISHED, load_longvit, read_longvit
from lightning_dilated.ext.slides.released import ReleasedModel
from lightning_dilated.ext.slides.weights import missing_file
from lightning_dilated.models.documents import mean_token
from lightning_dilated.models.pretrained import check_depth
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceSpec, active_sequence

RELEASED_SEGMENTS = {  # by pixels of the image's side; any other side has those of 1024
    1024: (64, 128, 256, 512, 1024),
    4096: (1024, 2048, 4096, 8192, 16384),
    8192: (1024, 4096, 8192, 16384, 65536),
    16384: (1024, 4096, 16384, 65536, 262144),
    32768: (1024, 4096, 32768, 262144, 1048576),
}
#: patches that are copied out of an image at a time
CHUNK = 4096


def released_pattern(
    image_size: int, segment_lengths: list[int] | None, dilation_rates: list[int] | None, padding: str
) -> DilatedPattern:
    """The releases' pattern for images of a size, with other segments (in patches) or rates where they are not None."""
    segments = (
        RELEASED_SEGMENTS.get(image_size, RELEASED_SEGMENTS[1024]) if segment_lengths is None else segment_lengths
    )
    rates = RELEASED_RATES if dilation_rates is None else dilation_rates
    return DilatedPattern.longnet(list(segments), list(rates), offsets="blocked", padding=padding)


class LongViT(ReleasedModel, PooledModule):
    """LongViT: patches of an image, embedded linearly, with learned positions; the mean over the patches is the embedding.

    Called with images it returns embeddings, see `forward`. For training, batches are mappings with `label` (B,) and either
    `image` (B, C, H, W), or, under this package's strategies and for images of different sizes, `patches` (B, N, C P P),
    padded on the right, with `grid` (B, 2), rows and columns of patches: the results of `image_patches`.

    Args:
        image_size: pixels along a side of the square images that the table of positions is for; others are interpolated.
        patch_size: P.
        in_channels: C.
        dim: E; the defaults of the sizes are those of longvit_small_patch32_1024.
        depth: number of layers.
        num_heads: attention heads.
        segment_lengths: patches, of the branches; None: the release's for image_size (for a size without a release those of
            1024, whose largest is 1,024 patches).
        dilation_rates: of the branches; None: the releases' 1, 2, 4, 8, 16.
        padding: "masked", the exact attention, or "attended", what released weights were trained with (zero pads of the
            last segment take part in the softmax).
        norm_at: where the last norm stands: "mean", on the mean over the patches (fine-tuned releases), or "patches", on
            each of them before the mean (the pretrained release).
        pretrained: a released file to start from, see `from_longvit`.
        pattern: another pattern than the released branches, as `TransformerModel` takes it; in place of segment_lengths,
            dilation_rates and padding.
        drop_path: see `BlockOptions`.
        options: those of `PooledModule` and `ReleasedModel`.

    Raises:
        FileNotFoundError: if there is no file `pretrained`.
        ValueError, TypeError: naming the argument.
    """

    sequence_spec = SequenceSpec({"patches": 1}, whole=["image", "grid", "label", "index"])
    input_layers = ("patch_embed.", "pos_embed")
    host_entries = ("grid",)

    def __init__(
        self,
        image_size: int = 1024,
        patch_size: int = 32,
        in_channels: int = 3,
        dim: int = 384,
        depth: int = 12,
        num_heads: int = 16,
        *,
        segment_lengths: list[int] | None = None,
        dilation_rates: list[int] | None = None,
        padding: Literal["masked", "attended"] = "masked",
        norm_at: Literal["mean", "patches"] = "mean",
        pretrained: str | None = None,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern] | None = None,
        drop_path: float = 0.1,
        **options: Any,
    ) -> None:
        integer(image_size, "image_size", 1)
        settings = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        own = self._own_pattern(pattern, padding, settings)
        super().__init__(
            released_pattern(image_size, segment_lengths, dilation_rates, padding) if own is None else own,
            dim=dim, depth=depth, num_heads=num_heads, drop_path=drop_path, **options,
        )  # fmt: skip
        self.patch_size, self.in_channels = integer(patch_size, "patch_size", 1), integer(in_channels, "in_channels", 1)
        self.image_size = image_size
        if image_size % patch_size:
            raise ValueError(f"patch_size={patch_size} must divide image_size={image_size}.")
        if norm_at not in ("mean", "patches"):
            raise ValueError(f"norm_at must be mean or patches, got {norm_at!r}.")
        if pretrained is not None and not Path(pretrained).is_file():
            raise FileNotFoundError(f"pretrained {missing_file(pretrained, 'weights')}")
        self.norm_at, self.pretrained = norm_at, pretrained

    @classmethod
    def from_longvit(
        cls,
        path: str | Path,
        compat: bool = True,
        num_heads: int = 16,
        image_size: int | None = None,
        norm_at: Literal["mean", "patches"] | None = None,
        **options: Any,
    ) -> LongViT:
        """A model in eval mode with released weights, such as longvit_small_patch32_1024.pth; sizes follow from the tensors.

        Images must be RGB in [0, 1], minus (0.485, 0.456, 0.406), divided by (0.229, 0.224, 0.225).

        Args:
            path: `{"model": state_dict}` (or under "teacher", "module" or "state_dict") or a bare state dict, of the
                pretrained or of a fine-tuned model; loaded with `weights_only=True`.
            compat: attention as released, which attends to zero pads (`padding="attended"`); False masks them.
            num_heads: which does not follow from weights; the release has 16.
            image_size: pixels of the images' side, if it is not the file's: its table of positions is then resized once, as
                the release does for fine-tuning (but not rounded to half precision), and the segments are those of this
                size. A model made without it has the file's segments for larger images, too.
            norm_at: None: where the file has its last norm. "mean" with a pretrained file starts with a fresh norm, as its
                authors fine-tune.
            options: other arguments of `LongViT`. With `task="classification"` and the file's number of classes, a
                fine-tuned file's head is loaded.

        Raises:
            FileNotFoundError, ValueError: naming what the file lacks. Unused entries are reported in one line.
        """
        file = read_longvit(path)
        if norm_at is None:
            norm_at = "mean" if "mean" in file.norms else "patches"
        sizes = file.sizes()
        known = PUBLISHED.get((sizes["in_channels"], sizes["patch_size"], sizes["dim"]))
        check_depth(sizes["depth"], options.get("depth"), known, path, "the published LongViT")
        settings: dict[str, Any] = {**sizes, "num_heads": num_heads, "norm_at": norm_at}
        settings |= {"padding": "attended" if compat else "masked"}
        settings |= {} if image_size is None else {"image_size": image_size}
        model = cls(**{**settings, **options}, pretrained=str(path))
        model.configure_model()
        return model.eval()

    def _transformer(self, depth: int) -> DilatedTransformer:
        transformer = super()._transformer(depth)
        transformer.norm = nn.Identity()  # the only last norm is that of `norm_at`
        return transformer

    def build(self) -> None:
        """Patch embedding, table of positions, blocks, norm and head, with fresh weights or those of `pretrained`."""
        self.patch_embed = nn.Linear(self.in_channels * self.patch_size**2, self.dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, (self.image_size // self.patch_size) ** 2, self.dim))
        self.dropout = nn.Dropout(self.options.dropout)
        self.transformer = self._transformer(self.depth)
        self.norm = nn.LayerNorm(self.dim, eps=1e-6 if self.norm_at == "patches" else 1e-5)
        self.head = self._make_head()
        init_weights(self, self.depth, self.dim)
        if self.pretrained is not None:
            load_longvit(self, self.pretrained)
        if self.compile_blocks:
            self.transformer.compile_blocks()

    # -- what planning asks ------------------------------------------------------------------------------------------

    @property
    def token_meaning(self) -> str:  # type: ignore[override]  # DilatedModule has an attribute
        """With the patch's size."""
        return f"a patch of {self.patch_size} x {self.patch_size} pixels of an image"

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """A random image of N patches, in rows of 1,024 or 2,048 where that divides N, and its label.

        Never of as many columns as the table of positions has, which is then interpolated as for most images.
        """
        usual = 1024 << (self.image_size // self.patch_size == 1024)
        squarest = (n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
        columns = next(squarest) if tokens % usual else usual
        patches = torch.randn(1, tokens, self.in_channels * self.patch_size**2)
        grid = self.host_tensor([[tokens // columns, columns]])
        return {"patches": patches, "grid": grid, **self.example_label()}

    def planning_notes(self) -> list[str]:
        """How positions are found."""
        cells = self.image_size // self.patch_size
        return [
            f"images come as patches and grid; positions are interpolated from the table of {cells} x {cells} patches, as "
            "they are for images of another size."
        ]

    # -- from images ---------------------------------------------------------------------------------------------------
    def forward(self, images: Tensor | Iterable[Tensor]) -> Tensor:
        """(B, E) embeddings of images.

        Args:
            images: (B, C, H, W), floating point, H and W multiples of P; on any device, since strips of it are moved. Or an
                iterator of strips of the same images from top to bottom, each of any height: then only one strip and the
                patches' embeddings (twice N x E while they are concatenated) are in memory. A list is refused.

        Raises:
            TypeError, ValueError: for another shape or dtype.
        """
        x = self._embedded(images)
        return self._pooled(x, torch.arange(x.shape[1]), None)

    def hidden_states(self, images: Tensor | Iterable[Tensor]) -> Tensor:
        """(B, N, E), patches row by row, before the mean; normalised if `norm_at` is "patches". Images as of `forward`."""
        return self._encoded(self._embedded(images), None)

    def _embedded(self, images: Tensor | Iterable[Tensor]) -> Tensor:
        """(B, N, E): embedded patches plus their positions."""
        self.configure_model()
        group = active_sequence()
        if group is not None and group.ranks > 1:
            raise ValueError("images are embedded on one rank; several take patches and grid of models.image_patches.")
        if isinstance(images, (list, tuple)):
            raise TypeError("images come stacked (B, C, H, W); strips of the same images come from an iterator.")
        strips = [self._strip(x) for x in (self._strips(images) if isinstance(images, Tensor) else images)]
        if not strips or not len(strips[0][0]):
            raise ValueError("there is no image: got an empty batch, or no strips.")
        sizes = [(len(x), columns) for x, columns in strips]
        if len(set(sizes)) > 1:
            raise ValueError(f"strips must be of the same images: got (images, patches in a row) of {sizes}.")
        x, columns = torch.cat([x for x, _ in strips], 1), strips[0][1]
        placed = table_positions(self.pos_embed, x.shape[1] // columns, columns, torch.arange(x.shape[1]))
        return x + placed.to(x.device, self.pos_embed.dtype)

    def _strips(self, images: Tensor) -> Iterable[Tensor]:
        if images.ndim != 4:
            self._check_pixels(images)
        return images.split(self.patch_size * max(1, CHUNK * self.patch_size // max(1, images.shape[3])), 2)

    def _check_pixels(self, images: Any) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != self.in_channels:
            shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"images must be (images, {self.in_channels}, height, width), got {shape}.")
        if not images.is_floating_point():
            raise TypeError(
                f"images are {images.dtype}: scale them to [0, 1] and normalise them as the weights were trained "
                "(x.float() / 255, then minus the channels' mean, divided by their standard deviation)."
            )

    def _strip(self, strip: Tensor) -> tuple[Tensor, int]:
        """(embedded patches (B, N, E), patches in a row) of a strip of images."""
        self._check_pixels(strip)
        weight = self.patch_embed.weight
        patches, _ = image_patches(strip, self.patch_size)
        return self.patch_embed(patches.to(weight.device, weight.dtype)), strip.shape[3] // self.patch_size

    # -- from batches --------------------------------------------------------------------------------------------------
    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, E) from a training batch, on every rank of the sequence."""
        self.configure_model()
        checked_by_all(self._check_entries, batch)
        if "image" in batch:
            return self(batch["image"])
        patches, grids = batch["patches"], torch.as_tensor(batch["grid"]).tolist()
        positions, group = token_positions(0, patches.shape[1]), active_sequence()
        seq_len = patches.shape[1] if group is None else group.agreed.seq_len  # type: ignore[union-attr]
        lengths = checked_by_all(_lengths, grids, seq_len)
        tables = {(r, c): table_positions(self.pos_embed, r, c, positions) for r, c in set(map(tuple, grids))}
        placed = torch.stack([tables[r, c] for r, c in grids])
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        return self._pooled(x + placed.to(x.device, self.pos_embed.dtype), positions, lengths)

    def _check_entries(self, batch: Mapping[str, Any]) -> None:
        if batch.get("cu_seqlens") is not None:
            raise ValueError(
                "the batch holds cu_seqlens, but a LongViT takes no images packed into one row: pad them (see "
                "models.image_patches)."
            )
        if "image" in batch and "patches" not in batch:
            return
        if "patches" not in batch or "grid" not in batch or "image" in batch:
            raise ValueError(
                f"the batch holds {list(batch)}, but a LongViT takes either `image`, or `patches` with `grid` (see "
                "models.image_patches)."
            )
        x, grid, width = batch["patches"], torch.as_tensor(batch["grid"]), self.in_channels * self.patch_size**2
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != width or not x.is_floating_point():
            kind = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"patches must be floating point (B, N, {width}), see models.image_patches; got {kind}.")
        if grid.shape != (len(x), 2) or grid.is_floating_point():
            kind = f"{grid.dtype} of shape {tuple(grid.shape)}"
            raise ValueError(f"grid must be integers ({len(x)}, 2), rows and columns of patches; got {kind}.")

    # -- to embeddings -------------------------------------------------------------------------------------------------
    def _encoded(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = self.transformer(self.dropout(x), lengths=lengths)
        return self.norm(x) if self.norm_at == "patches" else x

    def _pooled(self, x: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
        mean = mean_token(self._encoded(x, lengths), positions, lengths)
        return mean if self.norm_at == "patches" else self.norm(mean)


def _lengths(grids: list[list[int]], seq_len: int) -> Tensor | None:
    """(B,) patches of each image; None without padding."""
    lengths = [rows * columns for rows, columns in grids]
    if min(min(g) for g in grids) < 1 or max(lengths) != seq_len:
        raise ValueError(
            f"patches has {seq_len} rows an image, but the grids are {grids}: each must be (rows, columns) of patches, at "
            f"least 1 x 1, and the largest image must have {seq_len} of them."
        )
    return None if min(lengths) == seq_len else torch.tensor(lengths)
