"""CUDA graphs of a training step: recorded once for each shape, and replayed."""
