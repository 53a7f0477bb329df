"""LongViT (arXiv 2312.03558): images as sequences of patches."""
