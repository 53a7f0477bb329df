"""Checkpoints: folders that ranks write together, manifests that reveal damage, readers that run no code in files."""

__all__: list[str] = []
