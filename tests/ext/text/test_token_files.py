"""Token files: all formats return the same tokens, also by range, and errors about other files name a remedy."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_dilated.data import TokenDataModule
from lightning_dilated.ext.text.tokens import TokenStream, scan, token_file

TOKENS = np.random.default_rng(0).integers(0, 50_000, 400)


def write(path: Path, tokens: np.ndarray = TOKENS, dtype: str = "uint16", header: int = 0) -> str:
    """Write a .npy or a raw file, according to the extension of the path."""
    if path.suffix == ".npy":
        np.save(path, tokens.astype(dtype))
    else:
        path.write_bytes(b"\7" * header + tokens.astype(dtype).tobytes())
    return str(path)


def open_files(*paths: str, dtype: str | None = None, header: int = 0) -> TokenStream:
    return TokenStream([token_file(path, Path(path).stat().st_size, dtype, header) for path in paths])


@pytest.mark.parametrize(
    ("name", "dtype", "header"),
    [
        *[("a.npy", dtype, 0) for dtype in ("uint16", "uint32", "int32", "int64", ">u2", ">i8")],
        *[("a.bin", dtype, 0) for dtype in ("uint16", "uint32", "int32", "int64")],
        *[("a.bin", dtype, header) for dtype in ("uint16", "uint32") for header in (24, 1024, 7)],
    ],
)
def test_reads_by_range(tmp_path: Path, touched, name: str, dtype: str, header: int) -> None:
    stream = open_files(write(tmp_path / name, dtype=dtype, header=header), dtype=dtype, header=header)
    assert len(stream) == 400
    width, offset = np.dtype(dtype).itemsize, stream.files[0].offset
    for start, stop in ((0, 400), (0, 1), (399, 400), (17, 123), (5, 5)):
        content_read = stream.read(start, stop)
        assert content_read.dtype == np.int64 and content_read.tolist() == TOKENS[start:stop].tolist()
        expected = [(name, offset + start * width, offset + stop * width)] if stop > start else []
        assert touched.take() == expected
    assert stream.bytes_read == (400 + 1 + 1 + 106) * width


def test_files_of_all_kinds_are_one_stream(tmp_path: Path) -> None:
    parts = np.split(TOKENS, [100, 101, 250])
    kinds = [("a.npy", "int64"), ("b.bin", "uint32"), ("c.npy", "uint16"), ("d.bin", "uint32")]
    paths = [write(tmp_path / name, part, dtype) for part, (name, dtype) in zip(parts, kinds, strict=True)]
    stream = open_files(*paths, dtype="uint32")
    for start, stop in ((0, 400), (99, 102), (100, 101), (90, 390)):
        assert stream.read(start, stop).tolist() == TOKENS[start:stop].tolist()
    assert [stream.where(at) for at in (0, 99, 100, 101, 399)] == [
        *((paths[0], 0), (paths[0], 99), (paths[1], 0), (paths[2], 0), (paths[3], 149))
    ]
    copy = pickle.loads(pickle.dumps(stream))
    assert copy.read(95, 260).tolist() == TOKENS[95:260].tolist()
    assert copy.fingerprint() == stream.fingerprint() != open_files(*paths[1:], dtype="uint32").fingerprint()
    with pytest.raises(IndexError, match=r"\[3, 401\) lies outside the stream of 400 tokens"):
        stream.read(3, 401)


@pytest.mark.parametrize("chunk", [1, 7, 400, 1000])
def test_scan_finds_every_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 5, 400)
    stream, chunks = open_files(write(tmp_path / "a.bin", tokens)), TokenStream.chunks
    monkeypatch.setattr(TokenStream, "chunks", lambda self: chunks(self, chunk))
    assert scan(stream, 5, 3).tolist() == np.flatnonzero(tokens == 3).tolist()
    assert scan(stream, 5, None).tolist() == []
    with pytest.raises(
        ValueError, match=rf"token 4 at position {np.argmax(tokens == 4)} .* the largest token of all is 4"
    ):
        scan(stream, 4, None)


TWELVE = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({10**12},)}}"


def header(text: str, length: int | None = None) -> bytes:
    """Return the bytes of a .npy file with this header and 50 tokens."""
    declared = len(text) if length is None else length
    return b"\x93NUMPY\x02\x00" + declared.to_bytes(4, "little") + text.encode() + bytes(100)


def npy(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "a.npy", array)
    return folder / "a.npy"


def raw(folder: Path, content: bytes, name: str = "a.bin") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def negative(folder: Path) -> Path:
    tokens = TOKENS.copy()
    tokens[30] = -1
    return npy(folder, tokens)


LLMC = np.array([20240520, 1, 400, *[0] * 253], dtype=np.int32).tobytes()
NO_HEADER = "a.npy has no readable .npy header"
#: name: (.npy file, part of the error)
NPY = {
    "truncated": (
        lambda d: cut(npy(d, TOKENS), 1000),
        "a.npy was cut off: its header states 400 .* but it has 109 .*again",
    ),
    "cut in its header": (lambda d: cut(npy(d, TOKENS), 20), f"{NO_HEADER} .* write it again"),
    "longer than its header": (
        lambda d: raw(d, npy(d, TOKENS).read_bytes() + b"more", "a.npy"),
        "a.npy goes on after its array: its header states 400 tokens, but it has 400 .and 4 bytes",
    ),
    "negative": (negative, "a.npy holds token -1 at position 30 "),
}
#: name: (array, part of the error)
ARRAYS = {
    "2-D": (TOKENS.reshape(4, 100), r"a.npy holds an array of shape \(4, 100\).* save array.resh"),
    "0-D": (np.array(3), r"a.npy holds an array of shape \(\)"),
    "floats": (TOKENS / 2, "a.npy holds float64; tokens are one of uint16, .* save array.astype"),
    "bytes": (TOKENS.astype(np.uint8), "a.npy holds uint8; tokens are one of"),
    "objects": (np.array([{}, 1], dtype=object), "a.npy holds object"),
    "no tokens": (TOKENS[:0].astype(np.uint16), "a.npy is empty .an array of 0 tokens"),
}
#: name: (content of a .npy file, part of the error)
HEADERS = {
    "none": (b"x" * 900, f"{NO_HEADER}.* rename it to .bin"),
    "a negative shape": (
        header("{'descr': '<u2', 'fortran_order': False, 'shape': (-5,)}"),
        "its header states -5 tokens",
    ),
    "10^12 tokens": (header(TWELVE), "a.npy was cut off: its header states 1,000,000,000,000 tokens, but it has 50"),
    "4 GiB of header": (header(TWELVE, 2**32 - 1), f"{NO_HEADER} .4,294,967,295 bytes of header in a"),
    "open brackets": (header("[" * 9000), f"{NO_HEADER} .* rename it to .bin"),
    "an expression": (header("__import__('os')"), f"{NO_HEADER} .* rename it to .bin"),
    "nothing": (header(""), f"{NO_HEADER} .* rename it to .bin"),
}
SHORT = TOKENS.astype(np.uint16).tobytes()
#: name: (content of a .bin file, options of TokenDataModule, part of the error)
RAW = {
    "empty": (b"", {}, "a.bin is empty: write it again or leave it out"),
    "odd size": (b"x" * 801, {}, "a.bin has 801 bytes, .* whole number .* uint16 tokens of 2 bytes.* cut off"),
    "not a multiple of 4": (b"x" * 802, {"dtype": "uint32"}, "802 bytes, .* uint32 tokens of 4 bytes"),
    "shorter than its header": (b"x" * 800, {"header": 1024}, "after a header of 1024: .*data.header is wrong"),
    "uint32 unasked": (
        TOKENS.astype(np.uint32).tobytes(),
        {},
        "a.bin reads as uint16 with tokens of at most 0 in every second place.* set data.dtype to uint32",
    ),
    "uint16 read as uint32": (
        SHORT,
        {"dtype": "uint32"},
        r"a.bin holds token \d+ at position 0 .* data.dtype to that of the file",
    ),
    "llm.c": (LLMC + SHORT, {}, "header of llm.c: set data.header to 1024 and data.dtype to uint16"),
    "lit-gpt": (b"LITPKDS" + b"\1" * 99, {}, "24-byte header of lit-gpt's packed data: set data.header to 24"),
    "gzip": (gzip.compress(b"x" * 99), {}, "a.bin is compressed by gzip: decompress it"),
}
BAD = {
    **{f"npy: {name}": (make, {}, says) for name, (make, says) in NPY.items()},
    **{f"array: {name}": (lambda d, x=x: npy(d, x), {}, says) for name, (x, says) in ARRAYS.items()},
    **{f"npy header: {name}": (lambda d, x=x: raw(d, x, "a.npy"), {}, says) for name, (x, says) in HEADERS.items()},
    **{f"raw: {name}": (lambda d, x=x: raw(d, x), *more) for name, (x, *more) in RAW.items()},
    "npy called bin": (
        lambda d: npy(d, TOKENS).rename(d / "a.bin"),
        {},
        "a.bin is a .npy file by its content: rename it",
    ),
    "text": (lambda d: raw(d, b"once upon", "a.txt"), {}, "a.txt ends neither in .npy nor in .bin.*ByteDataModule"),
    "out of vocabulary": (
        lambda d: npy(d, TOKENS),
        {"vocab_size": 49_000},
        rf"a.npy holds token \d+ at position {np.argmax(TOKENS >= 49_000)} \(counted from 0\), but data.vocab_size = 49000 "
        rf"allows 0 to 48999; the largest token of all is {TOKENS.max()}: set data.vocab_size",
    ),
    "missing": (lambda d: d / "a.bin", {}, r"a.bin does not exist; pass existing .* in data.paths$"),
    "no such files": (
        lambda d: raw(d, b"x", "a.txt").parent,
        {},
        "holds no regular files ending in .npy, .bin .* data.paths$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path: Path, case: str) -> None:
    make, options, message = BAD[case]
    data = TokenDataModule(str(make(tmp_path)), **{"seq_len": 10, "vocab_size": 50_000, **options})
    for _ in range(2):  # every call must raise
        with pytest.raises((ValueError, OSError), match=message):
            data.check()


def test_said_is_said(tmp_path: Path) -> None:
    """An explicit dtype overrides detection: this file looks like uint32, and is read as uint16."""
    tokens = np.stack([TOKENS, 0 * TOKENS], 1).reshape(-1)
    assert open_files(write(tmp_path / "a.bin", tokens), dtype="uint16").read(0, 800).tolist() == tokens.tolist()
