"""Lightning's progress bars show the current chunk in every stage, on rank 0 only."""

import io
import re
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedStrategy
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.ext.streams import progress as chunk_progress

from ...models import batch, tiny, trainer
from ...strategy.runs import launched

PATTERN = DilatedPattern.longnet([4, 16], [1, 2])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Draw bars after every chunk, without the minimum time between them."""
    monkeypatch.setattr(chunk_progress, "SECONDS", 0.0)


class Tqdm(TQDMProgressBar):
    """A tqdm bar that writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.out = io.StringIO()

    def _to_buffer(self, bar):
        bar.fp = self.out  # the buffer to which tqdm writes
        bar.sp = bar.status_printer(self.out)
        return bar

    def init_sanity_tqdm(self):
        return self._to_buffer(super().init_sanity_tqdm())

    def init_train_tqdm(self):
        return self._to_buffer(super().init_train_tqdm())

    def init_validation_tqdm(self):
        return self._to_buffer(super().init_validation_tqdm())

    def init_test_tqdm(self):
        return self._to_buffer(super().init_test_tqdm())

    def init_predict_tqdm(self):
        return self._to_buffer(super().init_predict_tqdm())

    def lines(self):
        return re.split("[\\r\\n]", self.out.getvalue())


class Rich(RichProgressBar):
    """A rich bar that draws immediately, on its own terminal."""

    def __init__(self):
        self.out = io.StringIO()
        super().__init__(console_kwargs={"file": self.out, "force_terminal": True, "width": 200})

    def refresh(self, hard=False):
        super().refresh(hard=True)

    def lines(self):
        return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", self.out.getvalue()).splitlines()


def texts(n=2, tokens=14):
    return DataLoader([{k: v[0] for k, v in batch(1, tokens).items()} for _ in range(n)], batch_size=1)


def run(bar, stage, **options):
    """Return the lines that the bar writes in a run of two batches of four chunks."""
    recompute = ActivationRecompute(stream=4, truncate=options.pop("truncate", False))
    built = trainer(callbacks=[bar, recompute], enable_progress_bar=True, max_epochs=1, precision="64-true", **options)
    if stage == "fit":
        built.fit(tiny(), texts(), texts())
    else:
        getattr(built, stage)(tiny(), texts())
    return bar.lines()


def chunks(lines, name):
    """Return the chunks that the lines show, in order, without repetitions."""
    every = [re.findall("(?:forward|backward|chunk) +[0-9/]+", line) for line in lines if name in line]
    said = [chunk for line in every for chunk in line]
    return [x for i, x in enumerate(said) if i == 0 or said[i - 1] != x]


FORWARD, BACKWARD = (["forward 1/3", "forward 2/3"], ["backward 1/4", "backward 2/4", "backward 3/4"])
WHOLE = ["forward 1/4", "forward 2/4", "forward 3/4"]


@pytest.mark.parametrize("kind", [Tqdm, Rich])
def test_a_fit(kind, capsys):
    lines = run(kind(), "fit", num_sanity_val_steps=1)
    assert chunks(lines, "Sanity Checking") == WHOLE
    assert chunks(lines, "Epoch 0") == [*FORWARD, *BACKWARD] * 2
    assert chunks(lines, "Validation") == WHOLE * 2
    shown = [line for line in lines if "Epoch 0" in line and "backward" in line]
    assert "train_loss" in shown[-1], "the text of the bar was lost"
    assert not re.search("forward|backward", "".join(lines[-2:])), "a chunk was left behind"
    assert "ward" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Tqdm, Rich])
@pytest.mark.parametrize("stage, name", [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")])
def test_stages(kind, stage, name):
    lines = run(kind(), stage)
    assert chunks(lines, name) == WHOLE * 2


def test_truncated_training():
    lines = run(Tqdm(), "fit", truncate=True, limit_val_batches=0)
    assert chunks(lines, "Epoch 0") == ["chunk 1/4", "chunk 2/4", "chunk 3/4"] * 2


@pytest.mark.parametrize("kind", [Tqdm, Rich])
def test_short_passes_are_not_shown(kind, monkeypatch):
    """Chunks are not shown in short passes, nor by a disabled bar."""
    bar = kind()
    bar.disable()
    assert "ward" not in "".join(run(bar, "fit"))
    monkeypatch.setattr(chunk_progress, "SECONDS", 60.0)
    assert "ward" not in "".join(run(kind(), "fit"))


def test_a_bar_of_another_kind_is_let_be():
    class Own(ProgressBar):
        def lines(self):
            return []

        def enable(self):
            pass

        def disable(self):
            pass

    assert run(Own(), "fit") == [] and chunk_progress.bar_text(None, None) is None


def test_a_failed_step_and_the_model_afterwards():
    """After a failed pass, its text is not shown again, and the model has no progress callback."""
    model, shown, bar = tiny().train(), [], Tqdm()
    run_chunk, broken = model.streaming.chunk, []

    def chunk(model, batch, at, *args):
        if at == 2 and not broken:
            broken.append(at)
            raise KeyError("broken")
        return run_chunk(model, batch, at, *args)

    model.streaming.chunk = chunk
    recompute = ActivationRecompute(stream=4)
    with pytest.raises(KeyError, match="broken"):
        trainer(callbacks=[bar, recompute], enable_progress_bar=True, max_steps=1, precision="64-true").fit(
            model, texts()
        )
    trainer(callbacks=[recompute], max_steps=1, precision="64-true").fit(model, texts())
    assert chunks(bar.lines(), "Epoch 0") == FORWARD
    assert model.transformer.stream.watch is None
    model.transformer.stream.watch = lambda *chunk: shown.append(chunk)
    with torch.no_grad():
        model.stream(batch(1, 14)["tokens"], chunk=5)
    assert shown == [("forward", i, 3) for i in range(4)]


def on_ranks(rank, group):
    """Return (lines of this rank's bar, whether its streams have a progress callback)."""
    bar, watched = Tqdm(), []

    class Looks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            watched.append(pl_module.transformer.stream.watch is not None)

    built = pl.Trainer(
        accelerator="cpu", devices=launched(rank), strategy=RingDilatedStrategy(sequence_size=1), max_steps=1,
        callbacks=[bar, ActivationRecompute(stream=4), Looks()], logger=False, enable_checkpointing=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    with mock.patch.object(chunk_progress, "SECONDS", 0.0):
        built.fit(LongNetLM(PATTERN, 11, dim=16, depth=1, num_heads=4), texts())
    return bar.lines(), watched


@pytest.mark.full
def test_other_ranks_show_nothing(pool):
    (lines, watched), (silent, unwatched) = pool.run(2, on_ranks)
    assert chunks(lines, "Epoch 0") == [*FORWARD, *BACKWARD] and watched == [True]
    assert "".join(silent) == "" and unwatched == [False]
