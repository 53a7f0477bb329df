"""Fixtures: four gloo ranks (the pool of other extensions has two), and Triton's interpreter."""

from ...distributed.conftest import pool  # noqa: F401
from ...kernels.conftest import free_of_determinism, interpreter  # noqa: F401
