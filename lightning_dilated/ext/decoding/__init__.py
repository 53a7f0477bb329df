"""Decoding: prompts, sampling, the step from a token to the next."""
