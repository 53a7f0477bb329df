"""A file of random bytes for the Trainer runs."""

from pathlib import Path

import numpy as np
import pytest

from .runs import SAMPLES, SEQ_LEN


@pytest.fixture
def file(tmp_path: Path) -> str:
    size = SAMPLES * SEQ_LEN + 1
    path = tmp_path / "bytes.bin"
    # 1/8 of all bytes (room for one sequence) goes to validation
    path.write_bytes(np.random.default_rng(0).integers(0, 256, size * 8 // 7 + 1, dtype=np.uint8).tobytes())
    return str(path)
