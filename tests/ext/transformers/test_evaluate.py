"""AccuracyByDepth, LossByPosition and `evaluate` for decoders of transformers: counts by hand, tiles, ranks, a folder."""

import csv

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.callbacks import LossByPosition

from ...models import loader, trainer
from ..evaluation.test_loss_by_position import batch, check_rows

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")

from lightning_dilated import RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import AccuracyByDepth, RecallByDistance
from lightning_dilated.data import LongContextDataModule
from lightning_dilated.ext.evaluation.evaluate import load_causal_model
from lightning_dilated.integrations.transformers import HFCausalLM

from ...cli.conftest import run_in
from ...strategy.runs import launched
from ..evaluation import test_recall_by_distance as by_distance
from .decoders import config
from .test_hf_causal_lm import HYBRID


def task(**options):
    sizes = {"vocabulary": 3, "fillers": 1, "distractors": 0, "value_tokens": 12, "batch_size": 2, "train_size": 2}
    return LongContextDataModule("needle", [34, 29], [0, 100], 3, "tokens", **{**sizes, **options})


def model_of(tile=None, family="llama", **options):
    torch.manual_seed(2)
    model = HFCausalLM(config(family, vocab_size=9, tie_word_embeddings=False, **options), tile=tile)
    model.configure_model()
    return model


def rows(rank, group, family, tile, strategy, folder):
    """Return the rows of this rank after a test."""
    world, strategy = launched(rank), dict(strategy)
    plugin = (RingDilatedFSDPStrategy if strategy.pop("fsdp", False) else RingDilatedStrategy)(**strategy)
    callback = AccuracyByDepth(folder, table=False, picture=False)
    trainer(strategy=plugin, devices=world, callbacks=[callback]).test(model_of(tile, family), task(), verbose=False)
    return callback.rows


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("tile", [None, 5])
def test_equals_answers_counted_by_hand(tmp_path, tile, family):
    data, model, callback = task(), model_of(tile, family), AccuracyByDepth(tmp_path, table=False, picture=False)
    trainer(callbacks=[callback]).test(model, data, verbose=False)
    right = {}
    for sample in data.dataset("test"):
        with torch.no_grad():
            likeliest = model({"tokens": sample["tokens"][None]})[0].argmax(-1)
        counted = sample["labels"] != -100
        cell = data.cell("test", sample["index"])
        right[cell] = right.get(cell, 0) + int((likeliest == sample["labels"])[counted].sum())
    assert 0 < sum(right.values()) < 4 * 36
    assert [(r["length"], r["depth"], round(36 * r["token_accuracy"])) for r in callback.rows] == [
        (*cell, n) for cell, n in right.items()
    ]
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks


@pytest.mark.parametrize(
    "ranks, strategy, tile",
    [
        (3, {}, 5),
        (2, {"sequence_size": 1}, 5),
        (2, {"fsdp": True}, None),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, {}, None), (2, {}, 5), (3, {}, None))),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, {"sequence_size": 1}, None), (2, {"fsdp": True}, 5))),
    ],
)
def test_ranks_equal_one(pools, tmp_path, ranks, strategy, tile):
    want = pools(1).run(1, rows, "llama", tile, {}, str(tmp_path / "one"))[0]
    for got in pools(ranks).run(ranks, rows, "llama", tile, strategy, str(tmp_path / "many")):
        assert got == want


@pytest.mark.full
def test_a_folder_of_transformers_on_the_command_line(tmp_path):
    """The folder's tokenizer.json encodes the text. Without it, --tokenizer is required."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["The code of a thing is 12."] * 9, 270)
    model = HFCausalLM(config("qwen3", vocab_size=280, max_position_embeddings=400))
    model.save_pretrained(tmp_path / "hf")
    grid = ("--lengths", "500", "--depths", "0", "100", "--samples", "2", "--distractors", "0")
    without = run_in(tmp_path, "evaluate", "--ckpt_path", "hf", *grid, "--out", "out")
    assert without.code == 2 and "has a vocabulary of 280, so it does not read bytes: give --tokenizer" in without.err
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    with pytest.warns(UserWarning, match="the lengths go up to 500, above the 400 tokens"):
        result = run_in(tmp_path, "evaluate", "--ckpt_path", "hf", *grid, "--out", "out")
    assert result.code == 0, result.err
    with (tmp_path / "out" / "accuracy_by_depth.csv").open() as file:
        assert [(r["length"], r["depth"], r["samples"]) for r in csv.DictReader(file)] == [
            ("500", "0.0", "2"), ("500", "100.0", "2"),
        ]  # fmt: skip
    (tmp_path / "hf" / "model.safetensors").unlink()
    lost = run_in(tmp_path, "evaluate", "--ckpt_path", "hf", *grid, "--out", "out2")
    assert lost.code == 2 and "Traceback" not in lost.err and "hf" in lost.err


def test_positions_that_the_model_does_not_have(tmp_path):
    """A model has a fixed number of learned positions, so longer texts raise. Rotary positions only become inaccurate."""
    model = HFCausalLM(config("GPT2Config", max_position_embeddings=32, vocab_size=9))
    with pytest.raises(
        ValueError, match="the lengths go up to 34, but the model has positions for 32 tokens: leave out"
    ):
        trainer(callbacks=[AccuracyByDepth(tmp_path)]).test(model, task())
    with pytest.raises(ValueError, match=r"the model has 8 tokens, and the data .* has 9"):
        trainer(callbacks=[AccuracyByDepth(tmp_path)]).test(HFCausalLM(config("llama", vocab_size=8)), task())


def test_a_folder_of_adapters(tmp_path):
    pytest.importorskip("peft", reason="needs the extra lora")
    lora = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    HFCausalLM(config("llama"), lora=lora).save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match=r"does not name the model that they belong to.*adapters="):
        load_causal_model(str(tmp_path / "alone"))
    model = HFCausalLM(HFCausalLM(config("llama")).save_pretrained(tmp_path / "base"), lora=lora)
    model.save_pretrained(tmp_path / "named")
    loaded, ids = load_causal_model(str(tmp_path / "named"), 64), torch.arange(9)[None]
    assert loaded.tile == 64 and torch.equal(loaded({"tokens": ids}), model({"tokens": ids}))


@pytest.mark.parametrize("tile", [None, 7])
def test_recall_by_distance(tmp_path, tile):
    data, callback = by_distance.task(), RecallByDistance()
    torch.manual_seed(2)
    model = HFCausalLM(config("llama", vocab_size=data.vocab_size, tie_word_embeddings=False), tile=tile)
    model.configure_model()
    by_distance.quiet(tmp_path, callback).validate(model, data, verbose=False)
    want = by_distance.by_hand(model, data, "val")
    assert [(r["first"], r["labels"]) for r in callback.rows] == [(first, n) for first, (_, n) in want.items()]
    assert [r["accuracy"] for r in callback.rows] == [k / n for k, n in want.values()]
    assert model.watch_predictions is None


def test_a_long_batch_is_warned_of_once(tmp_path, recwarn):
    """Only the decoder's own warning appears, because advice on `max_seq_len` is for models with that argument."""
    model = HFCausalLM(config("llama", vocab_size=9, max_position_embeddings=16))
    trainer(max_steps=1, limit_val_batches=0).fit(model, task())
    words = [str(x.message) for x in recwarn if "16" in str(x.message) and "made for" in str(x.message)]
    assert not any("max_seq_len" in x for x in words)


# -- LossByPosition ----------------------------------------------------------------------------------------------------
pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")


@pytest.mark.parametrize("tile", [None, 7])
@pytest.mark.parametrize("kind", ["whole", "lengths", "documents"])
def test_equals_sums_by_hand(kind, tile, tmp_path):
    torch.manual_seed(1)
    model, data = ld.integrations.transformers.HFCausalLM(config("gemma3"), HYBRID, tile=tile), [batch(kind)]
    callback = LossByPosition(table=False, picture=False)
    run = trainer(callbacks=[callback], default_root_dir=tmp_path, precision="64-true")
    run.validate(model, loader(*data), verbose=False)
    check_rows(model, data, callback.rows, rel=1e-5)
    octaves = [r for r in callback.rows if r["part"] == "octave"]
    mean = sum(r["bits"] * r["tokens"] for r in octaves) / sum(r["tokens"] for r in octaves)
    assert mean == pytest.approx(float(run.callback_metrics["val_bits_per_token"]), rel=1e-6)
    assert model.watch_losses is None
    torch.testing.assert_close(model.token_losses(data[0]).sum(), model.loss_terms(data[0])[0])
