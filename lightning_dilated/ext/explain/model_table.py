"""ModelTable: a model's layers and parameters, printed when a fit starts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelSummary
from typing_extensions import override


class ModelTable(ModelSummary):
    """Prints Lightning's summary as a short table of layers with parameters, without FLOPs.

    Lightning counts FLOPs only with an `example_input_array`; `lightning-dilated explain` and `plan` count them.
    """

    @staticmethod
    @override
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the table."""
        print("\n" + table(dict(summary_data), total_parameters, trainable_parameters, model_size) + "\n", flush=True)


def table(columns: dict[str, list[str]], total: int, trained: int, megabytes: float) -> str:
    """Return one line for each layer, and a line with the sums.

    Args:
        columns: columns of Lightning's summary: each layer's "Name", "Type", "Params" (a number as text) and "Mode".
        total, trained: numbers of all parameters and of trained parameters.
        megabytes: size of all parameters.
    """
    names = [name for name in ("Name", "Type", "Params per Device", "Params", "Mode") if name in columns]
    rows = [[columns[name][i].strip() for name in names] for i in range(len(columns["Name"]))]
    size = names.index("Params")
    rows = [row for row in rows if row[size] != "0"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(x.rjust(w) if "Params" in name else x.ljust(w) for name, x, w in zip(names, row, widths, strict=True))
        for row in rows
    ]
    frozen = "all of them trained" if trained == total else f"{trained:,} of them trained"
    return "\n".join(
        [*(f"  {line.rstrip()}" for line in lines), f"  {total:,} parameters ({megabytes:,.1f} MB), {frozen}"]
    )
