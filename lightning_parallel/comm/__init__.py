"""Process groups of a mesh and every collective the library calls.

All communication passes through this package: each call names its group, can be recorded, and turns the loss of a
peer into an error that names the lost ranks. A group of one rank communicates nothing and needs no process group.
"""

from lightning_parallel.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    broadcast_,
    irecv,
    isend,
    reduce_scatter,
)
from lightning_parallel.comm.executor import (
    Executor,
    InlineExecutor,
    StreamExecutor,
    ThreadExecutor,
    overlapping_executor,
)
from lightning_parallel.comm.gradient_session import GradientSession, MeanReducer, MeanStep, fill_buckets
from lightning_parallel.comm.groups import Group, MeshGroups
from lightning_parallel.comm.objects import (
    agree,
    all_gather_object,
    barrier,
    broadcast_from,
    broadcast_object,
    equal_everywhere,
    raise_together,
)
from lightning_parallel.comm.records import PROFILING, CommRecord, Pending, observe, record, rehearsal

__all__ = [
    "GradientSession",
    "irecv",
    "record",
    "Group",
    "InlineExecutor",
    "rehearsal",
    "raise_together",
    "overlapping_executor",
    "MeshGroups",
    "broadcast_object",
    "Pending",
    "Executor",
    "fill_buckets",
    "CommRecord",
    "Worker",
    "agree",
    "broadcast_from",
    "ThreadExecutor",
    "all_gather",
    "equal_everywhere",
    "MeanStep",
    "MeanReducer",
    "reduce_scatter",
    "StreamExecutor",
    "all_reduce_",
    "observe",
    "isend",
    "all_to_all",
    "broadcast_",
    "barrier",
    "PROFILING",
    "all_gather_object",
    "all_reduce",
]
