"""Callbacks: the run's report, and the writer of predictions."""

from lightning_dilated.callbacks.predictions import PredictionWriter
from lightning_dilated.callbacks.report import RunReport

__all__ = ["PredictionWriter", "RunReport"]
