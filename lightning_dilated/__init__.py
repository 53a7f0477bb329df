"""Transformers with dilated attention (LongNet) for PyTorch Lightning."""
