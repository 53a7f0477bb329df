"""Training in less memory: recomputation, offloading, and computation in chunks of tokens or heads."""

__all__: list[str] = []
