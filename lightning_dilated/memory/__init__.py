"""Training in less memory: recomputation, offloading, and computing in chunks of tokens or heads."""

__all__: list[str] = []
