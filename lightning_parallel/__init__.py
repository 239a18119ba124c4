"""Tensor, pipeline and data parallelism, gradient compression and profiling for PyTorch Lightning."""

from lightning_parallel.callbacks import (
    AutoResume,
    CommunicationProfiler,
    CompressionMonitor,
    DataShardingMonitor,
    HangReporter,
    MemoryProfiler,
    NonFiniteGuard,
    PipelineTimeline,
    ProfileReport,
    ReplicaDriftMonitor,
    StepBreakdown,
    StragglerMonitor,
    Throughput,
)
from lightning_parallel.callbacks.measuring import MeasuringCallback
from lightning_parallel.checkpoint import load_weights
from lightning_parallel.compression import (
    Auto,
    BlockTopK,
    Cast,
    HookState,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    StepValue,
    TopK,
    compression_hook,
)
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "AutoResume",
    "HookState",
    "MeasuringCallback",
    "PipelinePlan",
    "StepValue",
    "compression_hook",
    "load_weights",
    "BlockTopK",
    "Cast",
    "CommunicationProfiler",
    "CompressedDDPStrategy",
    "CompressedDeepSpeedStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
    "CompressionMonitor",
    "DataShardingMonitor",
    "HangReporter",
    "HybridParallelStrategy",
    "MemoryProfiler",
    "NonFiniteGuard",
    "PipelineParallelStrategy",
    "PipelineTimeline",
    "Policy",
    "PowerSGD",
    "ProfileReport",
    "Quantize",
    "RandomK",
    "ReplicaDriftMonitor",
    "Sign",
    "StepBreakdown",
    "StragglerMonitor",
    "TensorParallelStrategy",
    "Throughput",
    "TopK",
]
