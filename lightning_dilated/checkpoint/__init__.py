"""Checkpoints: folders that ranks write together, their manifest and damage, and files read without running code."""

__all__: list[str] = []
