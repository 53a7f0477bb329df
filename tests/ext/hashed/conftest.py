"""Four gloo ranks for the tests of this folder; the pool of other extensions has two."""

from ...distributed.conftest import pool  # noqa: F401
