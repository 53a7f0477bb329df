"""A text with half of a surrogate pair, such as a cut emoji's escape in JSON: every reader replaces it with U+FFFD."""

import json

import pytest
import tokenizers

import lightning_dilated as ld
from lightning_dilated.ext.text.load_tokenizer import load_text_tokenizer
from lightning_dilated.ext.text.records import whole_texts
from lightning_dilated.ext.text.tokenizer import encode, load_tokenizer, whole_text

HALF = "\ud83d"
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A BPE tokenizer on bytes."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|turn|>"], "show_progress": False, "vocab_size": 300, "initial_alphabet": alphabet}
    bpe.train_from_iterator(["user assistant"], tokenizers.trainers.BpeTrainer(**options))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    return str(path)


def test_whole_texts():
    assert whole_text("plain \U0001f600") == "plain \U0001f600"
    assert [whole_text(x) for x in (HALF, "a\ude00b", HALF + "\ude00", HALF + HALF)] == [
        "\ufffd",
        "a\ufffdb",
        "\U0001f600",
        "\ufffd" * 2,
    ]
    nested = {"messages": [{"content": f"hi {HALF}", HALF: 1}], "n": 2, "none": None}
    assert whole_texts(nested) == {"messages": [{"content": "hi \ufffd", "\ufffd": 1}], "n": 2, "none": None}


def test_encode(tokenizer):
    for text in (f"hi {HALF}", f"\udc00{HALF}x"):
        want = load_tokenizer(tokenizer).encode(whole_text(text)).ids
        assert encode(load_tokenizer(tokenizer), text) == load_text_tokenizer(tokenizer).encode(text) == want


def test_a_tokenizer_of_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<|turn|>")
    fast.save_pretrained(tmp_path)
    loaded = load_text_tokenizer(str(tmp_path))
    assert loaded.encode(f"hi {HALF}") == loaded.encode("hi \ufffd")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_stream_of_texts(tokenizer, tmp_path, suffix):
    rows = [{"text": "hello world"}, {"text": f"half {HALF} of it"}]
    text = json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
    assert "\\ud83d" in text
    (tmp_path / f"texts{suffix}").write_text(text)
    data = ld.data.TextStreamDataModule(
        str(tmp_path / f"texts{suffix}"), tokenizer, seq_len=64, readers=1, epoch_rows=3, cache_dir=str(tmp_path / "cache"),
        eos_token="<|turn|>",
    )  # fmt: skip
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert "half \ufffd of it" in load_tokenizer(tokenizer).decode(batch["tokens"][0].tolist())


@pytest.mark.parametrize("kind", ["cache", "stream"])
def test_conversations(tokenizer, tmp_path, kind):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ho {HALF}"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4) + "\n")
    options = {"seq_len": 64, "template": TEMPLATE, "cache_dir": str(tmp_path / "cache")}
    if kind == "cache":
        data = ld.data.ChatDataModule(
            str(tmp_path / "rows.jsonl"), tokenizer, val_fraction=0, test_fraction=0, **options
        )
    else:
        data = ld.data.ChatStreamDataModule(str(tmp_path / "rows.jsonl"), tokenizer, readers=1, **options)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert "ho \ufffd" in load_tokenizer(tokenizer).decode(batch["tokens"][0].tolist())
