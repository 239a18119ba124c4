"""Tensor, pipeline and data parallelism, gradient compression and profiling for PyTorch Lightning."""

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
    "CompressedDDPStrategy",
    "CompressedDeepSpeedStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
    "HybridParallelStrategy",
    "PipelineParallelStrategy",
    "Policy",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Sign",
    "TensorParallelStrategy",
    "TopK",
]
