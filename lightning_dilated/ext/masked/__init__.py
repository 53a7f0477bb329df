"""Masked language models: masks that ranks draw alike, and LongNetMLM."""
