"""A range read over many files returns the bytes of their concatenation and touches no other bytes."""

import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.data import ByteStream

from ...examples import examples


def write(folder: Path, contents: list[bytes]) -> list[str]:
    files = []
    for number, content in enumerate(contents):
        file = folder / f"{number:04d}"
        file.write_bytes(content)
        files.append(str(file))
    return files


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.binary(max_size=7), max_size=8), st.integers(1, 3), st.data())
def test_reads_are_slices_of_the_concatenation(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], max_open: int, pick: st.DataObject
) -> None:
    whole = b"".join(contents)
    stream = ByteStream(write(tmp_path_factory.mktemp("files"), contents), max_open=max_open)
    assert len(stream) == len(whole)
    requested = 0
    for _ in range(5):
        start = pick.draw(st.integers(0, len(whole)))
        stop = pick.draw(st.integers(start, len(whole)))
        part = stream.read(start, stop)
        assert part.dtype == np.uint8
        assert part.tobytes() == whole[start:stop]
        requested += stop - start
        assert stream.bytes_read == requested


@given(st.integers(0, 30), st.integers(1, 9))
def test_chunks_hold_each_pair_once(size: int, chunk: int) -> None:
    class Counting(ByteStream):
        def read(self, start: int, stop: int) -> np.ndarray:
            return np.arange(start, stop)

    pieces = list(Counting([]).chunks(0, size, chunk))
    assert all(len(piece) <= chunk + 1 for piece in pieces)
    pairs = [(int(a), int(b)) for piece in pieces for a, b in pairwise(piece)]
    assert pairs == [(number, number + 1) for number in range(max(0, size - 1))]


def test_only_touched_files_are_opened_and_few_stay_open(tmp_path: Path) -> None:
    files = write(tmp_path, [bytes([number]) * 3 for number in range(200)])
    stream = ByteStream(files, max_open=4)
    os.remove(files[7])
    assert stream.read(0, 21).tolist() == [number for number in range(7) for _ in range(3)]
    assert len(stream._maps) == 4
    assert stream.read(24, 600)[-1] == 199
    assert len(stream._maps) == 4
    with pytest.raises(FileNotFoundError, match="0007 was removed or renamed after it was indexed"):
        stream.read(20, 25)


def test_thousands_of_files_do_not_use_up_descriptors(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 100
    stream = ByteStream(write(tmp_path, [b"x"] * 500))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, open_now + 100), hard))
    try:
        assert stream.read(0, 500).tobytes() == b"x" * 500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"abc", 3), (b"abcdefgh", 8)])
@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_changed_size_is_named(tmp_path: Path, content: bytes, size: int, opened: bool) -> None:
    (file,) = write(tmp_path, [b"abcde"])
    stream = ByteStream([file])
    if opened:
        stream.read(0, 5)
    Path(file).write_bytes(content)
    with pytest.raises(ValueError, match=f"0000 had 5 bytes when it was indexed and has {size} now"):
        stream.read(0, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_ranges_outside(tmp_path: Path, start: int, stop: int) -> None:
    stream = ByteStream(write(tmp_path, [b"abc", b"de"]))
    with pytest.raises(IndexError, match=rf"\[{start}, {stop}\) lies outside the stream of 5 bytes"):
        stream.read(start, stop)


def test_a_copy_opens_its_own_files(tmp_path: Path) -> None:
    stream = ByteStream(write(tmp_path, [b"abc", b"", b"de"]))
    stream.read(0, 5)
    copy = pickle.loads(pickle.dumps(stream))
    assert len(copy._maps) == 0
    assert copy.read(1, 4).tobytes() == b"bcd"
    assert (copy.bytes_read, stream.bytes_read) == (8, 5)


def test_max_open_is_checked() -> None:
    with pytest.raises(ValueError, match="max_open is 0"):
        ByteStream([], max_open=0)
