"""The folder of blocks stays below its limit, whatever processes write to it, and serves nothing that is damaged."""

import multiprocessing
import os
import re
import threading
import time
from pathlib import Path

import pytest

from lightning_dilated.data.block_cache import BlockCache, cache_root, locked


def key(number: int) -> str:
    return f"{number:02x}" * 20


def stored(cache: BlockCache) -> int:
    """Bytes of all files of blocks."""
    return sum(x.stat().st_size for x in (Path(cache.folder) / "blocks").rglob("*") if x.is_file())


def test_blocks_that_were_not_used_leave(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 4 * 1004)
    for number in range(4):
        cache.put(key(number), bytes([number]) * 1000)
        os.utime(cache._path(key(number)), (number, number))
    assert cache.get(key(0)) == bytes(1000)  # used now
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
    # a count that is too low is that of a folder that someone wrote to; it holds again once the limit is reached
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

    monkeypatch.setattr(Path, "write_bytes", full)
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
        with locked(tmp_path / "lock"):  # under which blocks come and go
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
