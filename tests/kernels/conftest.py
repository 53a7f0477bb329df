"""Worker processes in which Triton's interpreter runs kernels on the CPU. Triton decides on it at import."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from ..distributed.pool import Pool
from .patched_once import interpret


@pytest.fixture(scope="session")  # kept for the session, because xdist mixes files of folders and a start takes seconds
def interpreter(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Two ranks under the interpreter; `run(1, ...)` uses one of them.

    A call may take most of the time that `--timeout` allows for a test.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    limit = float(pytestconfig.getoption("timeout") or pytestconfig.getini("timeout"))
    pool = Pool(2, timeout=0.8 * limit, environment={"TRITON_INTERPRET": "1"}, first=interpret)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def free_of_determinism() -> Iterator[None]:
    """Disable torch's deterministic algorithms after each test, because some tests enable them in this process."""
    yield
    torch.use_deterministic_algorithms(False)
