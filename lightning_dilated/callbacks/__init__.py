"""Callbacks: recomputation, memory, throughput, communication, checkpoints, progress, reports, evaluation, predictions."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.callbacks.activation_recompute import ActivationRecompute

if TYPE_CHECKING:
    from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint
    from lightning_dilated.ext.evaluation.accuracy_by_depth import AccuracyByDepth
    from lightning_dilated.ext.evaluation.loss_by_position import LossByPosition, RecallByDistance
    from lightning_dilated.ext.evaluation.predictions import PredictionWriter
    from lightning_dilated.ext.explain.metrics_bar import MetricsProgressBar
    from lightning_dilated.ext.explain.run_report import RunReport
    from lightning_dilated.ext.pooled.bootstrap import BootstrapIntervals
    from lightning_dilated.ext.profiling.communication import CommunicationProfiler
    from lightning_dilated.ext.profiling.memory import MemoryProfiler
    from lightning_dilated.ext.profiling.throughput import ThroughputMonitor
    from lightning_dilated.ext.slides.attention_writer import AttentionWriter

__getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AccuracyByDepth",
    "ActivationRecompute",
    "AttentionWriter",
    "BootstrapIntervals",
    "CommunicationProfiler",
    "LossByPosition",
    "MemoryProfiler",
    "MetricsProgressBar",
    "PredictionWriter",
    "RecallByDistance",
    "RunReport",
    "ShardedCheckpoint",
    "ThroughputMonitor",
]
