"""Execute the programs of all ranks round by round with Python sets. A row is (document, sample, kv head, position)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence.exchange.program import Message, Program, Round
from lightning_dilated.sequence.requirements import Document, Problem, row_requests
from lightning_dilated.sequence.shard import Shard

from .cases import Case, member_of


def rows_of(message: Message) -> list[tuple]:
    """Return the rows of a message in the order of sending: by piece, then by sample."""
    return [(x.document, sample, x.head, p) for x in message for sample in range(x.document.samples) for p in x.rows]


def rows_in(messages: Iterable[Message]) -> list[tuple]:
    """Return the rows of several messages."""
    return [row for message in messages for row in rows_of(message)]


def held_rows(problem: Problem, rank: int, heads: tuple[int, int] | None = None) -> set[tuple]:
    """Return the rows that a rank has at the start, for the kv heads of the problem or for `heads`."""
    return {
        (d, sample, head, p)
        for d in problem.documents
        for sample in range(d.samples)
        for head in range(*(heads or problem.kv_heads))
        for piece in problem.shard.ranges(rank)
        for p in piece
        if d.start <= p < d.stop
    }


def requested_rows(problem: Problem, rank: int) -> set[tuple]:
    """Return the rows that the requests of a rank read."""
    return {
        (request.document, sample, request.head // problem.group, p)
        for request in row_requests(problem, rank)
        for sample in range(request.document.samples)
        for piece in request.keys
        for p in piece
    }


def all_programs(problem: Problem, program: Callable, per_node: int = 1) -> list:
    """Return the program of every rank."""
    return [program(problem, rank, per_node) for rank in range(problem.shard.ranks)]


def check_agreed(rounds: list[Round]) -> None:
    """Check one round of all ranks: the receiver of a message expects it, with the same rows in the same order."""
    for rank, step in enumerate(rounds):
        for peer, message in step.sends.items():
            assert message and rounds[peer].receives.get(rank) == message, (rank, peer)
        for peer in step.receives:
            assert rank in rounds[peer].sends, f"rank {rank} waits for rank {peer}, which sends nothing"


def play(problem: Problem, programs: list[Program]) -> list[list[list[tuple]]]:
    """Return the rows that each rank receives, by round. Check that a sender has the rows of its messages."""
    assert len({len(program.rounds) for program in programs}) == 1
    own = [held_rows(problem, rank) for rank in range(problem.shard.ranks)]
    arrived: list[list[list[tuple]]] = [[] for _ in programs]
    for number in range(len(programs[0].rounds)):
        steps = [program.rounds[number] for program in programs]
        check_agreed(steps)
        for rank, step in enumerate(steps):
            # without `keep`, the rows of earlier rounds are discarded
            remaining = arrived[rank] if programs[rank].keep else arrived[rank][-1:]
            have = own[rank].union(*remaining)
            for message in step.sends.values():
                assert have.issuperset(rows_of(message)), f"rank {rank} sends in round {number} what it does not hold"
        for rank, step in enumerate(steps):
            arrived[rank].append(rows_in(step.receives.values()))
    return arrived


def check_kept(problem: Problem, arrived: list[list[list[tuple]]]) -> None:
    """Check that at the end every rank has received the rows of its requests, and no row twice."""
    for rank, rounds in enumerate(arrived):
        rows = Counter(row for rows in rounds for row in rows)
        assert not rows or max(rows.values()) == 1
        assert requested_rows(problem, rank) <= set(rows)


def from_others(step: Round, rank: int) -> list[tuple]:
    """Return the rows that a rank receives from other ranks in a round."""
    return rows_in(message for peer, message in step.receives.items() if peer != rank)


def needed_by_definition(case: Case, problem: Problem) -> list[set[tuple]]:
    """Return the remote rows that the queries of each rank see, by the definition."""
    group = problem.shard.members
    return [
        {
            (document, sample, kv_head, p)
            for document, kv_head, p in visible
            for sample in range(document.samples)
            if member_of(problem.shard, p) // group != rank
        }
        for rank, visible in enumerate(case.rows_seen(problem))
    ]


def check_enters_once(problem: Problem, programs: list[Program], per_node: int, needs: list[set]) -> None:
    """Check that exactly the remote rows that a node needs are sent to the node, each to one of its ranks."""
    for node in range(len(programs) // per_node):
        mates = range(node * per_node, (node + 1) * per_node)
        entered = Counter()
        for rank in mates:
            for step in programs[rank].rounds:
                entered.update(rows_in(m for peer, m in step.receives.items() if peer not in mates))
        assert not entered or max(entered.values()) == 1
        here = set().union(*(held_rows(problem, rank) for rank in mates))
        assert entered.keys() == set().union(*(needs[rank] for rank in mates)) - here


def geometric(
    keys: int, local: int, ranks: int, heads: int, causal: bool = False, kv_heads: int | None = None
) -> Problem:
    """Return a problem with segments of `keys` rows, up to the whole sequence, over shards of `local` tokens."""
    n = ranks * local
    pattern = DilatedPattern.geometric(keys, n)
    return Problem(pattern, heads, kv_heads or heads, causal, Shard(n, ranks), (Document(0, 1, 0, n),), (0, heads))


@st.composite
def nested_cases(draw, ranks: tuple[int, ...] = (2, 4, 8, 16)):
    """Draw cases for the butterfly: wide branches have 2^i times a shard's tokens, and each rate divides the next."""
    count, local = draw(st.sampled_from(ranks)), draw(st.sampled_from([2, 3, 4, 6, 8]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 3)]))
    n, levels = count * local, count.bit_length() - 1
    last_offset, rate = draw(st.one_of(st.none(), st.integers(0, 63))), 1
    offset_heads = draw(st.sampled_from(["query", "kv"]))
    unit = heads // kv_heads if offset_heads == "kv" else 1
    branches = []
    for level in range(levels + 1):
        width = local << level
        for _ in range(draw(st.integers(0, 2)) if level else draw(st.integers(0, 1))):
            rate *= draw(st.sampled_from([x for x in (1, 2, 3) if width % (rate * x) == 0 or width == n]))
            units = draw(st.one_of(st.none(), st.sets(st.integers(0, heads // unit - 1), min_size=1)))
            served = None if units is None else [x * unit + i for x in units for i in range(unit)]
            offset = None if last_offset is None else last_offset % rate
            longer = width == n and draw(st.booleans())
            branches.append(Branch(width + 5 if longer else width, rate, heads=served, offset=offset))
    if not branches or draw(st.booleans()):
        narrow = draw(st.sampled_from([x for x in range(1, local + 1) if local % x == 0]))
        branches.append(Branch(narrow, draw(st.integers(1, 4))))
    pattern = DilatedPattern(draw(st.permutations(branches)), offset_heads=offset_heads)
    documents = (Document(0, draw(st.integers(1, 2)), 0, n),)
    members = draw(st.integers(1, 2)) if local % 2 == 0 else 1
    return Case(pattern, heads, kv_heads, draw(st.booleans()), Shard(n, count, "contiguous", members), documents)
