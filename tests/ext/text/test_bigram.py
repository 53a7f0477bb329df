"""The bigram baseline equals a plain loop over the pairs that the loader of a split returns."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lightning_dilated.data import ByteDataModule, ByteStream
from lightning_dilated.ext.text.bytes import bigram_counts, bits_per_byte


def plain(train: bytes, pairs: list[tuple[int, int]]) -> float:
    counts: dict[tuple[int, int], int] = {}
    rows: dict[int, int] = {}
    for first, second in pairwise(train):
        counts[first, second] = counts.get((first, second), 0) + 1
        rows[first] = rows.get(first, 0) + 1
    bits = [-math.log2((counts.get(pair, 0) + 1) / (rows.get(pair[0], 0) + 256)) for pair in pairs]
    return sum(bits) / len(bits)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_agrees_with_a_plain_loop(tmp_path: Path, split: str, limit: int | None) -> None:
    values = np.random.default_rng(0).integers(0, 40, 3000, dtype=np.uint8) ** 2
    (tmp_path / "a").write_bytes(values[:1100].tobytes())
    (tmp_path / "b").write_bytes(values[1100:].tobytes())
    module = ByteDataModule(str(tmp_path), seq_len=16, val_fraction=0.2, test_fraction=0.1, val_limit=limit)
    loader = getattr(module, f"{split}_dataloader")()
    pairs = [
        pair
        for batch in loader
        for pair in zip(batch["tokens"].flatten().tolist(), batch["labels"].flatten().tolist(), strict=True)
    ]
    assert len(pairs) == len(module.dataset(split)) * 16
    assert module.bigram_bits_per_byte(split) == pytest.approx(plain(values[:2100].tobytes(), pairs), rel=1e-12)


def test_is_cached(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4)
    module = ByteDataModule(str(tmp_path), seq_len=8)
    first = module.bigram_bits_per_byte()
    read = module.stream.bytes_read
    assert module.bigram_bits_per_byte() == first
    assert module.stream.bytes_read == read
    module.bigram_bits_per_byte("test")
    assert module.stream.bytes_read < read + 60  # the counts of the training bytes are reused


@pytest.mark.parametrize("chunk", [1, 7, 99, 100, 1000])
def test_counts_do_not_depend_on_the_chunk(tmp_path: Path, chunk: int) -> None:
    values = np.random.default_rng(1).integers(0, 3, 100, dtype=np.uint8)
    (tmp_path / "a").write_bytes(values.tobytes())
    counts = bigram_counts(ByteStream([str(tmp_path / "a")]), 10, 90, chunk)
    expected = np.zeros((256, 256), dtype=np.int64)
    np.add.at(expected, (values[10:89], values[11:90]), 1)
    assert (counts == expected).all()


def test_known_values() -> None:
    nothing = np.zeros((256, 256), dtype=np.int64)
    one = nothing.copy()
    one[1, 2] = 1
    assert bits_per_byte(nothing, one) == pytest.approx(8)
    assert bits_per_byte(one * 255, one) == pytest.approx(math.log2(511 / 256))
    with pytest.raises(ValueError, match="no byte pairs"):
        bits_per_byte(one, nothing)


def test_a_split_without_sequences(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100)
    module = ByteDataModule(str(tmp_path), seq_len=8, val_fraction=0)
    with pytest.raises(ValueError, match=r"the val split has no sequences: set data\.val_fraction above 0"):
        module.bigram_bits_per_byte()
    with pytest.raises(ValueError, match="split must be one of"):
        module.bigram_bits_per_byte("dev")
