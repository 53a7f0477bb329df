"""Random calls of every kind give the same results on several ranks as on one, forward and backward."""

import contextlib
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings

from ..examples import examples
from .calls import alone, attend, by_definition, compare, compare_rounded
from .pool import Pool
from .strategies import ANY, DTYPES, EXCHANGES, LAYOUTS, ROUNDED, Sharded, larger_groups, sharded

#: number of random calls per exchange, by the number of ranks
EXAMPLES = {1: 6, 2: 30, 3: 40, 4: 40}
SERVING = {1: EXCHANGES, 2: (*ANY, "butterfly"), 3: ANY, 4: EXCHANGES}
RUNS = [(ranks, exchange) for ranks in EXAMPLES for exchange in SERVING[ranks]]
#: features that each sample for a butterfly must contain, in calls that transfer rows; see `Sharded.features`
BUTTERFLIES = {
    "contiguous", "causal", "not causal", "wide", "wide and dilated", "gqa, query offsets", "gqa, kv offsets", "odd heads",
    "batch", "subsets", "strides", "math",
}  # fmt: skip
FEATURES = BUTTERFLIES | {
    *LAYOUTS, "rate does not divide", "uneven", "blocked", "attended", "documents", "lengths", "shift", "offsets",
    "gigapath",
}  # fmt: skip


class Enough(BaseException):
    """All features have occurred. A BaseException, because hypothesis would look for a smaller case that raises."""


def check(pool: Pool, case: Sharded, dtype: torch.dtype, counts: Counter) -> None:
    """Run a case on its ranks. An exchange that does not support the call must refuse on all ranks."""
    answers = pool.answers(case.ranks, attend, case, dtype)
    if case.may_refuse and answers[0].message.startswith(f"exchange={case.exchange!r} cannot serve this call: "):
        refusals = {(a.error, a.message) for a in answers}
        assert len(refusals) == 1 and answers[0].error == "ValueError", refusals
        counts["refused"] += 1
        return
    results = pool.values(answers, case)
    if dtype in ROUNDED:
        compare_rounded(case, results, dtype)
    else:
        compare(case, results, alone(case), 1e-10)
        if case.call.seq_len < 20:
            compare(case, results, by_definition(case), 1e-10)
            counts["definition"] += 1
    forward, backward = (sum(r.sent[i] for r in results) > 0 for i in range(2))
    assert forward == backward, case
    counts["cases"] += 1
    counts["moved"] += forward and case.head_size == 1  # head groups also transfer rows when the exchange does not
    for feature in features(case, dtype):
        counts[feature] += forward or feature == "no tokens"


def features(case: Sharded, dtype: torch.dtype) -> set[str]:
    """Return the features of the case, and its dtype."""
    known, narrow = case.features() | {str(dtype)}, dtype in (torch.bfloat16, torch.float16)
    return known | {"rank without a head in 16 bits"} if narrow and "rank without a head" in known else known


def required(ranks: int, exchange: str) -> set[str]:
    """Return the features that a sample of cases must contain."""
    needed = FEATURES
    if "butterfly" not in exchange:
        needed = needed | {"window", "dilated window", "window beyond a shard"}
        needed = needed | {"global tokens", "global tokens on several ranks"}
    if ranks > 2:
        needed = needed | {"empty rank"}  # with two ranks, only a sequence of one token leaves a rank empty
    needed = BUTTERFLIES if "butterfly" in exchange else needed | {"no tokens", "definition"}
    if not exchange.startswith("hierarchical"):
        needed = needed | {"head groups", "kv head on several", "uneven windows"}
        if ranks == 4:
            needed = needed | {"head groups and wider"}
    return needed | {str(dtype) for dtype in (torch.float64, *ROUNDED)}


@pytest.mark.parametrize("times", [1, pytest.param(35, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ranks", "exchange"), RUNS)
def test_random(pool, ranks, exchange, times):
    counts = Counter()
    needed = required(ranks, exchange) if ranks > 1 else set()

    def sample(number: int, only: set[str] | None = None) -> None:
        """Check random cases. With `only`, check just the cases that have a feature in `only` for the first time."""

        @seed(number)
        @settings(max_examples=examples(times * EXAMPLES[ranks]), suppress_health_check=list(HealthCheck))
        @given(sharded(ranks, exchange), DTYPES)
        def random(case, dtype):
            assume(not case.call.refused())
            assume(only is None or any(not counts[feature] for feature in only & features(case, dtype)))
            check(pool, case, dtype, counts)
            if only is not None and all(counts[feature] for feature in only):
                raise Enough

        with contextlib.suppress(Enough):
            random()

    first = times * 700 + RUNS.index((ranks, exchange))  # each run draws its own examples
    sample(first)
    missing = {feature for feature in needed if not counts[feature]}
    if missing:  # a version of hypothesis may draw other cases from the same seed
        sample(first + 50, missing)
    if ranks == 1:
        assert counts["cases"] and not counts["moved"] and not counts["refused"]
        return
    assert counts["moved"] >= EXAMPLES[ranks] // 5 and counts["cases"] >= EXAMPLES[ranks] * 3 // 4, counts
    missing = {feature for feature in needed if not counts[feature]}
    assert not missing, f"the sample holds no {missing}: {counts}"


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", ANY)
def test_more_ranks_than_heads(pool, ranks, exchange, count):
    """In a head group, some ranks have no head, and some have no token."""
    counts = Counter()
    # with two ranks, only a sequence of one token leaves a rank empty
    needed = {"rank without a head", "rank without a head in 16 bits"}
    needed |= {"empty rank of head groups"} if ranks > 2 else set()

    def sample(number: int, only: set[str] | None = None) -> None:
        """Check random cases. With `only`, check just the cases that have one of these features."""

        @seed(number)
        @settings(max_examples=examples(count), suppress_health_check=list(HealthCheck))
        @given(larger_groups(ranks, exchange), DTYPES)
        def random(case, dtype):
            assume(not case.call.refused())
            assume(only is None or only & features(case, dtype))
            check(pool, case, dtype, counts)

        random()

    sample(ranks + 10 * ANY.index(exchange))
    missing = {feature for feature in needed if not counts[feature]}
    if missing:  # a version of hypothesis may draw other cases from the same seed
        sample(ranks + 10 * ANY.index(exchange) + 1000, missing)
    assert counts["cases"] >= count * 3 // 4 and all(counts[feature] for feature in needed), counts
