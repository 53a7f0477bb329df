"""Whole slides: the encoder, its pretraining, and released weights."""
