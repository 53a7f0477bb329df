"""Streams: a sequence computed chunk by chunk, with the gradients of one pass; and sequences without an end."""
