"""Checkpoints: folders that ranks write together, manifests that show damage, and readers that run no code in files."""

__all__: list[str] = []
