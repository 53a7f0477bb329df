"""Masked modelling on many ranks: the masks, losses, gradients and metrics of one rank."""

import functools

import pytest
import torch

from lightning_dilated import LongNetMLM
from lightning_dilated.sequence import active_sequence

from .runs import Run, full, launched, make

pytestmark = pytest.mark.full


class Watched(LongNetMLM):
    """Keeps every (step, sample, global position to find), step -1 in validation; not those of first-batch checks."""

    def masked(self, batch):
        seen, chosen = super().masked(batch)
        if self.trainer.training and not self.training:
            return seen, chosen
        at = active_sequence().positions(chosen.shape[1])
        step = self.trainer.global_step if self.training else -1
        kept = self.__dict__.setdefault("kept", set())
        kept |= {(step, int(batch["index"][b]), int(at[i])) for b, i in chosen.nonzero().tolist()}
        return seen, chosen


RUN = Run(seq_len=37, batch_size=2, steps=3, cls=Watched, model={"mask_fraction": 0.3, "ignore_tokens": [2]})
RUNS = {
    "plain": RUN,
    "spans": RUN.but(model={**RUN.model, "mask_span": 3}),
    "lengths": RUN.but(kind="lengths"),
    "documents": RUN.but(kind="documents", batch_size=1),
    "workers": RUN.but(workers=2, steps=2),
    "sharded parameters": RUN.but(double=True),
}
WAYS = {
    "2": (2, {}),
    "4": (4, {}),
    "4, data 2": (4, {"sequence_size": 2}),
    "2, strided": (2, {"layout": "strided"}),
    "2, zigzag": (2, {"layout": "zigzag"}),
    "2, first batch": (2, {"check_first_batch": True}),
}


def fit(rank, group, run):
    """What a run leaves on this rank."""
    built, model, data, record = make(run, launched(rank))
    built.fit(model, data)
    found = built.validate(model, data, verbose=False)[0]
    parameters = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    return record.losses, record.norms, found, parameters, model.kept


@pytest.fixture(scope="module")
def alone(pools):
    return functools.cache(lambda name: pools(1).run(1, fit, RUNS[name])[0])


CASES = [("plain", way) for way in WAYS if way not in ("2", "4", "2, strided")]
CASES += [("spans", "2, strided"), ("lengths", "2"), ("documents", "2"), ("sharded parameters", "2")]
#: four ranks are in "4, data 2"
SLOW = [("plain", "2"), ("plain", "4"), ("plain", "2, strided"), ("workers", "2"), ("spans", "2"), ("spans", "4")]
CASES += [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW]


@pytest.mark.parametrize("name, way", CASES)
def test_equals_one_rank(pools, alone, name, way):
    ranks, settings = WAYS[way]
    run, want = RUNS[name].but(strategy=settings, fsdp=name == "sharded parameters"), alone(name)
    found = pools(ranks).run(ranks, fit, run)
    assert set.union(*(kept for *_, kept in found)) == want[-1]  # masks of no rank but one's, and all of them
    assert len({step for step, _, _ in want[-1]}) == run.steps + 1 and min(want[1]) > 0
    logged = 3e-7 if run.double else 1e-9
    for losses, norms, metrics, parameters, _ in found:
        assert losses == pytest.approx(want[0], rel=logged) and norms == pytest.approx(want[1], rel=1e-9)
        assert metrics == pytest.approx(want[2], rel=logged) and 0 < metrics["val_accuracy"] < 1
        for key, p in want[3].items():
            torch.testing.assert_close(parameters[key], p, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
