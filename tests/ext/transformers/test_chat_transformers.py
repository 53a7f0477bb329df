"""Conversations with transformers' tokenizers and rows from `datasets`, and HFCausalLM trained on them."""

import lightning.pytorch as pl
import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.data import ChatDataModule, ChatStreamDataModule, TextStreamDataModule
from lightning_dilated.ext.text.messages import conversation
from lightning_dilated.ext.text.template import TransformersTokenizer

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from ...strategy.runs import Losses, launched, trainer
from ..text.chats import CHATML, END, FORGETS, START, TAGGED, bpe, chat, chats, tokenizer_json, write
from .decoders import close, config

HFCausalLM = ld.integrations.transformers.HFCausalLM
V = 330


def hf_folder(path, template=None):
    """Save a transformers folder with the tokenizer of `bpe`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token=END, bos_token=START)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return hf_folder(tmp_path / "tokenizer", CHATML)


def make(tmp_path, tokenizer, rows=None, **options):
    options = {"val_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path / "cache"), "seq_len": 400, **options}
    if rows is not None:
        options["paths"] = write(tmp_path / "chats.jsonl", rows)
    return ChatDataModule(tokenizer=tokenizer, **options)


def samples(data, split="train"):
    return [(x["tokens"].tolist(), x["labels"].tolist()) for x in data.dataset(split)]


# -- tokenizers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_a_folder_equals_its_tokenizer_json(tmp_path, template):
    rows = [*chats(6), chat("猫 😀", "über\n\nall", system="x")]
    theirs = make(tmp_path, hf_folder(tmp_path / "hf", template), rows)
    ours = make(tmp_path, tokenizer_json(tmp_path / "own"), rows, template=template)
    assert samples(theirs) == samples(ours)
    assert theirs.vocab_size == ours.vocab_size


def test_tokens_are_those_of_apply_chat_template(folder):
    tokenizer = TransformersTokenizer(folder, None)
    for row in chats(5):
        ids, mask = tokenizer.tokens(conversation(row, "here"))
        assert ids.tolist() == tokenizer.tokenizer.apply_chat_template(row["messages"], return_dict=False)
        answers = [x["content"] + END for x in row["messages"] if x["role"] == "assistant"]
        assert tokenizer.tokenizer.decode(ids[mask]) == "".join(answers)


def test_special_tokens_are_named_by_a_folder(tmp_path):
    data = make(tmp_path, hf_folder(tmp_path / "hf", "{{ bos_token }}" + CHATML), [chat("dry", "wet")])
    assert data.tokenizer.tokenizer.decode(data.dataset("train")[0]["tokens"]).startswith(START + START)


def test_tools_reach_the_template(tmp_path):
    template = "{{ tools | tojson if tools else '' }}" + CHATML
    rows = [{**chat("dry", "wet"), "tools": [{"type": "function", "function": {"name": "dry"}}]}]
    theirs = make(tmp_path, hf_folder(tmp_path / "hf", template), rows)
    ours = make(tmp_path, tokenizer_json(tmp_path / "own"), rows, template=template)
    assert samples(theirs) == samples(ours)
    assert "function" in theirs.tokenizer.tokenizer.decode(theirs.dataset("train")[0]["tokens"])


# -- rows of datasets ----------------------------------------------------------------------------------------------------
@pytest.fixture
def hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    datasets.disable_progress_bars()
    return datasets


def test_rows_of_parquet_and_of_folders(tmp_path, folder, hub):
    rows = chats(7)
    want = samples(make(tmp_path, folder, rows))
    table = hub.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    hub.DatasetDict({"train": table, "extra": table.select([2])}).save_to_disk(tmp_path / "splits")
    sources = [
        str(tmp_path / "rows.parquet"),
        str(tmp_path / "saved"),
        {"path": str(tmp_path / "splits"), "split": "train"},
        {"path": "json", "data_files": str(tmp_path / "chats.jsonl")},
        {"path": "json", "data_files": str(tmp_path / "chats.jsonl"), "split": "train"},
    ]
    for source in sources:
        assert samples(make(tmp_path, folder, paths=source)) == want, source
    joined = make(tmp_path, folder, paths=[str(tmp_path / "saved"), str(tmp_path / "chats.jsonl")])
    assert samples(joined) == want + want
    own = make(
        tmp_path, folder, rows, val_fraction=None, val_paths={"path": str(tmp_path / "splits"), "split": "extra"}
    )
    assert samples(own, "val") == [want[2]]


def test_misused_datasets(tmp_path, folder, hub):
    table = hub.Dataset.from_list(chats(3))
    hub.DatasetDict({"train": table, "extra": table}).save_to_disk(tmp_path / "splits")
    table.save_to_disk(tmp_path / "saved")
    saved, splits = str(tmp_path / "saved"), str(tmp_path / "splits")
    for source, message in {
        "no split": ({"path": splits}, "choose a split of .*; it has train, extra"),
        "another split": ({"path": splits, "split": "dev"}, "there is no split 'dev' of .*; it has train, extra"),
        "one without splits": ({"path": saved, "split": "train"}, "leave `split` out"),
        "options": ({"path": saved, "revision": "x"}, r"takes `split` and `streaming` only; got \['revision'\]"),
    }.values():
        with pytest.raises(ValueError, match=message):
            make(tmp_path, folder, paths=source).check()
    with pytest.raises(ValueError, match=r"saved, row 0 .* neither 'talk'"):
        make(tmp_path, folder, paths=saved, column="talk").check()


# -- models --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_losses_of_a_pack_are_those_one_by_one(tmp_path, folder, family):
    data = make(tmp_path, folder, chats(5), pack_tokens=10_000)
    (batch,) = data.train_dataloader()
    model = HFCausalLM(config(family, vocab_size=V)).double()
    total, count = model.loss_terms(batch)
    total.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    apart = [model.loss_terms({k: v[None] for k, v in x.items() if k != "index"}) for x in data.dataset("train")]
    want = sum(x for x, _ in apart)
    want.backward()
    assert count == sum(n for _, n in apart) > 0
    torch.testing.assert_close(total, want, rtol=1e-6, atol=0)  # rotary tables have fp32 rounding
    close(got, {n: p.grad for n, p in model.named_parameters()}, 1e-5)


def train(rank, group, kind, paths, folder, cache):
    """Return losses, validation loss and weights of a run in which all ranks share each row."""
    world, record = launched(rank), Losses()
    pl.seed_everything(1, verbose=False)
    model = HFCausalLM(config("llama", vocab_size=V))
    streams = {"readers": 2, "epoch_rows": 8, "val_paths": paths, "val_limit": 3, "cache_dir": cache}
    if kind == "chat":
        data = ChatDataModule(paths, folder, 300, cache_dir=cache, val_fraction=0.25, test_fraction=0)
    elif kind == "chat stream":
        data = ChatStreamDataModule(paths, folder, 300, **streams)
    else:
        data = TextStreamDataModule(paths, folder, 100, column="prompt", **streams)
    built = trainer("ring_dilated", world, max_steps=3, precision="64-true", callbacks=[record])
    built.fit(model, data)
    built.validate(model, data, verbose=False)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": record.losses, "val_loss": float(built.callback_metrics["val_loss"]), "weights": weights}


@pytest.mark.parametrize("kind", ["chat", "chat stream", "text stream"])
def test_ranks_of_a_sequence_train_as_one(pools, tmp_path, folder, kind):
    """Train on two ranks, and on three for uneven lengths. The ranks share the work of encoding the rows of a file."""
    rows = [{"prompt": " ".join(x["content"] for x in row["messages"]), "completion": "dry"} for row in chats(32)]
    paths = write(tmp_path / "chats.jsonl", rows)
    (want,) = pools(1).run(1, train, kind, paths, folder, str(tmp_path / "cache"))
    assert len(want["losses"]) == 3
    for ranks in (2, 3) if kind == "chat" else (2,):
        cache = tmp_path / f"cache{ranks}"
        for got in pools(ranks).run(ranks, train, kind, paths, folder, str(cache)):
            torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-6, atol=0)
            assert got["val_loss"] == pytest.approx(want["val_loss"], rel=1e-6)
            close(got["weights"], want["weights"], 1e-5)
        assert kind != "chat" or len([x for x in cache.iterdir() if x.is_dir()]) == 1


# -- misuse --------------------------------------------------------------------------------------------------------------
def test_misuse(tmp_path, folder):
    rows = [chat("the cat", "sat on", "a mat", "dry")]
    with pytest.raises(ValueError, match=r"has no chat template: set data\.template"):
        make(tmp_path, hf_folder(tmp_path / "plain"), rows).check()
    with pytest.raises(ValueError, match=r"cannot be determined.*generation %}"):
        make(tmp_path, folder, rows, template=FORGETS).check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no tokenizer that transformers can read"):
        make(tmp_path, str(tmp_path / "empty"), rows).check()
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        make(tmp_path, str(tmp_path / "no where"), rows).check()
    with pytest.raises(ValueError, match=r"refuses this conversation \(no"):
        make(tmp_path, folder, rows, template="{{ raise_exception('no') }}").check()
