"""Processes in which Triton's interpreter runs the kernels on the CPU; Triton decides this at its import."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from ..distributed.pool import Pool
from .patched_once import interpret


@pytest.fixture(scope="session")  # xdist mixes files of this folder with others, and the start takes seconds
def interpreter(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Two ranks under the interpreter; `run(1, ...)` uses one of them.

    A call may take most of the time that `--timeout` allows a test.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    limit = float(pytestconfig.getoption("timeout") or pytestconfig.getini("timeout"))
    pool = Pool(2, timeout=0.8 * limit, environment={"TRITON_INTERPRET": "1"}, first=interpret)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def free_of_determinism() -> Iterator[None]:
    """Switch off torch's deterministic algorithms afterwards, which some tests switch on in this process."""
    yield
    torch.use_deterministic_algorithms(False)
