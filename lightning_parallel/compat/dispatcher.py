"""Collectives and messages on their way through PyTorch's dispatcher, from Python as from C++.

All process groups of torch, from any caller (DDP's reducer, FSDP, DTensor, compiled code, `torch.distributed`),
issue their operations as operators of the namespace `c10d`, in torch 2.6 to 2.13. Inside `intercepted_collectives` a
kernel of this module runs before the kernel of the backend. Waits of Python pass through `Work.wait`. Waits of C++ do
not; `on_graph_end` and `Interceptor.finish` see these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The id of the running backward pass, -1 if none runs: no public function tells two passes apart.
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _ExcludeDispatchKeyGuard as KeyHidden
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes

from lightning_parallel.compat import Patches

__all__ = [
    "Collective",
    "Interceptor",
    "current_graph_task_id",
    "groups_past_dispatcher",
    "intercepted_collectives",
    "is_coalescing",
    "on_graph_end",
    "unseen",
]


class Collective(NamedTuple):
    """An operation of a process group that is about to be issued.

    Attributes:
        op: Name of the operation in `torch.distributed`; with `_object` if it carries Python objects.
        process_group: The group.
        tensors: The tensors that the operation reads and writes.
        payload: The tensors that count as its payload, as in nccl-tests.
        times: Factor of the payload: a gather has one part per rank, and each rank knows only its part.
        peer: Position in the group of the rank at the other end of a message.
        tag: Tag of a message.
        is_waited_for: Whether the issuing function waits for it at once. Older versions of torch do not tell.
    """

    op: str
    process_group: Any
    tensors: list[Tensor]
    payload: list[Tensor]
    times: int = 1
    peer: int | None = None
    tag: int | None = None
    is_waited_for: bool = False


class Interceptor(Protocol):
    """Sees operations and waits; each method must run its `call` once, and return its result."""

    def is_listening(self) -> bool:
        """Return whether the interceptor wants to see the current call of the thread, before any other method runs."""

    def issue(self, collective: Collective, call: Callable[[], Any]) -> None:
        """Run `call`, which issues the operation and returns torch's handle; None if there is nothing to wait for."""

    def wait(self, work: Any, call: Callable[[], Any]) -> Any:
        """Run `call`, in which the calling thread waits for the handle `work`."""

    def wait_tensor(self, tensor: Tensor, call: Callable[[], Any]) -> Any:
        """Run `call`, in which the calling thread waits for the functional collective that makes `tensor`."""

    def finish(self, call: Callable[[], Any]) -> Any:
        """Run `call`, which issues operations and waits for all of them in C++."""

    def wait_event(self, event: Any, stream: Any, call: Callable[[], Any]) -> Any:
        """Run `call`, which lets a CUDA stream wait for `event`; the current stream if `stream` is None."""


# Operator -> its name in `torch.distributed`, and which argument holds the payload.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}

# Functions of `torch.distributed` for Python objects: each sends sizes and contents, as tensors.
_OBJECT_CALLS = {
    "all_gather_object": "all_gather_object",
    "gather_object": "gather_object",
    "broadcast_object_list": "broadcast_object",
    "scatter_object_list": "scatter_object",
}
_MODULES_OF_CALLS = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")

# This key comes after the keys of autograd, which tensors of inference mode lack, and before the keys of all backends.
# All tensors have it.
_KEY = torch._C.DispatchKey.BackendSelect
_KEYS = torch._C.DispatchKeySet(_KEY)
_SHOWN = nullcontext()

_interceptors: list[Interceptor] = []
_libraries: list[torch.library.Library] = []
_patches = Patches()


@contextmanager
def intercepted_collectives(interceptor: Interceptor) -> Iterator[None]:
    """Inside the block, show `interceptor` each operation of process groups, and each wait for one.

    With several interceptors, only the last one is called. The end of the last block restores the dispatcher.
    """
    _interceptors.append(interceptor)
    try:
        # Once for all interceptors: the kernels look up the last interceptor at each call.
        if len(_interceptors) == 1:
            _register()
            _intercept_waits()
        yield
    finally:
        # The kernels go first: a helper thread that calls one looks up the last interceptor.
        if len(_interceptors) == 1:
            _patches.undo()
            while _libraries:
                _libraries.pop()._destroy()  # otherwise the kernels stay until garbage collection
        _interceptors.remove(interceptor)


def unseen() -> AbstractContextManager[None]:
    """Hide the operators of the block from all interceptors; a kernel in Python takes more time than small messages.

    The caller must record them itself. They must make no tensors, because creation needs the hidden dispatch key.
    """
    # A mode would run its own code in the block, which may make tensors.
    if not _interceptors or num_dispatch_modes() > 0:
        return _SHOWN
    hidden: AbstractContextManager[None] = KeyHidden(_KEYS)
    return hidden


def _register() -> None:
    key = "BackendSelect"
    after = torch._C._dispatch_keyset_full_after(_KEY)
    collectives = torch.library.Library("c10d", "IMPL")
    _libraries.append(collectives)
    for name in _OPERATORS:
        if hasattr(torch.ops.c10d, name):  # some came with later versions of torch
            collectives.impl(name, _kernel(name, after), key, with_keyset=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(functional)
    operator = torch.ops._c10d_functional.wait_tensor.default

    def wait_tensor(keys: Any, tensor: Tensor) -> Any:
        return _interceptors[-1].wait_tensor(tensor, lambda: operator.redispatch(keys & after, tensor))

    functional.impl("wait_tensor", wait_tensor, key, with_keyset=True)


def _kernel(name: str, after: Any) -> Callable[..., Any]:
    """Make the kernel of one operator; the kernels of the keys in `after` do the work of the operator."""
    operator = getattr(torch.ops.c10d, name).default
    redispatch = operator.redispatch
    facts = _Operator.of(name, [argument.name for argument in operator._schema.arguments])

    def kernel(keys: Any, *given: Any) -> Any:
        interceptor = _interceptors[-1]
        if not interceptor.is_listening():
            # Only the keys behind this one, or this kernel would call itself.
            return redispatch(keys & after, *given)
        # The interceptor sees the handle; the caller gets all results of the operator.
        results: list[Any] = []

        def call() -> Any:
            results.append(redispatch(keys & after, *given))
            work = results[0][-1] if isinstance(results[0], (tuple, list)) else results[0]
            # Operators return the handle as a boxed object of TorchScript.
            return None if work is None else dist.Work.unbox(work)

        interceptor.issue(_describe(facts, given), call)
        return results[0]

    return kernel


class _Operator(NamedTuple):
    """An operator: its name in `torch.distributed`, and the places of its arguments; None for a missing argument."""

    op: str
    payload: int | None
    group: int
    peer: int | None
    tag: int | None
    async_op: int | None

    @classmethod
    def of(cls, name: str, arguments: list[str]) -> _Operator:
        """Find the places from the names of the operator's arguments."""
        op, payload = _OPERATORS[name]
        named = ("dst" if op == "send" else "src", "tag", "async_op")
        places = (arguments.index(one) if one in arguments else None for one in named)
        return cls(op, payload, arguments.index("process_group"), *places)


def _describe(facts: _Operator, given: Sequence[Any]) -> Collective:
    """Describe the call of an operator from its arguments: tensors before the group, numbers after it."""
    op = facts.op
    group = dist.ProcessGroup.unbox(given[facts.group])
    is_waited_for = not _given(given, facts.async_op, True)
    if facts.payload is None:
        return Collective(op, group, [], [], is_waited_for=is_waited_for)
    tensors = _flat(given[0])
    for argument in given[1 : facts.group]:
        tensors = tensors + _flat(argument)
    times = group.size() if op in ("gather", "scatter") else 1
    called = _object_call(_caller()) or op
    payload = _flat(given[facts.payload])
    peer, tag = _given(given, facts.peer), _given(given, facts.tag)
    return Collective(called, group, tensors, payload, times, peer, tag, is_waited_for)


def _given(given: Sequence[Any], place: int | None, default: Any = None) -> Any:
    """Return the argument at a place; the dispatcher leaves out last arguments that have their default values."""
    return given[place] if place is not None and place < len(given) else default


def _flat(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if argument and not isinstance(argument[0], Tensor):
        return [tensor for tensors in argument for tensor in tensors]
    return list(argument)


def _caller() -> FrameType | None:
    """Return the Python frame that issued the operation of `_describe`; None in a thread of C++."""
    # Two frames up: `_describe`, then the kernel.
    kernel = sys._getframe(2)
    return kernel.f_back


def _object_call(frame: FrameType | None) -> str | None:
    """Name the function for Python objects that leads to `frame`, the caller of the kernel, if one does."""
    found = None
    while frame is not None and frame.f_globals.get("__name__") in _MODULES_OF_CALLS:
        found = _OBJECT_CALLS.get(frame.f_code.co_name, found)
        frame = frame.f_back
    return found


def _intercept_waits() -> None:
    """Patch the functions that wait: waits have no operator, and some functions wait in C++."""

    def around(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wait(*args: Any, **kwargs: Any) -> Any:
            interceptor = _interceptors[-1]
            if not interceptor.is_listening():
                return function(*args, **kwargs)
            return getattr(interceptor, method)(*args[:1], lambda: function(*args, **kwargs))

        return wait

    _patches.replace(dist.Work, "wait", around("wait", dist.Work.wait))
    broadcast = dist._broadcast_coalesced  # DDP sends buffers by this function before each forward

    @wraps(broadcast)
    def broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
        return _interceptors[-1].finish(lambda: broadcast(*args, **kwargs))

    _patches.replace(dist, "_broadcast_coalesced", broadcast_coalesced)
    if torch.cuda.is_available():
        wait = torch.cuda.Event.wait  # `Stream.wait_event` and `Stream.wait_stream` call it, too

        @wraps(wait)
        def wait_event(event: Any, stream: Any = None) -> Any:
            return _interceptors[-1].wait_event(event, stream, lambda: wait(event, stream))

        _patches.replace(torch.cuda.Event, "wait", wait_event)


def is_coalescing(process_group: Any) -> bool:
    """Tell whether a group is collecting operations to issue them together; torch has no public name for this."""
    return process_group in dist.distributed_c10d._world.pg_coalesce_state


def groups_past_dispatcher() -> list[str]:
    """Name the classes of groups implemented in Python: their operations do not pass through the dispatcher."""
    groups = dist.distributed_c10d._world.pg_map
    return sorted({type(group).__qualname__ for group in groups if type(group) is not dist.ProcessGroup})


def on_graph_end(call: Callable[[], None]) -> None:
    """Run `call` when the running backward pass has no node left, before calls that are queued later.

    DDP and FSDP queue such a call to wait for gradients. Only the engine's private object offers this function.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
