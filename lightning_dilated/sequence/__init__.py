"""One sequence on many ranks: where its tokens lie, which rows must move, and the exact exchanges that move them."""

from lightning_dilated.sequence.collectives import sequence_gather, sequence_mean, sequence_sum
from lightning_dilated.sequence.group import SequenceGroup, active_sequence
from lightning_dilated.sequence.plan import Links, Plan, make_problem, plan
from lightning_dilated.sequence.shard import Shard

__all__ = [
    "Links",
    "Plan",
    "SequenceGroup",
    "Shard",
    "active_sequence",
    "make_problem",
    "plan",
    "sequence_gather",
    "sequence_mean",
    "sequence_sum",
]
