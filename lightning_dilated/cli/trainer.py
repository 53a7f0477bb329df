"""The Trainer of the command line: Lightning's, whose number of nodes may be that of the launcher."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl

from lightning_dilated.strategy import launched_nodes


class Trainer(pl.Trainer):
    """Lightning's Trainer.

    Args:
        num_nodes: number of nodes; "auto": as many as torchrun or SLURM started.
    """

    def __init__(self, *, num_nodes: int | Literal["auto"] = 1, **kwargs: Any) -> None:
        super().__init__(num_nodes=launched_nodes() if num_nodes == "auto" else num_nodes, **kwargs)
