"""Records communication of other code: Lightning, DDP, FSDP, DeepSpeed, DTensor, the user.

`trace_collectives` records all operations that pass through the dispatcher of PyTorch, from C++ and from Python. It
also records the times in which the training thread, or the compute stream, stands still for communication:

```
 the wait is                          seen by           charged by                      the call ends
 in the call, or `Work.wait`          issue, wait       the flight, as the block ends   with the wait
 in C++, in one call (DDP's buffers)  finish            a phase around the call         with its completion
 in C++, as backward ends (buckets)   finish_pending    reassigned to the wait          with its completion
 of a stream, on CUDA                 wait_event        a span "stream" around it       -
 nowhere                              end_step          nobody                          in the next step
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_parallel import comm, tracing
from lightning_parallel.comm import GRADIENTS
from lightning_parallel.compat.default_group import all_processes, backend_of
from lightning_parallel.compat.dispatcher import (
    Collective,
    current_graph_task_id,
    groups_past_dispatcher,
    intercepted_collectives,
    is_coalescing,
    on_graph_end,
)
from lightning_parallel.compat.torch import storage_address
from lightning_parallel.mesh import AXES, CONTEXT, DATA, Mesh
from lightning_parallel.tracing import InFlight, Recorder

__all__ = ["CollectiveTracer", "blind_spots", "trace_collectives", "tracer_for"]

EXPOSED = "communication_exposed"


class CollectiveTracer:
    """Names the process groups of other code, and keeps its calls that have not ended.

    Args:
        axes: Mesh axis of a group, by its ranks; every other group is called `world`.
        default: Name of the default group.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str], default: str = "world") -> None:
        self._axes = dict(axes)
        self._default = default
        self._groups: dict[Any, tuple[str, tuple[int, ...], str, bool]] = {}
        # By handle, in the order of their issue. Threads of autograd begin calls, and the training thread ends them.
        # Keeping the handle keeps its identity: the caller's later wait finds its flight by the same object.
        self._open: dict[Any, InFlight] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._graph: int = -1
        self._graph_end: Any = None

    def group(self, process_group: Any) -> tuple[str, tuple[int, ...], str, bool]:
        """Return axis, ranks and name of a group, and whether devices carry its messages."""
        found = self._groups.get(process_group)
        if found is None:
            found = self._groups[process_group] = self._describe(process_group)
        return found

    def _describe(self, process_group: Any) -> tuple[str, tuple[int, ...], str, bool]:
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            backend = backend_of(process_group)
        except (KeyError, RuntimeError, ValueError):  # created by hand: torch does not know its ranks
            return "world", tuple(range(process_group.size())), "", False
        axis = self._default if process_group is all_processes() else self._axes.get(ranks, "world")
        return axis, ranks, getattr(process_group, "group_name", ""), "nccl" in backend

    # ------------------------------------------------------------------------------------------------ intercepted calls

    def is_listening(self) -> bool:
        """Return whether a recorder is active, and `comm` does not already record the thread's current call."""
        # First what holds for most calls: each message of a step asks twice.
        known = comm.current_call()
        if known is not None and known.dtype is not None:
            return False
        # `comm` does not know the size of Python objects.
        return tracing.active() is not None

    def issue(self, collective: Collective, call: Callable[[], Any]) -> None:
        """Record an operation, unless `comm` does."""
        active = tracing.active()
        known = comm.current_call()
        if active is None or known is not None:
            # `comm` does not know the size of Python objects, so add the sizes of their messages.
            if known is not None and known.dtype is None and collective.payload and known.op != "barrier":
                known.bytes = (known.bytes or 0) + _size_bytes(collective)
            call()
            return
        axis, ranks, name, on_device = self.group(collective.process_group)
        if len(ranks) == 1:  # a group of one rank sends nothing
            call()
            return
        self.note_backward()
        flight = self._begin(active, collective, axis, ranks, name)
        # Calls of other threads and streams do not hold up the training thread.
        with flight if active.is_computing() else nullcontext():
            work = call()
        if work is None:
            flight.complete = active.now()
            flight.finish(flight.complete)
        elif on_device and is_coalescing(collective.process_group):
            flight.finish()  # not begun yet: torch issues it with other operations, in a call that is not intercepted
        elif collective.is_waited_for and active.clock is None:
            self._thread.next = work, flight  # the wait follows at once, and its end is the completion
        else:
            self._leave_open(active, flight, work, collective.tensors, on_device)

    def _begin(
        self, active: Recorder, collective: Collective, axis: str, ranks: tuple[int, ...], name: str
    ) -> InFlight:
        num_bytes = _size_bytes(collective) if collective.tensors else None
        is_plain = bool(collective.payload) and not collective.op.endswith("_object")
        dtype = _dtype_name(collective.payload[0].dtype) if is_plain else None
        peer = None if collective.peer is None else ranks[collective.peer]
        return InFlight(active, collective.op, axis, ranks, num_bytes, dtype, peer, collective.tag, group=name)

    def _leave_open(
        self, active: Recorder, flight: InFlight, work: Any, tensors: Sequence[Tensor], on_device: bool
    ) -> None:
        """Keep the flight of `work` open until something waits for `work`, and note its completion."""
        # The caller may release the tensors. Torch keeps them only until the first wait, which may be our clock.
        flight.tensors = tensors
        # On CUDA, work has no callback at its completion. Only a stream can wait for it.
        flight.watch(work, on_device and bool(tensors) and tensors[0].is_cuda)
        with self._lock:
            self._open[work] = flight
        opened = getattr(self._thread, "opened", None)
        if opened is not None:
            opened.append(work)

    def wait(self, work: Any, call: Callable[[], Any]) -> Any:
        """Record the wait for a handle, which ends its communication."""
        active = tracing.active()
        if active is None or comm.current_call() is not None:
            return call()
        following, flight = getattr(self._thread, "next", (None, None))
        self._thread.next = None, None
        if following is not work:
            following = None
            with self._lock:
                flight = self._open.pop(work, None)
        if flight is None:
            # Several operations were issued as one, or another thread has waited already.
            with tracing.waiting("communication"):
                return call()
        begin = active.now()
        with flight if active.is_computing() else nullcontext():
            result = call()
        if active.clock is None:
            end = active.now()
            # Torch waited at once, so the end of the wait is the end of the communication.
            if following is not None and flight.complete is None:
                flight.complete = end
            flight.note_wait(begin, end)
        flight.tensors = ()  # torch releases the tensors here, too
        # If another stream waits, both the host and the compute stream go on.
        flight.finish(flight.complete if active.clock is not None and not active.is_computing() else None)
        return result

    def wait_tensor(self, tensor: Tensor, call: Callable[[], Any]) -> Any:
        """Record the wait for a functional collective. The caller knows only its result, not its handle."""
        if not self._open or tensor.is_meta:
            return call()
        address = storage_address(tensor.untyped_storage())
        with self._lock:
            works = [
                work
                for work, flight in self._open.items()
                if any(storage_address(one.untyped_storage()) == address for one in flight.tensors)
            ]
        return self.wait(works[0], call) if works else call()

    def finish(self, call: Callable[[], Any]) -> Any:
        """Record operations that one call both issues and waits for."""
        active = tracing.active()
        if active is None or comm.current_call() is not None or not active.is_computing():
            return call()
        # `_leave_open` adds the operations that C++ issues in this thread.
        opened = self._thread.opened = list[Any]()
        active.enter(EXPOSED)
        try:
            return call()
        finally:
            end = active.leave()
            self._thread.opened = None
            with self._lock:
                flights = [self._open.pop(work) for work in opened if work in self._open]
            self._end_together(active, flights, end)

    def _end_together(self, active: Recorder, flights: Sequence[InFlight], end: Any) -> None:
        """End flights for which C++ has waited, one after the other, until `end`."""
        if active.clock is not None:
            for flight in flights[-1:]:
                flight.block(flight.released, end)
        else:
            reached = 0
            for flight in flights:
                complete = end if flight.complete is None else flight.complete
                # Begin after the last completion: overlapping times would be counted twice.
                begin = max(reached, flight.released)
                reached = max(begin, complete)
                flight.block(begin, reached)
        for flight in flights:
            flight.finish(end if flight.complete is None else flight.complete)

    def wait_event(self, event: Any, stream: Any, call: Callable[[], Any]) -> Any:
        """Record how long the compute stream stands still for another stream while communication is in flight."""
        active = tracing.active()
        clock = None if active is None else active.clock
        if active is None or clock is None or not active.in_flight or not active.is_computing():
            return call()
        if comm.current_call() is not None or not clock.is_main(stream):
            return call()
        with tracing.waiting("stream"):
            return call()

    # ---------------------------------------------------------------------------------------------- backward passes

    def note_backward(self) -> bool:
        """Watch for the end of the backward pass in this thread; return whether a backward pass runs."""
        graph = current_graph_task_id()
        if graph == -1:
            return False
        active = tracing.active()
        if graph != self._graph and active is not None:
            # Backward passes may be nested, as with activation checkpointing. The end of the last pass counts.
            self._graph = graph
            self._graph_end = None
            on_graph_end(lambda: self._note_graph_end(active))
        return True

    def _note_graph_end(self, active: Recorder) -> None:
        self._graph_end = active.now()

    def finish_pending(self, active: Recorder, source: str | None = None) -> None:
        """End complete operations, and charge the waits of a backward pass after its last node.

        Only C++ has waited for these operations: the buckets of DDP, and work that its communication hooks gave to
        other threads and streams.

        Args:
            active: The recorder.
            source: The phase of the wait; by default the innermost phase.
        """
        begin, self._graph_end = self._graph_end, None
        with self._lock:
            ended = [work for work, flight in self._open.items() if _is_complete(work, flight)]
            flights = [self._open.pop(work) for work in ended]
        beside, active.beside = active.beside, []
        if begin is not None:
            if active.num_beside:
                beside.append(active.now())
            if active.clock is None:
                end = self._charge_on_host(active, begin, flights, max(beside, default=begin))
            else:
                # Marks of a device have no order before they are read. Streams pass them in the order of their issue.
                end = self._charge_on_device(active, begin, flights, beside)
            active.reassign(EXPOSED, begin, end, source)
        for flight in flights:
            flight.finish(flight.complete)

    def _charge_on_host(self, active: Recorder, begin: int, flights: Sequence[InFlight], beside: int) -> int:
        # Flights overlap: each moment is charged to one flight.
        reached = begin
        for flight in flights:
            if flight.complete > reached:
                flight.block(reached, flight.complete)
                reached = flight.complete
        if beside > reached:
            active.add_wait("gradients", reached, beside)
        return min(max(reached, beside), active.now())

    def _charge_on_device(self, active: Recorder, begin: Any, flights: Sequence[InFlight], beside: list[Any]) -> Any:
        if beside:
            active.add_wait("gradients", begin, beside[-1])
            return beside[-1]
        if not flights:
            return begin
        flights[-1].block(begin, flights[-1].complete)
        return flights[-1].complete

    def end_step(self, active: Recorder) -> None:
        """End complete operations, and operations of earlier steps that had no wait."""
        self.finish_pending(active, source="forward")
        with self._lock:
            # A call of this step may still get its wait in the next step.
            old = [work for work, flight in self._open.items() if flight.step < active.step]
            flights = [self._open.pop(work) for work in old]
        for flight in flights:
            flight.finish()


def _is_complete(work: Any, flight: InFlight) -> bool:
    """Return whether an operation is complete; on the host, also set the completion time of its flight."""
    # A wait in C++ may end before the thread of gloo has noted the completion, so ask the future.
    if flight.complete is None and flight.clock is None:
        with suppress(AttributeError, RuntimeError):  # not every operation has a future
            if work.get_future().done():
                flight.complete = flight.now()
    return flight.complete is not None


def blind_spots() -> list[str]:
    """Describe communication that is not recorded, in sentences."""
    return [f"What goes through groups of the class {name} is not seen." for name in groups_past_dispatcher()]


def tracer_for(trainer: Trainer, mesh: Mesh) -> CollectiveTracer:
    """Return a tracer that names groups by the axes of the mesh."""
    axes: dict[tuple[int, ...], str] = {}
    if mesh.context_parallel > 1:
        axes.update({tuple(ranks): GRADIENTS for ranks in mesh.peers(DATA, CONTEXT)})
    for axis in AXES:
        axes.update({tuple(ranks): axis for ranks in mesh.peers(axis) if len(ranks) > 1})
    # Strategies of Lightning use the default group for the axis that spans all ranks, if there is such an axis.
    whole = [axis for axis in AXES if mesh.size(axis) == mesh.world_size]
    return CollectiveTracer(axes, "world" if hasattr(trainer.strategy, "groups") or not whole else whole[0])


@contextmanager
def trace_collectives(tracer: CollectiveTracer, recorder: Recorder) -> Iterator[None]:
    """Record the communication of other code in the block; `recorder` is the recorder of the steps."""
    recorder.on_submit = tracer.note_backward
    try:
        with intercepted_collectives(tracer):
            yield
    finally:
        recorder.on_submit = None


def _size_bytes(collective: Collective) -> int:
    total = 0
    for tensor in collective.payload:
        total += tensor.numel() * tensor.element_size()
    return collective.times * total


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
