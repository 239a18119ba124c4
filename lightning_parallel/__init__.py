"""Tensor, pipeline and data parallelism, gradient compression and profiling for PyTorch Lightning."""

from lightning_parallel.callbacks import (
    CommunicationProfiler,
    CompressionMonitor,
    DataShardingMonitor,
    HangReporter,
    MemoryProfiler,
    PipelineTimeline,
    ProfileReport,
    ReplicaDriftMonitor,
    StepBreakdown,
    StragglerMonitor,
    Throughput,
)
from lightning_parallel.compression import (
    BlockTopK,
    Cast,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
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
