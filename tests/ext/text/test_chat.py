"""Conversations as samples: labels are the assistant's words, and packs equal single conversations on all ranks."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated import DilatedPattern, LongNetLM, SequenceSpec
from lightning_dilated.data import ChatDataModule
from lightning_dilated.data.packing import PackedSamples, collate_pack
from lightning_dilated.ext.text.messages import conversation
from lightning_dilated.ext.text.store import next_tokens
from lightning_dilated.ext.text.template import JsonTokenizer
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from ...models import trainer
from .chats import CHATML, END, FORGETS, GLUED, START, TAGGED, bpe, chat, chats, tokenizer_json, write

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return tokenizer_json(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def module(tmp_path, vocabulary):
    """Return a function: `module(rows, **options)` returns a module that reads the rows from a file."""

    def make(rows, **options):
        path = write(tmp_path / "chats.jsonl", rows)
        options = {
            "template": CHATML,
            "val_fraction": 0,
            "test_fraction": 0,
            "cache_dir": str(tmp_path / "cache"),
        } | options
        return ChatDataModule(**{"paths": path, "tokenizer": vocabulary, "seq_len": 400, **options})

    return make


def learned(data, sample):
    """Decode the labels of a sample."""
    labels = sample["labels"][sample["labels"] != -100].tolist()
    return data.tokenizer.tokenizer.decode(labels, skip_special_tokens=False)


def text(data, sample):
    return data.tokenizer.tokenizer.decode(sample["tokens"].tolist(), skip_special_tokens=False)


# -- labels --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_labels_are_what_the_assistant_writes(module, template):
    rows = [chat("the cat", "sat on", "a mat?", "nobody came 猫", system="it rained"), chat("dry", "wet")]
    data = module(rows, template=template)
    first, second = data.dataset("train")
    assert learned(data, first) == f"sat on{END}nobody came 猫{END}" and learned(data, second) == f"wet{END}"
    assert text(data, second) == f"{START}user\ndry{END}\n{START}assistant\nwet{END}\n"
    for sample in (first, second):
        at = sample["labels"] != -100
        assert torch.equal(sample["labels"][:-1][at[:-1]], sample["tokens"][1:][at[:-1]]) and not at[-1]


STYLES = {
    "instructions": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}",
        " sat on<|im_end|> dry<|im_end|>",
    ),
    "another name": (
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|im_start|>' + role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
        "sat on<|im_end|>dry<|im_end|>",
    ),
    "headers": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_start|>\n\n' + m['content'] | trim + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}",
        "sat on<|im_end|>dry<|im_end|>",
    ),
    "a system prompt of its own": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nbe good<|im_end|>\n' }}{% endif %}" + CHATML,
        "sat on<|im_end|>dry<|im_end|>",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_templates_in_the_style_of_released_models(module, style):
    template, want = STYLES[style]
    data = module([chat("the cat ", "sat on", "a mat", "dry")], template=template)
    assert learned(data, data.dataset("train")[0]) == want


def test_all_tokens(module):
    data = module([chat("dry", "wet")], train_on="all")
    (sample,) = data.dataset("train")
    assert sample["labels"].tolist() == [*sample["tokens"].tolist()[1:], -100]
    only_questions = module([chat("dry")], train_on="all")
    assert len(only_questions.dataset("train")) == 1


@given(
    st.lists(st.text(min_size=1, max_size=20) | st.sampled_from([START, END + "\n", "\n\n"]), min_size=2, max_size=7)
)
def test_tagged_and_prefixes_agree(contents):
    """Tags and prefixes, two independent ways to compute the mask, agree, even if texts contain special tokens."""
    row = conversation(chat(*contents), "here")
    by_prefix, by_tags = TOKENIZERS()
    ids, mask = by_prefix.tokens(row)
    other, tags = by_tags.tokens(row)
    assert ids.tolist() == other.tolist() and mask.tolist() == tags.tolist()


def TOKENIZERS(cache=[]):  # noqa: B006
    """Return tokenizers for both kinds of templates. They are cached."""
    if not cache:
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            path = tokenizer_json(Path(folder))
            cache += [JsonTokenizer(path, CHATML), JsonTokenizer(path, TAGGED)]
    return cache


def test_long_conversations_are_encoded_about_twice(module, monkeypatch):
    """The check of prefixes takes time proportional to the number of turns, not to its square."""
    tokenizer = TOKENIZERS()[0]
    row = conversation(chat(*["the cat sat on a mat"] * 200), "here")
    encoded, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda x: encoded.append(len(x)) or encode(x))
    _, mask = tokenizer.tokens(row)
    assert sum(encoded) < 4 * len(tokenizer.render(row)) and mask.sum() == 700


def test_prompt_and_completion(module):
    rows = [
        {"prompt": "dry", "completion": "wet"},
        {"prompt": chat("dry")["messages"], "completion": chat("", "wet")["messages"][1:]},
    ]
    data = module([*rows, chat("dry", "wet")])
    samples = list(data.dataset("train"))
    assert all(torch.equal(x["tokens"], samples[2]["tokens"]) for x in samples)
    assert all(torch.equal(x["labels"], samples[2]["labels"]) for x in samples)


def test_files_of_json(tmp_path, module):
    rows = chats(5)
    want = [x["tokens"].tolist() for x in module(rows).dataset("train")]
    (tmp_path / "array.json").write_text("\n " + json.dumps(rows))
    assert [x["tokens"].tolist() for x in module(rows, paths=str(tmp_path / "array.json")).dataset("train")] == want
    lines = "\n\n".join(json.dumps(x) for x in rows) + "\n \n"  # empty lines are left out, and none ends the file
    (tmp_path / "spaced.jsonl").write_text(lines)
    assert [x["tokens"].tolist() for x in module(rows, paths=str(tmp_path / "spaced.jsonl")).dataset("train")] == want
    joined = module(rows, paths=[str(tmp_path / "spaced.jsonl"), str(tmp_path / "array.json")])
    assert [x["tokens"].tolist() for x in joined.dataset("train")] == want * 2


# -- too long, splits, the cache -----------------------------------------------------------------------------------------
def test_too_long(module, caplog):
    rows = [chat("the cat", "sat"), chat("dry " * 50, "wet"), chat("a", "long " * 50)]
    lengths = module(rows).dataset("train").lengths.tolist()
    with pytest.raises(
        ValueError, match=r"2 of the 3 conversations .* up to \d+ \(the first is row 1.*too_long to skip"
    ):
        module(rows, seq_len=30).check()
    with caplog.at_level("INFO"):
        skipped = module(rows, seq_len=30, too_long="skip")
        assert skipped.dataset("train").lengths.tolist() == lengths[:1]
        assert "2 are left out" in caplog.text
        cut = module(rows, seq_len=30, too_long="cut")
        assert cut.dataset("train").lengths.tolist() == [lengths[0], 30]
        assert "1 are left out (nothing to learn is left before the cut), 1 end there" in caplog.text
    long, whole = cut.dataset("train")[1], module(rows).dataset("train")[2]
    assert torch.equal(long["tokens"], whole["tokens"][:30]) and torch.equal(long["labels"][:29], whole["labels"][:29])
    assert long["labels"][29] == -100
    assert cut.dataset("train").fingerprint() != skipped.dataset("train").fingerprint()


def test_splits(tmp_path, module):
    data = module(chats(20), val_fraction=0.2, test_fraction=0.1, val_limit=2)
    assert [len(data.dataset(x)) for x in ("train", "val", "test")] == [14, 2, 2]
    data = module(chats(20), val_fraction=0.2, test_fraction=0.2, val_limit=1)
    assert (
        [len(data.dataset(x)) for x in ("train", "val", "test")] == [12, 1, 4] == [12, 1, len(data.predict_dataset())]
    )
    data = module(chats(20), val_fraction=0.2, test_fraction=0.1, val_limit=2)
    assert "14 train, 2 val, 2 test" in data.describe() and "% of them to learn" in data.describe()
    whole = module(chats(20)).dataset("train")
    assert torch.equal(data.dataset("val")[0]["tokens"], whole[14]["tokens"])
    own = module(
        chats(20), val_fraction=None, test_fraction=None, val_paths=write(tmp_path / "val.jsonl", chats(3, seed=1))
    )
    assert [len(own.dataset(x)) for x in ("train", "val")] == [20, 3] and own.wanted("test")


def test_rows_are_encoded_once(module, monkeypatch):
    module(chats(5)).check()

    def never(*args):
        raise AssertionError("encoded again")

    monkeypatch.setattr(JsonTokenizer, "tokens", never)
    again = module(chats(5))
    again.check()
    assert len(pickle.loads(pickle.dumps(again.dataset("train")))[3]["tokens"]) == again.dataset("train").lengths[3]
    with pytest.raises(AssertionError):
        module(chats(5, seed=1)).check()
    with pytest.raises(AssertionError):
        module(chats(5), template=TAGGED).check()


def test_a_damaged_store_is_made_again(tmp_path, module):
    want = module(chats(5)).dataset("train")[4]["tokens"]
    (folder,) = (x for x in (tmp_path / "cache").iterdir() if x.is_dir())
    (folder / "tokens").write_bytes(b"\0" * 8)
    again = module(chats(5)).dataset("train")
    assert torch.equal(again[4]["tokens"], want)
    assert module(chats(5, seed=1)).dataset("train").fingerprint() != again.fingerprint()


# -- packs ---------------------------------------------------------------------------------------------------------------
def test_packs_hold_the_conversations(module):
    data = module(chats(12), pack_tokens=150)
    packed_texts = []
    for batch in data.train_dataloader():
        bounds = batch["cu_seqlens"].tolist()
        assert batch["tokens"].shape == batch["labels"].shape == (1, bounds[-1])
        for i, (a, b) in zip(batch["index"].tolist(), itertools.pairwise(bounds), strict=True):
            sample = data.dataset("train")[i]
            assert torch.equal(batch["tokens"][0, a:b], sample["tokens"])
            assert torch.equal(batch["labels"][0, a:b], sample["labels"])
            packed_texts.append(i)
    assert sorted(packed_texts) == list(range(12)) and len(data.train_dataloader()) < 12


def model(**options):
    torch.manual_seed(1)
    pattern = DilatedPattern.longnet([8, 32, 512], [1, 2, 4])
    return LongNetLM(pattern, vocab_size=330, dim=16, depth=2, num_heads=4, **options).double()


@pytest.mark.full
def test_losses_and_gradients_of_a_pack_are_those_one_by_one(module):
    data, network = module(chats(5), pack_tokens=10_000), model(rotary_base=100.0)
    (batch,) = data.train_dataloader()
    total, count = network.loss_terms(batch)
    total.backward()
    packed = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    apart = [
        network.loss_terms({k: v[None] for k, v in sample.items() if k != "index"}) for sample in data.dataset("train")
    ]
    sum(x for x, _ in apart).backward()
    torch.testing.assert_close(total, sum(x for x, _ in apart), rtol=1e-9, atol=0)
    assert count == sum(n for _, n in apart) == data._samples["train"].store.learned
    for got, p in zip(packed, network.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "strided"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_of_a_sequence_reads_its_slice(module, ranks, layout):
    data = module(chats(8)).dataset("train")
    packed, spec = PackedSamples(data, 200), SequenceSpec({"tokens": 1, "labels": 1}, whole=["cu_seqlens", "index"])
    if layout == "zigzag" and ranks == 3:
        layout = "contiguous"
    for pack in [(3, 0, 7), (5,), tuple(range(8))]:
        whole = collate_pack([packed[pack]])
        for rank in range(ranks):
            place = Place(ranks, rank, layout)
            part, want = collate_pack(RankDataset(packed, place).__getitems__([pack])), spec.cut(whole, place)
            assert part.keys() == want.keys() and all(torch.equal(part[name], want[name]) for name in want)


@given(st.lists(st.booleans(), min_size=2, max_size=9), st.data())
def test_labels_of_a_range(learn, drawn):
    ids = np.arange(len(learn))
    stop = drawn.draw(st.integers(1, len(learn)))
    start = drawn.draw(st.integers(0, stop - 1))
    whole = [ids[t + 1] if t + 1 < len(ids) and learn[t + 1] else -100 for t in range(len(ids))]
    upto = min(stop + 1, len(ids))
    tokens, labels = next_tokens(ids[start:upto], np.array(learn)[start:upto], stop - start)
    assert tokens.tolist() == ids[start:stop].tolist() and labels.tolist() == whole[start:stop]


# -- misuse --------------------------------------------------------------------------------------------------------------
ROWS = {
    "no messages": ({"text": "x"}, "line 2 has neither 'messages' nor 'prompt' and 'completion', but 'text'"),
    "another form": ({"conversations": [{"from": "human", "value": "x"}]}, "rename from/value"),
    "no object": ([1], "line 2 is a list"),
    "empty": ({"messages": []}, "at least one message"),
    "text": ({"messages": "hello"}, "at least one message, got 'hello'"),
    "a message of text": ({"messages": ["hello"]}, "message 0 is 'hello'"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'; roles are system"),
    "no role": ({"messages": [{"content": "x"}]}, "role None"),
    "no content": ({"messages": [{"role": "user"}]}, "content 'None'"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "images and sounds"),
    "no assistant": (chat("question"), "no message of the role 'assistant'.*line|line 2 has no message of the role"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_conversations(module, name):
    row, message = ROWS[name]
    with pytest.raises(ValueError, match=message):
        module([chat("dry", "wet"), row]).check()


def test_a_line_that_is_not_json(tmp_path, module):
    (tmp_path / "bad.jsonl").write_text('{"messages": [\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1 is not JSON"):
        module([], paths=str(tmp_path / "bad.jsonl")).check()
    (tmp_path / "bad.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="begins as a JSON array"):
        module([], paths=str(tmp_path / "bad.json")).check()


MISUSES = {
    "missing file": (FileNotFoundError, "data.paths", {"paths": "nowhere.jsonl"}),
    "no rows": (ValueError, "holds no row", {}),
    "mapping without path": (ValueError, "needs `path`", {"paths": {"split": "train"}}),
    "paths": (TypeError, "data.paths", {"paths": 7}),
    "no template": (ValueError, "holds no chat template: set data.template", {"template": None}),
    "missing template": (FileNotFoundError, "data.template nowhere.jinja", {"template": "nowhere.jinja"}),
    "no jinja": (ValueError, "cannot be read", {"template": "{% for x %}"}),
    "unnamed token": (ValueError, "uses bos_token", {"template": "{{ bos_token }}" + CHATML}),
    "missing tokenizer": (FileNotFoundError, "nowhere.json", {"tokenizer": "nowhere.json"}),
    "tokenizer": (TypeError, "data.tokenizer must be", {"tokenizer": None}),
    "train_on": (ValueError, "data.train_on must be one of", {"train_on": "user"}),
    "too_long": (ValueError, "data.too_long must be one of", {"too_long": "wrap"}),
    "seq_len": (ValueError, "data.seq_len", {"seq_len": 1}),
    "no validation": (ValueError, "the val split has no conversation of the 1 in .*set it to 0", {"val_fraction": 0.1}),
    "two validations": (ValueError, "data.val_fraction is 0.1 and", {"val_fraction": 0.1, "val_paths": "x.jsonl"}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(module, name):
    error, message, options = MISUSES[name]
    with pytest.raises(error, match=message):
        module([], **options).check() if name == "no rows" else module([chat("dry", "wet")], **options).check()


TEMPLATES = {
    "forgets thoughts": (FORGETS, r"message 1 cannot be determined.*'<think></think>"),
    "glued": (GLUED, "message 1 cannot be determined.*a token crosses"),
    "refuses": ("{{ raise_exception('roles must alternate') }}", r"refuses this conversation \(roles must alternate\)"),
    "nothing within tags": (CHATML + "{% generation %}{% endgeneration %}", "leaves no token to learn"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_do_not_show_the_assistant(module, name):
    template, message = TEMPLATES[name]
    with pytest.raises(ValueError, match=message):
        module([chat("the cat", "sat on", "a mat", "dry")], template=template).check()


def test_a_model_with_fewer_tokens(module):
    small = LongNetLM(DilatedPattern.dense(), vocab_size=300, dim=16, depth=1)
    with pytest.raises(ValueError, match=r"vocab_size=300 is below the data's 325 tokens"):
        trainer(max_steps=1).fit(small, module(chats(3)))


def test_the_vocabulary_has_all_tokens():
    assert max(bpe().get_vocab().values()) + 1 == TOKENIZERS()[0].vocab_size
