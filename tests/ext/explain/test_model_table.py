"""ModelTable shows layers with parameters and their sums, and shows FLOPs only if they were counted."""

import pytest

import lightning_dilated as ld
from lightning_dilated.ext.explain.model_table import ModelTable, table

from ...models import trainer


def test_layers_and_sums(capsys):
    m = ld.LongNetLM(ld.DilatedPattern.longnet([8], [1]), dim=16, depth=1, num_heads=2)
    m.configure_model()
    m.embedding.requires_grad_(False)
    ModelTable().on_fit_start(trainer(), m)
    out = capsys.readouterr().out
    total = sum(p.numel() for p in m.parameters())
    trained = sum(p.numel() for p in m.parameters() if p.requires_grad)
    assert f"{total:,} parameters" in out and f"{trained:,} of them trained" in out and trained < total
    assert "embedding" in out and "transformer" in out and "mean_loss" not in out and "FLOPs" not in out


@pytest.mark.parametrize("sharded", [False, True])
def test_columns_are_aligned(sharded):
    columns = {
        "Name": ["a", "longer"],
        "Type": ["Linear", "X"],
        "Params": ["1.2 K", "12.3 M"],
        "Mode": ["train", "eval"],
    }
    columns |= {"FLOPs": ["0", "0"]} | ({"Params per Device": ["0.6 K", "6 M"]} if sharded else {})
    lines = table(columns, 12_301_200, 12_301_200, 49.2).splitlines()
    assert lines[-1] == "  12,301,200 parameters (49.2 MB), all of them trained"
    assert lines[0].index("train") == lines[1].index("eval")
