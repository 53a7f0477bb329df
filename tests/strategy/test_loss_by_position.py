"""LossByPosition gives the same rows on several ranks as on one, for every layout and kind of batch."""

import pytest

from lightning_dilated.callbacks import LossByPosition

from .runs import Run, launched, make

pytestmark = pytest.mark.full


def rows(rank, group, run, folder):
    """Return this rank's rows after a validation."""
    built, model, data, _ = make(run, launched(rank))
    callback = LossByPosition(table=False, picture=False)
    built.callbacks.append(callback)
    built._default_root_dir = folder
    built.validate(model, data, verbose=False)
    return callback.rows


WAYS = {
    "2": (2, {}),
    "4, data 2": (4, {"sequence_size": 2}),
    "2, zigzag": (2, {"layout": "zigzag"}),
    "2, chunked": (2, {"layout": "chunked"}),
}
KINDS = ("whole", "lengths", "documents")
#: cases in CI, with each way and each kind of batch; other pairs run with `-m slow`
CI = {("2", "documents"), ("4, data 2", "lengths"), ("2, zigzag", "lengths"), ("2, chunked", "documents")}
CI |= {("4, data 2", "whole")}


@pytest.mark.parametrize(
    "way, kind",
    [pytest.param(w, k, marks=[] if (w, k) in CI else pytest.mark.slow) for w in WAYS for k in KINDS],
)
def test_ranks_equal_one(pools, tmp_path, way, kind):
    ranks, strategy = WAYS[way]
    if kind == "documents":  # a batch has one row, so there are no data ranks
        strategy = {k: v for k, v in strategy.items() if k != "sequence_size"}
    run = Run(kind=kind, batch_size=2 if "sequence_size" in strategy else 1, masked=0.3)
    want = pools(1).run(1, rows, run, str(tmp_path / "one"))[0]
    memory = {"stream": 11} if strategy.get("layout") == "chunked" else None
    results = pools(ranks).run(ranks, rows, run.but(strategy=strategy, memory=memory), str(tmp_path / "many"))
    for got in results:
        assert [{k: v for k, v in r.items() if k != "bits"} for r in got] == [
            {k: v for k, v in r.items() if k != "bits"} for r in want
        ]
        assert [r["bits"] for r in got] == pytest.approx([r["bits"] for r in want], rel=1e-9)
