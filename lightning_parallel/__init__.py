"""Tensor, context, pipeline and data parallelism, gradient compression and profiling for PyTorch Lightning."""

from lightning_parallel.callbacks import (
    AutoResume,
    CommunicationProfiler,
    CompressionMonitor,
    DataShardingMonitor,
    GradientNoiseScale,
    HangWatchdog,
    LearningRateScaling,
    MemoryProfiler,
    NonFiniteGuard,
    PipelineTimeline,
    ProfileReport,
    ReplicaDriftMonitor,
    StepBreakdown,
    StragglerMonitor,
    Throughput,
)
from lightning_parallel.callbacks.recording.measuring import MeasuringCallback
from lightning_parallel.checkpoint import load_weights
from lightning_parallel.comm import LostRankError, RendezvousError
from lightning_parallel.compression import (
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
from lightning_parallel.optim import LAMB, LARS
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    ContextParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_parallel.strategies.hooks.views import HookError
from lightning_parallel.strategies.self_check.proof import SelfCheckError

__version__ = "0.1.0"

__all__ = [
    "AutoParallelStrategy",
    "AutoResume",
    "BlockTopK",
    "Cast",
    "CommunicationProfiler",
    "CompressedDDPStrategy",
    "CompressedDeepSpeedStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
    "CompressionMonitor",
    "ContextParallelStrategy",
    "DataShardingMonitor",
    "GradientNoiseScale",
    "HangWatchdog",
    "HookError",
    "HookState",
    "HybridParallelStrategy",
    "LAMB",
    "LARS",
    "LearningRateScaling",
    "LocalSGDStrategy",
    "LostRankError",
    "MeasuringCallback",
    "MemoryProfiler",
    "NonFiniteGuard",
    "PipelineParallelStrategy",
    "PipelinePlan",
    "PipelineTimeline",
    "Policy",
    "PowerSGD",
    "ProfileReport",
    "Quantize",
    "RandomK",
    "RendezvousError",
    "ReplicaDriftMonitor",
    "SelfCheckError",
    "Sign",
    "StepBreakdown",
    "StepValue",
    "StragglerMonitor",
    "TensorParallelStrategy",
    "Throughput",
    "TopK",
    "compression_hook",
    "load_weights",
]
