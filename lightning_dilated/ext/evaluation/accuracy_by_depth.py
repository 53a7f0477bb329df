"""AccuracyByDepth: right answers about a long context, by its length and the depth of the answer.

Shape letters: B batch, L tokens of this rank, E features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated.data import LongContextDataModule
from lightning_dilated.ext.evaluation.counting import CountsAnswers, Report, append_rows, check_model, datamodule
from lightning_dilated.memory.chunked_loss import IGNORE

NAME = "accuracy_by_depth"
FIELDS = (
    *("step", "split", "task", "length", "depth", "samples", "right", "accuracy", "tokens", "token_accuracy"),
    *("blind", "unbound"),
)


class AccuracyByDepth(CountsAnswers):
    """Share of right answers in validation and test by length and depth, for a LongNetLM or HFCausalLM on a
    `LongContextDataModule`.

    An answer is right if each of its tokens is the likeliest one, given the right tokens before it. Samples are counted
    over all ranks; samples that were not computed are left out. After each validation and test the table is printed,
    appended to `accuracy_by_depth.csv`, and drawn as `accuracy_by_depth_TASK.png`.

    Logs `val_accuracy`, the share over all samples, and `val_accuracy_N` for each length N; in test `test_accuracy` and
    `test_accuracy_N`.

    Args:
        folder: folder of the CSV and the picture; None: the run's folder.
        table: print the table.
        picture: draw the picture.

    Attributes:
        rows: rows of the last validation or test, one for each length and depth: mappings of step, split, task, length,
            depth (percent), samples, right (samples), accuracy, tokens (of answers), token_accuracy, and the accuracy
            of guessing, blind and unbound.

    Raises:
        TypeError: when a run starts, for another model or other data.
        ValueError: when a run starts, if the model's vocabulary is smaller than the data's, or if the model has learned
            positions for fewer tokens. With rotary positions, longer samples only give a warning.
    """

    def __init__(self, folder: str | Path | None = None, table: bool = True, picture: bool = True) -> None:
        super().__init__()
        self.folder = None if folder is None else Path(folder)
        self.table, self.picture = table, picture
        self._where = Path()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check model and data, and determine the folder. Collective, because all ranks determine it."""
        data = datamodule(trainer)
        check_model(self, pl_module, "watch_predictions")
        if not isinstance(data, LongContextDataModule):
            kind = "loaders alone" if data is None else type(data).__name__
            raise TypeError(
                f"AccuracyByDepth needs a LongContextDataModule, which has lengths and depths; got {kind}. Give the "
                "Trainer such a DataModule, or remove the callback."
            )
        check_fits(pl_module, data)
        self._where = self.folder or Path(trainer.log_dir or trainer.default_root_dir)

    def counters(self, trainer: pl.Trainer, split: str) -> int:
        """Return the number of counters, one per sample, so that counts of all ranks can be summed."""
        return datamodule(trainer).sizes[split]

    def add(self, batch: Mapping[str, Any], predictions: Tensor) -> None:
        """Add a batch's predictions (B, L) at this rank's positions."""
        if self._counts is None:
            return
        labels = batch["labels"].to(predictions.device)
        counted = labels != IGNORE
        right = (predictions == labels) & counted
        index = batch["index"].to(self._counts.device)
        for row, values in zip(self._counts, (right, counted), strict=True):
            row.index_add_(0, index, values.sum(1).to(self._counts.device))

    def evaluate(self, trainer: pl.Trainer, split: str, right: list[int], labels: list[int]) -> Report:
        """Return table rows, and {suffix: accuracy} to log, from each counter's numbers of right answers and labels."""
        rows = rows_of(datamodule(trainer), split, trainer.global_step, right, labels)
        chosen = {"": rows, **{f"_{n}": _with_length(rows, n) for n in _lengths(rows)}}
        return rows, {x: sum(r["right"] for r in y) / sum(r["samples"] for r in y) for x, y in chosen.items()}

    def write(self) -> None:
        append_rows(self._where / f"{NAME}.csv", FIELDS, self.rows)
        if self.table:
            console = Console()
            console.print(headline(self.rows), soft_wrap=True)
            console.print(table_of(self.rows))
        if self.picture:
            draw(self.rows, self._where / f"{NAME}_{self.rows[0]['task']}.png")


def check_fits(model: Any, data: LongContextDataModule) -> None:
    """Raise ValueError if the model lacks tokens or positions of the data; warn of lengths that it is not made for."""
    longest, most = max(data.lengths), model.made_for
    if data.vocab_size > model.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} tokens, and the data ({data.form.rule()}) has {data.vocab_size}. Give the "
            "tokenizer that the model was trained with, or train the model with a vocabulary of at least that size."
        )
    if most is None or longest <= most:
        return
    if model.learns_positions:
        raise ValueError(
            f"the lengths go up to {longest:,}, but the model has positions for {most:,} tokens: leave out longer ones."
        )
    rank_zero_warn(
        f"the lengths go up to {longest:,}, above the {most:,} tokens that the model is made for: expect wrong answers "
        "there."
    )


def rows_of(
    data: LongContextDataModule, split: str, step: int, right: Sequence[int], labels: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each length and depth, from each sample's numbers of right tokens and labels."""
    cells: dict[Any, list[tuple[int, int]]] = {}
    for index, pair in enumerate(zip(right, labels, strict=True)):
        if pair[1]:
            cells.setdefault(data.cell(split, index), []).append(pair)
    rows = []
    for cell, pairs in cells.items():
        tokens, good = sum(n for _, n in pairs), sum(k == n for k, n in pairs)
        rows.append(
            {
                **{"step": step, "split": split, "task": data.task.name, "length": cell.length, "depth": cell.depth},
                **{"samples": len(pairs), "right": good, "accuracy": good / len(pairs)},
                **{"tokens": tokens, "token_accuracy": sum(k for k, _ in pairs) / tokens, **data.guess},
            }
        )
    return rows


def _lengths(rows: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["length"] for row in rows))


def _depths(rows: list[dict[str, Any]]) -> list[float]:
    return list(dict.fromkeys(row["depth"] for row in rows))


def _with_length(rows: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["length"] == length]


def headline(rows: list[dict[str, Any]]) -> str:
    """Return a line that describes the table, with the accuracy of guessing."""
    first = rows[0]
    guess = f"{100 * first['unbound']:.3g} among the values of the text, {100 * first['blind']:.3g} among all"
    return f"{first['task']}: percent of right answers by length and depth (guessing: {guess})"


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the percentage of right answers, with a line per length, and columns per depth and for all."""
    table = Table()
    for name in ("tokens", *(f"{depth:g} %" for depth in _depths(rows)), "all"):
        table.add_column(name, justify="right")
    for length in _lengths(rows):
        chosen = {row["depth"]: row for row in _with_length(rows, length)}
        shares = [f"{100 * chosen[d]['accuracy']:.1f}" if d in chosen else "" for d in _depths(rows)]
        share = sum(r["right"] for r in chosen.values()) / sum(r["samples"] for r in chosen.values())
        table.add_row(f"{length:,}", *shares, f"{100 * share:.1f}")
    return table


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a PNG: a column per length, a row per depth, and shares of right answers as colours and numbers."""
    from matplotlib.figure import Figure

    lengths, depths = _lengths(rows), sorted(_depths(rows))
    share = torch.full((len(depths), len(lengths)), float("nan"))
    for row in rows:
        share[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    size = (2.4 + 0.8 * len(lengths), 1.6 + 0.45 * len(depths))
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    axes = figure.subplots()
    image = axes.imshow(share.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:g} %" for d in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(rows[0]["task"])
    for y, line in enumerate(share.tolist()):
        for x, value in enumerate(line):
            colour = "black" if value > 0.6 else "white"
            axes.text(x, y, "" if value != value else f"{100 * value:.0f}", ha="center", va="center", color=colour)
    figure.colorbar(image, ax=axes, label="share of right answers")
    figure.savefig(path)
