"""Lightning strategies: thin classes, no algorithms. Importing this package registers their names."""

from collections.abc import Callable

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel.compat.twins import share_strategies
from lightning_parallel.strategies.auto_parallel import AutoParallelStrategy
from lightning_parallel.strategies.compressed import NAMED_COMPRESSORS, CompressedDDPStrategy, with_compressor
from lightning_parallel.strategies.compressed_deepspeed import CompressedDeepSpeedStrategy
from lightning_parallel.strategies.compressed_fsdp import CompressedFSDPStrategy, CompressedModelParallelStrategy
from lightning_parallel.strategies.local_sgd import LocalSGDStrategy
from lightning_parallel.strategies.parallel import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)

__all__ = [
    "AutoParallelStrategy",
    "CompressedDDPStrategy",
    "CompressedDeepSpeedStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
    "HybridParallelStrategy",
    "LocalSGDStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
]

_NAMES: dict[str, tuple[Callable[[], Strategy], str]] = {
    "tensor_parallel": (TensorParallelStrategy, "Layers divided over ranks, data over replicas"),
    "pipeline_parallel": (PipelineParallelStrategy, "Runs of layers on stages, data over replicas"),
    "hybrid_parallel": (HybridParallelStrategy, "Tensor x pipeline x data parallelism"),
    "auto_parallel": (AutoParallelStrategy, "The layout that the planner finds best when a run begins"),
    "local_sgd": (LocalSGDStrategy, "Replicas that take local steps, and average their drift now and then"),
}
for _family, _compressed, _description in (
    ("ddp", CompressedDDPStrategy, "DDP with compressed gradients"),
    ("fsdp", CompressedFSDPStrategy, "FSDP with compressed gradients"),
    ("deepspeed", CompressedDeepSpeedStrategy, "DeepSpeed ZeRO 1 with compressed gradients"),
):
    for _ending, _build in NAMED_COMPRESSORS.items():
        _NAMES[f"{_family}_{_ending}"] = (with_compressor(_compressed, _build), _description)

# What one tries on the command line of LightningCLI; Lightning looks names up in lower case.
for _kind in (
    TensorParallelStrategy,
    PipelineParallelStrategy,
    HybridParallelStrategy,
    AutoParallelStrategy,
    LocalSGDStrategy,
):
    _NAMES[f"lightning_parallel.{_kind.__name__}".lower()] = (_kind, "The same, by its class")

for _name, (_make, _description) in _NAMES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _make, description=_description)

share_strategies([globals()[_name] for _name in __all__], {_name: _make for _name, (_make, _) in _NAMES.items()})
