"""Continue prompts with causal models: caches, sampling, and the step from one token to the next."""
