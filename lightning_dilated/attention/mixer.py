"""Mixer: what a layer has beside attention, such as a short convolution or a recurrence. Extensions define them."""

from __future__ import annotations

from torch import nn


class Mixer(nn.Module):
    """Base of what a layer has beside attention. Rows are those of a call's N tokens, in B samples.

    A mixer with `mixes` changes keys and values before they are rotated. It defines

        mix(query, lengths, cu_seqlens, place): a function of k and v side by side (B, N, 2 K D).
        mix_new(cache): the same for new tokens that follow those of a cache.

    A mixer with `adds` adds to the heads' outputs. It defines, for rows q, k and v before their rotation,

        add(query, rows, lengths, cu_seqlens, place): (B, N, H, D).
        add_new(query, rows, cache): the same for new tokens, before the cache takes them.

    `place` is the layer's place in a stream, None outside of one; a mixer that cannot follow a stream raises a ValueError
    for it. Neighbouring tokens may be on other ranks: `sequence_halo` brings them. A cache holds in its `kept` what the
    mixer needs for the next token.

    Attributes:
        option: the layer's option, for messages.
        token_flops: FLOPs of a token forward, without those of its matrices.
    """

    option = ""
    mixes = adds = False
    token_flops = 0
