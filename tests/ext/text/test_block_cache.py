"""A folder of blocks stays within its limit with any number of writers, and never returns damaged blocks."""

import gzip
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dilated.ext.genomes.files import plain_file
from lightning_dilated.ext.text.block_cache import BlockCache, cache_root, locked
from lightning_dilated.ext.text.packed_stream import PackedReaders, Position, StreamedRows
from lightning_dilated.ext.text.store import encoded
from lightning_dilated.sequence.links import Links


def key(number: int) -> str:
    return f"{number:02x}" * 20


def stored(cache: BlockCache) -> int:
    """Return the bytes of all block files."""
    return sum(x.stat().st_size for x in (Path(cache.folder) / "blocks").rglob("*") if x.is_file())


def test_blocks_that_were_not_used_leave(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 4 * 1004)
    for number in range(4):
        cache.put(key(number), bytes([number]) * 1000)
        os.utime(cache._path(key(number)), (number, number))
    assert cache.get(key(0)) == bytes(1000)  # key 0 was now used last
    cache.put(key(4), bytes(1000))
    assert [cache.has(key(x)) for x in range(5)] == [True, False, True, True, True]
    assert stored(cache) <= cache.limit


def test_no_limit_is_passed(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 10_000)
    for number in range(40):
        cache.put(key(number), bytes(number * 25))
        assert stored(cache) <= cache.limit
    assert cache.has(key(39))
    cache.put(key(100), bytes(10_001))
    assert not cache.has(key(100))
    lower = BlockCache(str(tmp_path), 2000)
    lower.put(key(101), bytes(500))
    assert stored(lower) <= 2000 and lower.has(key(101))


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path / "cache"), 0)
    cache.put(key(0), b"a")
    with cache.fetching(key(0)):
        assert cache.get(key(0)) is None and not cache.has(key(0))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", [b"", b"abc", bytes(1004), b"x" * 1004])
def test_a_damaged_block_is_missing(tmp_path: Path, damage: bytes) -> None:
    cache = BlockCache(str(tmp_path), 10_000)
    cache.put(key(0), b"y" * 1000)
    assert cache.get(key(0)) == b"y" * 1000
    cache._path(key(0)).write_bytes(damage)
    assert cache.get(key(0)) is None and not cache.has(key(0))
    cache.put(key(0), b"y" * 1000)
    assert cache.get(key(0)) == b"y" * 1000


@pytest.mark.parametrize("count", ["", "wrong", "99999999", "0"])
def test_a_wrong_count_corrects_itself(tmp_path: Path, count: str) -> None:
    cache = BlockCache(str(tmp_path), 3 * 1004)
    for number in range(3):
        cache.put(key(number), bytes(1000))
    (tmp_path / "bytes").write_text(count)
    for number in range(3, 12):
        cache.put(key(number), bytes(1000))
    # the count is too low only in a manipulated folder; it is corrected when the limit is reached
    assert stored(cache) <= cache.limit
    assert cache.has(key(11))


def test_what_a_process_left_behind_goes(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 2008)
    cache.put(key(0), bytes(1000))
    old, new = tmp_path / "blocks" / "00" / "a.part", tmp_path / "blocks" / "00" / "b.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    for number in (1, 2):
        cache.put(key(number), bytes(1000))
    assert not old.exists() and new.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlockCache(str(tmp_path), 10_000)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_dilated.ext.text.block_cache.write_part", full)
    with pytest.warns(
        UserWarning, match=r"cannot keep blocks .*No space left.* name another folder in data\.cache_dir"
    ):
        cache.put(key(0), b"a")
    assert cache.get(key(0)) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=r"file is not a folder; name another in data\.cache_dir"):
        BlockCache(str(tmp_path / "file" / "cache"), 10_000).put(key(0), b"a")


def writes(folder: str, seed: int) -> None:
    cache = BlockCache(folder, 40 * 1004)
    for i in range(150):
        number = (i * 7 + seed * 13) % 100
        data = cache.get(key(number))
        assert data in (None, bytes([number]) * 1000)
        if data is None:
            cache.put(key(number), bytes([number]) * 1000)


@pytest.mark.full
def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=writes, args=(str(tmp_path), seed)) for seed in range(4)]
    for worker in workers:
        worker.start()
    cache = BlockCache(str(tmp_path), 40 * 1004)
    while any(worker.is_alive() for worker in workers):
        with locked(tmp_path / "lock"):  # under the lock, no blocks are written or removed
            whole = [x for x in (tmp_path / "blocks").rglob("*") if re.fullmatch("[0-9a-f]{40}", x.name)]
        assert len(whole) <= 40
        time.sleep(0.005)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert 0 < stored(cache) <= cache.limit
    assert not list((tmp_path / "blocks").rglob("*.part"))


def test_one_fetches_and_the_others_wait(tmp_path: Path) -> None:
    cache, fetched = BlockCache(str(tmp_path), 10_000), []

    def fetch() -> None:
        with cache.fetching(key(0)):
            if cache.get(key(0)) is None:
                fetched.append(1)
                time.sleep(0.05)
                cache.put(key(0), b"a")

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1


def test_the_folder_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LIGHTNING_DILATED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "lightning-dilated"
    monkeypatch.setenv("LIGHTNING_DILATED_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"


class HeldChats:
    """Data with one conversation."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Any:
        return {"messages": [{"role": "user", "content": "a"}]}

    def where(self, number: int) -> str:
        return "row 0"

    def content(self) -> list[bytes]:
        return [b"it"]


class HeldTokenizer:
    """A tokenizer that returns three tokens for any text."""

    def digest(self) -> str:
        return "it"

    def tokens(self, conversation: Any, learn: str) -> tuple[np.ndarray, np.ndarray]:
        return np.array([1, 2, 3]), np.array([True, True, True])


# -- what another user put into a shared folder ------------------------------------------------------------------------
def victim(folder: Path) -> Path:
    """Write a folder with a file, to which a link in a cache points."""
    (folder / "victim").mkdir(parents=True)
    (folder / "victim" / "file").write_text("keep me")
    return folder / "victim"


def unharmed(folder: Path) -> bool:
    return [x.name for x in folder.iterdir()] == ["file"] and (folder / "file").read_text() == "keep me"


@pytest.mark.parametrize("name", ["bytes", "lock", f"blocks/{key(1)[:2]}/{key(1)}"])
def test_a_link_to_a_file_is_not_written_through(tmp_path: Path, name: str) -> None:
    target, cache = victim(tmp_path), BlockCache(str(tmp_path / "cache"), 10_000)
    link = tmp_path / "cache" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target / "file")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.put(key(1), b"x" * 100)
    assert unharmed(target)
    assert cache.get(key(1)) == b"x" * 100 or (name == "lock" and "lock" in str(caught[0].message))


def test_a_link_to_a_block_is_not_read(tmp_path: Path) -> None:
    cache, other = BlockCache(str(tmp_path / "cache"), 10_000), BlockCache(str(tmp_path / "other"), 10_000)
    other.put(key(1), b"secret")
    cache._path(key(1)).parent.mkdir(parents=True)
    cache._path(key(1)).symlink_to(other._path(key(1)))
    assert cache.get(key(1)) is None and not cache.has(key(1))


@pytest.mark.parametrize("name", ["blocks", "blocks/01", "locks"])
def test_a_link_to_a_folder_is_neither_written_nor_emptied(tmp_path: Path, name: str) -> None:
    target, cache = victim(tmp_path), BlockCache(str(tmp_path / "cache"), 2500)
    link = tmp_path / "cache" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    for number in range(1, 6):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with cache.fetching(key(number)):
                    cache.put(key(number), bytes(1000))
        except OSError as error:
            assert "symbolic link" in str(error) and str(link) in str(error)
    assert unharmed(target)


@pytest.mark.parametrize("name", ["bytes", f"blocks/{key(1)[:2]}/{key(1)}"])
def test_a_fifo_in_a_cache_is_not_waited_for(tmp_path: Path, name: str) -> None:
    cache, place = BlockCache(str(tmp_path), 10_000), tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(place)
    signal.alarm(20)
    try:
        assert cache.get(key(1)) is None
        cache.put(key(1), b"x")
        assert cache.get(key(1)) == b"x"
    finally:
        signal.alarm(0)


def test_a_cache_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "scratch")
    cache = BlockCache(str(tmp_path / "cache"), 10_000)
    cache.put(key(1), b"x")
    assert cache.get(key(1)) == b"x"


@pytest.mark.parametrize("kind", ["the folder", "about.json", "tokens", "bounds.npy", "the lock"])
def test_a_store_of_conversations_is_not_reached_by_links(tmp_path: Path, kind: str) -> None:
    target, cache = victim(tmp_path), tmp_path / "cache"
    store = encoded(HeldChats(), HeldTokenizer(), "all", "messages", str(cache))
    folder, names = store.folder, {"the folder": store.folder, "the lock": store.folder.with_suffix(".lock")}
    place = names.get(kind, folder / kind)
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    try:
        again = encoded(HeldChats(), HeldTokenizer(), "all", "messages", str(cache))
    except OSError as error:
        assert "symbolic link" in str(error) and kind.startswith("the")
    else:
        assert (
            again.read("tokens", 0, 3).tolist() == [1, 2, 3] and not place.is_symlink() and not kind.startswith("the")
        )
    assert unharmed(target) and outside.exists()


@pytest.mark.parametrize("suffix", [".fa", ".fa.lock"])
def test_an_unpacked_genome_is_not_reached_by_links(tmp_path: Path, suffix: str) -> None:
    source, cache = tmp_path / "a.fa.gz", tmp_path / "cache"
    source.write_bytes(gzip.compress(b">a\nACGT\n"))
    plain = Path(plain_file(str(source), cache))
    place = plain.with_name(plain.name.removesuffix(".fa") + suffix)
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    plain.unlink(missing_ok=suffix != ".fa") if suffix != ".fa" else None
    with pytest.raises(OSError, match="symbolic link"):
        plain_file(str(source), cache)


def test_notes_of_a_stream_are_not_written_through_links(tmp_path: Path) -> None:
    target = victim(tmp_path)
    rows = StreamedRows(PackedReaders(None, None, None, 8), 1, tmp_path / "cache" / "notes", "it")  # type: ignore[arg-type]
    (tmp_path / "cache" / "notes").mkdir(parents=True)
    rows._file(0).symlink_to(target / "file")
    with pytest.raises(OSError, match="symbolic link"):
        rows._note(0, 0, Position())
    with pytest.raises(OSError, match="symbolic link"):
        rows._noted(0, 0)
    rows._file(0).unlink()
    rows._note(0, 0, Position())
    assert rows._noted(0, 0) == (0, Position()) and unharmed(target)


def test_links_are_not_saved_through_links(tmp_path: Path) -> None:
    target = victim(tmp_path)
    (tmp_path / f"links.json.{os.getpid()}.part").symlink_to(target / "file")
    Links().save(tmp_path / "links.json")
    assert unharmed(target) and Links.load(tmp_path / "links.json").near == Links().near
