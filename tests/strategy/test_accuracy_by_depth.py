"""AccuracyByDepth gives the same rows on several ranks as on one, even if ranks share the tokens of an answer."""

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.callbacks import AccuracyByDepth
from lightning_dilated.data import LongContextDataModule

from .runs import launched, trainer

pytestmark = pytest.mark.full


class Erring(LongNetLM):
    """Predicts all labels correctly, except the last or the third last label of some samples, chosen by index."""

    def loss_terms(self, batch):
        labels = batch["labels"]
        positions = token_positions(0, labels.shape[1])  # a collective operation
        answers = labels.clone()
        for row, index in enumerate(batch["index"].tolist()):
            length = DATA[0] if index < 6 else DATA[1]
            for place, wrong in ((length - 2, index % 3 == 1), (length - 4, index % 3 == 2)):
                answers[row, (positions == place) & (labels[row].cpu() != -100) & wrong] += 1
        if self.watch_predictions is not None:
            self.watch_predictions(batch, answers)
        return self.head.weight.sum() * 0, (labels != -100).sum()


DATA = (34, 29)


def rows(rank, group, kind, strategy, batch_size, folder):
    """Return this rank's rows after a test. Answers have 12 tokens, so some are on several ranks."""
    world = launched(rank)
    task = LongContextDataModule(
        "needle", list(DATA), [0, 100], 3, "tokens", vocabulary=3, fillers=1, distractors=0, value_tokens=12,
        batch_size=batch_size, train_size=9,
    )  # fmt: skip
    torch.manual_seed(7)
    pattern = DilatedPattern.longnet([8, 16, 64], [1, 2, 4])
    model = kind(pattern, vocab_size=task.vocab_size, dim=16, depth=2, num_heads=4, tie_embeddings=False)
    model.configure_model()  # before sharding, so that all strategies draw the same weights
    callback = AccuracyByDepth(folder, table=False, picture=False)
    fsdp = strategy.pop("fsdp", False)
    plugin = (RingDilatedFSDPStrategy if fsdp else RingDilatedStrategy)(**strategy)
    precision = "32-true" if fsdp else "64-true"
    trainer(plugin, world, callbacks=[callback], precision=precision).test(model, task, verbose=False)
    return callback.rows


@pytest.mark.parametrize("kind", [Erring, LongNetLM])
@pytest.mark.parametrize(
    "ranks, strategy", [(2, {}), (3, {}), (4, {"sequence_size": 2}), (2, {"layout": "zigzag"}), (2, {"fsdp": True})]
)
def test_ranks_equal_one(pools, tmp_path, ranks, strategy, kind):
    want = pools(1).run(1, rows, kind, {}, 1, str(tmp_path / "one"))[0]
    if kind is Erring:
        assert [(r["samples"], r["right"], r["token_accuracy"]) for r in want] == [(3, 1, 34 / 36)] * 4
    else:
        assert 0 < sum(r["token_accuracy"] for r in want) < 4
    # a batch of 4 has samples of both lengths
    for size in (1, 4):
        for got in pools(ranks).run(ranks, rows, kind, strategy, size, str(tmp_path / f"many{size}")):
            assert got == want
