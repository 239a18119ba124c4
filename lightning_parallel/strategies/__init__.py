"""Lightning strategies: doors, which the Trainer calls, and rooms, which keep one promise each.

The import of this package registers their names.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel.compat.lightning import open_fabric
from lightning_parallel.compat.twins import share_strategies
from lightning_parallel.compression import PowerSGD, Quantize
from lightning_parallel.strategies.auto_parallel import AutoParallelStrategy
from lightning_parallel.strategies.compressed.ddp import CompressedDDPStrategy
from lightning_parallel.strategies.compressed.deepspeed import CompressedDeepSpeedStrategy
from lightning_parallel.strategies.compressed.fsdp import CompressedFSDPStrategy, CompressedModelParallelStrategy
from lightning_parallel.strategies.local_sgd import LocalSGDStrategy
from lightning_parallel.strategies.parallel import (
    ContextParallelStrategy,
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
    "ContextParallelStrategy",
    "HybridParallelStrategy",
    "LocalSGDStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
]

# Lightning asks no entry point before it looks a name up, so a name needs this import; `class_path` needs none.
_NAMES: dict[str, tuple[Callable[[], Strategy], str]] = {
    "tensor_parallel": (TensorParallelStrategy, "Layers sharded over ranks, data over replicas"),
    "pipeline_parallel": (PipelineParallelStrategy, "Layers split into stages, data over replicas"),
    "context_parallel": (ContextParallelStrategy, "Sequences split over ranks, data over replicas"),
    "hybrid_parallel": (HybridParallelStrategy, "Tensor x context x pipeline x data parallelism"),
    "auto_parallel": (AutoParallelStrategy, "The fastest layout by the planner when a run begins"),
    "local_sgd": (LocalSGDStrategy, "Replicas that train independently and average their updates every n steps"),
    # Functions, since each strategy needs a separate compressor.
    "ddp_powersgd": (lambda: CompressedDDPStrategy(PowerSGD()), "DDP with PowerSGD gradients"),
    "ddp_int8": (lambda: CompressedDDPStrategy(Quantize(8)), "DDP with gradients of 8 bits"),
}

# The class as a string on the command line of LightningCLI; Lightning looks names up in lower case.
for _kind in (
    TensorParallelStrategy,
    PipelineParallelStrategy,
    ContextParallelStrategy,
    HybridParallelStrategy,
    AutoParallelStrategy,
    LocalSGDStrategy,
):
    _NAMES[f"lightning_parallel.{_kind.__name__}".lower()] = (_kind, "The same, by its class")

for _name, (_make, _description) in _NAMES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _make, description=_description)

share_strategies([globals()[_name] for _name in __all__], {_name: _make for _name, (_make, _) in _NAMES.items()})


def _for_fabric(strategy: Strategy) -> Any:
    # Imported only now: most programs have no Fabric.
    from lightning_parallel.strategies.fabric import fabric_strategy

    return fabric_strategy(strategy) if isinstance(strategy, tuple(globals()[name] for name in __all__)) else strategy


open_fabric({_name: _make for _name, (_make, _) in _NAMES.items()}, _for_fabric)
