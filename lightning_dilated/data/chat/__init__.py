"""Conversations as training samples."""

__all__: list[str] = []
