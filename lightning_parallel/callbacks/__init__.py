"""Lightning callbacks: they measure a run, find differences between ranks, and let an interrupted run go on."""

from lightning_parallel.callbacks.monitors.communication import CommunicationProfiler
from lightning_parallel.callbacks.monitors.compression import CompressionMonitor
from lightning_parallel.callbacks.monitors.data_sharding import DataShardingMonitor
from lightning_parallel.callbacks.monitors.gradient_noise import GradientNoiseScale
from lightning_parallel.callbacks.monitors.hang import HangWatchdog
from lightning_parallel.callbacks.monitors.learning_rate import LearningRateScaling
from lightning_parallel.callbacks.monitors.memory import MemoryProfiler
from lightning_parallel.callbacks.monitors.nonfinite import NonFiniteGuard
from lightning_parallel.callbacks.monitors.pipeline_timeline import PipelineTimeline
from lightning_parallel.callbacks.monitors.replica_drift import ReplicaDriftMonitor
from lightning_parallel.callbacks.monitors.step_times import StepBreakdown, StragglerMonitor
from lightning_parallel.callbacks.monitors.throughput import Throughput
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.report import ProfileReport
from lightning_parallel.callbacks.resume.auto_resume import AutoResume

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
