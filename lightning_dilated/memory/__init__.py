"""Training in less memory: recomputation, offloading, and work over chunks of tokens or heads."""

__all__: list[str] = []
