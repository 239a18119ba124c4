"""The data-parallel axis: the mean of gradients, or of how far replicas have drifted."""

from lightning_parallel.comm import MeanReducer
from lightning_parallel.data_parallel.bucketed_reducer import GradientReducer
from lightning_parallel.data_parallel.drift_exchange import DriftExchange

__all__ = ["DriftExchange", "GradientReducer", "MeanReducer"]
