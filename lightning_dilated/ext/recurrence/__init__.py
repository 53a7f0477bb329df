"""Recurrent attention to a memory of constant size: in chunks, on many ranks, in streams and token by token."""
