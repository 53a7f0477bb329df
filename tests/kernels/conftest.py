"""Processes in which Triton's interpreter runs the kernels on the CPU, which is fixed at their first import."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from ..distributed.pool import Pool


@pytest.fixture(scope="session")  # files of this folder are run between others, and starting takes seconds
def interpreter() -> Iterator[Pool]:
    """Two ranks under the interpreter; `run(1, ...)` takes one of them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    pool, before = Pool(2, timeout=240, method="spawn"), os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.answers(2, ready)
    finally:
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
    yield pool
    pool.close()


def ready(rank, group):
    """Nothing: the workers have started when it returns."""
