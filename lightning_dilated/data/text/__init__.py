"""Bytes, tokens, and two versions of a text."""
