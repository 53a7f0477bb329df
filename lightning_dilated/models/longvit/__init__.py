"""Whole images as patches, and released weights."""

__all__: list[str] = []
