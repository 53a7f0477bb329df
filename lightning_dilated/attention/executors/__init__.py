"""Executors: ways to compute a call of the op, chosen in attention/resolve.py."""

__all__: list[str] = []
