"""Models with shifted odd layers: odd layers exchange rows, and even layers do not."""

from collections import Counter
from dataclasses import replace

import pytest

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.footprint import exchanged, footprint
from lightning_dilated.ext.planning.counting.memory_tracker import EXCHANGE
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.counting.workspace import workspace
from lightning_dilated.ext.planning.estimate import Facts, estimate
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.memory import memory
from lightning_dilated.ext.planning.ranks import step_on_ranks
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.planner import Links

from .machines import machine

pytestmark = pytest.mark.full

#: nested segments: shards of a multiple of 128 tokens split none of them
EVEN = DilatedPattern.longnet([64, 128], [1, 2])
ODD = EVEN.shifted(0.5)
RANKS, TOKENS = 4, 2048
SETUP, H200 = Setup("ring_dilated", RANKS, RANKS), GPUS["H200"]


def lm(depth=4, kind=ld.LongNetLM, **options):
    return kind(EVEN, **{"dim": 64, "depth": depth, "num_heads": 4, "shift_layers": "odd", **options})


def rows_of(pattern):
    return exchanged(pattern, TOKENS, (4, 4, 16), True, 2, Setup("ring_dilated", RANKS, RANKS)).kept


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", [ld.LongNetLM, ld.LongNetMLM])
def test_layers(kind, depth):
    model = lm(depth, kind)
    layers = counted_model_of(model).call.layers(depth)
    model.configure_model()
    of_blocks = [block.attention.attention.pattern for block in model.transformer.blocks]
    assert {call.pattern: n for call, n in layers} == {p: of_blocks.count(p) for p in of_blocks}


@pytest.mark.parametrize(
    "policy, depth",
    [
        ("attention-kept", 5),
        ("block", 4),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("attention-kept", 4), ("block", 5))),
    ],
)
def test_memory(policy, depth):
    """Two of four or five layers keep received rows. With recomputed blocks, only one layer's rows exist at a time."""
    plan = footprint(counted_model_of(lm(depth), "bf16-mixed", MemorySettings(policy)), (1024, 2048))
    x = memory(plan, TOKENS, SETUP)
    assert x.exchange.name is None and rows_of(EVEN) == 0 and x.exchange.others[0].kept == rows_of(ODD) > 0
    under_way = {0, x.exchange.others[0].forward, x.exchange.others[0].backward}
    assert x.kinds[EXCHANGE] - (2 if policy == "attention-kept" else 1) * rows_of(ODD) in under_way


def test_room():
    """The workspace of each layer is computed from the layer's own pattern."""
    subject = counted_model_of(lm())
    plan = footprint(replace(subject, memory=MemorySettings("block")), (1024, 2048))
    last, first = (m for m in plan.moments if m.piece.op == "backward" and m.part[1] in (0, 1))
    wide = DilatedPattern.longnet([64, 128, 256], [1, 1, 1])
    for pattern, odd in ((EVEN, wide), (wide, EVEN)):
        call = replace(subject.call, tokens=1 << 16, dtype=first.piece.dtype, pattern=pattern, others=(odd,))
        each = [workspace(one)[1] for one, _ in call.layers(2)]
        assert [plan.room(m, call) for m in (first, last)] == each and each[0] != each[1]


@pytest.mark.parametrize("depth", [2, 3])
def test_time(depth):
    """Bytes and pairs are the sums over separate layers."""
    shifted, options = lm(depth), {"shift_layers": "none"}
    facts_of = lambda model: Facts.of(model, counted_model_of(model))  # noqa: E731
    mixed, even = facts_of(shifted), facts_of(lm(depth, **options))
    odd = replace(even, call=replace(even.call, pattern=ODD))
    estimated = lambda facts: estimate(facts, MemorySettings("block"), TOKENS, SETUP, H200)  # noqa: E731
    mixed_estimate, low, high = estimated(mixed), estimated(even), estimated(odd)
    share = depth // 2 / depth
    for run in ("forward", "again", "backward"):
        assert low.step.bytes(run)[0] == 0
        assert mixed_estimate.step.bytes(run)[0] == pytest.approx(share * high.step.bytes(run)[0])
    assert mixed_estimate.flops == pytest.approx(low.flops + share * (high.flops - low.flops))
    assert (mixed_estimate.step.exchange, low.step.exchange) == ("gather", None)
    assert low.seconds < mixed_estimate.seconds < high.seconds


def test_layers_take_turns():
    """If links take no time, a step of alternating layers takes the mean of the steps with either pattern."""
    free = Links(near=1e30, far=1e30, round=1e-15, message=1e-15)
    setup = Setup("ring_dilated", RANKS, RANKS, links=free)
    even, odd, alternating = (step_on_ranks(machine(), x, 512, setup) for x in ([EVEN], [ODD], [EVEN, ODD]))
    assert alternating.seconds == pytest.approx((even.seconds + odd.seconds) / 2) and even.seconds != odd.seconds
    assert step_on_ranks(machine(), [EVEN, EVEN], 512, setup) == even


def hybrid(depth=6, **options):
    pattern = {"hybrid": {"local": 512, "global_every": 3}}
    return ld.LongNetLM(
        **{"pattern": pattern, "dim": 64, "depth": depth, "num_heads": 4, "max_seq_len": TOKENS, **options}
    )


def test_hybrid():
    """Dense layers keep many rows of other ranks, shifted local layers keep few, and other layers keep none."""
    model = hybrid()
    subject = counted_model_of(model)
    assert {p: n for p, n in ((x.pattern, n) for x, n in subject.call.layers(6))} == Counter(model.patterns)
    x = memory(footprint(subject, (1024, 2048)), TOKENS, SETUP)
    each = [rows_of(pattern) for pattern in model.patterns]
    assert x.exchange.kept_by(6) == sum(each) and each[0] == 0 < each[1] < each[2]
    time = estimate(Facts.of(model, subject), MemorySettings(), TOKENS, SETUP, H200)
    pairs = [p.explain(TOKENS, 4, 1, True).pairs for p in model.patterns]
    plain = hybrid(pattern=DilatedPattern.dense(512))
    base = estimate(Facts.of(plain, counted_model_of(plain)), MemorySettings(), TOKENS, SETUP, H200)
    local = DilatedPattern.dense(512).explain(TOKENS, 4, 1, True).pairs
    assert time.flops - base.flops == pytest.approx(14 * 16 * (sum(pairs) - 6 * local) / RANKS)
