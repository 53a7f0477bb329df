"""The longest sequence: the search against all possible answers, and real trials on a CPU with a memory limit."""

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import lightning_dilated as ld
from benchmarks.find_max import Outcome, Samples, Trials, longest, run

pytestmark = pytest.mark.full


@given(
    most=st.integers(1, 5000),
    start=st.integers(1, 6000),
    multiple=st.integers(1, 7),
    within=st.sampled_from([0, 0.03, 0.4]),
    limit=st.one_of(st.none(), st.integers(7, 4000)),
)
def test_search(most, start, multiple, within, limit):
    tried = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= most

    if most < multiple:
        with pytest.raises(ValueError, match=f"not even {multiple} tokens fit"):
            longest(fits, start, multiple, within, limit)
        return
    answer_ = longest(fits, start, multiple, within, limit)
    assert answer_.times == len(tried) == len(set(tried)) and not any(x % multiple for x in tried)
    assert answer_.fits in tried and answer_.fits <= most and (limit is None or max(tried) <= limit)
    if answer_.fails is None:
        assert limit is not None and answer_.fits == limit // multiple * multiple
    else:
        assert answer_.fails in tried and answer_.fails > most
        assert answer_.fails - answer_.fits <= max(multiple, within * answer_.fits)


@pytest.fixture
def recipe(tmp_path):
    """A recipe of a small model in which logits (256 per token) take most of the memory."""
    pattern = {"segment_lengths": [64], "dilation_rates": [1]}
    settings = {
        "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": "lightning_dilated.callbacks.RunReport"}]},
        "model": {"class_path": "LongNetLM", "init_args": {"pattern": pattern, "dim": 16, "depth": 1, "num_heads": 2}},
        "data": {"class_path": "lightning_dilated.data.FarRecallDataModule"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return ["--config", str(path)]


def test_trials(recipe):
    """With 1M tokens, each of several copies of the logits has 1 GiB; with 2,048 tokens, 2 MiB."""
    trials = Trials(recipe, ranks=1, timeout=120, limit=1.5)
    few, many = trials(2048), trials(1048576)
    assert few.fits and few.seconds > 0 and few.host > 10**8 and "2,048 tokens: fits" in str(few)
    assert not many.fits and "rank 0: " in many.message and "out of memory" in str(many)


BRANCHES = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
SMALL = {"dim": 16, "depth": 1, "num_heads": 2}
MODELS = {
    "LongNetLM": {**SMALL, "pattern": BRANCHES},
    "LongNetMLM": {**SMALL, "pattern": BRANCHES, "vocab_size": 8, "mask_token": 7},
    "LongNetClassifier": {**SMALL, "pattern": BRANCHES, "vocab_size": 8, "task": "ordinal", "num_classes": 3},
    "SlideEncoder": {**SMALL, **BRANCHES, "feature_dim": 8, "task": "regression", "num_classes": 2},
    "SlidePretrainer": {**SMALL, **BRANCHES, "feature_dim": 8, "decoder_dim": 8, "decoder_depth": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_samples(name):
    """Samples have the requested length and the entries that the model needs, and are equal on all ranks."""
    model = getattr(ld, name)(**MODELS[name])
    samples = Samples(model, 96)
    batch, again, other = samples[0], Samples(model, 96)[0], samples[1]
    assert len(samples) == 2 and all(torch.equal(batch[k], again[k]) for k in batch)
    assert any(not torch.equal(batch[k], other[k]) for k in batch)
    model.configure_model()
    loss, count = model.token_mean(batch)
    loss.backward()
    assert loss.isfinite() and count > 0
    assert model.sequence_spec._seq_len(batch) == 96


def test_command(recipe, capsys, monkeypatch):
    """Run the whole search, with trials that succeed up to 300,000 tokens."""
    tried = []

    def trial(self, tokens):
        tried.append((tokens, self.ranks, list(self.arguments)))
        memory = {"allocated": 5 * 2**30, "reserved": 6 * 2**30, "host": 2**31, "pinned": 2**30}
        return Outcome(tokens, tokens <= 300_000, **memory, seconds=2.0, message="rank 1: out of memory")

    monkeypatch.setattr(Trials, "__call__", trial)
    run([*recipe, "--gpus", "2", "--limit", "1", "--model.dim", "32"])
    out = capsys.readouterr().out
    assert tried[0] == (131072, 2, [*recipe, "--model.dim", "32"])
    fits = max(n for n, *_ in tried if n <= 300_000)
    assert f"longest: {fits:,} tokens on 2 rank(s)" in out
    assert (
        fits % 2048 == 0
        and "5.0 GiB allocated, 6.0 reserved, 2.0 GiB of the host a rank (1.0 page-locked), 2.00 s" in out
        and "out of memory (rank 1" in out
    )
