"""Mixer: an addition to a layer's attention, such as a short convolution or a recurrence. Extensions define mixers."""

from __future__ import annotations

from torch import nn


class Mixer(nn.Module):
    """Base class of additions to a layer's attention, for calls with B samples of N tokens.

    A mixer with `mixes` changes keys and values before their rotation. It defines

        mix(query, lengths, cu_seqlens, place): return a function of the concatenated k and v, (B, N, 2 K D).
        mix_new(cache): return the same function for new tokens that follow a cache.

    A mixer with `adds` adds to the heads' outputs. It defines, for rows q, k and v before their rotation,

        add(query, rows, lengths, cu_seqlens, place): return (B, N, H, D).
        add_new(query, rows, cache): return the same for new tokens, before the cache contains them.

    `place` is the layer's place in a stream, or None. A mixer that does not support streams raises ValueError unless
    `place` is None. `sequence_halo` fetches neighbouring tokens from other ranks. A cache stores the mixer's state for the
    next token in `mixer_states`.

    Attributes:
        option: the layer's option, for messages.
        own_start: whether `reset_parameters` sets the mixer's own parameters, which `init_weights` then does not draw.
        token_flops: forward FLOPs per token, without products with weight matrices.
    """

    option = ""
    mixes = adds = own_start = False
    token_flops = 0
