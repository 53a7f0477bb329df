"""Random numbers that a run repeats, and that a resumed run continues: seeds of every step from (seed, stage, step, rank).

Ranks of one sequence draw hidden dropout apart, since they hold different tokens, and what is decided once for the sequence
together: outside of steps all generators are in step, and inside of them the CPU's is where the model is on a GPU. Attention
dropout takes one seed a sequence, from its first rank, whatever their number.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def run_seed(strategy: Any) -> int:
    """The run's seed, equal on all ranks. Where nobody called `seed_everything`, every rank takes rank 0's state."""
    if "PL_GLOBAL_SEED" in os.environ:
        return int(os.environ["PL_GLOBAL_SEED"])
    seed = strategy.broadcast(torch.initial_seed() % 2**32)
    if strategy.world_size > 1:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
    return seed


def key(*words: object) -> int:
    """A 63-bit seed from words."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def step_seeds(seed: int, stage: str, step: int, data_rank: int, rank: int, device: torch.device) -> Iterator[None]:
    """Within, generators start from the seeds of a step of one rank of a sequence; after it the CPU's goes on as before.

    On a GPU only its own generator differs between the ranks of a sequence.
    """
    words = (seed, stage, step, data_rank)
    before = torch.get_rng_state()
    if device.type == "cuda":
        torch.default_generator.manual_seed(key(*words))
        torch.cuda.default_generators[device.index or 0].manual_seed(key(*words, rank))
    else:
        torch.default_generator.manual_seed(key(*words, rank))
    try:
        yield
    finally:
        torch.set_rng_state(before)
