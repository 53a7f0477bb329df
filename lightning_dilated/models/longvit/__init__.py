"""Whole images as patches, and released weights."""
