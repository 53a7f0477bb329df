"""ShortConvolution: a token reads a few neighbours before attention, also on many ranks and in streams."""
