"""Collectives that others call: Lightning, DDP, FSDP, the user's own code.

Inside `watching`, the functions of `torch.distributed` note what passes through them, as far as it does so in Python.
They do what they did before and return what they returned.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import recorder
from lightning_parallel.recorder import Flight, Recorder

__all__ = ["Foreign", "bucket_mean", "watching"]

_CALLS: dict[str, tuple[str, str | None]] = {
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
"""Function -> operation, and the argument that holds its payload."""


class Foreign:
    """What was seen and is not over.

    Args:
        axes: Names of groups by their ranks; the others are called `world`.
        default: Name of the default group.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str], default: str = "world") -> None:
        self._axes, self._default = dict(axes), default
        self._groups: dict[dist.ProcessGroup | None, tuple[str, tuple[int, ...], str]] = {}
        self._open: list[Flight] = []
        self._lock = threading.Lock()

    def group(self, process_group: dist.ProcessGroup | None) -> tuple[str, tuple[int, ...], str]:
        """Axis, ranks and name of a group."""
        if process_group not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            known = dist.group.WORLD if process_group is None else process_group
            assert known is not None
            axis = self._default if known is dist.group.WORLD else self._axes.get(ranks, "world")
            self._groups[process_group] = axis, ranks, known.group_name
        return self._groups[process_group]

    def begin(self, active: Recorder, op: str, process_group: Any, payload: Any) -> Flight:
        """Note that a collective begins."""
        axis, ranks, name = self.group(process_group)
        tensors = [payload] if isinstance(payload, Tensor) else list(payload or ())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) if tensors else None
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else None
        return Flight(active, op, axis, ranks, num_bytes, dtype, None, group=name)

    def leave_open(self, flight: Flight, work: Any, may_hold: bool = True) -> None:
        """Note that the caller will wait for `work` where it is not seen; what computes, if `may_hold`."""
        clock = flight.clock
        if clock is not None:
            flight.complete = clock.completion(work)
        else:

            def note_completion(_: Any) -> None:  # on a thread of gloo
                flight.complete = flight.now()

            with suppress(AttributeError, RuntimeError):  # not every operation tells
                work.get_future().add_done_callback(note_completion)
        if not may_hold:
            flight.finish(flight.complete)
            return
        with self._lock:
            self._open.append(flight)

    def settle(self, active: Recorder) -> None:
        """All that was started is over: backward has waited, from the last start on, for what was still under way.

        That is so for DDP, which starts its last collective when the last gradient is there.
        """
        with self._lock:
            flights, self._open = self._open, []
        ends = [flight.complete for flight in flights if flight.complete is not None]
        if ends:
            end = ends[-1] if active.clock is not None else max(ends)
            active.move("communication_exposed", flights[-1].held_until(end), end)
        for flight in flights:
            flight.finish(active.now() if flight.complete is None else flight.complete)


@contextmanager
def watching(foreign: Foreign) -> Iterator[None]:
    """Inside the block, what others call in `torch.distributed` is recorded where a recorder is active."""
    originals = {name: getattr(dist, name) for name in _CALLS if hasattr(dist, name)}
    for name, function in originals.items():
        setattr(dist, name, _watched(function, foreign, *_CALLS[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def _watched(function: Callable[..., Any], foreign: Foreign, op: str, payload: str | None) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = recorder.active()
        if active is None or _records_itself(sys._getframe(1).f_globals.get("__name__", "")):
            return function(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        flight = foreign.begin(active, op, given.get("group"), given.get(payload) if payload else None)
        holds = active.clock is None or active.clock.is_here()
        with flight if holds else nullcontext():  # in a stream of its own it holds nothing up by itself
            work = function(*args, **kwargs)
        if work is None:
            flight.complete = active.now()
            flight.finish(flight.complete)
        else:
            foreign.leave_open(flight, work, holds)
        return work

    return call


def _records_itself(module: str) -> bool:
    return module.startswith("lightning_parallel.") and module != __name__


def bucket_mean(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own reduction as a communication hook, where it can be seen; with the same bits.

    Torch compares its annotations with types, so that they must not be strings in this file.
    """
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(process_group))
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
