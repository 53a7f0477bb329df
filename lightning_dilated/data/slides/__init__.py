"""Slides from h5 and .pt files, with labels."""
