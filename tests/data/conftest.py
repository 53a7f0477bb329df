"""Files for the tests: random bytes for Trainer runs, a real genome, and slides. One fixture records all reads."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lightning_dilated.data import write_synthetic_slides

from ..distributed.pool import Pool
from .runs import SAMPLES, SEQ_LEN
from .touched import Touched


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two ranks; a Trainer uses both. Xdist mixes files of several folders, so the pool lives for the whole session."""
    workers = Pool(2)
    yield workers
    workers.close()


@pytest.fixture
def file(tmp_path: Path) -> str:
    size = SAMPLES * SEQ_LEN + 1
    path = tmp_path / "bytes.bin"
    # 1/8 of the bytes, enough for one sequence, is the validation split
    path.write_bytes(np.random.default_rng(0).integers(0, 256, size * 8 // 7 + 1, dtype=np.uint8).tobytes())
    return str(path)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    return Touched(monkeypatch)


@pytest.fixture
def store() -> Iterator[str]:
    """An empty memory:// file system."""
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    yield "memory://"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def lambda_virus(tmp_path: Path) -> str:
    """Phage lambda's genome as an uncompressed FASTA file."""
    path = tmp_path / "lambda_virus.fa"
    path.write_bytes(gzip.decompress((Path(__file__).parent / "lambda_virus.fa.gz").read_bytes()))
    return str(path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A read-only folder with 12 slides and labels.csv."""
    path = tmp_path_factory.mktemp("slides")
    write_synthetic_slides(path, slides=12, tiles=(5, 30), features=4, classes=3)
    return str(path)
