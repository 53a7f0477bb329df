"""DataModules read the same samples from URLs as from local files, and fetch no other blocks."""

from __future__ import annotations

import gc
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from lightning_dilated.data import (
    ByteDataModule,
    GenomeDataModule,
    SlideDataModule,
    StreamDataModule,
    TokenDataModule,
    write_synthetic_slides,
)
from lightning_dilated.ext.slides.files import SlideReader
from lightning_dilated.ext.text.remote import BLOCK, RemoteFile

from ...data.runs import Recorder, run
from .stores import Fetched, equal, same_samples, tokens, upload

Make = Callable[..., Any]


def token_data(root: str, **options: Any) -> TokenDataModule:
    settings = {"seq_len": 64, "vocab_size": 1000, "batch_size": 2, "val_fraction": 0.1, "test_fraction": 0.1}
    return TokenDataModule(f"{root}/*.bin", **{**settings, **options})


def slide_data(root: str, **options: Any) -> SlideDataModule:
    return SlideDataModule(f"{root}/*.h5", f"{root}/labels.csv", val_fraction=0.2, test_fraction=0.2, **options)


def genome_data(root: str, **options: Any) -> GenomeDataModule:
    settings = {"seq_len": 500, "val_fraction": 0.1, "test_fraction": 0.1}
    return GenomeDataModule(root, **{**settings, **options})


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    return {"cache_dir": str(tmp_path / "cache")}


def modules(make: Make, folder: Path, cached: dict[str, str]) -> tuple[Any, Any]:
    """Return the module of a local folder and the module of the folder's copy in a store."""
    return make(str(folder)), make(upload(folder, "memory:///data"), **cached)


# -- the same samples --------------------------------------------------------------------------------------------------
def test_tokens(store: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 5000)
    np.save(tmp_path / "b.npy", np.arange(3000, dtype=np.uint16) % 1000)
    for options in ({}, {"eos_token": 7, "batch_size": 1}, {"eos_token": 7, "batch_size": 1, "pack_tokens": 128}):
        local, remote = modules(lambda root, o=options, **extra: token_data(root, **o, **extra), tmp_path, cached)
        same_samples(local, remote)
        assert remote.dataset("train").fingerprint() == local.dataset("train").fingerprint()
    arrays = TokenDataModule("memory:///data/b.npy", 64, 1000, **cached)
    assert len(arrays.dataset("train")) > 0


@pytest.mark.parametrize("pack", [None, 128])
def test_bytes(store: str, tmp_path: Path, cached: dict[str, str], pack: int | None) -> None:
    for name in ("a.txt", "b/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 500)
    make: Make = lambda root, **extra: ByteDataModule(root, 64, suffixes=["txt"], pack_tokens=pack, **extra)  # noqa: E731
    local, remote = modules(make, tmp_path, cached)
    same_samples(local, remote)
    assert remote.describe() == local.describe()
    assert remote.bigram_bits_per_byte() == local.bigram_bits_per_byte()


def test_streams(store: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 5000)
    for options in ({"vocab_size": 1000, "separator": 3}, {"separator": 10}):
        make: Make = lambda root, o=options, **extra: StreamDataModule(f"{root}/*.bin", 64, 4, **o, **extra)  # noqa: E731
        same_samples(*modules(make, tmp_path, cached))


@pytest.mark.parametrize("options", [{}, {"order": "file", "max_tiles": 10, "over": "sample"}, {"check_values": "all"}])
def test_slides(store: str, folder: str, cached: dict[str, str], options: dict[str, Any]) -> None:
    local, remote = modules(lambda root, **extra: slide_data(root, **options, **extra), Path(folder), cached)
    same_samples(local, remote)
    assert remote.describe() == local.describe() and remote.classes == local.classes


def test_slides_of_torch(store: str, tmp_path: Path, cached: dict[str, str]) -> None:
    write_synthetic_slides(tmp_path, slides=8, tiles=(30, 40), features=4, kind="pt")
    same_samples(*modules(lambda root, **o: SlideDataModule(root, f"{root}/labels.csv", **o), tmp_path, cached))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("index", ["beside", "missing"])
def test_genomes(store: str, lambda_virus: str, cached: dict[str, str], packed: bool, index: str) -> None:
    folder = Path(lambda_virus).parent / "genome"
    folder.mkdir()
    text = Path(lambda_virus).read_bytes()
    (folder / ("a.fa.gz" if packed else "a.fa")).write_bytes(gzip.compress(text) if packed else text)
    name = next(iter(folder.iterdir())).name
    record, parts = text.split()[0][1:].decode(), ((100, 9100), (39_500, 42_500), (44_000, 48_000))
    (folder / "regions.bed").write_text("".join(f"{record}\t{start}\t{stop}\tgene\t0\t-\n" for start, stop in parts))
    if index == "missing" or packed:
        local, remote = modules(genome_data, folder, cached)
    else:
        local = genome_data(str(folder))
        local.check()  # writes the index file
        assert (folder / f"{name}.fai").exists()
        remote = genome_data(upload(folder, "memory:///data"), **cached)
    same_samples(local, remote)
    assert remote.dataset("train").fingerprint() == local.dataset("train").fingerprint()
    same_samples(
        *(genome_data(r, bed=f"{r}/regions.bed", **o) for r, o in ((str(folder), {}), ("memory:///data", cached)))
    )
    assert not any(name.endswith(".lock") for name in fsspec.filesystem("memory").find("/data"))


def test_an_index_that_is_replaced(store: str, lambda_virus: str, cached: dict[str, str]) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/a.fa", Path(lambda_virus).read_bytes())
    fs.pipe_file("/a.fa.fai", b"other\t100\t7\t70\t71\n")
    with pytest.raises(ValueError, match=r"the index \(\.fai\) of memory:///a\.fa does not fit the file"):
        genome_data("memory:///a.fa", **cached).check()
    fs.rm("/a.fa.fai")
    genome_data("memory:///a.fa", **cached).check()
    fs.pipe_file("/b.fa", b">x\nMKV*\n")
    with pytest.raises(ValueError, match=r"memory:///b\.fa: the record 'x' holds '\*' at base 4"):
        genome_data("memory:///b.fa", seq_len=2, **cached).check()


# -- what is fetched ---------------------------------------------------------------------------------------------------
def test_a_window_of_a_large_file(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 32 * BLOCK
    fsspec.filesystem("memory").pipe_file("/a.bin", tokens(tmp_path / "a.bin", size // 2).read_bytes())
    fetched = Fetched(monkeypatch, "memory")
    options = {"seq_len": 2 * BLOCK, "val_fraction": 0, "test_fraction": 0, "scan": False}
    data = token_data("memory:///", **options, cache_dir=str(tmp_path / "cache"))
    samples = data.dataset("train")
    assert fetched.count() == BLOCK  # the first block, which shows the file's format
    half = samples.read_ranges(3, (range(BLOCK),))  # first half of the 4 MiB window, for the first of two ranks
    assert fetched.count() == 3 * BLOCK  # two blocks of tokens, and one with the last label
    other = samples.read_ranges(3, (range(BLOCK, 2 * BLOCK),))
    assert fetched.count() == 2 * BLOCK  # the block that both ranks need is in the cache
    whole = token_data(str(tmp_path), **options).dataset("train")[3]
    assert torch.equal(torch.cat([half["tokens"], other["tokens"]]), whole["tokens"])


def test_tiles_of_a_large_slide(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_synthetic_slides(tmp_path, slides=1, tiles=(4000, 4000), features=1024)
    upload(tmp_path, "memory:///slides")
    fetched = Fetched(monkeypatch, "memory")
    data = SlideDataModule("memory:///slides", val_fraction=0, test_fraction=1, check_values="first", cache_gib=0)
    reader = SlideReader(opener=data.opener)
    features, _ = reader.read("memory:///slides/slide_000.h5", np.arange(2000, 2100))
    local, _ = SlideReader().read(str(tmp_path / "slide_000.h5"), np.arange(2000, 2100))
    assert torch.equal(features, local)
    assert fetched.count() <= 5 * BLOCK  # the file has 16 MB


def test_heads_of_slides_are_fetched_once(store: str, folder: str, cached: dict[str, str]) -> None:
    upload(folder, "memory:///data")
    first, second = slide_data("memory:///data", **cached), slide_data("memory:///data", **cached)
    first.check()
    assert first.opener.bytes_fetched > 0
    second.check()
    assert equal(second.dataset("train")[0], first.dataset("train")[0])
    assert second.opener.bytes_fetched == 0


# -- training ----------------------------------------------------------------------------------------------------------
def trained(data: Any, **options: Any) -> tuple[Recorder, Any]:
    return run(data, **options)


def test_a_run_goes_on_where_it_stopped(store: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 2000)
    upload(tmp_path, "memory:///data")
    whole, _ = trained(token_data(str(tmp_path)), max_steps=20)
    first, trainer = trained(token_data("memory:///data", **cached), max_steps=7)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    second, _ = trained(token_data("memory:///data", **cached), ckpt=tmp_path / "stopped.ckpt", max_steps=20)
    assert first.seen + second.seen == whole.seen
    # the run can resume with a local copy of the data, because the contents are equal
    local, _ = trained(token_data(str(tmp_path)), ckpt=tmp_path / "stopped.ckpt", max_steps=20)
    assert local.seen == second.seen
    (tmp_path / "a.bin").write_bytes(tokens(tmp_path / "a.bin", 2000).read_bytes()[::-1])
    with pytest.raises(ValueError, match="fingerprint"):
        upload(tmp_path, "memory:///data")
        trained(token_data("memory:///data", vocab_size=65536, **cached), ckpt=tmp_path / "stopped.ckpt", max_steps=20)


def test_the_memory_of_a_process_is_not_shared(store: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 2000)
    upload(tmp_path, "memory:///data")
    data = token_data("memory:///data", num_workers=2, **cached)
    with pytest.raises(ValueError, match=r"memory:///data/a\.bin is in the memory of this process, .*num_workers to 0"):
        data.setup("fit")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tokens", "slides"])
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers(tmp_path: Path, folder: str, cached: dict[str, str], kind: str, context: str) -> None:
    tokens(tmp_path / "a.bin", 2000)
    make, root = (token_data, str(tmp_path)) if kind == "tokens" else (slide_data, folder)
    local, remote = make(root), make(f"file://{root}", num_workers=2, **cached)
    remote.setup("fit")
    loader = remote.train_dataloader()
    loader.multiprocessing_context = context
    assert all(equal(a, b) for a, b in zip(local.train_dataloader(), loader, strict=True))


# -- errors ------------------------------------------------------------------------------------------------------------
def test_a_csv_that_is_missing(store: str, folder: str, cached: dict[str, str]) -> None:
    upload(folder, "memory:///data")
    with pytest.raises(FileNotFoundError, match=r"data\.labels_csv: memory:///data/other\.csv is no file"):
        SlideDataModule("memory:///data", "memory:///data/other.csv", **cached).check()
    fsspec.filesystem("memory").pipe_file("/data/words.csv", b"\xff\xfe\x00slide")
    with pytest.raises(ValueError, match=r"memory:///data/words\.csv is not UTF-8 text"):
        SlideDataModule("memory:///data", "memory:///data/words.csv", **cached).check()


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_slide(store: str, folder: str, cached: dict[str, str], damage: str) -> None:
    whole = (Path(folder) / "slide_000.h5").read_bytes()
    data = {"cut": whole[: len(whole) // 2], "text": b"no HDF5", "empty": b""}[damage]
    fsspec.filesystem("memory").pipe_file("/a.h5", data)
    with pytest.raises(ValueError, match=r"memory:///a\.h5 cannot be read: it is (truncated|not an HDF5 file|damaged)"):
        SlideDataModule("memory:///a.h5", **cached).check()


def test_an_error_of_the_store_is_not_hidden_by_hdf5(
    store: str, folder: str, cached: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dilated.ext.text.remote.time.sleep", lambda seconds: None)
    upload(folder, "memory:///data")
    data = slide_data("memory:///data", cache_gib=0)
    samples = data.dataset("train")
    data.opener.remote._held.clear()

    def broken(*args: Any, **options: Any) -> bytes:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", broken)
    with pytest.raises(
        ConnectionError, match=r"memory:///data/slide_\d+\.h5 could not be read in 5 tries .*reset by peer"
    ):
        samples[0]
    # if an HDF5 file with a Python source exists when Python exits, the process ends with a segmentation fault
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is RemoteFile]
