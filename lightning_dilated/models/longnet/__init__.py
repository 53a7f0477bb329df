"""Models over tokens: causal, masked, and classifiers."""

__all__: list[str] = []
