"""Models over tokens: causal, masked, and classifiers."""
