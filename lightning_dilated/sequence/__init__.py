"""One sequence on many ranks: its shards, the rows that must move between ranks, and the exchanges that move them."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.sequence.collectives import loss_share, loss_sum, sequence_gather, sequence_mean, sequence_sum
from lightning_dilated.sequence.group import SequenceGroup, active_sequence, no_sequence
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import Plan, make_problem, plan
from lightning_dilated.sequence.shard import Place, SequenceSpec, Shard

if TYPE_CHECKING:
    from lightning_dilated.ext.convolution.halo import SequenceConv1d, sequence_halo

__getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Links",
    "Place",
    "Plan",
    "SequenceConv1d",
    "SequenceGroup",
    "SequenceSpec",
    "Shard",
    "active_sequence",
    "loss_share",
    "loss_sum",
    "make_problem",
    "no_sequence",
    "plan",
    "sequence_gather",
    "sequence_halo",
    "sequence_mean",
    "sequence_sum",
]
