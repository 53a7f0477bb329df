"""switch: for each head, a segment that crosses ranks has one owner, which computes the whole segment."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES, all_to_all
from lightning_dilated.sequence.requirements import Document, Problem
from lightning_dilated.sequence.shard import Shard

from ..examples import examples
from ..pattern import naive
from .cases import Case, cases, interleaved, runs_of
from .play import all_programs, check_agreed, held_rows, rows_in, rows_of
from .sums import check_pads, check_pairs

ANY = cases(longest=32, ranks=16, members=2)


def wide(case: Case, problem: Problem) -> set[tuple]:
    """Return (document, branch, head, positions) of every wide segment of each head in the window."""
    runs = [set(range(a, b + 1)) for a, b in runs_of(case.shard)]
    out = set()
    for d in case.documents:
        n = d.stop - d.start
        for i, branch in enumerate(case.pattern.branches):
            segments: dict[int, list[int]] = {}
            for p in range(n):
                segments.setdefault((p + branch.shift) // (branch.segment_length or n), []).append(p)
            for positions in segments.values():
                everywhere = {d.start + p for p in positions}
                if not interleaved(case.shard) and any(everywhere <= run for run in runs):
                    continue
                for h in range(*problem.heads):
                    at = (naive.segment_of(case.pattern, branch, h, p, n, case.heads, case.kv_heads) for p in positions)
                    used = tuple(d.start + p for p, x in zip(positions, at, strict=True) if x is not None)
                    if used:
                        out.add((d, i, h, used))
    return out


def owned(problem: Problem, rank: int) -> list:
    """Return the tasks that this rank owns."""
    return all_to_all.program(problem, rank, 1).tasks


@given(ANY)
@settings(max_examples=examples(75))
def test_one_owner_with_all_rows(case):
    for problem in case.problems():
        assert EXCHANGES["switch"].why_not(problem, 1) is None
        programs = all_programs(problem, all_to_all.program)
        check_agreed([program.keys for program in programs])
        check_agreed([program.queries for program in programs])
        tasks = Counter(x for p in programs for x in owned_rows(problem, p.tasks))
        assert set(tasks) == wide(case, problem)
        assert all(n == 1 for n in tasks.values())
        for rank, program in enumerate(programs):
            check_rows(problem, rank, program)


def owned_rows(problem: Problem, tasks: list) -> list[tuple]:
    """Return (document, branch, head, rows) of each task of an owner. Global tokens are a task of their own."""
    rows, joined = [], {}
    for x in tasks:
        if problem.pattern.branches[x.branch].tokens is None:
            rows.append((x.document, x.branch, x.head, tuple(x.queries)))
        else:
            joined.setdefault((x.document, x.branch, x.head), []).extend(x.queries)
    return rows + [(*key, tuple(x)) for key, x in joined.items()]


def check_rows(problem: Problem, rank: int, program: all_to_all.AllToAllProgram) -> None:
    """Check that senders have the rows of their messages, and that a rank receives each row of its tasks once."""
    for step, heads, group in (
        (program.keys, problem.kv_heads, problem.group),
        (program.queries, problem.heads, 1),
    ):
        held = held_rows(problem, rank, heads)
        for message in step.sends.values():
            assert held.issuperset(rows_of(message))
        got = Counter(rows_in(step.receives.values()))
        assert got.keys() == {
            (task.document, sample, task.head // group, p)
            for task in program.tasks
            for sample in range(task.document.samples)
            for p in task.queries
        }
        assert not got or max(got.values()) == 1
    for task in program.tasks:
        if problem.pattern.branches[task.branch].tokens is None:
            assert task.keys == (task.queries,) and task.causal == problem.causal
        assert task.slot == 0


@given(cases(longest=32, ranks=8))
@settings(max_examples=examples(75))
def test_every_pair_once(case):
    check_pairs(case, owned, whole=True)


@given(cases(longest=24, ranks=5, padding="attended"))
@settings(max_examples=examples(50))
def test_pads(case):
    check_pads(case, owned, whole=True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads, ranks", [(8, 4), (4, 4), (6, 4), (2, 4), (7, 3)])
def test_owners_take_turns(heads, ranks, causal):
    # with a single segment, each rank owns H / R heads, as in Ulysses, but H need not be a multiple of R
    n = 16 * ranks
    document = (Document(0, 1, 0, n),)
    problem = Problem(DilatedPattern.dense(), heads, heads, causal, Shard(n, ranks), document, (0, heads))
    shares = [len(program.tasks) for program in all_programs(problem, all_to_all.program)]
    assert sum(shares) == heads and max(shares) - min(shares) <= 1


@given(ANY, st.data())
@settings(max_examples=examples(30))
def test_owners_hold_positions_of_their_segments(case, data):
    # the owner of a segment has some of its positions, so that rows cross no unnecessary links
    for problem in case.problems():
        rank = data.draw(st.integers(0, problem.shard.ranks - 1))
        for task in owned(problem, rank):
            branch = case.pattern.branches[task.branch]
            n = task.document.stop - task.document.start
            w = branch.segment_length or n
            index = (task.queries[0] - task.document.start + branch.shift) // w
            low = max(task.document.start, task.document.start + index * w - branch.shift)
            high = min(task.document.stop, task.document.start + (index + 1) * w - branch.shift)
            assert any(problem.shard.owner(p)[0] == rank for p in range(low, high))
