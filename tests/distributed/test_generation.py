"""Generation by ranks that share prompts: logits and tokens are those of one rank, and each rank keeps its part of the rows.

Shape letters: B batch, N tokens of a prompt with its padding, R ranks, H query heads, K kv heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import DilatedPattern, Window
from lightning_dilated.ext.decoding import generation
from lightning_dilated.ext.decoding.cache_slots import layer_slots
from lightning_dilated.ext.decoding.shared_prompts import DecodedShard, SharedPrompts
from lightning_dilated.ext.streams.carried_rows import ENDLESS, chunk_problem, leaving_rows, live_count
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.sequence.requirements import Document
from lightning_dilated.sequence.shard import Shard

from ..examples import examples
from ..models import tiny
from ..pattern.strategies import branches, patterns
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
                if "conv" in name or name.endswith("recurrence.scale"):  # which begin as the identity, and closed
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
        [
            draw(patterns(heads, kv, windows=False, global_tokens=layout != "strided"))
            for _ in range(draw(st.integers(1, 2)))
        ],
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
@settings(max_examples=examples(4))
def test_ranks_equal_one(pool, case):
    check(pool, case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=examples(200))
def test_many_random_cases(pool, case):
    check(pool, case)


HYBRID = {"hybrid": {"local": 5, "global_every": 2}}
NAMED = {
    "hybrid, gqa, kv_conv, zigzag": Case(HYBRID, 3, (29, 7), layout="zigzag", kv_conv=4),
    "hybrid, drawn": Case(HYBRID, 4, (37,), temperature=1.3),
    "shifted, past the segments": Case(DilatedPattern.longnet([4, 16], [1, 2]).shifted(), 2, (21,), new=40),
    "recurrence": Case(HYBRID, 2, (29, 7), padding=2, more=(("recurrence", [{}, {"kind": "delta", "segment": 5}]),)),
    "recurrence, zigzag": Case(HYBRID, 3, (20,), layout="zigzag", more=(("recurrence", {"kind": "linear", "segment": 4}),)),
    "an empty shard": Case(DilatedPattern.longnet([4, 16], [1, 2]), 4, (9, 2), kv_conv=3),
    "more ranks than heads and tokens": Case(DilatedPattern.dense(), 4, (1,), heads=(1, 1), kv_conv=2),
    "padding": Case(DilatedPattern.longnet([8, 32], [1, 3], offsets="blocked"), 3, (3, 20, 11), padding=13),
    "whole sequence, head groups": Case(
        DilatedPattern([(None, 1), (None, 3), (8, 2)]), 4, (26, 5), head_size=2, layout="zigzag"
    ),
    "xpos": Case(
        DilatedPattern.longnet([4, 16], [1, 2]), 2, (19,),
        more=(("position_encoding", "xpos"), ("xpos_scale_base", 16.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_cases(pool, name):
    check(pool, NAMED[name])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop(pool, temperature):
    """All ranks end with the last sample."""
    case = Case(HYBRID, 2, (9, 14), temperature=temperature, new=25)
    free = recorded(case.model(), case.prompts(), case)[0]
    stopped = replace(case, stop=int(free[1, 16]))
    want = recorded(case.model(), case.prompts(), stopped)[0]
    for tokens, _ in pool.run(2, part, stopped):
        assert torch.equal(tokens, want)
    assert want.shape[1] <= free.shape[1]


def streamed(rank, group, case):
    """The tokens of a stream, with the draws of a generator of each rank's own, and the state of torch's afterwards."""
    torch.manual_seed(5 + rank)
    with sequence(group, layout=case.layout) as ours:
        model, tokens = case.model(), case.prompts()[:, positions(ours, case.seq_len)]
        with ours.active():
            stream = model.generate_stream(tokens, case.new, temperature=case.temperature)
        return torch.stack(list(stream), 1)  # the ranks are those of the call


def test_stream_draws_as_rank_0(pool):
    case = Case(HYBRID, 3, (23, 23), temperature=1.0)
    model = case.model()
    torch.manual_seed(5)
    case.model()
    want = model.generate(case.prompts(), case.new)
    for tokens in pool.run(3, streamed, case):
        assert torch.equal(tokens, want[:, 23:])


def with_one_rank(rank, group, case):
    with sequence(group) as ours, ours.active():
        return case.model().generate(case.prompts(), case.new, temperature=0)


def test_a_group_of_one_rank(pool):
    case = Case(HYBRID, 1, (23,))
    want = case.model().generate(case.prompts(), case.new, temperature=0)
    assert torch.equal(pool.run(1, with_one_rank, case)[0], want)


# -- rows ----------------------------------------------------------------------------------------------------------------
def kept(rank, group, case):
    """(rows of each branch after the prompt, and after each token; bytes of the caches; traffic of a token)."""
    with sequence(group, layout=case.layout) as ours, torch.no_grad():
        model, tokens = case.model(), case.prompts()[:, positions(ours, case.seq_len)]
        shared = SharedPrompts(ours, case.seq_len, case.lengths)
        caches = model.transformer.new_caches(case.seq_len + case.new, shared=shared)
        with ours.active():
            model(tokens, caches=caches)
        rows, where = [[cache.rows() for cache in caches]], [cache._k.data_ptr() for cache in caches]
        before = ours.forward_traffic.messages, ours.forward_traffic.sent
        for _ in range(case.new):
            model(tokens.new_zeros(len(tokens), 1), caches=caches, last_only=True)
            rows.append([cache.rows() for cache in caches])
        assert where == [cache._k.data_ptr() for cache in caches]  # the buffers stay where they are
        sent = ours.forward_traffic.messages - before[0], ours.forward_traffic.sent - before[1]
        return rows, sum(cache.nbytes for cache in caches), sent


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_are_kept_once(pool, layout):
    """Every row lies on one rank; a head that sees all keeps an equal part on each, before and after the prompt."""
    case = Case([DilatedPattern.dense(), DilatedPattern.longnet([8, 64], [1, 3])], 4, (48,), layout=layout, new=40)
    model, found = case.model(), pool.run(4, kept, case)
    caches = model.transformer.new_caches(88)
    with torch.no_grad():
        for step, part in enumerate(case.prompts().new_zeros(1, 88).split([48, *[1] * 40], 1)):
            model(part, caches=caches)
            for layer, cache in enumerate(caches):
                for branch, want in enumerate(cache.rows()):
                    parts = [rows[step][layer][branch] for rows, _, _ in found]
                    assert {h: sum(x.get(h, 0) for x in parts) for h in want} == want
            assert all(12 + step // 4 <= x[step][0][0][0] <= 12 + -(-step // 4) for x, _, _ in found)
    whole, most = sum(cache.nbytes for cache in caches), max(size for _, size, _ in found)
    assert most < 0.5 * whole
    heads, dim, layers = 4, 4, 2
    assert all(sent == (40 * layers * 3, 40 * layers * 3 * heads * (dim + 1) * 8) for _, _, sent in found)


@given(st.data())
@settings(max_examples=examples(60))
def test_rows_of_the_prompt_are_those_that_a_stream_carries(data):
    """The cache keeps of a branch what chunks of a stream carry on: the rows that later tokens read."""
    heads, kv = data.draw(st.sampled_from(HEADS))
    branch = data.draw(branches(heads, heads // kv, True, windows=False))
    pattern, prompt = DilatedPattern([branch], offset_heads="kv"), data.draw(st.integers(1, 60))
    ranks, layout = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["contiguous", "zigzag"]))
    problem = chunk_problem(pattern, heads, kv, [Document(0, 1, 0, ENDLESS)], ChunkShard(0, ENDLESS, 1), (0, heads))
    total = 0
    for rank in range(ranks):
        kept, shard = DecodedShard(Shard(prompt, ranks, layout), rank), Shard(prompt, ranks, layout)
        want = sum(len(x.rows) for held in shard.ranges(rank) for x in leaving_rows(problem, held, prompt))
        assert rows_of(pattern, heads, kv, kept, prompt) == want, (rank, branch)
        total += want
    assert total == live_count(problem, prompt)


def rows_of(pattern, heads, kv_heads, kept, prompt):
    """Rows of all slots that a rank keeps of a prompt and that a later token reads."""
    (branch,) = layer_slots(pattern, heads, kv_heads)
    first, reads = branch.first(prompt - 1), lambda rows: bool(rows[-1:]) and rows[-1] >= prompt
    end = ENDLESS if branch.width is None else first + branch.width
    return sum(
        kept.count(branch.positions(residue, first, prompt), prompt)
        for residue, _ in branch.users
        if reads(branch.positions(residue, first, end))
    )


# -- errors --------------------------------------------------------------------------------------------------------------
def odd_one(rank, group, settings, odd):
    """The last rank makes another call; then all make a valid one."""
    case = Case(HYBRID, group.size(), (11, 11), new=3)
    model = case.model()
    with sequence(group, **settings) as ours, ours.active():
        tokens = case.prompts()[:, positions(ours, 11)]
        options = {"max_new_tokens": 3, "temperature": 0, "tokens": tokens}
        mine = {**options, **(odd if rank == ours.ranks - 1 else {})}
        if "vocabulary" in mine:
            mine["tokens"] = mine["tokens"] + mine.pop("vocabulary")
        try:
            model.generate(**mine)
        except (ValueError, TypeError) as error:
            return str(error), None if settings else model.generate(**options)
    return None, None


ODD = {
    "count": ({"max_new_tokens": 4}, "count: rank 2 has 4"),
    "temperature": ({"temperature": 0.5}, "sampling: rank 2 has"),
    "stop": ({"stop": 3}, "ends: rank 2 has"),
    "lengths": ({"lengths": [11, 4]}, "lengths: rank 2 has"),
    "wrong lengths": ({"lengths": [12, 4]}, "lengths holds 12"),
    "wrong option": ({"top_p": 0.0}, "top_p must be"),
    "wrong tokens": ({"vocabulary": 20}, "vocab_size=11 allows 0 to 10"),
    "no tokens": ({"tokens": None}, "the prompt must be"),
    "tokens of another shard": ({"tokens": torch.zeros(2, 9, dtype=torch.int64)}, "of the sequence holds"),
    "batch": ({"tokens": torch.zeros(1, 3, dtype=torch.int64)}, "shape: rank 2 has"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_rank_that_differs(pool, name):
    """All ranks raise before anything is computed, and go on afterwards."""
    odd, text = ODD[name]
    case = Case(HYBRID, 3, (11, 11), new=3)
    want = case.model().generate(case.prompts(), 3, temperature=0)
    for error, after in pool.run(3, odd_one, {}, odd):
        assert error and text in error, error
        assert torch.equal(after, want)


def windowed_model(rank, group):
    """What ranks that share a prompt say of a model with windows."""
    case = Case([DilatedPattern([Window(4)])], group.size(), (11, 11), new=3)
    with sequence(group) as ours, ours.active(), pytest.raises(ValueError) as refused:
        case.model().generate(case.prompts()[:, positions(ours, 11)], max_new_tokens=3)
    return str(refused.value)


def test_windows_are_refused(pool):
    for message in pool.run(2, windowed_model):
        assert "ranks cannot share prompts where a layer has windows, as Window(4)" in message


def test_chunked_layout_is_refused(pool):
    errors = pool.run(2, odd_one, {"layout": "chunked", "stream": 4}, {})
    assert all("layout='chunked' is not offered" in error for error, _ in errors), errors


def left_early(rank, group):
    """One rank leaves a stream after a token, and begins another."""
    case = Case(HYBRID, 2, (11,), new=5)
    model = case.model()
    with sequence(group) as ours, ours.active():
        tokens = case.prompts()[:, positions(ours, 11)]
        stream = model.generate_stream(tokens, 5, temperature=0)
        next(stream)
        try:
            if rank:
                stream.close()
                model.generate(tokens, 5, temperature=0)
            else:
                list(stream)
        except ValueError as error:
            return str(error)


def test_a_rank_that_leaves_a_stream(pool):
    errors = pool.run(2, left_early)
    assert all("the ranks of the sequence disagree" in error and "turn" in error for error in errors), errors


def misused(rank, group):
    """Errors of wrong calls of caches for shared prompts."""
    case, errors = Case(HYBRID, 2, (11,)), []
    model = case.model()
    with sequence(group) as ours, torch.no_grad():
        shared, tokens = SharedPrompts(ours, 11, [11]), case.prompts()[:, positions(ours, 11)]
        fresh = lambda: model.transformer.new_caches(13, shared=shared)  # noqa: E731

        def attempt(*args, **options):
            try:
                model(*args, **options)
            except ValueError as error:
                errors.append(str(error))

        for short in (None, 10):
            try:
                model.transformer.new_caches(short, shared=shared)
            except ValueError as error:
                errors.append(str(error))
        attempt(tokens, caches=fresh())  # a prompt outside of the group
        with ours.active():
            attempt(tokens[:, :-1] if rank else tokens, caches=fresh())
            read = fresh()
            model(tokens, caches=read)
            attempt(tokens[:, :1], caches=read)  # a token within the group
        attempt(tokens[:, :2], caches=read)
        model(tokens[:, :1], caches=read)
        model(tokens[:, :1], caches=read)
        attempt(tokens[:, :1], caches=read)  # beyond max_length
        return errors


def test_misused_caches(pool):
    words = [
        "need a max_length of at least as many, got None", "need a max_length of at least as many, got 10",
        "a cache serves one rank", "of the sequence holds", "a cache serves one rank",
        "each later one a token; got 2 after 11", "made for max_length=13 tokens",
    ]  # fmt: skip
    for errors in pool.run(2, misused):
        assert len(errors) == len(words), errors
        for word, error in zip(words, errors, strict=True):
            assert word in error, (word, error)
