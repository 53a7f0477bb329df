"""Models over tokens: causal and masked."""

__all__: list[str] = []
