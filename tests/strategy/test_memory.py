"""Memory settings on many ranks: a run with all settings has the same results as a plain run on one rank."""

import pytest
import torch

from .runs import Run, fit, launched, make
from .test_equals_one_rank import alone, check  # noqa: F401 (alone is a fixture)

pytestmark = pytest.mark.full

EVERYTHING = {"policy": "block", "every": 2, "offload": 1, "tile": 5, "head_chunks": 2}
RUN = Run(steps=3, accumulate=2, clip=0.1, masked=0.3, batch_size=2, model={"depth": 3, "num_kv_heads": 2})
WAYS = {
    "one rank": (1, RUN.but(memory=EVERYTHING)),
    "ddp": (2, RUN.but(memory=EVERYTHING)),
    "ddp, kept": (2, RUN.but(memory={**EVERYTHING, "policy": "attention-kept", "every": 1})),
    "ddp, head 2": (2, RUN.but(memory=EVERYTHING, strategy={"head_size": 2})),
    "ddp, ring": (2, RUN.but(memory=EVERYTHING, strategy={"exchange": "ring"})),
}


STREAM = {**EVERYTHING, "stream": 16}
#: ranks compute every chunk together
SHARED = {"layout": "chunked"}
COMPILED = {"depth": 1, "kv_conv": 3, "compile_blocks": True}
STREAMS = {
    "one rank": (1, RUN.but(memory=STREAM)),
    "ddp": (2, RUN.but(memory=STREAM, strategy={"sequence_size": 1})),
    "ddp, documents": (2, RUN.but(memory={"stream": 7}, kind="documents", batch_size=2, strategy={"sequence_size": 1})),
    "shared": (2, RUN.but(memory=STREAM, strategy=SHARED)),
    "shared, documents": (3, RUN.but(memory={"stream": 7}, kind="documents", batch_size=1, strategy=SHARED)),
    "shared, lengths": (2, RUN.but(memory={"stream": 11, "policy": "attention-kept"}, kind="lengths", strategy=SHARED)),
    "shared, data 2": (4, RUN.but(memory=STREAM, steps=2, strategy={**SHARED, "sequence_size": 2})),
    "shared, one chunk": (2, RUN.but(memory={"stream": 40}, strategy=SHARED)),
    "shared, first batch": (2, RUN.but(memory={"stream": 15}, strategy={**SHARED, "check_first_batch": True})),
    "shared, compiled": (2, RUN.but(memory={"stream": 16}, model=COMPILED, steps=1, strategy=SHARED)),
}


#: cases in CI, which tests/distributed/test_streamed_model.py does not cover
QUICK = ("one rank", "ddp, documents", "shared, data 2", "shared, one chunk")
RUNS = [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in STREAMS]


@pytest.mark.parametrize("way", RUNS)
def test_streams(pools, way):
    """Ranks stream sequences of their own or share chunks, also in validation. DDP's hooks run once per micro-batch."""
    ranks, run = STREAMS[way]
    # packed documents are one sample, so one rank cannot run the two samples of two data ranks in one batch
    plain, ranks_alone = run.but(memory=None, strategy={}, workers=0), 1
    if run.kind == "documents" and run.strategy.get("sequence_size") == 1:
        plain, ranks_alone = run.but(memory=None), 2
    want = pools(ranks_alone).run(ranks_alone, fit, plain)[0]
    assert min(want["norms"]) > 0
    check(pools(ranks).run(ranks, fit, run), want, 1e-9)


def refused(rank, group, changes):
    fit(rank, group, RUN.but(**{"memory": {"stream": 16}, **changes}))


def test_streams_are_refused_where_ranks_share(pools):
    for got in pools(2).errors(ValueError, 2, refused, {}):
        assert "with layout='contiguous' its ranks do not hold" in got and "Set layout='chunked'" in got
    chunked = "layout='chunked' "
    for changes, why in (
        (
            {"strategy": SHARED, "memory": None},
            chunked + "shares every chunk of a stream among ranks, but no callback streams",
        ),
        ({"strategy": {**SHARED, "exchange": "ring"}}, chunked + "exchanges rows by gather, not by exchange='ring'"),
        ({"strategy": {**SHARED, "head_size": 2}}, chunked + "is not offered with head_size=2: set head_size=1"),
        ({"strategy": SHARED, "fsdp": True, "double": True}, chunked + "is not offered by RingDilatedFSDPStrategy"),
        ({"strategy": {"layout": "zigzag"}}, "with layout='zigzag' its ranks do not hold pieces"),
        ({"strategy": {"sequence_size": 1}, "fsdp": True, "double": True}, "not offered with RingDilatedFSDPStrategy"),
    ):
        assert all(why in got for got in pools(2).errors(ValueError, 2, refused, changes))


SLOW = ("ddp, head 2", "ddp, ring")  # tests/distributed covers these exchanges with head_chunks


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.slow) if w in SLOW else w for w in WAYS])
def test_every_setting_at_once(pools, alone, way):  # noqa: F811
    ranks, run = WAYS[way]
    want = alone(RUN)
    assert min(want["norms"]) > 0
    check(pools(ranks).run(ranks, fit, run), want, 1e-9)


@pytest.mark.parametrize("policy", ["block", pytest.param("attention-kept", marks=pytest.mark.slow)])
def test_sharded_parameters(pools, policy):
    plain = RUN.but(double=True)
    memory = {**EVERYTHING, "policy": policy, "every": 2 if policy == "block" else 1}
    want = pools(1).run(1, fit, plain)[0]
    check(pools(2).run(2, fit, plain.but(fsdp=True, memory=memory)), want, 1e-9, 3e-7)


@pytest.mark.parametrize(
    "ranks, precision, tol",
    [
        (1, "bf16-mixed", 1e-2),
        (2, "32-true", 1e-6),
        pytest.param(1, "32-true", 1e-6, marks=pytest.mark.slow),
        pytest.param(2, "bf16-mixed", 1e-2, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps(pools, alone, ranks, precision, tol):  # noqa: F811
    run = Run(steps=20, precision=precision, model={"depth": 3, "num_kv_heads": 2})
    want = alone(run)
    for got in pools(ranks).run(ranks, fit, run.but(memory=EVERYTHING)):
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=tol, atol=0)


def routes(rank, group):
    """Return the number of routes that the sequence's group caches: during a fit, after it, and after a validation."""
    built, model, data, _ = make(Run(steps=1), launched(rank))
    counts = []
    model.on_train_end = lambda: counts.append(len(built.strategy.sequence._remembered))
    built.fit(model, data)
    counts.append(len(built.strategy.sequence._remembered))
    built.validate(model, data, verbose=False)
    return [*counts, len(built.strategy.sequence._remembered)], float(built.callback_metrics["val_loss"])


def test_routes_do_not_outlive_a_run(pools):
    """Routes use memory of the device, and the group exists until the process ends, so a run's routes are removed."""
    for (within, *after), loss in pools(2).run(2, routes):
        assert within > 0 and after == [0, 0] and loss > 0
