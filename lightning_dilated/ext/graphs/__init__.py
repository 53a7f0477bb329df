"""Record CUDA graphs of a training step, one for each shape, and replay them."""
