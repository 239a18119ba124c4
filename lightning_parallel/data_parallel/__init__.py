"""The mean of gradients over the data-parallel axis."""

from lightning_parallel.comm import MeanReducer
from lightning_parallel.data_parallel.bucketed_reducer import GradientReducer

__all__ = ["GradientReducer", "MeanReducer"]
