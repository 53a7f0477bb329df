"""Random samples of one length for the models of this package, equal on all ranks.

Shape letters: N tokens, F features, C classes, P pixels of a patch's side.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dilated.cli.find_max.trials import LINE
from lightning_dilated.models import DilatedModule, TokenModel
from lightning_dilated.models.longnet.classifier import LongNetClassifier
from lightning_dilated.models.longvit.model import LongViT
from lightning_dilated.models.slides.encoder import SlideEncoder
from lightning_dilated.models.slides.mae import SlidePretrainer


class Samples(Dataset):
    """Two samples of N tokens: of a text, rows of a slide (its tiles, behind one for the class token), patches of an image.

    Args:
        model: of a recipe.
        tokens: N.

    Raises:
        ValueError: for a model whose batches are not known, or that is not trained.
    """

    def __init__(self, model: DilatedModule, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        if not isinstance(model, (TokenModel, LongNetClassifier, SlideEncoder, SlidePretrainer, LongViT)):
            raise ValueError(
                "--find-max makes random samples for LongNetLM, LongNetMLM, LongNetClassifier, SlideEncoder, "
                f"SlidePretrainer and LongViT, not for {type(model).__name__}. Run fit with ever longer data of your own."
            )
        if getattr(model, "task", "some") is None:
            raise ValueError(f"this {type(model).__name__} has no task, so it is not trained: give it one.")

    @property
    def line(self) -> str:
        """What a recipe says of a length, {} standing for N."""
        if isinstance(self.model, (SlideEncoder, SlidePretrainer)):
            return "data.init_args.max_tiles: {}, less 1 for the class token's row"
        return "images of at most {} patches" if isinstance(self.model, LongViT) else LINE

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        made, model, n = torch.Generator().manual_seed(index), self.model, self.tokens
        words = lambda size, kinds: torch.randint(0, kinds, size, generator=made)  # noqa: E731
        rows = lambda width: torch.randn(n, width, generator=made)  # noqa: E731
        if isinstance(model, TokenModel):
            text = words((n + 1,), model.vocab_size)
            return {"tokens": text[:-1], "labels": text[1:], "index": index}
        label = {} if isinstance(model, SlidePretrainer) else {"label": self._label(made)}
        if isinstance(model, LongViT):
            columns = next(x for x in range(math.isqrt(n), 0, -1) if n % x == 0)
            patches = rows(model.in_channels * model.patch_size**2)
            return {"patches": patches, "grid": torch.tensor([n // columns, columns]), "index": index, **label}
        if isinstance(model, LongNetClassifier):
            many = {"tokens": words((n,), model.width)} if model.input == "tokens" else {"features": rows(model.width)}
            return {**many, "index": index, **label}
        place = torch.arange(n - 1)
        cells = torch.stack([place % model.grid, place // model.grid % model.grid], 1) * model.tile_size
        coords = torch.cat([torch.full((1, 2), -1), cells])
        return {"features": rows(model.feature_dim), "coords": coords, "lengths": n, "index": index, **label}

    def _label(self, made: torch.Generator) -> Tensor:
        """() int64 of classes, or (C,) targets."""
        count = self.model.num_classes or 1
        return (
            torch.randn(count, generator=made)
            if self.model.task == "regression"
            else torch.randint(0, count, (), generator=made)
        )
