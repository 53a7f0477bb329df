"""MetricsProgressBar shows full names of metrics; Lightning's bar shortens them."""

import io

import lightning.pytorch as pl
import pytest
import rich
import rich.console
import torch
from lightning.pytorch.callbacks import RichProgressBar

import lightning_dilated as ld


def shown(kind: type[RichProgressBar], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the output of the bar in a short fit, in a terminal of `width` columns."""
    screen = io.StringIO()
    monkeypatch.setattr(rich, "_console", rich.console.Console())  # the bar reconfigures the process's console
    bar = kind(console_kwargs={"file": screen, "width": width, "force_terminal": True})
    tokens = torch.randint(256, (4, 33))
    loader = torch.utils.data.DataLoader([{"tokens": x[:-1], "labels": x[1:]} for x in tokens])
    model = ld.LongNetLM(ld.DilatedPattern.dense(), dim=16, depth=1, num_heads=1)
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(max_steps=4, callbacks=[bar], num_sanity_val_steps=0, **options).fit(model, loader, loader)
    return screen.getvalue()


def test_metrics_are_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shown(ld.callbacks.MetricsProgressBar, 74, monkeypatch)
    assert "val_bits_per_byte:" in own and "…" not in own
    assert "…" in shown(RichProgressBar, 74, monkeypatch)


def test_an_epoch_has_no_last_one_where_steps_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shown(ld.callbacks.MetricsProgressBar, 100, monkeypatch)
    assert "Epoch 0" in own and "/-2" not in own
    assert "Epoch 0/-2" in shown(RichProgressBar, 100, monkeypatch)


@pytest.mark.parametrize("width, columns", [(40, 8), (80, 10), (100, 30), (200, 40)])
def test_bar_takes_what_metrics_leave(width: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich, "_console", rich.console.Console(file=io.StringIO(), width=width))
    (bar,) = (x for x in ld.callbacks.MetricsProgressBar().configure_columns(pl.Trainer()) if hasattr(x, "bar_width"))
    assert bar.bar_width == columns
