"""Bytes, tokens, and two versions of a text."""

__all__: list[str] = []
