"""Compute a sequence chunk by chunk, with the gradients of one pass, and train on endless sequences."""
