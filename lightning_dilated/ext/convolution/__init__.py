"""ShortConvolution: a token sees a few neighbours before attention; on ranks and in streams, by kernels where they serve."""
