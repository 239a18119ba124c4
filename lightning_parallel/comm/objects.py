"""Collectives on Python objects, and the checks that ranks make together: all go on, or all raise.

A group of one rank communicates nothing. In a pretended group, all ranks give the same value.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.comm.collectives import all_reduce_, broadcast_
from lightning_parallel.comm.groups import Group
from lightning_parallel.comm.work import blocking_call

__all__ = [
    "StepOutcome",
    "RepeatedBroadcast",
    "agree",
    "all_gather_object",
    "barrier",
    "broadcast_from",
    "broadcast_object",
    "equal_everywhere",
    "failing_together",
    "gather_object",
    "on_any_rank",
    "raise_together",
    "shared_key",
]

T = TypeVar("T")

_PICKLED_BYTES = 1 << 16
"""Tensors on the CPU up to this size are pickled: a separate message would take longer."""

_SIZE_BYTES, _HEAD_BYTES = 8, 1 << 10
"""Bytes of the first message about an object: of its size, and of the first part of its data."""

_DIGEST_BYTES = 16


def all_gather_object(value: T, group: Group) -> list[T]:
    """Gather the picklable `value` of every rank, by position."""
    if group.process_group is None:
        return [value] * group.size
    data = pickle.dumps(value)
    with blocking_call("all_gather_object", group):
        # Torch sends the sizes first. Most objects are flags and names: here one message holds their size and bytes.
        head = len(data).to_bytes(_SIZE_BYTES, "little") + data[:_HEAD_BYTES]
        heads = _all_gather_bytes(head, _SIZE_BYTES + _HEAD_BYTES, group)
        sizes = [int.from_bytes(found[:_SIZE_BYTES], "little") for found in heads]
        found = [found[_SIZE_BYTES:] for found in heads]
        # All ranks see all sizes, and so agree whether there is a second message.
        longest = max(sizes) - _HEAD_BYTES
        if longest > 0:
            rest = _all_gather_bytes(data[_HEAD_BYTES:], longest, group)
            found = [first + second for first, second in zip(found, rest)]
    return [pickle.loads(one[:size]) for one, size in zip(found, sizes)]


def _all_gather_bytes(data: bytes, num_bytes: int, group: Group) -> list[bytes]:
    """Gather `data` of every rank, filled up to `num_bytes`, by position."""
    # Of one length on all ranks, as the collective needs it; the receiver cuts the padding off. `bytearray`, because
    # torch warns about memory that is read-only.
    mine = torch.frombuffer(bytearray(data.ljust(num_bytes, b"\0")), dtype=torch.uint8).to(group.host_device)
    found = mine.new_empty(group.size, num_bytes)
    dist.all_gather(list(found.unbind()), mine, group=group.process_group)
    return [row.tobytes() for row in found.cpu().numpy()]


def gather_object(value: T, group: Group, target: int = 0) -> list[T] | None:
    """Gather the picklable `value` of every rank, by position, on the rank at position `target`; None elsewhere."""
    if group.process_group is None:
        return [value] * group.size
    values: list[Any] | None = [None] * group.size if group.rank == target else None
    with blocking_call("gather_object", group):
        dist.gather_object(value, values, group.ranks[target], group=group.process_group)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the picklable `value` of the rank at position `source`."""
    if group.process_group is None:
        return value
    values: list[Any] = [value]
    with blocking_call("broadcast_object", group):
        dist.broadcast_object_list(values, group.ranks[source], group=group.process_group)
    return values[0]


def broadcast_from(make: Callable[[], T], group: Group, source: int = 0, device: torch.device | None = None) -> T:
    """Call `make` on the rank at position `source` only, and return its result on every rank.

    Large tensors in the result, and tensors on a device, travel as tensors: the host does not wait for the device.

    Args:
        make: Makes a value that can be pickled.
        group: The group.
        source: Position of the rank that makes the value.
        device: Device of the other ranks for the tensors that are on a device on the rank at `source`; the CPU if None.

    Raises:
        Exception: On every rank, if `make` raises, or returns a value that cannot be pickled.
    """
    value: T | None = None
    packed = _Packed(b"", [])
    tensors: list[Tensor] = []
    failure: Exception | None = None
    if group.rank == source:
        try:
            value = make()
            # Pickled here, not in the broadcast: an error in the broadcast would leave the other ranks waiting.
            if group.size > 1:
                packed, tensors = _pack(value)
        except Exception as error:
            failure = error
    # The error takes the place of the value in one message: all ranks then agree whether tensors follow.
    carried = None if failure is None else _carried(failure)
    packed, carried = broadcast_object((packed, carried), group, source)
    if failure is not None:
        raise failure
    if carried is not None:
        raise _like(*carried, f"\n(found on rank {group.ranks[source]})")
    tensors = _broadcast_tensors(packed.tensors, tensors, group, source, device or torch.device("cpu"))
    return cast(T, value) if group.rank == source else _Unpickler(packed.data, tensors).load()


@dataclass(frozen=True)
class _Packed:
    """A pickled value. For each tensor left out: its shape, its dtype, and whether it is on a device."""

    data: bytes
    tensors: list[tuple[torch.Size, torch.dtype, bool]]


class _Pickler(pickle.Pickler):
    """Leaves out tensors that are large or on a device."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        # Subclasses may have their own way to pickle, and a sparse tensor is several tensors: pickle takes both.
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None
        if value.device.type == "cpu" and value.numel() * value.element_size() <= _PICKLED_BYTES:
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts tensors that were left out where they belong."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _pack(value: Any) -> tuple[_Packed, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    described = [(tensor.shape, tensor.dtype, tensor.device.type != "cpu") for tensor in pickler.tensors]
    return _Packed(file.getvalue(), described), pickler.tensors


def _broadcast_tensors(
    described: list[tuple[torch.Size, torch.dtype, bool]],
    tensors: list[Tensor],
    group: Group,
    source: int,
    device: torch.device,
) -> list[Tensor]:
    """Broadcast tensors, with one message for all tensors of a dtype and device; return them on every rank."""
    found = list(tensors) if tensors else [torch.empty(0)] * len(described)
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, (_, dtype, is_on_device) in enumerate(described):
        kinds.setdefault((dtype, is_on_device), []).append(number)
    for (dtype, is_on_device), numbers in kinds.items():
        sizes = [described[number][0].numel() for number in numbers]
        if group.rank == source:
            flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device if is_on_device else "cpu")
        broadcast_(flat, group, source)
        for number, part in zip(numbers, flat.split(sizes)):
            # A copy: a view would keep all tensors of the message in memory.
            found[number] = found[number] if group.rank == source else part.view(described[number][0]).clone()
    return found


def shared_key(group: Group) -> str:
    """Return a new random key, equal on all ranks of `group`; every rank must call it."""
    # No counter: ranks may have made different numbers of keys before.
    return broadcast_object(uuid4().hex, group)


def barrier(group: Group) -> None:
    """Wait until the host of every rank of `group` has arrived; queued work of devices may go on."""
    if group.process_group is not None:
        with blocking_call("barrier", group):
            if "nccl" in group.backend and group.host_device == "cpu":
                # torch's barrier would synchronize devices, so each host would wait for all its queued work.
                dist.all_reduce(torch.zeros(1), group=group.process_group)
            else:
                dist.barrier(group=group.process_group)


# ------------------------------------------------------------------------------------- a value in each step


_INLINE_BYTES = 1 << 12
"""Tensors on the CPU up to this size travel with the numbers: every rank sends as many bytes."""
_CONSTANTS = (str, bool, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType)


class StepOutcome(NamedTuple):
    """The end of a step, see `RepeatedBroadcast`.

    Attributes:
        is_failed: Whether a rank has failed.
        failure: The error of this rank in making the value.
        value: The value, if no rank has failed.
    """

    is_failed: bool
    failure: Exception | None
    value: Any


class RepeatedBroadcast:
    """Broadcasts a value of one rank in each step, and tells every rank whether any rank has failed.

    One small collective does both, and nothing is pickled, as long as the value keeps its form: everything in it but
    numbers and the data of tensors. A new form is described once. Large tensors, and tensors on a device, follow as
    tensors, so that the host does not wait for the device.

    Args:
        group: The group.
        source: Position of the rank with the value.
        device: Where the other ranks keep tensors that are on a device on that rank.
    """

    def __init__(self, group: Group, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._device = device
        self._form: Any = None
        # The bytes of the numbers and small tensors of this form.
        self._num_bytes = 0

    def __call__(self, make: Callable[[], Any], is_failed: bool = False) -> StepOutcome:
        """Meet the other ranks; all ranks call it.

        Args:
            make: Makes the value; called on the rank at `source` only, unless that has failed.
            is_failed: Whether this rank has failed.
        """
        value, failure, packed = None, None, _FormedValue(self._form, b"", [], b"")
        if self._group.rank == self._source and not is_failed:
            try:
                value = make()
                packed = packed if self._group.process_group is None else self._packed(value)
            except Exception as error:
                failure = error
        is_failed = is_failed or failure is not None
        if self._group.process_group is None:
            return StepOutcome(is_failed, failure, value)
        first = b"" if is_failed or packed.description else packed.data
        rest = b"" if is_failed else packed.description
        head = bytes([is_failed]) + len(rest).to_bytes(_SIZE_BYTES, "little") + first.ljust(self._num_bytes, b"\0")
        # The bytes of all other ranks are zero, so the maximum is the message of the source.
        found = _max_bytes(head, self._group)
        if found[0]:
            return StepOutcome(True, failure, None)
        size = int.from_bytes(found[1 : 1 + _SIZE_BYTES], "little")
        return StepOutcome(False, None, self._received(value, packed, found[1 + _SIZE_BYTES :], size))

    def _packed(self, value: Any) -> _FormedValue:
        numbers, tensors = list[Any](), list[Tensor]()
        form = _form_of(value, numbers, tensors, {})
        if form is None:
            whole, tensors = _pack(value)
            # No form: the next value is described again.
            return _FormedValue(None, b"", tensors, pickle.dumps((None, 0, whole)))
        data = _bytes_of(numbers)
        is_known = form == self._form
        return _FormedValue(form, data, tensors, b"" if is_known else pickle.dumps((form, len(data), data)))

    def _received(self, value: Any, packed: _FormedValue, data: bytes, size: int) -> Any:
        is_source = self._group.rank == self._source
        described: list[tuple[torch.Size, torch.dtype, bool]] = []
        if size:
            buffer = torch.frombuffer(bytearray(packed.description or size), dtype=torch.uint8)
            found = broadcast_(buffer.to(self._group.host_device), self._group, self._source)
            form, self._num_bytes, rest = pickle.loads(found.cpu().numpy().tobytes())
            self._form = packed.form if is_source else form
            if form is None:
                tensors = _broadcast_tensors(rest.tensors, packed.tensors, self._group, self._source, self._device)
                return value if is_source else _Unpickler(rest.data, tensors).load()
            data = rest
        _described_in(self._form, described)
        tensors = _broadcast_tensors(described, packed.tensors, self._group, self._source, self._device)
        return value if is_source else _rebuilt(self._form, _Reader(data, iter(tensors), []))


class _FormedValue(NamedTuple):
    """A value to send.

    Attributes:
        form: See `_form_of`; None for a value that must be pickled.
        data: The numbers and small tensors.
        tensors: The other tensors.
        description: The pickled form with the data, if the form is new.
    """

    form: Any
    data: bytes
    tensors: list[Tensor]
    description: bytes


@dataclass
class _Reader:
    """The parts of a value.

    Attributes:
        data: The bytes of numbers and small tensors.
        tensors: The other tensors.
        seen: The tensors so far.
        at: The position in `data`.
    """

    data: bytes
    tensors: Iterator[Tensor]
    seen: list[Tensor]
    at: int = 0

    def take(self, num_bytes: int) -> bytes:
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]


def _form_of(value: Any, numbers: list[Any], tensors: list[Tensor], seen: dict[int, int | None]) -> Any:
    """Return the form of a value: equal for values that differ in numbers and in the data of tensors only.

    Args:
        value: The value.
        numbers: Is extended by its numbers and small tensors.
        tensors: Is extended by its other tensors.
        seen: The tensors, by number, and the containers so far, by `id`.

    Returns:
        A tuple, or None if the value must be pickled: it holds an object of another class, or a container twice.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return "constant", value
    if kind is float or kind is int and -(1 << 63) <= value < 1 << 63:
        numbers.append(value)
        return ("number", kind)
    if id(value) in seen:
        return None if (number := seen[id(value)]) is None else ("again", number)
    if kind is Tensor:
        if value.requires_grad or value.layout != torch.strided or value.is_conj() or value.is_neg():
            return None
        seen[id(value)] = sum(number is not None for number in seen.values())
        is_on_device = value.device.type != "cpu"
        is_small = not is_on_device and value.numel() * value.element_size() <= _INLINE_BYTES
        (numbers if is_small else tensors).append(value)
        return "tensor", tuple(value.shape), value.dtype, is_on_device, is_small
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        keys: tuple[Any, ...] = ()
        parts: Iterable[Any] = value
    elif kind is dict and all(type(key) in (str, int, bool) for key in value):
        keys, parts = tuple([(type(key), key) for key in value]), value.values()
    else:
        return None
    if value or kind is not tuple:  # there is one empty tuple
        seen[id(value)] = None
    forms = [_form_of(part, numbers, tensors, seen) for part in parts]
    return None if None in forms else ("container", kind, keys, *forms)


def _bytes_of(numbers: list[Any]) -> bytes:
    parts = [
        struct.pack("<q" if type(each) is int else "<d", each)
        if not isinstance(each, Tensor)
        else each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for each in numbers
    ]
    return b"".join(parts)


def _described_in(form: Any, found: list[tuple[torch.Size, torch.dtype, bool]]) -> None:
    """Collect the shapes, dtypes and places of the tensors of a form that do not travel with the numbers."""
    if form[0] == "container":
        for part in form[3:]:
            _described_in(part, found)
    elif form[0] == "tensor" and not form[4]:
        found.append((torch.Size(form[1]), form[2], form[3]))


def _rebuilt(form: Any, parts: _Reader) -> Any:
    """Return the value of a form."""
    what, kind, *rest = form
    if what == "constant":
        return kind
    if what == "number":
        return struct.unpack("<q" if kind is int else "<d", parts.take(8))[0]
    if what == "again":
        return parts.seen[kind]
    if what == "tensor":
        dtype, _, is_small = rest
        if is_small:
            data = parts.take(math.prod(kind) * dtype.itemsize)
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
            parts.seen.append(flat.view(kind))
        else:
            parts.seen.append(next(parts.tensors))
        return parts.seen[-1]
    keys, *forms = rest
    values = [_rebuilt(each, parts) for each in forms]
    if kind is dict:
        return dict(zip([key for _, key in keys], values))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _max_bytes(data: bytes, group: Group) -> bytes:
    """Return the maximum over the ranks of each byte; all ranks give equally many."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if group.host_device != "cpu":
        # Pinned memory, so that the host need not wait for the copy as well.
        mine = mine.pin_memory().to(group.host_device, non_blocking=True)
    found = all_reduce_(mine, group, "max", between_hosts=True)
    # The one read, for which the host waits.
    return (found if group.host_device == "cpu" else found.cpu()).numpy().tobytes()


# ----------------------------------------------------------------------------------------------------------- checks


def raise_together(error: Exception | None, group: Group) -> None:
    """Raise on every rank of `group` if any rank gives an `error`, so that no rank is left waiting.

    A rank with an error raises its error. The other ranks raise a similar error that names the failed ranks.
    """
    try:
        found = all_gather_object(None if error is None else _carried(error), group)
    except RuntimeError as failure:
        if error is None:
            raise
        # A rank that already knows of the error may have ended. Its absence must not hide the error itself.
        raise error from failure
    if error is not None:
        raise error
    failed = {rank: failure for rank, failure in zip(group.ranks, found) if failure is not None}
    if failed:
        raise _like(*next(iter(failed.values())), f"\n(found on rank {', '.join(map(str, failed))})")


@contextmanager
def failing_together(group: Group) -> Iterator[None]:
    """Raise an error of any rank in the block on every rank of `group`; the block must not communicate."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(failure, group)


def _carried(error: Exception) -> tuple[str, str, bytes]:
    """Return the type of an error, its text, and its pickled content; no content if it cannot be pickled."""
    data = b""
    with suppress(Exception):  # it may hold a tensor with a graph
        data = pickle.dumps((type(error), error.args, vars(error)))
    return type(error).__name__, str(error), data


def _like(name: str, message: str, data: bytes, where: str) -> Exception:
    """Rebuild the error of another rank, and add `where` it was found to its text."""
    if "\n(found on rank " in message:
        where = ""  # it has been exchanged before
    with suppress(Exception):
        # Not through `__init__`, whose arguments are unknown here.
        kind, arguments, attributes = pickle.loads(data)
        error = kind.__new__(kind, *arguments)
        error.__dict__.update(attributes)
        # A different text means that the class needs more than its arguments: a known class replaces it below.
        if str(error) == message:
            # In some classes, such as `KeyError`, the text is not the argument itself.
            error.args = (message + where,) if error.args == (message,) else error.args
            return error
    kind = {"ValueError": ValueError, "TypeError": TypeError}.get(name, RuntimeError)
    return kind((message if kind.__name__ == name else f"{name}: {message}") + where)


def equal_everywhere(number: int, group: Group) -> bool:
    """Tell whether all ranks of `group` hold the same 63-bit `number`."""
    # One small all-reduce, not the gather of `agree`: the maxima of x and -x give the largest and smallest number.
    both = torch.tensor([number, -number], device=group.host_device)
    largest, smallest = all_reduce_(both, group, "max", between_hosts=True).tolist()
    return largest == -smallest


def on_any_rank(flags: Sequence[bool], group: Group) -> list[bool]:
    """Tell for each of `flags` whether it is set on some rank of `group`; all ranks give equally many flags.

    The host waits for the other hosts. It waits for a device only if the group communicates on devices only.
    """
    return [bool(flag) for flag in _max_bytes(bytes(flags), group)] if group.size > 1 else list(flags)


def agree(what: str, value: Any, group: Group) -> None:
    """Check that all ranks of `group` hold an equal `value`, described by `what`.

    Raises:
        ValueError: On every rank, with the values of all ranks; for dicts, with the entries that differ.
    """
    if group.process_group is None or _have_equal_pickles(value, group):
        return
    values = all_gather_object(value, group)
    # Again by value: equal values may have other pickles, such as sets.
    if any(other != values[0] for other in values):
        listed = "\n".join(f"  rank {rank}: {other}" for rank, other in zip(group.ranks, _differing(values)))
        what = what[:1].upper() + what[1:]
        raise ValueError(f"{what} must be the same on all ranks of the {group.axis} group; got\n{listed}")


def _have_equal_pickles(value: Any, group: Group) -> bool:
    """Tell whether the pickles of all ranks are equal; each rank receives a few bytes of each, whatever their size."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    # Without references to earlier values: equal strings are one object on some ranks only.
    pickler.fast = True
    pickler.dump(value)
    digest = blake2b(file.getvalue(), digest_size=_DIGEST_BYTES).digest()
    with blocking_call("all_gather_object", group):
        return len(set(_all_gather_bytes(digest, _DIGEST_BYTES, group))) == 1


def _differing(values: list[Any]) -> list[Any]:
    """Reduce dicts to the entries in which they differ; leave other values unchanged."""
    if not all(isinstance(value, dict) for value in values):
        return values
    # Not a set, whose order differs between processes: all ranks must print the same text.
    keys = dict.fromkeys(key for value in values for key in value)
    different = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
    return [{key: value.get(key) for key in different} for value in values]
