"""Process groups of a mesh, and every collective of the library.

All communication passes through this package: each call names its group, can be recorded, and turns the loss of a
peer into an error that names the lost ranks. A group of one rank communicates nothing and needs no process group.
"""

from lightning_parallel.comm.collectives import (
    all_gather,
    all_gather_,
    all_reduce,
    all_reduce_,
    all_to_all,
    broadcast_,
    exchange,
    irecv,
    isend,
    reduce_,
    reduce_scatter,
)
from lightning_parallel.comm.executors import (
    Executor,
    InlineExecutor,
    StreamExecutor,
    ThreadExecutor,
    overlapping_executor,
)
from lightning_parallel.comm.gradient_session import GradientSession, MeanReducer, MeanStep, Phases, fill_buckets
from lightning_parallel.comm.groups import GRADIENTS, Group, MeshGroups, NodeGroups
from lightning_parallel.comm.hashes import fingerprint, fingerprints, row_fingerprints
from lightning_parallel.comm.host import Process, boot_id, host_id
from lightning_parallel.comm.objects import (
    agree,
    all_gather_object,
    barrier,
    broadcast_from,
    broadcast_object,
    equal_everywhere,
    failing_together,
    gather_object,
    on_any_rank,
    raise_together,
    shared_key,
)
from lightning_parallel.comm.presence import (
    ApartError,
    LostRankError,
    RollCall,
    explained,
    name_run,
    report_failure,
    start_heartbeat,
    stop_heartbeat,
    wait_until_heard,
)
from lightning_parallel.comm.rendezvous import RendezvousError, attempt_store, may_outlive_attempts
from lightning_parallel.comm.threads import Helper
from lightning_parallel.comm.work import (
    PROFILING,
    Pending,
    Traffic,
    current_call,
    skip_communication,
    skips_communication,
)

__all__ = [
    "ApartError",
    "GRADIENTS",
    "RendezvousError",
    "RollCall",
    "GradientSession",
    "LostRankError",
    "PROFILING",
    "Process",
    "Executor",
    "Group",
    "Helper",
    "InlineExecutor",
    "MeanReducer",
    "MeanStep",
    "MeshGroups",
    "NodeGroups",
    "Pending",
    "Phases",
    "StreamExecutor",
    "ThreadExecutor",
    "Traffic",
    "agree",
    "all_gather",
    "all_gather_",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "attempt_store",
    "may_outlive_attempts",
    "name_run",
    "barrier",
    "boot_id",
    "broadcast_",
    "broadcast_from",
    "broadcast_object",
    "current_call",
    "skip_communication",
    "skips_communication",
    "equal_everywhere",
    "failing_together",
    "gather_object",
    "host_id",
    "exchange",
    "explained",
    "fill_buckets",
    "fingerprint",
    "fingerprints",
    "irecv",
    "isend",
    "on_any_rank",
    "overlapping_executor",
    "raise_together",
    "shared_key",
    "reduce_",
    "reduce_scatter",
    "row_fingerprints",
    "report_failure",
    "start_heartbeat",
    "stop_heartbeat",
    "wait_until_heard",
]
