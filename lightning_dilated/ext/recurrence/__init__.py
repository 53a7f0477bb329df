"""Recurrent attention: a memory of constant size, exact in chunks, on many ranks, in streams and token by token."""
