"""The fixture for Triton's interpreter, shared with tests/kernels."""

from ...kernels.conftest import free_of_determinism, interpreter  # noqa: F401
