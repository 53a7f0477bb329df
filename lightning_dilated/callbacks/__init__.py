"""Callbacks: activation recomputation, throughput, the run's report, and the writer of predictions."""

from lightning_dilated.callbacks.predictions import PredictionWriter
from lightning_dilated.callbacks.recompute import ActivationRecompute
from lightning_dilated.callbacks.report import RunReport
from lightning_dilated.callbacks.throughput import ThroughputMonitor

__all__ = ["ActivationRecompute", "PredictionWriter", "RunReport", "ThroughputMonitor"]
