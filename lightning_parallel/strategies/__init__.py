"""Lightning strategies: thin classes, no algorithms. Importing this package registers their names."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.tensor import TensorParallelStrategy

__all__ = ["TensorParallelStrategy"]

if "tensor_parallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "tensor_parallel", TensorParallelStrategy, description="Layers divided over ranks, data over replicas"
    )
