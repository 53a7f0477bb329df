"""The interpreter of Triton, as in tests/kernels."""

from ...kernels.conftest import free_of_determinism, interpreter  # noqa: F401
