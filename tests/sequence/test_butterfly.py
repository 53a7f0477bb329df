"""The butterfly, flat and hierarchical, is exact on every accepted call, and sends (S/2) log2 R rows of a head."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence.exchange import butterfly, gather
from lightning_dilated.sequence.requirements import Document, Problem
from lightning_dilated.sequence.shard import Shard

from ..examples import examples
from .cases import Case
from .play import (
    all_programs,
    check_enters_once,
    check_kept,
    from_others,
    geometric,
    needed_by_definition,
    nested_cases,
    play,
    rows_in,
)


def check_partners(programs) -> None:
    """Check that in round j a rank exchanges rows only with rank XOR 2^(j-1)."""
    for rank, program in enumerate(programs):
        assert len(program.rounds) == len(programs).bit_length() - 1
        for j, step in enumerate(program.rounds):
            assert set(step.sends) | set(step.receives) <= {rank ^ 1 << j}


@given(nested_cases())
@settings(max_examples=examples(100))
def test_exact(case):
    for problem in case.problems():
        assert butterfly.why_not(problem, 1) is None
        programs = all_programs(problem, butterfly.program)
        check_kept(problem, play(problem, programs))
        check_partners(programs)


@st.composite
def near_cases(draw):
    """Draw cases that are close to the butterfly's: mostly powers of two, with some exceptions."""
    ranks, local = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([4, 8, 6]))
    n = ranks * local + draw(st.sampled_from([0, 0, 0, 0, 1]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    width = st.one_of(st.sampled_from([local << i for i in range(5)]), st.sampled_from([1, 2, 3, 4, 12, 20, None]))
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        rate = draw(st.sampled_from([1, 1, 2, 2, 4, 8, 3]))
        branches.append(Branch(draw(width), rate, offset=draw(st.sampled_from([None, None, rate - 1, 0]))))
    if branches[0].segment_length and draw(st.integers(0, 5)) == 0:
        branches[0] = replace(branches[0], shift=branches[0].segment_length // 2)
    rules = {"offsets": draw(st.sampled_from(["interleaved", "interleaved", "blocked"]))}
    documents = (Document(0, 1, 0, n),) if draw(st.integers(0, 5)) else (Document(0, 1, 0, 5), Document(0, 1, 5, n))
    shard = Shard(n, ranks, draw(st.sampled_from(["contiguous"] * 5 + ["zigzag", "strided"])))
    return Case(DilatedPattern(branches, **rules), heads, kv_heads, draw(st.booleans()), shard, documents)


@given(near_cases())
@settings(max_examples=examples(200))
def test_exact_wherever_it_does_not_refuse(case):
    problem = case.problem()
    reason = butterfly.why_not(problem, 1)
    event("served" if reason is None else "refused")
    assume(reason is None)
    programs = all_programs(problem, butterfly.program)
    check_kept(problem, play(problem, programs))
    needs = needed_by_definition(case, problem)
    for rank, program in enumerate(programs):  # all needed rows arrive; additional rows are relayed
        assert needs[rank] <= set(rows_in(m for step in program.rounds for m in step.receives.values()))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("local", [16, 32, 64])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_closed_form(ranks, local, kv_heads):
    # if offsets followed the query head, 4 query heads could need 4 / kv_heads times the rows of a kv head
    problem = geometric(16, local, ranks, heads=4, kv_heads=kv_heads)
    problem = replace(problem, pattern=replace(problem.pattern, offset_heads="kv"))
    levels = ranks.bit_length() - 1
    for rank in range(ranks):
        steps = butterfly.program(problem, rank, 1).rounds
        for step in steps:
            per_head = Counter(head for _, _, head, _ in from_others(step, rank))
            assert per_head == {head: 8 for head in range(kv_heads)}
        assert sum(len(from_others(step, rank)) for step in steps) == 8 * levels * kv_heads


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_closed_forms_of_gather(ranks):
    # not causal: also (S/2) log2 R rows; causal: (S/2) popcount(rank), up to one boundary row per level
    levels = ranks.bit_length() - 1
    for causal in (False, True):
        problem = geometric(16, 32, ranks, heads=4, causal=causal)
        for rank in range(ranks):
            (step,) = gather.program(problem, rank, 1).rounds
            for head in range(4):
                got = sum(row[2] == head for row in from_others(step, rank))
                want = 8 * (rank.bit_count() if causal else levels)
                assert abs(got - want) <= (levels if causal else 0)


@given(st.data())
@settings(max_examples=examples(50))
def test_hierarchical(data):
    case = data.draw(nested_cases(ranks=(4, 8, 16)))
    ranks = case.shard.ranks
    per_node = data.draw(st.sampled_from([x for x in (2, 4, 8) if x < ranks]))
    for problem in case.problems():
        assert butterfly.hierarchical_why_not(problem, per_node) is None
        programs = all_programs(problem, butterfly.hierarchical_program, per_node)
        check_kept(problem, play(problem, programs))
        for rank, program in enumerate(programs):
            inside, above = per_node.bit_length() - 1, (ranks // per_node).bit_length() - 1
            assert len(program.rounds) == inside + 2 * above
            for number, step in enumerate(program.rounds):
                between = number >= inside and (number - inside) % 2 == 0
                for peer in (*step.sends, *step.receives):
                    if between:
                        assert peer == rank ^ 1 << (inside + (number - inside) // 2)
                        assert peer % per_node == rank % per_node
                    else:
                        assert peer // per_node == rank // per_node
        # a node receives each row that its ranks receive in the flat butterfly, once
        flat = all_programs(problem, butterfly.program)
        everything = [set(rows_in(m for step in x.rounds for m in step.receives.values())) for x in flat]
        check_enters_once(problem, programs, per_node, everything)


@pytest.mark.parametrize("ranks, per_node", [(8, 2), (8, 4), (16, 4), (16, 8)])
def test_hierarchical_closed_form(ranks, per_node):
    # per head, a rank receives (S/2) (log2 R - log2 per_node) / per_node rows from other nodes
    problem = geometric(16, 32, ranks, heads=2)
    above = (ranks // per_node).bit_length() - 1
    for rank in range(ranks):
        steps = butterfly.hierarchical_program(problem, rank, per_node).rounds
        far = rows_in(m for step in steps for peer, m in step.receives.items() if peer // per_node != rank // per_node)
        assert len(far) == 2 * 8 * above // per_node
        assert sum(len(from_others(step, rank)) for step in steps) == 2 * 8 * (ranks.bit_length() - 1)


GEOMETRIC = DilatedPattern.geometric(4, 64)
WHOLE = (Document(0, 1, 0, 64),)
# name: (pattern, shard, documents, part of the reason)
REFUSED = {
    "ranks": (GEOMETRIC, Shard(63, 3), (Document(0, 1, 0, 63),), "power of two of ranks, not 3"),
    "layout": (GEOMETRIC, Shard(64, 4, "zigzag"), WHOLE, "contiguous layout, not zigzag"),
    "short last shard": (GEOMETRIC, Shard(63, 4), (Document(0, 1, 0, 63),), "4 ranks do not divide 63"),
    "packed": (GEOMETRIC, Shard(64, 4), (Document(0, 1, 0, 30), Document(0, 1, 30, 64)), "packed or padded"),
    "padded": (GEOMETRIC, Shard(64, 4), (Document(0, 1, 0, 30),), "packed or padded"),
    "shift": (DilatedPattern([Branch(64, 1, shift=8)]), Shard(64, 4), WHOLE, r"branches[0] has shift=8"),
    "narrow branch": (DilatedPattern([(64, 1), (12, 1)]), Shard(64, 4), WHOLE, "branches[1]: its segments of 12"),
    "wide branch": (DilatedPattern([(24, 1)]), Shard(64, 4), WHOLE, "branches[0]: segments of 24"),
    "three shards wide": (DilatedPattern([(48, 1)]), Shard(128, 8), (Document(0, 1, 0, 128),), "segments of 48"),
    "rate": (DilatedPattern([(32, 3)]), Shard(64, 4), WHOLE, "dilation_rate=3 does not divide segment_length=32"),
    "rates": (DilatedPattern([(32, 4), (64, 2)]), Shard(64, 4), WHOLE, "offsets that nest, and head 0"),
    "offsets": (
        DilatedPattern([Branch(32, 2, offset=0), Branch(64, 4, offset=1)]),
        Shard(64, 4),
        WHOLE,
        "head 0 uses index 1 mod 4 in branches[1] but 0 mod 2 in branches[0]",
    ),
    "blocked": (DilatedPattern([(32, 2), (64, 4)], offsets="blocked"), Shard(64, 4), WHOLE, "nest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    pattern, shard, documents, text = REFUSED[name]
    problem = Problem(pattern, 4, 4, False, shard, documents, (0, 4))
    assert text in butterfly.why_not(problem, 1)
    assert text in butterfly.hierarchical_why_not(problem, 2)


@pytest.mark.parametrize("ranks, per_node, text", [(8, 1, "several ranks"), (8, 8, "several nodes"), (8, 3, "not 3")])
def test_hierarchical_refused(ranks, per_node, text):
    assert text in butterfly.hierarchical_why_not(geometric(16, 32, ranks, heads=1), per_node)
