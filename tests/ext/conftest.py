"""Fixtures that tests of extensions share with tests of the core."""

from ..data.conftest import file, folder, lambda_virus, pool, store, touched  # noqa: F401
from ..kernels.conftest import free_of_determinism, interpreter  # noqa: F401
