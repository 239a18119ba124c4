"""Lightning callbacks: they measure a run, find differences between ranks, and let an interrupted run go on."""

from lightning_parallel.callbacks.auto_resume import AutoResume
from lightning_parallel.callbacks.communication import CommunicationProfiler
from lightning_parallel.callbacks.compression_monitor import CompressionMonitor
from lightning_parallel.callbacks.data_sharding import DataShardingMonitor
from lightning_parallel.callbacks.gradient_noise import GradientNoiseScale
from lightning_parallel.callbacks.hang import HangWatchdog
from lightning_parallel.callbacks.learning_rate_scaling import LearningRateScaling
from lightning_parallel.callbacks.measuring import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.memory import MemoryProfiler
from lightning_parallel.callbacks.nonfinite import NonFiniteGuard
from lightning_parallel.callbacks.pipeline_timeline import PipelineTimeline
from lightning_parallel.callbacks.replica_drift import ReplicaDriftMonitor
from lightning_parallel.callbacks.report import ProfileReport
from lightning_parallel.callbacks.step_times import StepBreakdown, StragglerMonitor
from lightning_parallel.callbacks.throughput import Throughput

__all__ = [
    "Accumulator",
    "AutoResume",
    "CommunicationProfiler",
    "CompressionMonitor",
    "DataShardingMonitor",
    "GradientNoiseScale",
    "HangWatchdog",
    "LearningRateScaling",
    "MeasuringCallback",
    "MemoryProfiler",
    "NonFiniteGuard",
    "PipelineTimeline",
    "ProfileReport",
    "ReplicaDriftMonitor",
    "StepBreakdown",
    "StragglerMonitor",
    "Throughput",
]
