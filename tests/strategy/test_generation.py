"""Generation in `predict_step`: ranks that share sequences gather the prompts, and generate the same text."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.sequence import no_sequence, sequence_gather

from .runs import VOCAB, launched, trainer

pytestmark = pytest.mark.full

#: {name of the case: (number of ranks, strategy, arguments of the strategy)}
WAYS = {
    "2": (2, RingDilatedStrategy, {}),
    "4, data 2, zigzag": (4, RingDilatedStrategy, {"sequence_size": 2, "layout": "zigzag"}),
    "2, sharded weights": (2, RingDilatedFSDPStrategy, {}),
    "2, a sequence each": (2, RingDilatedStrategy, {"sequence_size": 1}),
}


class Continues(LongNetLM):
    """A model that generates in `predict_step`, as a user would write it."""

    def predict_step(self, batch, batch_idx):
        tokens = sequence_gather(batch["tokens"])
        with no_sequence():
            return batch["index"], self.generate(tokens, 6, temperature=0, lengths=batch["lengths"])


class Prompts(torch.utils.data.Dataset):
    """Four padded prompts of 9 to 21 tokens."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        tokens = torch.randint(VOCAB, (21,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "labels": tokens, "index": index, "lengths": 21 - 4 * index}


def predicted(rank, group, strategy, settings):
    """Return {sample: prompt and continuation} from a Trainer's predict on this rank."""
    run = trainer(strategy(**settings), launched(rank))
    pl.seed_everything(4, verbose=False)
    model = Continues({"hybrid": {"local": 5, "global_every": 2}}, vocab_size=VOCAB, dim=16, depth=2, kv_conv=3)
    parts = run.predict(model, torch.utils.data.DataLoader(Prompts(), batch_size=2))
    return {int(i): row for index, tokens in parts for i, row in zip(index, tokens, strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_predict_draws_as_one_rank(pools, way):
    ranks, strategy, settings = WAYS[way]
    (want,) = pools(1).run(1, predicted, RingDilatedStrategy, {})
    results = pools(ranks).run(ranks, predicted, strategy, settings)
    assert want.keys() == set(range(4)) == {i for rows in results for i in rows}
    for rows in results:
        for i, row in rows.items():
            n = 27 - 4 * i  # beyond n, the last token is repeated up to the length of the longest row
            assert torch.equal(row[:n], want[i][:n])


class Shares(LongNetLM):
    def predict_step(self, batch, batch_idx):
        return self.generate(batch["tokens"], 6)


def refused(rank, group):
    run = trainer(RingDilatedStrategy(), launched(rank))
    model = Shares({"hybrid": {"local": 5, "global_every": 2}}, vocab_size=VOCAB, dim=16, depth=2)
    with pytest.raises(ValueError, match=r"Gather them by .*sequence_gather.*within sequence\.no_sequence"):
        run.predict(model, torch.utils.data.DataLoader(Prompts(), batch_size=2))


def test_shared_prompts_are_refused(pools):
    pools(2).run(2, refused)
