"""Digests of a little of the data, by which a resumed run notices that files of equal names and sizes hold something else.

A dataset's fingerprint is what it says of names and sizes, then MARK and a digest of content. A checkpoint of an earlier
version has the first part only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np

#: between what a fingerprint says of names and sizes and the digest of content
MARK = "; content "
#: bytes of a block, and blocks of a file: the first, the last and others evenly between them
BLOCK = 4096
BLOCKS = 8
#: files that are looked into: the first, the last and others evenly between them
FILES = 4096


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`: the first, the last and others evenly between them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist() if count else []


def files_digest(files: Sequence[str]) -> str:
    """A digest of BLOCKS blocks of BLOCK bytes of at most FILES files. Equal files give equal digests on every machine.

    A file of up to 32 KiB is read whole; of a larger one a change elsewhere is not noticed.

    Raises: OSError for a file that has gone.
    """
    digest = hashlib.blake2b(digest_size=8)
    for at in spread(len(files), FILES):
        with open(files[at], "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in block_starts(size):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def block_starts(size: int) -> list[int]:
    """Where the blocks of a file of `size` bytes begin."""
    if size <= BLOCK * BLOCKS:
        return list(range(0, size, BLOCK))
    return np.linspace(0, size - BLOCK, BLOCKS).astype(np.int64).tolist()


def same_fingerprint(stored: object, here: object) -> bool:
    """Whether a checkpoint's fingerprint is that of the data; content counts where both tell of it."""
    if isinstance(stored, str) and isinstance(here, str) and (MARK in stored) != (MARK in here):
        return stored.split(MARK)[0] == here.split(MARK)[0]
    return stored == here


def tells_content(stored: object, here: object) -> bool:
    """False where the data tells of its content and the checkpoint does not."""
    return not (isinstance(stored, str) and isinstance(here, str) and MARK in here and MARK not in stored)
