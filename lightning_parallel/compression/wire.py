"""Requests for communication, answered for many generators at once.

A compression method is a generator: it yields a request and is sent the answer. `run` advances all generators of a
bucket in lockstep and joins their requests of one kind and dtype, so a bucket needs as many collectives as its longest
method has phases, whatever the number of tensors.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Optional, Protocol, Union

import numpy as np
import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor_state import Memory
from lightning_parallel.recorder import span

__all__ = [
    "SEPARATE_BYTES",
    "Codec",
    "Exact",
    "Requests",
    "AllGatherRequest",
    "MeanRequests",
    "Operation",
    "Request",
    "ReduceScatterRequest",
    "Seconds",
    "StepContext",
    "AllReduceRequest",
    "AllToAllRequest",
    "Traffic",
    "as_bytes",
    "split_by_rank",
    "from_bytes",
    "pack_nibbles",
    "pack_signs",
    "pad",
    "run",
    "sent_bytes",
    "unpack_nibbles",
    "unpack_signs",
]

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

# Joining tensors costs two copies, a collective of its own one round trip. From here on the copies cost more.
SEPARATE_BYTES = 1 << 20


class StepContext(Protocol):
    """The part of an optimizer step that methods and codecs need: what is sent to whom, and what is remembered."""

    @property
    def group(self) -> Group:
        """The ranks over which the mean is taken."""

    @property
    def number(self) -> int:
        """Number of steps committed before this one."""

    @property
    def scale(self) -> float:
        """The loss scale, by which gradients are multiplied."""

    @property
    def memory(self) -> Memory:
        """State kept from step to step."""

    def watch(self, received: Tensor) -> None:
        """Check at the end of the step that `received`, which is equal on all ranks, is finite."""

    def average_(self, total: Tensor) -> Tensor:
        """Watch a contiguous sum over the ranks and divide it by their number, in place."""


class AllReduceRequest(NamedTuple):
    """Sum `tensor` over the ranks. Its storage belongs to the exchange from then on; the answer has its shape."""

    tensor: Tensor


class ReduceScatterRequest(NamedTuple):
    """Sum `tensor`, (ranks, n), over the ranks and keep the row of this one; the answer is (n,)."""

    tensor: Tensor


class AllGatherRequest(NamedTuple):
    """Give every rank this rank's `tensor`, bytes (n,); the answer is (ranks, n)."""

    tensor: Tensor


class AllToAllRequest(NamedTuple):
    """Give rank j row j of `tensor`, bytes (ranks, n); row j of the answer, (ranks, n), came from rank j."""

    tensor: Tensor


Request = Union[AllReduceRequest, ReduceScatterRequest, AllGatherRequest, AllToAllRequest]
Requests = Generator[Request, Tensor, None]


class Traffic(NamedTuple):
    """Payload of one collective: what is summed, what one rank gives to a gather, or all rows of a swap."""

    operation: Operation
    payload_bytes: float


def sent_bytes(traffic: Iterable[Traffic], world_size: int) -> int:
    """What one rank sends for `traffic` in the bandwidth-optimal algorithms (ring all-reduce and all-gather)."""
    share = {
        "all_reduce": 2 * (world_size - 1) / world_size,
        "reduce_scatter": (world_size - 1) / world_size,
        "all_gather": world_size - 1,
        "all_to_all": (world_size - 1) / world_size,
    }
    return round(sum(share[operation] * payload_bytes for operation, payload_bytes in traffic))


@dataclass
class Seconds:
    """Where the host's time went: before the first collective, in collectives, after it."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0


def run(generators: Sequence[Requests], group: Group, seconds: Seconds | None = None) -> None:
    """Run all `generators` to their end. Every rank must bring the same ones, in the same order."""
    seconds = Seconds() if seconds is None else seconds
    requests: dict[int, Request] = {}
    start = time.perf_counter()
    with span("encode", category="compression"):
        for index, generator in enumerate(generators):
            _advance(generator, None, index, requests)
    seconds.encode += time.perf_counter() - start
    while requests:
        start = time.perf_counter()
        answers = _answer(requests, group)
        answered = time.perf_counter()
        requests = {}
        with span("decode", category="compression"):
            for index, answer in answers.items():
                _advance(generators[index], answer, index, requests)
        seconds.wire += answered - start
        seconds.decode += time.perf_counter() - answered


def _advance(generator: Requests, answer: Tensor | None, index: int, requests: dict[int, Request]) -> None:
    with contextlib.suppress(StopIteration):
        requests[index] = next(generator) if answer is None else generator.send(answer)


def _answer(requests: dict[int, Request], group: Group) -> dict[int, Tensor]:
    joint: dict[tuple[type[Request], torch.dtype, int], list[int]] = {}
    for index, request in requests.items():
        tensor = request.tensor
        large = (
            isinstance(request, (AllReduceRequest, ReduceScatterRequest))
            and tensor.numel() * tensor.element_size() >= SEPARATE_BYTES
        )
        joint.setdefault((type(request), tensor.dtype, index if large else -1), []).append(index)
    answers: dict[int, Tensor] = {}
    for (kind, _, _), indices in joint.items():
        tensors = [requests[index].tensor for index in indices]
        answers.update(zip(indices, _COLLECTIVES[kind](tensors, group)))
    return answers


def _all_reduce(tensors: list[Tensor], group: Group) -> list[Tensor]:
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    comm.all_reduce_(flat, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def _reduce_scatter(tensors: list[Tensor], group: Group) -> list[Tensor]:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    mine = comm.reduce_scatter(rows, group).view(-1)
    return list(mine.split([tensor.shape[1] for tensor in tensors]))


def _all_gather(tensors: list[Tensor], group: Group) -> list[Tensor]:
    flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    everyone = comm.all_gather(flat, group).view(group.size, -1)
    return list(everyone.split([tensor.numel() for tensor in tensors], dim=1))


def _all_to_all(tensors: list[Tensor], group: Group) -> list[Tensor]:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    return list(comm.all_to_all(rows, group).split([tensor.shape[1] for tensor in tensors], dim=1))


_COLLECTIVES: dict[type[Request], Callable[[list[Tensor], Group], list[Tensor]]] = {
    AllReduceRequest: _all_reduce,
    ReduceScatterRequest: _reduce_scatter,
    AllGatherRequest: _all_gather,
    AllToAllRequest: _all_to_all,
}


MeanRequests = Generator[Request, Tensor, tuple[Tensor, Optional[Tensor]]]


class Codec(abc.ABC):
    """Encodes rows of numbers, and takes their mean over the ranks in that encoding.

    Attributes:
        linear: Whether `mean` is a linear function of the ranks' numbers.
        unbiased: Whether the expected `mean` is the mean.
        collective: What `mean` is made of.
        stochastic: Whether it draws random numbers.
    """

    linear: bool
    unbiased: bool
    collective: str
    stochastic: bool = False

    @abc.abstractmethod
    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        """Bytes (rows, packed) of `rows` (rows, n)."""

    @abc.abstractmethod
    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Numbers (..., n) from bytes (..., packed)."""

    @abc.abstractmethod
    def packed_bytes(self, n: int, element_bytes: int = 4) -> int:
        """Bytes of one packed row of `n` numbers of `element_bytes`."""

    @abc.abstractmethod
    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        """The mean of `rows` (rows, n) over the ranks, watched, and what this rank contributed to it (if to `keep`).

        The mean of all ranks' contributions is the returned mean, up to rounding in the working dtype and, for casts,
        in the sum.
        """

    @abc.abstractmethod
    def mean_traffic(self, n: int, element_bytes: int, world_size: int) -> list[Traffic]:
        """The payloads of `mean` for one row of `n` numbers of `element_bytes`."""


class Exact(Codec):
    """Numbers as they are."""

    linear = True
    unbiased = True
    collective = "all_reduce"

    def pack(self, rows: Tensor, noise: Optional[torch.Generator] = None) -> Tensor:
        return as_bytes(rows)

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(packed, dtype)

    def packed_bytes(self, n: int, element_bytes: int = 4) -> int:
        return element_bytes * n

    def mean(self, rows: Tensor, step: StepContext, purpose: object, keep: bool) -> MeanRequests:
        total = yield AllReduceRequest(rows.clone() if keep else rows)
        step.watch(total)
        return total.div_(step.group.size), rows if keep else None

    def mean_traffic(self, n: int, element_bytes: int, world_size: int) -> list[Traffic]:
        return [Traffic("all_reduce", element_bytes * n)]

    def __repr__(self) -> str:
        return "Exact()"


def as_bytes(rows: Tensor) -> Tensor:
    """The bytes of each row of a matrix."""
    return rows.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of `dtype` from bytes, along the last dimension."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def pad(rows: Tensor, extent: int) -> Tensor:
    """Rows (rows, n) filled up with zeros to (rows, extent); the same tensor where nothing is missing."""
    missing = extent - rows.shape[1]
    return rows if missing == 0 else torch.nn.functional.pad(rows, (0, missing))


def split_by_rank(rows: Tensor, size: int, shard: int) -> Tensor:
    """What each of `size` ranks needs of rows (rows, n): parts of `shard` elements, (size, rows, shard)."""
    return pad(rows, size * shard).view(len(rows), size, shard).transpose(0, 1)


def pack_nibbles(levels: Tensor) -> Tensor:
    """Bytes (..., n / 2) of integers in [-8, 7], (..., n) with n even."""
    pairs = levels.view(*levels.shape[:-1], -1, 2)
    return ((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).view(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Integers (..., 2 n), int8, from bytes (..., n)."""
    signed = packed.view(torch.int8)
    return torch.stack([(signed << 4) >> 4, signed >> 4], dim=-1).flatten(-2)


def pack_signs(numbers: Tensor) -> Tensor:
    """Bytes (..., n / 8), one bit per number, (..., n) with n a multiple of 8: set where it is not negative."""
    positive = numbers >= 0
    if numbers.device.type == "cpu":
        return torch.from_numpy(np.packbits(positive.numpy(), axis=-1, bitorder="little"))
    bits = positive.view(*numbers.shape[:-1], -1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=numbers.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """+1 and -1, (..., 8 n), from bytes (..., n)."""
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), axis=-1, bitorder="little"))
    else:
        bits = ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)
    return bits.to(dtype).mul_(2).sub_(1)
