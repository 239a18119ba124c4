"""Records collectives issued by others: by Lightning, DDP, FSDP, the user's own code.

Inside `trace_collectives` the functions of `torch.distributed` record what passes through them, and inside
`trace_ddp_buckets` so do the reductions of DDP. They do and return what they did and returned before.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import tracing
from lightning_parallel.compat import Patches
from lightning_parallel.compat.default_group import all_processes
from lightning_parallel.compat.torch import ddp_comm_hooks, intercepted_all_reduce, is_coalesced
from lightning_parallel.compat.twins import is_a
from lightning_parallel.mesh import AXES, DATA, Mesh
from lightning_parallel.tracing import InFlight, Recorder

__all__ = ["CollectiveTracer", "blind_spots", "hides_waits", "trace_collectives", "trace_ddp_buckets", "tracer_for"]

# The collectives that Lightning, DDP and FSDP call; messages between two ranks are none of them.
_FUNCTIONS: dict[str, tuple[str, str | None]] = {
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "reduce": ("reduce", "tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "all_to_all_single": ("all_to_all", "input"),
    "all_gather_object": ("all_gather_object", None),
    "broadcast_object_list": ("broadcast_object", None),
    "barrier": ("barrier", None),
}
"""Function of `torch.distributed` -> operation, and the argument that holds its payload."""


class CollectiveTracer:
    """Names the groups of traced collectives, and keeps those that have not ended.

    Args:
        axes: Mesh axis of groups by their ranks; the others are called `world`.
        default: Name of the default group.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str], default: str = "world") -> None:
        self._axes = dict(axes)
        self._default = default
        self._groups: dict[dist.ProcessGroup | None, tuple[str, tuple[int, ...], str]] = {}
        # Autograd's threads begin collectives while the thread that trains ends them.
        self._open: list[InFlight] = []
        self._lock = threading.Lock()
        self._thread = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is inside a traced function, whose own calls must not be recorded again."""
        return getattr(self._thread, "is_inside", False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Set `is_inside` during the block."""
        before = self.is_inside
        self._thread.is_inside = True
        try:
            yield
        finally:
            self._thread.is_inside = before

    def group(self, process_group: dist.ProcessGroup | None) -> tuple[str, tuple[int, ...], str]:
        """Axis, ranks and name of a group."""
        if process_group not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            known = dist.group.WORLD if process_group is None else process_group
            axis = self._default if known is all_processes() else self._axes.get(ranks, "world")
            self._groups[process_group] = axis, ranks, getattr(known, "group_name", "")
        return self._groups[process_group]

    def begin(self, active: Recorder, op: str, process_group: Any, payload: Any) -> InFlight:
        """Record that a collective begins."""
        axis, ranks, name = self.group(process_group)
        tensors = [payload] if isinstance(payload, Tensor) else list(payload or ())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) if tensors else None
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else None
        return InFlight(active, op, axis, ranks, num_bytes, dtype, None, group=name)

    def run(self, active: Recorder, flight: InFlight, call: Callable[[], Any]) -> Any:
        """Issue a collective by `call`, and record when it ends; returns its work, None if it has ended."""
        # A collective in a separate stream does not block the stream that computes.
        may_block = active.clock is None or active.clock.is_on_main_stream()
        with flight if may_block else nullcontext():
            work = call()
        if work is None:
            flight.complete = active.now()
            flight.finish(flight.complete)
        elif is_coalesced(work):
            flight.finish()  # it has not begun: torch issues it with others, by a call that is not seen here
        else:
            self._leave_open(flight, work, may_block)
        return work

    def _leave_open(self, flight: InFlight, work: Any, may_block: bool) -> None:
        """Note when `work` completes; where the caller waits for it is not visible."""
        clock = flight.clock
        # On CUDA work has no callback when it completes, only a stream that can wait for it.
        if clock is not None:
            flight.complete = clock.completion(work, flight.group)
        else:

            def note_completion(_: Any) -> None:  # on a thread of gloo
                flight.complete = flight.now()

            with suppress(AttributeError, RuntimeError):  # not every operation has a future
                work.get_future().add_done_callback(note_completion)
        if not may_block:
            flight.finish(flight.complete)
            return
        with self._lock:
            self._open.append(flight)

    def finish_pending(self, active: Recorder) -> None:
        """End all open collectives: backward has waited for them, and since the last one began, for nothing else.

        That is true of DDP, which issues its last collective when the last gradient is there.
        """
        with self._lock:
            flights = self._open
            self._open = []
        ends = [flight.complete for flight in flights if flight.complete is not None]
        if ends:
            # Marks of a device have no order before they are read; a stream passes them in the order of their issue.
            end = ends[-1] if active.clock is not None else max(ends)
            active.reassign("communication_exposed", flights[-1].blocked_until(end), end)
        for flight in flights:
            flight.finish(active.now() if flight.complete is None else flight.complete)


def tracer_for(trainer: Trainer, mesh: Mesh) -> CollectiveTracer:
    """Return a tracer that names groups by the axes of the mesh."""
    axes: dict[tuple[int, ...], str] = {}
    for axis in AXES:
        axes.update({tuple(ranks): axis for ranks in mesh.peers(axis) if len(ranks) > 1})
    # Under a strategy that knows nothing but replicas the default group is the data-parallel axis.
    replicas_only = not hasattr(trainer.strategy, "groups") and mesh.data_parallel == mesh.world_size
    return CollectiveTracer(axes, DATA if replicas_only else "world")


@contextmanager
def trace_collectives(tracer: CollectiveTracer) -> Iterator[None]:
    """Inside the block, record what others call in `torch.distributed` while a recorder is active."""
    patches = Patches()
    try:
        for name, (op, payload) in _FUNCTIONS.items():
            if hasattr(dist, name):  # some came with later versions of torch
                patches.replace(dist, name, _traced(getattr(dist, name), tracer, op, payload))
        yield
    finally:
        patches.undo()


def _traced(function: Callable[..., Any], tracer: CollectiveTracer, op: str, payload: str | None) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = tracing.active()
        if active is None:
            return function(*args, **kwargs)
        with tracer.inside():
            # `comm` records its calls itself, with more than can be seen here.
            if _is_recorded_by_caller(sys._getframe(1).f_globals.get("__name__", "")):
                return function(*args, **kwargs)
            # Cheaper than `Signature.bind`, and a call that is wrong fails in the function itself.
            given = {**dict(zip(names, args)), **kwargs}
            if len(tracer.group(given.get("group"))[1]) == 1:
                return function(*args, **kwargs)  # what the user's code says to the only replica
            flight = tracer.begin(active, op, given.get("group"), given.get(payload) if payload else None)
            return tracer.run(active, flight, lambda: function(*args, **kwargs))

    return call


def _is_recorded_by_caller(module: str) -> bool:
    """Return whether a module records its communication itself, as `comm` does."""
    return module.startswith("lightning_parallel.")


@contextmanager
def trace_ddp_buckets(tracer: CollectiveTracer, strategy: Strategy) -> Iterator[None]:
    """Inside the block, record the reductions that DDP starts in C++, without a communication hook.

    A hook would replace DDP's own reduction by another, and could not be removed: DDP takes one only, the user's.
    """
    if not isinstance(strategy.model, DistributedDataParallel):
        yield
        return

    def record(tensors: list[Tensor], group: dist.ProcessGroup, call: Callable[[], Any]) -> None:
        active = tracing.active()
        # A traced function ends up here, too: its call was recorded when it began.
        if active is None or tracer.is_inside:
            call()
        else:
            tracer.run(active, tracer.begin(active, "all_reduce", group, tensors), call)

    with intercepted_all_reduce(record):
        yield


# --------------------------------------------------------------------------------------------------- what is not seen


def hides_waits(strategy: Strategy) -> bool:
    """Return whether ranks wait for each other inside forward and backward where that cannot be told from work."""
    # On CPU FSDP waits in functions of `torch.distributed`; on CUDA its streams wait for each other.
    if is_a(strategy, FSDPStrategy):
        return strategy.root_device.type == "cuda"
    return is_a(strategy, DeepSpeedStrategy) or is_a(strategy, ModelParallelStrategy)


def blind_spots(trainer: Trainer) -> Iterator[str]:
    """Return the communication of the strategy that is not recorded, in sentences."""
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return
    if isinstance(strategy.model, DistributedDataParallel):
        # C++ sends them and waits for them: the sending could be intercepted, the waiting not.
        if any(True for _ in strategy.model.buffers()):
            yield "DDP sends buffers before each forward inside torch, where that is not seen: it counts as forward."
        hooks = [hook for hook in ddp_comm_hooks(strategy.model) if not _is_ours(hook)]
        if hooks:
            names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
            yield f"The communication hook {names} is seen only as far as it calls functions of torch.distributed."
    if is_a(strategy, FSDPStrategy) and hides_waits(strategy):
        yield "FSDP communicates in separate streams: how long computing waits for it counts as forward and backward."
    if is_a(strategy, ModelParallelStrategy):
        yield "DTensor communicates inside torch, where that is not seen: it counts as forward and backward."
    if is_a(strategy, DeepSpeedStrategy):
        yield "DeepSpeed's communication is seen only as far as it calls functions of torch.distributed."


def _is_ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("lightning_parallel.")
