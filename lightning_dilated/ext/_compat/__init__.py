"""Wrap private names of other packages that only extensions use; every folder of `ext/` may import this folder."""
