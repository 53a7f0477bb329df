"""Generation by ranks that share prompts: logits and tokens are those of one rank, and each rank keeps its part of the rows.

Shape letters: B batch, N tokens of a prompt with its padding, R ranks, H query heads, K kv heads.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import DilatedPattern
from lightning_dilated.attention.kv_cache import KVCache
from lightning_dilated.attention.shared_prompts import SharedPrompts
from lightning_dilated.models.longnet import generation
from lightning_dilated.sequence import make_problem
from lightning_dilated.sequence.chunks import live_count
from lightning_dilated.sequence.shard import DealtRows, Shard

from ..examples import examples
from ..models import tiny
from ..pattern.strategies import patterns
from .calls import positions, sequence
from .strategies import HEADS

V = 11


@dataclass(frozen=True)
class Case:
    """A model, prompts and ranks: the repr repeats it."""

    pattern: Any
    ranks: int
    lengths: tuple[int, ...]
    padding: int = 0
    layout: str = "contiguous"
    head_size: int = 1
    heads: tuple[int, int] = (4, 2)
    kv_conv: int | None = None
    new: int = 12
    temperature: float = 0.0
    stop: int | None = None
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def seq_len(self):
        return max(self.lengths) + self.padding

    def model(self):
        """The same weights on every rank, so large that what a token says depends on all that it sees."""
        torch.manual_seed(6)
        heads, kv_heads = self.heads
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "dim": 4 * heads, "kv_conv": self.kv_conv}
        made = tiny(self.pattern, **{**sizes, "tie_embeddings": False, **dict(self.more)})
        with torch.no_grad():
            for name, p in made.named_parameters():
                if "kv_conv" in name:  # which begins as the identity
                    torch.nn.init.normal_(p, std=0.3)
                elif p.ndim >= 2:
                    p.mul_(20)
        return made

    def prompts(self):
        return torch.randint(V, (len(self.lengths), self.seq_len), generator=torch.Generator().manual_seed(3))

    def options(self, seed=0):
        ragged = self.padding or len(set(self.lengths)) > 1
        made = torch.Generator().manual_seed(4 + seed)
        options = {"temperature": self.temperature, "stop": self.stop, "generator": made}
        return {**options, **({"lengths": list(self.lengths)} if ragged else {})}


def recorded(model, tokens, case, seed=0):
    """(all tokens, the logits that each was drawn from)."""
    logits, draw = [], generation.Sampling.draw

    def watch(self, x, generator=None):
        logits.append(x.clone())
        return draw(self, x, generator)

    generation.Sampling.draw = watch
    try:
        return model.generate(tokens, case.new, **case.options(seed)), torch.stack(logits, 1)
    finally:
        generation.Sampling.draw = draw


def part(rank, group, case):
    with sequence(group, layout=case.layout, head_size=case.head_size) as ours, ours.active():
        tokens = case.prompts()[:, positions(ours, case.seq_len)]
        return recorded(case.model(), tokens, case, rank)


def check(pool, case):
    """Logits and tokens of every rank are those of one, and those of the full pass."""
    model, prompts = case.model(), case.prompts()
    want, logits = recorded(model, prompts, case)
    for tokens, found in pool.run(case.ranks, part, case):
        assert torch.equal(tokens, want), case
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        for row, length, seen in zip(want, case.lengths, logits, strict=True):
            full = model(row[None, : length + seen.shape[0] - 1])[0, length - 1 :]
            torch.testing.assert_close(seen, full, rtol=1e-10, atol=1e-10)


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    heads, kv = draw(st.sampled_from(HEADS))
    layout = draw(st.sampled_from(["contiguous", "zigzag", "strided"]))
    return Case(
        [draw(patterns(heads, kv)) for _ in range(draw(st.integers(1, 2)))],
        ranks,
        tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))),
        draw(st.sampled_from([0, 0, 3])),
        layout,
        draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0])),
        (heads, kv),
        None if layout == "strided" else draw(st.sampled_from([None, 2, 4])),
        draw(st.integers(1, 20)),
        more=(("depth", 2), ("position_encoding", draw(st.sampled_from(["rotary", "none"])))),
    )


@given(case=cases())
@settings(max_examples=examples(10))
def test_ranks_equal_one(pool, case):
    check(pool, case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=examples(200))
def test_many_random_cases(pool, case):
    check(pool, case)
