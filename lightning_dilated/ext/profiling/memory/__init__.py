"""Profile the memory of a training step by phase and kind, on every rank."""

from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler

__all__ = ["MemoryProfiler"]
