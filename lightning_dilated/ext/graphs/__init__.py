"""CUDA graphs of a training step: recorded once a shape, and replayed."""
