"""Streamed rows from `datasets`: readers share the rows without overlap, for any workers, ranks and restarts."""

import itertools

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_dilated as ld
from lightning_dilated.data import ChatStreamDataModule, TextStreamDataModule
from lightning_dilated.ext.text.sources import StreamReaders, open_readers

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
pytest.importorskip("datasets", reason="needs the extra datasets")
import datasets

from ...data.runs import run
from ...strategy.runs import trainer
from ..text.chats import CHATML, END, chats, write
from ..text.test_row_streams import served, texts
from .decoders import config
from .test_chat_transformers import V, hf_folder

datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    return hf_folder(tmp_path / "tokenizer", CHATML)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Four Parquet files with 7, 8, 9 and 10 texts."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    (tmp_path / "shards").mkdir()
    for i in range(4):
        datasets.Dataset.from_list(texts(7 + i, seed=i)).to_parquet(tmp_path / "shards" / f"{i}.parquet")
    return str(tmp_path / "shards")


def of_shards():
    return [texts(7 + i, seed=i) for i in range(4)]


def module(tmp_path, folder, paths, **options):
    options = {"readers": 4, "epoch_rows": 8, "cache_dir": str(tmp_path / "cache"), "seq_len": 16, **options}
    return TextStreamDataModule(paths, folder, **options)


def test_readers_have_their_own_files(shards):
    for count, want in (
        (4, of_shards()),
        (2, [of_shards()[0] + of_shards()[1], of_shards()[2] + of_shards()[3]]),
        (3, [list(itertools.chain(*of_shards()))[i::3] for i in range(3)]),
    ):
        readers, _ = open_readers([shards], "paths", count)
        assert isinstance(readers, StreamReaders) and readers.own_shards == (count != 3)
        for reader, start in itertools.product(range(count), (0, 1, 5)):
            assert [row for row, _ in readers.rows(reader, start)] == want[reader][start:]


def test_rows_are_the_texts(tmp_path, folder, shards):
    data = module(tmp_path, folder, shards)
    dataset, end = data.dataset("train"), data.tokenizer.tokenizer.eos_token_id
    assert data.tokenizer.tokenizer.decode(end) == END
    for reader in range(4):
        want = [x for row in of_shards()[reader] for x in (*data.tokenizer.encode(row["text"]), end)]
        got = torch.cat([dataset[i]["tokens"] for i in range(reader, 8, 4)]).tolist()
        assert got == want[: len(got)]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_have_the_rows_of_one(tmp_path, folder, shards, workers):
    one = served(module(tmp_path, folder, shards))
    options = {"cache_dir": str(tmp_path / "own"), "num_workers": workers}
    each = [served(module(tmp_path, folder, shards, **options), rank, 2) for rank in (0, 1)]
    assert sorted(itertools.chain(*each)) == one and len(one) == 16


def test_a_run_stops_and_goes_on(tmp_path, folder, shards):
    whole, _ = run(module(tmp_path, folder, shards), max_steps=11)
    with pytest.raises(KeyError):
        run(
            module(tmp_path, folder, shards),
            max_steps=11,
            crash_at=5,
            callbacks=[OnExceptionCheckpoint(tmp_path, "crash")],
        )
    resumed, _ = run(module(tmp_path, folder, shards), tmp_path / "crash.ckpt", max_steps=11)
    assert resumed.seen == whole.seen[5:]


def test_sources(tmp_path, folder, shards):
    """Train on data named by arguments of load_dataset, or stored in a folder by save_to_disk."""
    rows = chats(9)
    path = write(tmp_path / "chats.jsonl", rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    options = {"readers": 1, "epoch_rows": 3, "cache_dir": str(tmp_path / "cache"), "val_limit": 2}
    saved, created = str(tmp_path / "saved"), []
    for source in (path, saved, {"path": "json", "data_files": path, "split": "train"}, {"path": saved}):
        data = ChatStreamDataModule(source, folder, 200, val_paths=source, **options)
        created.append([data.dataset("train")[i]["tokens"].tolist() for i in range(3)])
    assert all(x == created[0] for x in created)
    model = ld.integrations.transformers.HFCausalLM(config("llama", vocab_size=V))
    built = trainer("auto", 1, max_steps=5, limit_val_batches=2)
    built.fit(model, data)
    assert built.callback_metrics["val_loss"] > 0


def test_misuse(tmp_path, folder, shards):
    with pytest.raises(ValueError, match=r"holds Parquet, which is read as a stream, and .*x\.jsonl"):
        module(tmp_path, folder, [shards, write(tmp_path / "x.jsonl", texts(5))]).check()
    with pytest.raises(ValueError, match=r"row 0 of reader 0 .* has no text in 'body', but 'text'"):
        module(tmp_path, folder, shards, column="body").check()
    with pytest.raises(ValueError, match=r"has no token '</s>': set data\.eos_token"):
        module(tmp_path, folder, shards, eos_token="</s>").check()
