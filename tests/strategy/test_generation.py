"""Generation in `predict_step`: ranks that share a batch's prompts draw the tokens that one rank draws."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.ext.decoding import command as generate

from .runs import VOCAB, launched, trainer

pytestmark = pytest.mark.full

#: {way: (ranks, strategy, its settings)}
WAYS = {
    "2": (2, RingDilatedStrategy, {}),
    "4, data 2, zigzag": (4, RingDilatedStrategy, {"sequence_size": 2, "layout": "zigzag"}),
    "2, sharded weights": (2, RingDilatedFSDPStrategy, {}),
    "2, a sequence each": (2, RingDilatedStrategy, {"sequence_size": 1}),
}


class Continues(LongNetLM):
    """As users would write it."""

    def predict_step(self, batch, batch_idx):
        return batch["index"], self.generate(batch["tokens"], 6, temperature=0, lengths=batch["lengths"])


class Prompts(torch.utils.data.Dataset):
    """Four prompts of 9 to 21 tokens, padded."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        tokens = torch.randint(VOCAB, (21,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "labels": tokens, "index": index, "lengths": 21 - 4 * index}


def predicted(rank, group, strategy, settings):
    """{sample: its prompt and what continues it}, as a Trainer's predict gives it on this rank."""
    run = trainer(strategy(**settings), launched(rank))
    pl.seed_everything(4, verbose=False)
    model = Continues({"hybrid": {"local": 5, "global_every": 2}}, vocab_size=VOCAB, dim=16, depth=2, kv_conv=3)
    parts = run.predict(model, torch.utils.data.DataLoader(Prompts(), batch_size=2))
    return {int(i): row for index, tokens in parts for i, row in zip(index, tokens, strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_predict_draws_as_one_rank(pools, way):
    ranks, strategy, settings = WAYS[way]
    (want,) = pools(1).run(1, predicted, RingDilatedStrategy, {})
    found = pools(ranks).run(ranks, predicted, strategy, settings)
    assert want.keys() == set(range(4)) == {i for rows in found for i in rows}
    for rows in found:
        for i, row in rows.items():
            n = 27 - 4 * i  # the rest is the last token again, up to the longest of its batch
            assert torch.equal(row[:n], want[i][:n])


def commanded(rank, group, folder, prompt):
    """What `generate --devices` computes on a rank."""
    args = generate.parsed(["--ckpt_path", folder, "--prompt", prompt, "--max_new_bytes", "20", "--devices", "2"])
    return list(generate.shared(rank, "cpu", args, prompt))


@pytest.mark.parametrize("prompt", ["ab and so on", "a"], ids=["shared", "a rank without a token"])
def test_the_command_draws_as_one_rank(pools, tmp_path, prompt):
    torch.manual_seed(0)
    model = LongNetLM({"hybrid": {"local": 5, "global_every": 2}}, dim=16, depth=2, num_heads=4)
    model.configure_model()
    model.save_pretrained(tmp_path)
    args = generate.parsed(["--ckpt_path", str(tmp_path), "--prompt", prompt, "--max_new_bytes", "20"])
    want = list(generate.Request.of(args, prompt).continued("cpu"))
    assert len(want) == 20 and pools(2).run(2, commanded, str(tmp_path), prompt) == [want, []]
