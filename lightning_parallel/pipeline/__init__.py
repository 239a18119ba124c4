"""Pipeline parallelism: consecutive layers on consecutive ranks, with microbatches that flow through them.

plan = analyze(model, num_ranks, example=(step, microbatch))
PipelineEngine(model, plan, group).forward_backward(step, batch)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parallel.pipeline.analysis import analyze
    from lightning_parallel.pipeline.engine import PipelineEngine
    from lightning_parallel.pipeline.pipeline_plan import PipelinePlan

__all__ = ["PipelineEngine", "PipelinePlan", "analyze"]

_HOME = {"PipelineEngine": "engine", "PipelinePlan": "pipeline_plan", "analyze": "analysis"}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: schedules are drawn and simulated without torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
