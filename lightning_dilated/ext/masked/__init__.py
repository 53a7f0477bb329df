"""Masked language models: LongNetMLM, and masks that are the same on any number of ranks."""
