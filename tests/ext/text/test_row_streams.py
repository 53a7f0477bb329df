"""Rows that are packed while they are read. Their contents do not depend on ranks, workers, epochs or restarts."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_dilated import SequenceSpec
from lightning_dilated.data import ChatStreamDataModule, TextStreamDataModule
from lightning_dilated.data.module import SendableCollate
from lightning_dilated.ext.text.packed_stream import Document, PackedReaders, Position, filled, packed
from lightning_dilated.ext.text.records import open_rows
from lightning_dilated.ext.text.tokens import collate_documents
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from ...data.runs import run
from .chats import CHATML, WORDS, chat, chats, tokenizer_json, write

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return tokenizer_json(tmp_path_factory.mktemp("tokenizer"))


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{"text": " ".join(rng.choice(WORDS, rng.integers(1, 30)))} for _ in range(count)]


@pytest.fixture
def text(tmp_path, vocabulary):
    """Return a function: `text(rows, **options)` returns a module that reads the rows from a file."""

    def make(rows, **options):
        path = write(tmp_path / "texts.jsonl", rows)
        options = {"readers": 2, "epoch_rows": 8, "cache_dir": str(tmp_path / "cache"), **options}
        return TextStreamDataModule(
            **{"paths": path, "tokenizer": vocabulary, "seq_len": 16, "eos_token": "<|endoftext|>", **options}
        )

    return make


@pytest.fixture
def talk(tmp_path, vocabulary):
    def make(rows, **options):
        path = write(tmp_path / "chats.jsonl", rows)
        options = {"readers": 2, "epoch_rows": 8, "cache_dir": str(tmp_path / "cache"), "template": CHATML, **options}
        return ChatStreamDataModule(**{"paths": path, "tokenizer": vocabulary, "seq_len": 150, **options})

    return make


# -- packing -------------------------------------------------------------------------------------------------------------
def documents(lengths, first=0):
    ends = np.cumsum(lengths)
    for i, (n, end) in enumerate(zip(lengths, ends, strict=True)):
        if i >= first:
            tokens = np.arange(end - n, end)
            yield Document(Position(0, i), tokens, np.append(tokens[1:], -100))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(2, 15))
def test_filled_rows_hold_all_tokens(lengths, size):
    """Tokens are in order, labels are the next tokens of a document, and reading may start at any row."""
    rows = list(filled(documents(lengths), size))
    whole = torch.cat([row["tokens"] for row, _ in rows])
    labels = torch.cat([row["labels"] for row, _ in rows])
    assert whole.tolist() == list(range(sum(lengths)))
    assert labels.tolist() == [x for d in documents(lengths) for x in d.labels.tolist()]
    starts = {0, *np.cumsum(lengths).tolist()}
    for i, (row, _) in enumerate(rows):
        bounds = [i * size + x for x in row["cu_seqlens"].tolist()]
        assert len(row["tokens"]) == size or i == len(rows) - 1
        assert bounds[0] == i * size and set(bounds[1:-1]) == {x for x in starts if bounds[0] < x < bounds[-1]}
    for i, (_, position) in enumerate(rows[:-1]):
        remaining = list(filled(documents(lengths, position.number), size, position.offset))
        assert [r["tokens"].tolist() for r, _ in remaining] == [r["tokens"].tolist() for r, _ in rows[i + 1 :]]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(2, 15))
def test_packed_rows_cut_no_document(lengths, size):
    rows = list(packed(documents(lengths), size))
    each = [n for row, _ in rows for n in row["cu_seqlens"].diff().tolist()]
    assert each == lengths and all(len(r["tokens"]) <= size or len(r["cu_seqlens"]) == 2 for r, _ in rows)
    for i, (_, position) in enumerate(rows[:-1]):
        remaining = list(packed(documents(lengths, position.number), size, position.offset))
        assert [r["tokens"].tolist() for r, _ in remaining] == [r["tokens"].tolist() for r, _ in rows[i + 1 :]]


# -- rows ----------------------------------------------------------------------------------------------------------------
def test_rows_are_the_texts(text):
    """Each of two readers has every second text. Each text ends with the end-of-document token."""
    rows = texts(12)
    data = text(rows)
    tokenizer, dataset = data.tokenizer, data.dataset("train")
    for reader in (0, 1):
        want = [x for row in rows[reader::2] for x in (*tokenizer.encode(row["text"]), 0)]
        got = torch.cat([dataset[i]["tokens"] for i in range(reader, 8, 2)])
        assert got.tolist() == [want[i % len(want)] for i in range(len(got))]  # starts over at the end
    row = dataset[0]
    assert (row["labels"] == -100).sum() == (row["tokens"] == 0).sum() and len(row["tokens"]) == 16
    assert set((row["cu_seqlens"][1:-1] - 1).tolist()) <= set((row["tokens"] == 0).nonzero().flatten().tolist())


def test_any_order_gives_the_same_rows(text, tmp_path):
    want = [text(texts(12)).dataset("train")[i]["tokens"].tolist() for i in range(8)]
    for order in ([7, 0, 3, 3, 2, 6, 1, 5, 4], [5, 4]):
        dataset = text(texts(12), cache_dir=str(tmp_path / str(order))).dataset("train")
        assert [dataset[i]["tokens"].tolist() for i in order] == [want[i] for i in order]
        dataset.set_epoch(1)
        later = dataset[0]["tokens"].tolist()
    fresh = text(texts(12), cache_dir=str(tmp_path / "other"), epoch_rows=16).dataset("train")
    assert fresh[8]["tokens"].tolist() == later not in want


def test_notes_spare_encoding_again(text, monkeypatch):
    want = [text(texts(40)).dataset("train")[i]["tokens"].tolist() for i in range(8)]
    dataset = text(texts(40)).dataset("train")
    encoded, encode = [], dataset.source.encode
    monkeypatch.setattr(dataset.source, "encode", lambda *x: encoded.append(x) or encode(*x))
    assert dataset[7]["tokens"].tolist() == want[7] and len(encoded) <= 4
    for file in dataset.folder.iterdir():
        file.unlink()
    again = text(texts(40)).dataset("train")
    assert again[7]["tokens"].tolist() == want[7]


def served(data, rank=0, replicas=1, epochs=2, skip=0):
    """Return [(number, tokens)] of the rows that a rank gets."""
    data._replica = lambda: (rank, replicas)
    loader = data.train_dataloader()
    if skip:
        loader.load_state_dict({**loader.state_dict(), "samples": skip, "epoch": 0})
    out = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        out += [(epoch * data.epoch_rows + int(x["index"][0]), x["tokens"][0].tolist()) for x in loader]
    return out


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_workers_and_epochs_have_the_rows_of_one(text, tmp_path, workers):
    one = served(text(texts(30), readers=12, epoch_rows=24))
    assert [x for x, _ in one] == list(range(48))
    for ranks in (1, 2, 3):
        cache = str(tmp_path / f"cache{ranks}")
        options = {"readers": 12, "epoch_rows": 24, "num_workers": workers, "cache_dir": cache}
        each = [served(text(texts(30), **options), rank, ranks) for rank in range(ranks)]
        assert sorted(itertools.chain(*each)) == one
        remaining = [served(text(texts(30), **options), rank, ranks, 1, skip=12) for rank in range(ranks)]
        assert sorted(itertools.chain(*remaining)) == one[12:24]


def test_a_rank_reads_its_documents_only(text, monkeypatch):
    data = text(texts(30), readers=4, epoch_rows=8)
    readers, read = data.dataset("train").source.readers, []
    table = readers.table

    class Seen:
        def __len__(self):
            return len(table)

        def __getitem__(self, i):
            read.append(i)
            return table[i]

        where = table.where

    readers.table = Seen()
    served(data, 1, 2, epochs=1)
    assert {i % 4 for i in read} == {1, 3}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "strided"])
@pytest.mark.parametrize("kind", ["text", "talk"])
def test_a_rank_of_a_sequence_keeps_its_slice(request, kind, layout):
    data = request.getfixturevalue(kind)(texts(12) if kind == "text" else chats(12))
    dataset, spec = data.dataset("train"), SequenceSpec({"tokens": 1, "labels": 1}, whole=["cu_seqlens", "index"])
    for i in range(4):
        whole = collate_documents([dataset[i]])
        for rank in range(2):
            place = Place(2, rank, layout)
            part, want = (
                SendableCollate(collate_documents)(RankDataset(dataset, place).__getitems__([i])),
                spec.cut(whole, place),
            )
            assert part.keys() == want.keys() and all(torch.equal(part[name], want[name]) for name in want)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_stops_and_goes_on(tmp_path, text, workers):
    def data(**options):
        return text(texts(30), num_workers=workers, readers=4, **options)

    whole, _ = run(data(), max_steps=14)
    assert len({x for _, x in whole.seen}) == 8
    with pytest.raises(KeyError):
        run(data(), max_steps=14, crash_at=4, callbacks=[OnExceptionCheckpoint(tmp_path, "crash")])
    resumed, _ = run(data(), tmp_path / "crash.ckpt", max_steps=14)
    assert resumed.seen == whole.seen[4:]
    with pytest.raises(ValueError, match="fingerprint"):
        run(text(texts(30, seed=1), readers=4), tmp_path / "crash.ckpt", max_steps=14)


# -- conversations -------------------------------------------------------------------------------------------------------
def test_conversations_are_whole(talk):
    data = talk(chats(12))
    dataset, rows = data.dataset("train"), chats(12)
    for reader in (0, 1):
        texts_of = []
        for i in range(reader, 8, 2):
            row, bounds = dataset[i], dataset[i]["cu_seqlens"].tolist()
            assert bounds[-1] == len(row["tokens"]) <= 150
            texts_of += [
                data.tokenizer.tokenizer.decode(row["tokens"][a:b].tolist(), False)
                for a, b in itertools.pairwise(bounds)
            ]
        want = [chat_text(x) for x in rows[reader::2]]
        assert texts_of == [want[i % len(want)] for i in range(len(texts_of))]


def chat_text(row):
    return "".join(f"<|im_start|>{x['role']}\n{x['content']}<|im_end|>\n" for x in row["messages"])


def test_too_long_conversations(talk, caplog):
    rows = [chat("the cat", "sat"), chat("a", "long " * 60), chat("dry " * 60, "wet"), chat("dry", "wet")]
    with pytest.raises(ValueError, match=r"line 2 has \d+ tokens, more than data.seq_len = 30"):
        list(talk(rows, seq_len=30, readers=1).dataset("train")[i] for i in range(8))
    with caplog.at_level("INFO"):
        skipped = talk(rows, seq_len=30, pack_tokens=1, too_long="skip", readers=1).dataset("train")
        assert torch.equal(skipped[0]["tokens"], skipped[2]["tokens"])
        assert "2 conversations of more than data.seq_len = 30" in caplog.text
    cut = talk(rows, seq_len=30, pack_tokens=1, too_long="cut", readers=1).dataset("train")
    assert len(cut[1]["tokens"]) == 30 and torch.equal(cut[0]["tokens"], cut[3]["tokens"])
    with pytest.raises(ValueError, match="no document that can be used"):
        talk(rows[1:3], seq_len=30, too_long="skip", readers=1).check()


def test_validation_rows(tmp_path, text):
    path = write(tmp_path / "val.jsonl", texts(9, seed=2))
    data = text(texts(12), val_paths=path, val_limit=3)
    rows = [x for x in data.val_dataloader()]
    assert len(rows) == 3 and "3 rows of val" in data.describe() and not data.test_dataloader()
    want = [x for row in texts(9, seed=2) for x in (*data.tokenizer.encode(row["text"]), 0)]
    assert torch.cat([x["tokens"][0] for x in rows]).tolist() == want[:48]
    tested = text(texts(12), val_paths=path, test_paths=path, val_limit=1)
    assert len(tested.val_dataloader()) == 1
    for loader in (tested.test_dataloader(), tested.predict_dataloader()):
        assert torch.cat([x["tokens"][0] for x in loader]).tolist() == want
    every = text(texts(12), val_paths=path, val_limit=10_000)
    assert torch.cat([x["tokens"][0] for x in every.val_dataloader()]).tolist() == want


# -- misuse --------------------------------------------------------------------------------------------------------------
MISUSES = {
    "missing file": (FileNotFoundError, "data.paths", {"paths": "nowhere.jsonl"}),
    "column": (ValueError, r"line 1 has no text in 'body', but 'text': set data.column", {"column": "body"}),
    "eos": (ValueError, r"which token of .* ends a document\? Set data.eos_token", {"eos_token": None}),
    "no such eos": (ValueError, "no token '</s>'", {"eos_token": "</s>"}),
    "readers": (ValueError, "data.readers", {"readers": 0}),
    "too many readers": (ValueError, "3 rows, but each of 4 readers", {"readers": 4}),
    "epoch": (ValueError, r"data.epoch_rows is 9, not a multiple of data.readers = 2: set it to 10", {"epoch_rows": 9}),
    "seq_len": (ValueError, "data.seq_len", {"seq_len": 1}),
    "tokenizer": (TypeError, "data.tokenizer must be", {"tokenizer": 5}),
    "val_limit": (ValueError, "data.val_limit", {"val_limit": 0}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(text, name):
    error, message, options = MISUSES[name]
    with pytest.raises(error, match=message):
        text(texts(3), **options).check()


def test_readers_that_cannot_be_shared(text):
    for workers, replicas, least in ((0, 3, 3), (2, 1, 2), (3, 1, 3)):
        data = text(texts(30), readers=4 if workers != 2 else 3, epoch_rows=12, num_workers=workers)
        data._replica = lambda replicas=replicas: (0, replicas)
        with pytest.raises(ValueError, match=f"cannot divide evenly: set it to a multiple of {least}"):
            data.train_dataloader()


def test_texts_that_are_empty(text):
    data = text([{"text": ""}, {"text": "the cat"}, {"text": ""}], readers=1, seq_len=4)
    assert (data.dataset("train")[0]["tokens"] == 0).sum() == 1
    with pytest.raises(ValueError, match="no document that can be used"):
        text([{"text": ""}], readers=1).check()


def test_readers_never_wait_for_documents_that_are_not_there():
    class Empty:
        count = 1

        def rows(self, reader, start):
            return iter(())

    with pytest.raises(ValueError, match="reader 0 of 1 has no document"):
        next(PackedReaders(Empty(), lambda *x: None, filled, 4).rows(0))
    assert json.dumps(Position()) == "[0, 0, 0]"


def test_a_line_of_json_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dilated.ext.text.records.LONGEST", 1000)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + '{"a": "' + "x" * 1000 + '"}\n')
    rows = open_rows([str(tmp_path / "a.jsonl")], "paths")
    assert rows[0] == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 has 1,010 bytes, above the limit of 1,000: divide the row"):
        rows[1]
