"""Bits per byte of an add-one-smoothed bigram model: the number that a trained model should beat."""

import numpy as np

from lightning_dilated.data.stream import ByteStream

_CHUNK = 1 << 22


def bigram_counts(stream: ByteStream, start: int, stop: int, chunk: int = _CHUNK) -> np.ndarray:
    """Count neighbouring byte pairs of stream[start:stop): (256, 256) int64, row = byte, column = next byte.

    Memory is bounded by `chunk` bytes at a time.
    """
    counts = np.zeros(256 * 256, dtype=np.int64)
    for piece in stream.chunks(start, stop, chunk):
        pairs = piece[:-1].astype(np.int32) * 256 + piece[1:]
        counts += np.bincount(pairs, minlength=counts.size)
    return counts.reshape(256, 256)


def bits_per_byte(train: np.ndarray, evaluated: np.ndarray) -> float:
    """Mean of -log2 p(next byte | byte) over the pairs counted in `evaluated`, p from `train` with one added to each.

    Args:
        train, evaluated: (256, 256) pair counts.

    Raises: ValueError if `evaluated` holds no pairs.
    """
    total = int(evaluated.sum())
    if total == 0:
        raise ValueError("there are no byte pairs to evaluate: pass at least two bytes")
    smoothed = train + 1.0
    bits = np.log2(smoothed.sum(axis=1, keepdims=True)) - np.log2(smoothed)
    return float((evaluated * bits).sum() / total)
