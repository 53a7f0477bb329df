"""Compute a sequence chunk by chunk, with the same gradients as in one pass, and train on endless sequences."""
