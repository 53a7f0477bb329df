"""Slides from h5 and .pt files, with labels."""

__all__: list[str] = []
