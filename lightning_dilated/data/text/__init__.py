"""Data of bytes and tokens."""

__all__: list[str] = []
