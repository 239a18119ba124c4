"""Requests for communication, answered for many compression methods at once, and the encoding of numbers.

A compression method is a generator: it yields a request and receives the answer. `run_phases` advances the methods of a
bucket in lockstep and joins their requests of one kind and dtype. The number of collectives depends on the phases and
kinds of the methods, and not on the number of small tensors:

    method A     AllToAll .............. AllGather
    method B     AllReduce ... AllReduce
    method C     AllReduce
                 2 collectives           2 collectives

The same generators, run on meta tensors, tell how many bytes they send without sending any: `estimate_bytes`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Protocol, Union

import numpy as np
import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.compression.compressor_state import Memory
from lightning_parallel.tracing import span

__all__ = [
    "AllGatherRequest",
    "AllReduceRequest",
    "AllToAllRequest",
    "Codec",
    "Exact",
    "MeanRequests",
    "ReduceScatterRequest",
    "Request",
    "Requests",
    "Seconds",
    "StepContext",
    "as_bytes",
    "bytes_sent",
    "estimate_bytes",
    "from_bytes",
    "goes_alone",
    "launches_kernels",
    "pack_signs",
    "pad",
    "run_phases",
    "split_by_rank",
    "unpack_signs",
]

# Joining tensors costs two copies, and a separate collective costs a round trip. From this size on, copies cost more.
SEPARATE_BYTES = 1 << 20
# Copies on a device are faster than on a CPU by about this ratio, but each kernel costs a launch.
SEPARATE_DEVICE_BYTES = 1 << 24


# A protocol: a module above this module defines the class of real steps, and estimates run without a real step.
class StepContext(Protocol):
    """The part of an optimizer step that methods and codecs use."""

    @property
    def group(self) -> Group:
        """The ranks to take the mean over."""

    @property
    def number(self) -> int:
        """Number of steps committed before this one."""

    @property
    def scale(self) -> float:
        """The loss scale, by which gradients are multiplied; memory is kept without it."""

    @property
    def expects_rollback(self) -> bool:
        """Whether steps are dropped as a matter of routine."""

    @property
    def memory(self) -> Memory:
        """State kept from step to step."""

    def watch(self, received: Tensor) -> None:
        """Check at the end of the step that `received`, which is equal on all ranks, is finite."""

    def average_(self, total: Tensor) -> Tensor:
        """Watch a contiguous sum over the ranks and divide it by their number, in place."""


# ------------------------------------------------------------------------------------------------------------ requests


class AllReduceRequest(NamedTuple):
    """Sum `tensor` over the ranks; the answer has its shape. The tensor may be overwritten."""

    tensor: Tensor


class ReduceScatterRequest(NamedTuple):
    """Sum `tensor`, (ranks, n), over the ranks and keep this rank's row; the answer is (n,)."""

    tensor: Tensor


# Ranks gather and exchange bytes: numbers and scales of any dtype share a message, and gloo takes no int16.
class AllGatherRequest(NamedTuple):
    """Send this rank's `tensor`, bytes (n,), to every rank; the answer is (ranks, n).

    Attributes:
        tensor: The bytes.
        whole: Memory for the answer, if `tensor` is the row of this rank in it.
    """

    tensor: Tensor
    whole: Optional[Tensor] = None


class AllToAllRequest(NamedTuple):
    """Send row j of `tensor`, bytes (ranks, n), to rank j; row j of the answer, (ranks, n), came from rank j."""

    tensor: Tensor


Request = Union[AllReduceRequest, ReduceScatterRequest, AllGatherRequest, AllToAllRequest]
Requests = Generator[Request, Tensor, None]
MeanRequests = Generator[Request, Tensor, tuple[Tensor, Optional[Tensor]]]


def bytes_sent(kind: type[Request], payload_bytes: float, world_size: int) -> float:
    """Return the bytes that one rank sends for a request, by the bandwidth-optimal (ring) algorithms.

    Args:
        kind: Class of the request.
        payload_bytes: Bytes of its `tensor`.
    """
    share = {
        AllReduceRequest: 2 * (world_size - 1) / world_size,
        ReduceScatterRequest: (world_size - 1) / world_size,
        AllGatherRequest: world_size - 1,
        AllToAllRequest: (world_size - 1) / world_size,
    }
    return share[kind] * payload_bytes


@dataclass
class Seconds:
    """Time of the host: before the first collective, in collectives, after each.

    Buckets may overlap: their times are added up.

    Attributes:
        counts: False if the gradients are on a device: the host then only launches the work.
    """

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    counts: bool = True


def run_phases(
    methods: Sequence[Requests], group: Group, seconds: Seconds
) -> Generator[Callable[[], None], None, list[float]]:
    """Run all `methods` to their end; every rank must pass the same methods, in the same order.

    Args:
        seconds: Times to add the spent time to.

    Yields:
        A function that waits for the collectives of a phase. Call it, on any thread, before the next phase.

    Returns:
        The bytes that this rank has sent for each method.
    """
    sent = [0.0] * len(methods)
    requests: dict[int, Request] = {}
    start = time.perf_counter()
    with span("encode", category="compression"):
        for index in range(len(methods)):
            _advance(methods, index, None, requests)
    seconds.encode += time.perf_counter() - start
    while requests:
        # Every payload passes this line, so no method needs a formula for its bytes.
        for index, request in requests.items():
            sent[index] += bytes_sent(type(request), _num_bytes(request.tensor), group.size)
        seconds.counts &= not launches_kernels(next(iter(requests.values())).tensor)
        phase = _Phase(requests, group)
        yield phase.wait
        start = time.perf_counter()
        requests = {}
        with span("decode", category="compression"):
            for index, answer in phase.answers.items():
                _advance(methods, index, answer, requests)
        seconds.wire += phase.seconds
        seconds.decode += time.perf_counter() - start
    return sent


def estimate_bytes(method: Requests, world_size: int) -> float:
    """Return the bytes that one rank would send for a method on meta tensors; this communicates nothing."""
    total = 0.0
    requests: dict[int, Request] = {}
    _advance([method], 0, None, requests)
    while requests:
        request = requests.pop(0)
        total += bytes_sent(type(request), _num_bytes(request.tensor), world_size)
        # On the meta device only the shape of an answer counts: a sum has the shape of its parts.
        answer = request.tensor
        if isinstance(request, AllGatherRequest):
            answer = answer.new_empty(world_size, len(answer))
        elif isinstance(request, ReduceScatterRequest):
            answer = answer[0]
        _advance([method], 0, answer, requests)
    return total


def _advance(methods: Sequence[Requests], index: int, answer: Tensor | None, requests: dict[int, Request]) -> None:
    """Resume one method with `answer`, and add its next request to `requests` unless it has ended."""
    method = methods[index]
    try:
        requests[index] = next(method) if answer is None else method.send(answer)
    except StopIteration:
        return


def launches_kernels(tensor: Tensor) -> bool:
    """Tell whether every operation on `tensor` launches a kernel: few operations on large tensors are then fastest.

    On a CPU, many operations on pieces are faster, because the pieces stay in the cache.
    """
    return tensor.device.type not in ("cpu", "meta")


def goes_alone(tensor: Tensor) -> bool:
    """Tell whether `tensor` is too large to gain from joining it with other tensors."""
    num_bytes = _num_bytes(tensor)
    return num_bytes >= SEPARATE_BYTES and (num_bytes >= SEPARATE_DEVICE_BYTES or not launches_kernels(tensor))


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Phase:
    """Begins one collective for all small requests of a kind and dtype, and answers requests by their index.

    Attributes:
        answers: The answers by index, after `wait`.
        seconds: Seconds from the start to the end of the phase.
    """

    def __init__(self, requests: dict[int, Request], group: Group) -> None:
        self.answers: dict[int, Tensor] = {}
        self._start = time.perf_counter()
        self.seconds = 0.0
        # Collectives begin in the order of insertion: the order of the methods, which is the same on all ranks.
        joint: dict[tuple[type[Request], torch.dtype, int], list[int]] = {}
        # A large tensor goes alone, without the copies that joining takes.
        for index, request in requests.items():
            separate = not isinstance(request, AllToAllRequest) and goes_alone(request.tensor)
            joint.setdefault((type(request), request.tensor.dtype, index if separate else -1), []).append(index)
        self._begun = [(indices, _begin([requests[index] for index in indices], group)) for indices in joint.values()]

    def wait(self) -> None:
        """Wait for the answers."""
        for indices, finish in self._begun:
            self.answers.update(zip(indices, finish()))
        self.seconds = time.perf_counter() - self._start


_Finish = Callable[[], Sequence[Tensor]]  # waits for the answers to requests of one kind


def _begin(requests: list[Request], group: Group) -> _Finish:
    """Begin one collective for requests of one kind."""
    first = requests[0]
    if len(requests) == 1 and isinstance(first, AllGatherRequest) and first.whole is not None:
        whole = _waiting(comm.all_gather_(first.whole, group, async_op=_has_handle(first.whole)))
        return lambda: [whole()]
    return _COLLECTIVES[type(first)]([request.tensor for request in requests], group)


def _all_reduce(tensors: list[Tensor], group: Group) -> _Finish:
    # A tensor that goes alone is summed in its own memory, without a copy.
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    total = _waiting(comm.all_reduce_(flat, group, async_op=_has_handle(flat)))

    def finish() -> list[Tensor]:
        parts = total().split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]

    return finish


def _reduce_scatter(tensors: list[Tensor], group: Group) -> _Finish:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    mine = _waiting(comm.reduce_scatter(rows, group, async_op=_has_handle(rows)))
    return lambda: mine().view(-1).split([tensor.shape[1] for tensor in tensors])


def _all_gather(tensors: list[Tensor], group: Group) -> _Finish:
    flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    everyone = _waiting(comm.all_gather(flat, group, async_op=_has_handle(flat)))
    return lambda: everyone().view(group.size, -1).split([tensor.numel() for tensor in tensors], dim=1)


def _all_to_all(tensors: list[Tensor], group: Group) -> _Finish:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    received = _waiting(comm.all_to_all(rows, group, async_op=_has_handle(rows)))
    return lambda: received().split([tensor.shape[1] for tensor in tensors], dim=1)


def _has_handle(tensor: Tensor) -> bool:
    """Tell whether the host has to wait: on a device, the stream orders a collective instead."""
    return tensor.device.type == "cpu"


def _waiting(begun: Any) -> Callable[[], Tensor]:
    """Return a function that waits for a collective and returns its result."""
    return begun.wait if isinstance(begun, Pending) else lambda: begun


_COLLECTIVES: dict[type[Request], Callable[[list[Tensor], Group], _Finish]] = {
    AllReduceRequest: _all_reduce,
    ReduceScatterRequest: _reduce_scatter,
    AllGatherRequest: _all_gather,
    AllToAllRequest: _all_to_all,
}


# -------------------------------------------------------------------------------------------------------------- codecs


class Codec(abc.ABC):
    """Encodes rows of numbers, and takes their mean over the ranks in this encoding.

    A codec may follow `|`, as in `TopK(0.01) | Quantize(8)`.

    Attributes:
        stochastic: True if the codec draws random numbers.
    """

    stochastic: bool = False

    @abc.abstractmethod
    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        """Return bytes (rows, packed) of `rows` (rows, n)."""

    @abc.abstractmethod
    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return numbers (..., n) from bytes (..., packed)."""

    @abc.abstractmethod
    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        """Take the mean of `rows` (rows, n) over the ranks, and watch it.

        Args:
            purpose: Names the numbers; random draws depend on it.
            keep: Return this rank's contribution as well.

        Returns:
            The mean, and this rank's contribution to it. The mean of all ranks' contributions is the returned mean,
            up to rounding in the working dtype and, for casts, in the sum.
        """


class Exact(Codec):
    """Sends numbers without encoding."""

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        return as_bytes(rows)

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(packed, dtype)

    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        # The sum overwrites its tensor, so a kept contribution needs a copy.
        total = yield AllReduceRequest(rows.clone() if keep else rows)
        step.watch(total)
        return total.div_(step.group.size), rows if keep else None

    def __repr__(self) -> str:
        return "Exact()"


def as_bytes(rows: Tensor) -> Tensor:
    """Return the bytes of each row of a matrix."""
    # A view as another dtype needs contiguous rows.
    return rows.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of `dtype` from bytes, along the last dimension."""
    # The clone aligns the bytes: a slice of a message may begin at any byte, but a view as another dtype must not.
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def pad(rows: Tensor, extent: int) -> Tensor:
    """Return rows (rows, n) padded with zeros to (rows, extent); the same tensor if n equals `extent`."""
    missing = extent - rows.shape[1]
    return rows if missing == 0 else torch.nn.functional.pad(rows, (0, missing))


def split_by_rank(rows: Tensor, size: int, shard: int) -> Tensor:
    """Split rows (rows, n), padded with zeros, into a part of `shard` elements per rank: (size, rows, shard)."""
    return pad(rows, size * shard).view(len(rows), size, shard).transpose(0, 1)


def pack_signs(numbers: Tensor) -> Tensor:
    """Return bytes (..., n / 8), one bit per number of (..., n), n a multiple of 8: 1 where it is not negative."""
    positive = numbers >= 0
    # For a million numbers numpy takes 1.4 ms here, and torch 4.3 ms.
    if not (numbers.is_meta or launches_kernels(numbers)):
        return torch.from_numpy(np.packbits(positive.numpy(), axis=-1, bitorder="little"))
    bits = positive.view(*numbers.shape[:-1], -1, 8).to(torch.uint8)
    # The shifted bits do not overlap, so their sum is their union. Without the dtype the sum would be int64.
    return (bits << torch.arange(8, dtype=torch.uint8, device=numbers.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return +1 and -1, (..., 8 n), from bytes (..., n)."""
    if not (packed.is_meta or launches_kernels(packed)):
        bits = torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), axis=-1, bitorder="little"))
    else:
        bits = ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)
    return bits.to(dtype).mul_(2).sub_(1)
