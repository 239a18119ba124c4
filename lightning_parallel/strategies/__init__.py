"""Lightning strategies: thin classes, no algorithms. Importing this package registers their names."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.compressed import NAMED_COMPRESSORS, CompressedDDPStrategy, with_compressor
from lightning_parallel.strategies.compressed_deepspeed import CompressedDeepSpeedStrategy
from lightning_parallel.strategies.compressed_fsdp import CompressedFSDPStrategy, CompressedModelParallelStrategy
from lightning_parallel.strategies.parallel import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)

__all__ = [
    "CompressedDDPStrategy",
    "CompressedDeepSpeedStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
    "HybridParallelStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
]

for _name, _strategy, _description in (
    ("tensor_parallel", TensorParallelStrategy, "Layers divided over ranks, data over replicas"),
    ("pipeline_parallel", PipelineParallelStrategy, "Runs of layers on stages, data over replicas"),
    ("hybrid_parallel", HybridParallelStrategy, "Tensor x pipeline x data parallelism"),
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _strategy, description=_description)

for _family, _compressed, _description in (
    ("ddp", CompressedDDPStrategy, "DDP with compressed gradients"),
    ("fsdp", CompressedFSDPStrategy, "FSDP with compressed gradients"),
    ("deepspeed", CompressedDeepSpeedStrategy, "DeepSpeed ZeRO 1 with compressed gradients"),
):
    for _ending, _build in NAMED_COMPRESSORS.items():
        if f"{_family}_{_ending}" not in StrategyRegistry:
            _make = with_compressor(_compressed, _build)
            StrategyRegistry.register(f"{_family}_{_ending}", _make, description=_description)
