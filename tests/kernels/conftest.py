"""Processes in which Triton's interpreter runs the kernels on the CPU, which is fixed as Triton is imported."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from ..distributed.pool import Pool
from .patched_once import interpret


@pytest.fixture(scope="session")  # files of this folder are run between others, and starting takes seconds
def interpreter(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Two ranks under the interpreter; `run(1, ...)` takes one of them.

    A call may take most of what `--timeout` allows a test.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    limit = float(pytestconfig.getoption("timeout") or pytestconfig.getini("timeout"))
    pool = Pool(2, timeout=0.8 * limit, environment={"TRITON_INTERPRET": "1"}, first=interpret)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def free_of_determinism() -> Iterator[None]:
    """Torch's deterministic algorithms, which some tests ask for in this process, are off afterwards."""
    yield
    torch.use_deterministic_algorithms(False)
