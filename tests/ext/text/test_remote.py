"""Files by URL: requests, listings, and errors that contain a remedy."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.data import (
    ByteDataModule,
    ByteStream,
    ChatDataModule,
    GenomeDataModule,
    SlideDataModule,
    TokenDataModule,
    read_variants,
)
from lightning_dilated.data.opener import FileOpener, is_url
from lightning_dilated.ext.files.files import collect_files, files_digest
from lightning_dilated.ext.genomes.regions import read_bed
from lightning_dilated.ext.slides.labels import Columns, read_rows
from lightning_dilated.ext.text.remote import BLOCK, RUN, TRIES

from .stores import Fetched, upload


@pytest.fixture
def opener(tmp_path: Path) -> FileOpener:
    return FileOpener(str(tmp_path / "cache"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds between retries instead of waiting."""
    seconds: list[float] = []
    monkeypatch.setattr("lightning_dilated.ext.text.remote.time.sleep", seconds.append)
    return seconds


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def put(name: str, data: bytes) -> str:
    fsspec.filesystem("memory").pipe_file(f"/{name}", data)
    return f"memory:///{name}"


@pytest.mark.parametrize("path", ["s3://bucket/a.h5", "hf://datasets/a/b.bin", "gs://a", "memory:///a"])
def test_urls(path: str) -> None:
    assert is_url(path)


@pytest.mark.parametrize("path", ["a.h5", "/a/b", "C:\\a", "c://a", "a/b://c", Path("s3://a"), None])
def test_paths(path: Any) -> None:
    assert not is_url(path)


# -- reading -----------------------------------------------------------------------------------------------------------
def test_only_the_blocks_of_a_range_are_fetched(
    store: str, opener: FileOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(20 * BLOCK + 17)
    url, fetched = put("a.bin", data), Fetched(monkeypatch, "memory")
    assert opener.remote.read(url, 5 * BLOCK - 3, 5 * BLOCK + 9).tobytes() == data[5 * BLOCK - 3 : 5 * BLOCK + 9]
    assert fetched.requests == [("/a.bin", 4 * BLOCK, 6 * BLOCK)]  # adjacent blocks are one request
    assert fetched.count() == opener.bytes_fetched == 2 * BLOCK
    opener.remote.read(url, 4 * BLOCK, 6 * BLOCK)
    pickle.loads(pickle.dumps(opener)).remote.read(url, 4 * BLOCK, 6 * BLOCK)  # read from the disk cache
    assert fetched.count() == 0
    assert opener.remote.read(url, 0, len(data)).tobytes() == data
    assert fetched.requests == [("/a.bin", 0, 4 * BLOCK), ("/a.bin", 6 * BLOCK, len(data))]


def test_a_request_is_of_bounded_length(store: str, opener: FileOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content((RUN + 2) * BLOCK)
    url, fetched = put("a.bin", data), Fetched(monkeypatch, "memory")
    assert opener.remote.read(url, 0, len(data)).tobytes() == data
    assert fetched.requests == [("/a.bin", 0, RUN * BLOCK), ("/a.bin", RUN * BLOCK, len(data))]


def test_without_a_cache_on_disk(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, opener = content(3 * BLOCK), FileOpener(str(tmp_path / "cache"), 0)
    url, fetched = put("a.bin", data), Fetched(monkeypatch, "memory")
    for _ in range(2):
        assert opener.remote.read(url, 10, BLOCK + 10).tobytes() == data[10 : BLOCK + 10]
    assert fetched.count() == 2 * BLOCK
    opener.remote.prefetch([url])
    assert fetched.count() == 0 and not (tmp_path / "cache").exists()


def test_a_damaged_block_is_fetched_again(store: str, opener: FileOpener, tmp_path: Path) -> None:
    data = content(BLOCK)
    url = put("a.bin", data)
    opener.remote.read(url, 0, BLOCK)
    (file,) = (x for x in (tmp_path / "cache" / "blocks").rglob("*") if x.is_file())
    file.write_bytes(bytes(BLOCK))
    assert pickle.loads(pickle.dumps(opener)).remote.read(url, 0, BLOCK).tobytes() == data


def test_a_file_is_sought_in(store: str, opener: FileOpener) -> None:
    data = content(BLOCK + 100)
    with opener.open(put("a.bin", data)) as file:
        assert file.read(10) == data[:10] and file.tell() == 10
        file.seek(-50, io.SEEK_END)
        assert file.read() == data[-50:] and file.read(1) == b""
        file.seek(BLOCK - 5)
        assert file.read(10) == data[BLOCK - 5 : BLOCK + 5]
        with pytest.raises(ValueError, match="before its beginning"):
            file.raw.seek(-1)  # type: ignore[attr-defined]


def test_a_stream_of_local_and_remote_files(store: str, opener: FileOpener, tmp_path: Path) -> None:
    parts = [content(1000, seed) for seed in range(3)]
    (tmp_path / "b.bin").write_bytes(parts[1])
    stream = ByteStream([put("a.bin", parts[0]), str(tmp_path / "b.bin"), put("c.bin", parts[2])], opener=opener)
    assert stream.read(500, 2500).tobytes() == b"".join(parts)[500:2500]


@pytest.mark.parametrize("size", [1, 4096, 40_000, 3 * BLOCK])
def test_digests_are_those_of_local_files(
    store: str, opener: FileOpener, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(content(size))
    url, fetched = put("a.bin", content(size)), Fetched(monkeypatch, "memory")
    assert files_digest([url], opener) == files_digest([str(tmp_path / "a.bin")])
    assert fetched.count() <= 8 * 4096
    assert ByteStream([url], opener=opener).fingerprint() == ByteStream([str(tmp_path / "a.bin")]).fingerprint()


# -- lists -------------------------------------------------------------------------------------------------------------
def test_lists_are_those_of_local_folders(store: str, opener: FileOpener, tmp_path: Path) -> None:
    names = ["b.bin", "a.bin", "a.txt", "d/c.bin", "d/e/f.BIN", ".hidden.bin", ".h/g.bin", "a-b/x.bin", "a/x.bin"]
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    upload(tmp_path / "data", "memory:///data")

    def listed(root: str, tail: str, suffixes: list[str] | None) -> list[str]:
        files = collect_files([f"{root}{tail}"], suffixes, opener=opener)
        return [file.removeprefix(root) for file in files]

    for tail in ("", "/*.bin", "/**/*.bin", "/*/*.bin", "/d", "/a.bin", "/[ab].bin", "/.*.bin"):
        for suffixes in (None, [".bin"]):
            assert listed("memory:///data", tail, suffixes) == listed(str(tmp_path / "data"), tail, suffixes), tail


def test_names_with_brackets(store: str, opener: FileOpener) -> None:
    assert opener.expand(put("a[1].bin", b"1"), None, "hint") == ["memory:///a[1].bin"]


@pytest.mark.parametrize(
    "url", ["memory:///none/*.bin", "memory:///data/*.bin", "memory:///none", "memory:///none/a.bin"]
)
def test_nothing_there(store: str, opener: FileOpener, url: str) -> None:
    put("data/a.txt", b"1")
    with pytest.raises(FileNotFoundError, match=url.replace("*", r"\*")):
        collect_files([url], [".bin"], "pass others in data.paths", opener)
    empty = r"the folder memory:///data holds no file ending in \.bin .*; pass others in data\.paths"
    with pytest.raises(FileNotFoundError, match=empty):
        collect_files(["memory:///data"], [".bin"], "pass others in data.paths", opener)


def test_where_only_local_files_are_read(store: str) -> None:
    with pytest.raises(
        ValueError, match=r"memory:///a\.bin, but only files of this machine are read here: copy it first"
    ):
        collect_files([put("a.bin", b"1")])


# -- errors ------------------------------------------------------------------------------------------------------------
def test_a_changed_file_is_noticed(store: str, opener: FileOpener) -> None:
    url = put("a.bin", content(3 * BLOCK))
    stream = ByteStream([url], opener=opener)
    stream.read(0, 10)
    put("a.bin", content(3 * BLOCK, seed=1))  # the same size
    with pytest.raises(
        ValueError, match=r"a\.bin had .* when it was looked up .* keep the data unchanged .* start again"
    ):
        stream.read(BLOCK, BLOCK + 10)
    # a new lookup finds the new file, although the cache has the old one
    again = FileOpener(str(Path(opener.remote.cache.folder)))
    assert again.remote.read(url, 0, 10).tobytes() == content(3 * BLOCK, seed=1)[:10]
    put("a.bin", content(10))
    with pytest.raises(ValueError, match="keep the data unchanged"):
        again.remote.read(url, 2 * BLOCK, 3 * BLOCK)
    fsspec.filesystem("memory").rm("/a.bin")
    with pytest.raises(FileNotFoundError, match=r"a\.bin is no file .* must stay while it is in use"):
        again.remote.read(url, 2 * BLOCK, 3 * BLOCK)


class Failing:
    """Makes the first requests for contents fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception | None = None) -> None:
        self.left, cls = failures, fsspec.get_filesystem_class("memory")
        cat = cls.cat_file

        def failing(fs: Any, path: str, start: int = 0, end: int = 0, **options: Any) -> bytes:
            if self.left:
                self.left -= 1
                if error is None:  # the connection ends early
                    return cat(fs, path, start=start, end=end, **options)[:-1]
                raise error
            return cat(fs, path, start=start, end=end, **options)

        monkeypatch.setattr(cls, "cat_file", failing)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("late"), RuntimeError("of a library"), None]
)
def test_requests_that_fail_are_tried_again(
    store: str, opener: FileOpener, waits: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    data = content(100)
    url = put("a.bin", data)
    failing = Failing(monkeypatch, TRIES - 1, error)
    assert opener.remote.read(url, 0, 100).tobytes() == data
    assert waits == [1.0, 2.0, 4.0, 8.0]
    failing.left, fresh = TRIES, FileOpener(cache_gib=0)
    with pytest.raises(
        ConnectionError, match=rf"memory:///a\.bin could not be read in {TRIES} tries .*last checkpoint"
    ):
        fresh.remote.read(url, 0, 100)
    assert failing.left == 0 and len(waits) == 2 * (TRIES - 1)


def test_a_refused_request_is_not_tried_again(
    store: str, opener: FileOpener, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put("a.bin", b"1")
    failing = Failing(monkeypatch, 9, PermissionError("Forbidden"))
    with pytest.raises(PermissionError, match=r"memory:///a\.bin may not be read by this user \(Forbidden\)"):
        opener.remote.read(url, 0, 1)
    assert failing.left == 8 and not waits


def test_a_package_that_is_missing(opener: FileOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    known = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        extra = {"s3": "s3", "gs": "gcs"}[scheme]
        monkeypatch.delitem(known, scheme, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ImportError, match=rf"{scheme}://b/a\.bin needs .* pip install 'lightning-dilated\[{extra}\]'"
        ):
            opener.expand(f"{scheme}://b/a.bin", None, "hint")


def test_a_store_that_is_unknown(opener: FileOpener) -> None:
    with pytest.raises(ValueError, match=r"xyz://b/a\.bin: files are not read from xyz://, but from file, local, s3"):
        opener.expand("xyz://b/a.bin", None, "hint")


NO_FILES = [
    "reference://x",
    "REFERENCE://x",
    "zip://a",
    "simplecache://a",
    "filecache://a",
    "github://a:b@c/d",
    "ssh://a/b",
]
NO_FILES += [
    "ftp://a/b",
    "dir://a",
    "data://a",
    "git://a",
    "jupyter://a",
    "abfs://a/b",
    "generic://a",
    "async_wrapper://a",
]
CHAINS = ["reference://x::file://{}", "zip://x::{}", "simplecache::file://{}", "file://{}::s3://b", "https://a::b"]
ADDRESSES = [*NO_FILES, *CHAINS]


def entries(address: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return {name: function that passes the address in one way}."""
    cache, opener = str(folder / "cache"), FileOpener(str(folder / "cache"))
    return {
        "expand": lambda: opener.expand(address, None, "hint"),
        "a glob": lambda: opener.expand(f"{address}/*", None, "hint"),
        "look_up": lambda: opener.look_up([address]),
        "size": lambda: opener.size(address),
        "open": lambda: opener.open(address),
        "read": lambda: opener.remote.read(address, 0, 1),
        "prefetch": lambda: opener.remote.prefetch([address]),
        "bytes": lambda: ByteDataModule(address, 8, cache_dir=cache).check(),
        "tokens": lambda: TokenDataModule(address, 8, 256, cache_dir=cache).check(),
        "slides": lambda: SlideDataModule(address, cache_dir=cache).check(),
        "labels": lambda: read_rows(address, Columns(), opener),
        "genomes": lambda: GenomeDataModule(address, cache_dir=cache).check(),
        "bed": lambda: read_bed(address, [], opener),
        "vcf": lambda: read_variants(address),
        "a tokenizer": lambda: ChatDataModule("none.jsonl", seq_len=8, tokenizer=address),
        "datasets": lambda: ChatDataModule({"path": "json", "data_files": {"train": [address]}}, "a.json", 8),
        "a checkpoint": lambda: LongNetLM.load_from_checkpoint(address),
        "a trusted one": lambda: LongNetLM.load_from_checkpoint(address, weights_only=False),
    }


@pytest.mark.parametrize("address", ADDRESSES)
def test_stores_that_interpret_files_are_refused_everywhere(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text("{}")
    address = address.format(tmp_path / "a.json")
    for name in ("url_to_fs", "open", "get_fs_token_paths"):
        monkeypatch.setattr(f"fsspec.core.{name}", lambda *args, **kwargs: pytest.fail("fsspec was asked"))
    for name, use in entries(address, tmp_path).items():
        with pytest.raises(ValueError, match=re.escape(address)) as error:
            use()
        assert name and any(x in str(error.value) for x in ("files are not read from", "chain", "only files of this"))


@pytest.mark.parametrize("address", ["reference://x::file://{}", "zip://x", "simplecache::{}", "async_wrapper://x"])
@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_a_trainer_refuses_such_addresses(address: str, strategy: str, tmp_path: Path) -> None:
    model = LongNetLM(DilatedPattern.longnet([8], [1]), dim=16, depth=1, num_heads=2)
    (tmp_path / "a.txt").write_text("hello " * 99)
    data = ByteDataModule(str(tmp_path / "a.txt"), 16, 1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match=r"files are not read from|chain of addresses"):
        trainer.validate(model, data, ckpt_path=address.format(tmp_path / "a.json"))


@pytest.mark.parametrize("gib", [-1, "20", float("nan")])
def test_a_limit_that_is_none(gib: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"data\.cache_gib"):
        FileOpener(cache_gib=gib)


# -- processes ---------------------------------------------------------------------------------------------------------
def reads(opener: FileOpener, url: str, out: Any) -> None:
    out.put(opener.remote.read(url, 10, 20).tobytes())


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_read(tmp_path: Path, opener: FileOpener, method: str) -> None:
    (tmp_path / "a.bin").write_bytes(content(100))
    url = f"file://{tmp_path}/a.bin"
    opener.remote.read(url, 0, 10)
    context = multiprocessing.get_context(method)
    out = context.Queue()
    process = context.Process(target=reads, args=(opener, url, out))
    process.start()
    assert out.get(timeout=120) == content(100)[10:20]
    process.join()
