"""The pools of ranks of the strategies' tests, because a Trainer uses all ranks of its process group."""

from ...strategy.conftest import pools  # noqa: F401
