"""Requests for communication, answered for many generators at once.

A compression method is a generator: it yields a request and is sent the answer. `run` advances all generators of a
bucket in lockstep and joins their requests of one kind and dtype, so a bucket needs as many collectives as its longest
method has phases, whatever the number of tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Union

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.tracing import span

__all__ = [
    "ALONE_BYTES",
    "Exchange",
    "Gather",
    "Operation",
    "Request",
    "Scatter",
    "Seconds",
    "Sum",
    "Swap",
    "Traffic",
    "run",
    "sent_bytes",
]

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

# Joining tensors costs two copies, a collective of its own one round trip. From here on the copies cost more.
ALONE_BYTES = 1 << 20


class Sum(NamedTuple):
    """Sum `tensor` over the ranks. Its storage belongs to the exchange from then on; the answer has its shape."""

    tensor: Tensor


class Scatter(NamedTuple):
    """Sum `tensor`, (ranks, n), over the ranks and keep the row of this one; the answer is (n,)."""

    tensor: Tensor


class Gather(NamedTuple):
    """Give every rank this rank's `tensor`, bytes (n,); the answer is (ranks, n)."""

    tensor: Tensor


class Swap(NamedTuple):
    """Give rank j row j of `tensor`, bytes (ranks, n); row j of the answer, (ranks, n), came from rank j."""

    tensor: Tensor


Request = Union[Sum, Scatter, Gather, Swap]
Exchange = Generator[Request, Tensor, None]


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


def run(exchanges: Sequence[Exchange], group: Group, seconds: Seconds | None = None) -> None:
    """Run all `exchanges` to their end. Every rank must bring the same ones, in the same order."""
    seconds = Seconds() if seconds is None else seconds
    requests: dict[int, Request] = {}
    start = time.perf_counter()
    with span("encode", category="compression"):
        for index, exchange in enumerate(exchanges):
            _advance(exchange, None, index, requests)
    seconds.encode += time.perf_counter() - start
    while requests:
        start = time.perf_counter()
        answers = _answer(requests, group)
        answered = time.perf_counter()
        requests = {}
        with span("decode", category="compression"):
            for index, answer in answers.items():
                _advance(exchanges[index], answer, index, requests)
        seconds.wire += answered - start
        seconds.decode += time.perf_counter() - answered


def _advance(exchange: Exchange, answer: Tensor | None, index: int, requests: dict[int, Request]) -> None:
    with contextlib.suppress(StopIteration):
        requests[index] = next(exchange) if answer is None else exchange.send(answer)


def _answer(requests: dict[int, Request], group: Group) -> dict[int, Tensor]:
    joint: dict[tuple[type[Request], torch.dtype, int], list[int]] = {}
    for index, request in requests.items():
        tensor = request.tensor
        large = isinstance(request, (Sum, Scatter)) and tensor.numel() * tensor.element_size() >= ALONE_BYTES
        joint.setdefault((type(request), tensor.dtype, index if large else -1), []).append(index)
    answers: dict[int, Tensor] = {}
    for (kind, _, _), indices in joint.items():
        tensors = [requests[index].tensor for index in indices]
        answers.update(zip(indices, _COLLECTIVES[kind](tensors, group)))
    return answers


def _sum(tensors: list[Tensor], group: Group) -> list[Tensor]:
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    comm.all_reduce_(flat, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def _scatter(tensors: list[Tensor], group: Group) -> list[Tensor]:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    mine = comm.reduce_scatter(rows, group).view(-1)
    return list(mine.split([tensor.shape[1] for tensor in tensors]))


def _gather(tensors: list[Tensor], group: Group) -> list[Tensor]:
    flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    everyone = comm.all_gather(flat, group).view(group.size, -1)
    return list(everyone.split([tensor.numel() for tensor in tensors], dim=1))


def _swap(tensors: list[Tensor], group: Group) -> list[Tensor]:
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    return list(comm.all_to_all(rows, group).split([tensor.shape[1] for tensor in tensors], dim=1))


_COLLECTIVES: dict[type[Request], Callable[[list[Tensor], Group], list[Tensor]]] = {
    Sum: _sum,
    Scatter: _scatter,
    Gather: _gather,
    Swap: _swap,
}
