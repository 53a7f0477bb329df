"""RecallByDistance gives one rank's rows and metrics on several ranks in any layout, even if a rank has no tokens."""

import lightning.pytorch as pl
import pytest

from lightning_dilated import LongNetLM
from lightning_dilated.callbacks import RecallByDistance
from lightning_dilated.data import FarRecallDataModule
from lightning_dilated.strategy import RingDilatedStrategy

from .runs import PATTERN, launched, trainer

pytestmark = pytest.mark.full


def recalled(rank, group, seq_len, strategy):
    """Return the rows and metrics of this rank after a validation and a test."""
    world = launched(rank)
    pl.seed_everything(5, verbose=False)
    pairs = 3 if seq_len > 8 else 1
    data = FarRecallDataModule(
        seq_len, pairs, 4, pair_tokens=1 if seq_len < 8 else 2, batch_size=1, train_size=8, val_size=16, test_size=6
    )  # fmt: skip
    model = LongNetLM(PATTERN, vocab_size=data.vocab_size, dim=16, depth=2, tie_embeddings=False)
    callback = RecallByDistance()
    run = trainer(RingDilatedStrategy(**strategy), world, precision="64-true", callbacks=[callback])
    results = []
    for evaluate in (run.validate, run.test):
        evaluate(model, data, verbose=False)
        results.append((callback.rows, {k: float(x) for k, x in run.callback_metrics.items() if "accuracy" in k}))
    return results


CASES = {
    "2": (2, 40, {}),
    "2, zigzag": (2, 40, {"layout": "zigzag"}),
    "2, strided": (2, 40, {"layout": "strided"}),
    "2, odd": (2, 41, {}),
    "4, data 2": (4, 40, {"sequence_size": 2}),
    "4, a rank without tokens": (4, 3, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one(pools, case):
    ranks, seq_len, strategy = CASES[case]
    want = pools(1).run(1, recalled, seq_len, {})[0]
    for rows, metrics in want:
        assert rows and len(metrics) == 1 + len(rows)
    if seq_len >= 40:
        assert any(row["accuracy"] > 0 for row in want[0][0]), "all wrong would say nothing of who is right"
    for outcome in pools(ranks).run(ranks, recalled, seq_len, strategy):
        assert outcome == want
