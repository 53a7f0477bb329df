"""The warning about walls on many ranks: rank zero prints it once, for the length of the whole sequence."""

import warnings

import pytest
import torch.distributed as dist

from lightning_dilated import DilatedPattern

from .runs import Run, launched, make

pytestmark = pytest.mark.full

RUN = Run(steps=1, model={"pattern": DilatedPattern.longnet([10, 20], [1, 2])})


def warned(rank, group):
    with warnings.catch_warnings(record=True) as caught:
        built, model, data, _ = make(RUN, launched(rank))
        warnings.simplefilter("always")
        built.fit(model, data)
    assert dist.get_world_size() == 2
    return [str(w.message) for w in caught if "wall(s)" in str(w.message)]


def test_rank_zero_speaks_of_the_whole_sequence(pools):
    """The whole sequence of 40 tokens crosses a wall, a shard of 20 tokens does not."""
    results = pools(2).run(2, warned)
    assert len(results[0]) == 1 and "at 40 tokens: 1 wall(s)" in results[0][0] and results[1] == []
