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
from lightning_parallel.comm.worker import Worker

__all__ = [
    "PROFILING",
    "CommRecord",
    "Group",
    "MeshGroups",
    "Pending",
    "Worker",
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "broadcast_from",
    "broadcast_object",
    "equal_everywhere",
    "irecv",
    "isend",
    "observe",
    "raise_together",
    "record",
    "reduce_scatter",
    "rehearsal",
]
