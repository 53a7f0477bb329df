"""Attention maps on many ranks equal the maps of one rank, if ranks predict different slides."""

import numpy as np
import pytest
import torch

from lightning_dilated import RingDilatedStrategy
from lightning_dilated.callbacks import AttentionWriter
from lightning_dilated.data import SlideDataModule, write_synthetic_slides

from ..ext.slides.slides import encoder
from .runs import launched, trainer

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five slides, so that two data ranks have unequal numbers."""
    path = tmp_path_factory.mktemp("slides")
    write_synthetic_slides(path, slides=5, tiles=(6, 40), features=12)
    return str(path)


def predicted(rank, group, settings, folder, out):
    """Write maps to `out`."""
    data = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=1, batch_size=2)
    run = trainer(RingDilatedStrategy(**settings), launched(rank), callbacks=[AttentionWriter(path=f"{out}/maps")])
    run.predict(encoder(grid=100), data, return_predictions=False)


def test_attention_of_data_ranks(pools, tmp_path, folder):
    """Ranks with different slides write all maps. Ranks that share slides raise before they predict."""
    pools(1).run(1, predicted, {}, folder, str(tmp_path / "one"))
    pools(2).run(2, predicted, {"sequence_size": 1}, folder, str(tmp_path / "many"))
    written = [sorted(x.name for x in (tmp_path / name / "maps").iterdir()) for name in ("one", "many")]
    files = sorted((tmp_path / "one" / "maps").glob("*.npz"))
    assert written[0] == written[1] == sorted(f"{x.stem}.{kind}" for x in files for kind in ("npz", "png"))
    assert len(files) == 5
    for path in files:
        with np.load(path) as one, np.load(tmp_path / "many" / "maps" / path.name) as other:
            torch.testing.assert_close(torch.tensor(other["attention"]), torch.tensor(one["attention"]))
    errors = pools(2).errors(ValueError, 2, predicted, {}, folder, str(tmp_path / "shared"))
    assert all("2 ranks share each slide" in error for error in errors)
    assert not (tmp_path / "shared").exists()
