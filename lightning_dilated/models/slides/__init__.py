"""Whole slides: the encoder, its pretraining, and released weights."""

__all__: list[str] = []
