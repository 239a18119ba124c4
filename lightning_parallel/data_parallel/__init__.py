"""The data-parallel axis: means of gradients, means of drifts, and slices of parameters."""

from lightning_parallel.comm import MeanReducer
from lightning_parallel.data_parallel.absent_parameters import AbsentParameter
from lightning_parallel.data_parallel.bucketed_reducer import GradientReducer
from lightning_parallel.data_parallel.drift_exchange import DriftExchange
from lightning_parallel.data_parallel.host_steps import put_data
from lightning_parallel.data_parallel.parameter_shards import ParameterShards
from lightning_parallel.data_parallel.parameter_slices import ParameterSlices, check_divisible
from lightning_parallel.data_parallel.scattering_reducer import ScatteringReducer

__all__ = [
    "AbsentParameter",
    "DriftExchange",
    "GradientReducer",
    "MeanReducer",
    "ParameterShards",
    "ParameterSlices",
    "ScatteringReducer",
    "check_divisible",
    "put_data",
]
