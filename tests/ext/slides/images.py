"""Recorded LongViT models and small ones: what the tests of LongViT share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dilated import LongViT

DATA = torch.load(Path(__file__).parents[2] / "golden" / "longvit" / "two_layers_64.pt", weights_only=True)
CASES = DATA["cases"]
SIZES = {"image_size": 32, "patch_size": 4, "dim": 16, "depth": 2, "num_heads": 4, "drop_path": 0.0}
SIZES |= {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4]}


def state(kind: str = "pretrained") -> dict[str, Tensor]:
    """The recorded weights under the names of one of the two models that the release has."""
    if kind == "pretrained":
        return dict(DATA["pretrained"])
    inner = {f"model.{k}": v for k, v in DATA["pretrained"].items() if not k.startswith("norm.")}
    return {**inner, **DATA["finetuned_only"]}


def load(folder: Path, stored: Any, case: str = "ragged", **options: Any) -> LongViT:
    """The model of a file that holds `stored`, with a case's branches."""
    torch.save(stored, folder / "release.pth")
    told = {x: CASES[case][x] for x in ("segment_lengths", "dilation_rates")}
    return LongViT.from_longvit(folder / "release.pth", **{**told, **options})


def equal(model: LongViT, case: str, want: str = "pretrained_embedding", tol: float = 1e-5) -> None:
    """The model makes what was recorded."""
    with torch.no_grad():
        got = model(CASES[case]["image"].float())
    torch.testing.assert_close(got.float().cpu(), CASES[case][want], rtol=0, atol=tol)


def made(dtype: torch.dtype = torch.float64, **options: Any) -> LongViT:
    """A built model, equal weights at every call, every weight random."""
    model = LongViT(**{**SIZES, **options})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model.configure_model()
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype).eval()


def pixels(*shape: int, seed: int = 3) -> Tensor:
    """Random values of a shape, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
