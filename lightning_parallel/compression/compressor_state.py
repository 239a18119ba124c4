"""The memory of a compressor, changed in transactions: tensors by slot and parameter name, and their checkpoints.

A step stages new values, and `commit` replaces the old values by them. The parameters of one shape share one stacked
tensor, so methods work on a batch. Each stack has two buffers: a step reads the current buffer and writes the spare
buffer, and `commit` exchanges them. A step copies nothing, and a dropped step restores every bit. The price is a second
buffer. A held stack (`Memory.hold`) has one buffer, changed in place: a dropped step sets it to zero. The tensors of a
stack may have different shapes: they are corners of its matrices, which zeros fill up.

In a checkpoint, the state of one rank is `{"version", "step", "world_size", slot: {parameter: tensor}, ...}`. A reducer
continues from the state of this rank, or from the states of all ranks. If the number of ranks has changed, each rank
continues from the mean of the states. The mean of the unsent parts, which the next mean gradient receives, stays equal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_parallel.comm import Group

__all__ = [
    "Memory",
    "SavedStates",
    "StackKey",
    "corners",
    "joined",
    "mean_of",
    "slots_for",
    "state_of",
    "without_memory",
]

Shapes = Optional[tuple[Sequence[int], ...]]  # of the tensors of a stack; None if they are its rows


def corners(stack: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the first rows and columns of each matrix of a contiguous stack (matrices, N, M), as views of `shapes`.

    A shape is (n, ...), with m numbers in a row of the matrix.
    """
    _, extent, width = stack.shape
    start, size = stack.storage_offset(), extent * width
    # One operation for each view, instead of an index, two slices and a view.
    return [
        stack.as_strided(shape, (width, *_strides(shape[1:])), start + index * size)
        for index, shape in enumerate(shapes)
    ]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


class StackKey(NamedTuple):
    """Values that share one tensor, and its form.

    Attributes:
        slot: Slot of the values.
        names: Their parameters.
        shape: Shape of a row of the tensor, which is (names, *shape).
        dtype: Its dtype.
        device: Its device.
        shapes: Shapes of the values, if they are corners of the rows; the rest of a row must be zero.
    """

    slot: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    shapes: Shapes = None

    def new(self, make: Callable[..., Tensor]) -> _Stack:
        """Return a stack with a tensor by `torch.empty` or `torch.zeros`."""
        tensor = make((len(self.names), *self.shape), dtype=self.dtype, device=self.device)
        return _Stack(tensor, tensor.unbind() if self.shapes is None else tuple(corners(tensor, self.shapes)))


class _Stack(NamedTuple):
    """One tensor for several parameters, (names, *shape), and its rows, or their corners."""

    tensor: Tensor
    rows: tuple[Tensor, ...]


class Memory:
    """Named tensors in slots (`residual`, `left`, ...), changed by staging and committing."""

    def __init__(self) -> None:
        self._current: dict[str, dict[str, Tensor]] = {}
        self._buffers: dict[StackKey, list[_Stack]] = {}  # [current] or [spare, current]
        self._complete: set[StackKey] = set()  # stacks whose current rows are all in `_current`
        self._staged: dict[StackKey, _Stack] = {}
        self._held: dict[StackKey, _Stack] = {}  # in this step
        self._discarded: list[tuple[str, tuple[str, ...]]] = []

    def holds(self, slot: str, name: str) -> bool:
        """Return whether the slot has a committed tensor of this name."""
        return name in self._current.get(slot, {})

    def read(self, slot: str, name: str, device: torch.device, shape: Sequence[int | None]) -> Tensor | None:
        """Return the committed tensor, on `device`; None if there is none yet.

        Args:
            shape: The expected shape; None stands for any extent.

        Raises:
            ValueError: If it has another shape.
        """
        tensor = self._current.get(slot, {}).get(name)
        if tensor is not None and not _fits(tensor.shape, shape):
            wanted, found = ("x".join("?" if n is None else str(n) for n in some) for some in (shape, tensor.shape))
            raise ValueError(
                f"`{slot}` of `{name}` in the compressor's memory must be of shape {wanted}; got {found}. The memory"
                " belongs to another model, or to the same model with other split points. Use a compressor for each"
            )
        return tensor if tensor is None or tensor.device == device else tensor.to(device)

    def read_stack(self, key: StackKey) -> Tensor | None:
        """Return the committed stack (names, *shape); None if the tensors are not one stack: use `read` for each."""
        return self._buffers[key][-1].tensor if key in self._complete else None

    def stage(self, key: StackKey) -> Tensor:
        """Return an uninitialised tensor (names, *shape) whose rows become the new values of the names at `commit`.

        Within one step the same key gives the same tensor.
        """
        if key not in self._staged:
            buffers = self._buffers.get(key, [])
            self._staged[key] = buffers[0] if len(buffers) == 2 else key.new(torch.empty)
        return self._staged[key].tensor

    def hold(self, key: StackKey) -> Tensor:
        """Return the values in one tensor (names, *shape), zeros at first, to be changed in place.

        There is no second buffer: a rollback sets the values to zero.
        """
        if key not in self._complete:
            made = key.new(torch.zeros)
            for name, row in zip(key.names, made.rows):
                old = self.read(key.slot, name, key.device, row.shape)
                if old is not None:
                    row.copy_(old)
            self._install(key, [made])
            self._forget_regrouped([key])
        # Frees the spare buffer of an earlier `stage`: held values need none.
        self._buffers[key] = self._buffers[key][-1:]
        self._held[key] = self._buffers[key][-1]
        return self._held[key].tensor

    def discard(self, slot: str, names: Sequence[str]) -> None:
        """Remove the values of `names` in `slot` at `commit`."""
        self._discarded.append((slot, tuple(names)))

    def commit(self) -> None:
        """Replace the old values by the staged ones."""
        for slot, names in self._discarded:
            for name in names:
                self._current.get(slot, {}).pop(name, None)
            # A stack with a removed row must not be read as one tensor: the row would come back.
            gone = {key for key in self._complete if key.slot == slot and not set(names).isdisjoint(key.names)}
            self._complete -= gone
        new = [key for key in self._staged if key not in self._buffers]
        for key, stack in self._staged.items():
            # The staged tensor becomes the current buffer, and the current buffer the spare of the next step.
            self._install(key, [*self._buffers.get(key, [])[-1:], stack])
        if new:
            self._forget_regrouped(new)
        self._end_step()

    def rollback(self) -> None:
        """Keep the old values, and the staged tensors as spare buffers; held stacks become zero."""
        for key, stack in self._staged.items():
            if key in self._buffers:
                self._buffers[key] = [stack, self._buffers[key][-1]]
        # Held values were changed in place without a copy. Zeros lose unsent parts, but add nothing wrong.
        for stack in self._held.values():
            stack.tensor.zero_()
        self._end_step()

    def _end_step(self) -> None:
        self._staged = {}
        self._held = {}
        self._discarded = []

    def _install(self, key: StackKey, stacks: list[_Stack]) -> None:
        """Keep `stacks`, and the rows of the last one as the values."""
        self._buffers[key] = stacks
        self._current.setdefault(key.slot, {}).update(zip(key.names, stacks[-1].rows))
        self._complete.add(key)

    def _forget_regrouped(self, new: Sequence[StackKey]) -> None:
        """Drop stacks with a name of a `new` stack, as after buckets were rebuilt."""
        # The new stack replaces their rows. Together, the old stacks are as large as the memory itself.
        taken = {(key.slot, name) for key in new for name in key.names}
        stale = [
            key for key in self._buffers if key not in new and any((key.slot, name) in taken for name in key.names)
        ]
        for key in stale:
            del self._buffers[key]
            self._complete.discard(key)

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield slot, name and committed tensor, in sorted order."""
        for slot in sorted(self._current):
            for name in sorted(self._current[slot]):
                yield slot, name, self._current[slot][name]

    def load(self, values: dict[str, dict[str, Tensor]]) -> None:
        """Replace everything by copies of `values`."""
        # A stale stack would hide the loaded tensors: `read_stack` looks there first.
        self._forget_stacks()
        self._current = {
            slot: {name: tensor.detach().clone() for name, tensor in named.items()} for slot, named in values.items()
        }

    def leave_device(self) -> None:
        """Keep the committed values on the CPU, and no second buffers."""
        self._forget_stacks()
        for named in self._current.values():
            named.update((name, tensor.cpu()) for name, tensor in named.items())

    def _forget_stacks(self) -> None:
        self._buffers = {}
        self._complete = set()
        self._end_step()

    @property
    def num_bytes(self) -> int:
        """Bytes held, with the second buffers."""
        stacked = {id(stack.tensor): stack.tensor for stacks in self._buffers.values() for stack in stacks}
        named = {(key.slot, name) for key in self._buffers for name in key.names}
        # Rows of a stack are views of the stack, so only loose tensors are added.
        loose = [tensor for slot, name, tensor in self.items() if (slot, name) not in named]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*stacked.values(), *loose))


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, found) for found, want in zip(shape, wanted))


VERSION = 1
REPLICATED = {"left", "right", "mean_estimate"}  # equal on all ranks by construction
CHUNKED = {"server_residual"}  # rank r holds part r of a flattened parameter, to be added to the mean of `residual`

Slots = dict[str, dict[str, Tensor]]
State = Mapping[str, Any]
SavedStates = Union[State, Sequence[State]]
"""The state of one rank, or the states of all ranks in their order."""


def state_of(memory: Memory, step: int, world_size: int) -> dict[str, Any]:
    """Return a copy of this rank's state."""
    state: dict[str, Any] = {"version": VERSION, "step": step, "world_size": world_size}
    for slot, name, tensor in memory.items():
        state.setdefault(slot, {})[name] = tensor.detach().clone()
    return state


def without_memory(step: int) -> dict[str, Any]:
    """Return a state that holds the number of steps alone; it loads with any number of ranks."""
    return {"version": VERSION, "step": int(step), "world_size": 1}


def joined(parts: Iterable[State]) -> dict[str, Any]:
    """Join states of different parameters to one state."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = {**whole.get(key, {}), **value} if isinstance(value, Mapping) else value
    return whole


def mean_of(values: Iterable[Tensor]) -> Tensor:
    """Return the mean of one or more tensors; integers, such as counts, have no mean: return the first tensor."""
    total, *others = values
    if not total.is_floating_point():
        return total
    for value in others:
        # Out of place: the first value belongs to the saved state.
        total = total + value
    return total / (1 + len(others))


def slots_for(saved: SavedStates, group: Group, wanted: Optional[frozenset[str]] = None) -> Slots:
    """Return the slots that this rank of `group` continues with.

    Args:
        saved: This rank's state among as many ranks, or the states of all ranks of any number.
        group: The ranks that continue.
        wanted: The slots of the reducer, which may differ from the saved reducer; None stands for all slots.

    Raises:
        ValueError: If a state is damaged, or belongs to another number of ranks.
    """
    is_alone = isinstance(saved, Mapping)
    states: list[Any] = [saved] if is_alone or not saved else list(saved)
    for state in states:
        _check(state)
    everyone: list[Slots] = [
        {slot: dict(named) for slot, named in state.items() if isinstance(named, Mapping)} for state in states
    ]
    if not any(everyone):
        return {}
    size = states[0]["world_size"]
    if is_alone:
        _check_ranks(size, group.size, ". A list with the states of all ranks loads with any number of ranks")
    else:
        _check_ranks(size, len(states), " states")
    is_same = size == group.size
    # Modulo: with more ranks than states `own` only names slots, and the mean replaces its values.
    own = everyone[0] if is_alone else everyone[group.rank % size]
    taken = [(group.rank, own)] if is_same else list(enumerate(everyone))
    unused = set() if wanted is None else own.keys() - wanted
    for slot in CHUNKED & own.keys():
        # A chunk keeps its owner only if the number of ranks is equal, and only in a compressor with chunks.
        if not is_same or (slot in unused and wanted is not None and "residual" in wanted):
            for rank, slots in taken:
                _add_chunks(slots.get("residual", {}), slots.pop(slot), rank, size)
            unused.discard(slot)
    slots = own if is_same else _mean([slots for _, slots in taken])
    lost = unused - REPLICATED
    if lost and group.rank == 0:
        listed = ", ".join(f"`{slot}`" for slot in sorted(lost))
        warnings.warn(
            f"The compression state holds {listed}, which this compressor does not use. Gradients that were not sent"
            " yet are lost.",
            stacklevel=2,
        )
    return {slot: named for slot, named in slots.items() if slot not in unused}


def _mean(everyone: Sequence[Slots]) -> Slots:
    first = everyone[0]
    return {
        slot: {
            name: value if slot in REPLICATED else mean_of(slots[slot][name] for slots in everyone)
            for name, value in named.items()
        }
        for slot, named in first.items()
    }


def _add_chunks(residuals: dict[str, Tensor], chunks: Mapping[str, Tensor], rank: int, size: int) -> None:
    """Add this rank's chunks to its residuals, so that the mean of the residuals over `size` ranks contains them."""
    # `ef21` has no residuals to take the chunks: its chunks are dropped once the ranks have changed.
    for name in chunks.keys() & residuals.keys():
        # A contiguous clone: `view` must see the elements in order, and the saved state must not change.
        chunk, residual = chunks[name], residuals[name].clone(memory_format=torch.contiguous_format)
        own = residual.view(-1)[rank * len(chunk) :][: len(chunk)]
        # A chunk is a part of the mean, and no other rank has it: the mean divides it by the number of ranks.
        own.add_(chunk[: len(own)], alpha=size)
        residuals[name] = residual


def _check(state: object) -> None:
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, Mapping) else state
        raise ValueError(f"The compression state must have version {VERSION}; got {found!r}")
    numbers = state.get("step"), state.get("world_size")
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(
            "The compression state must have `step` and `world_size`; got the keys"
            f" {', '.join(sorted(map(str, state)))}"
        )
    for slot, named in state.items():
        for name, tensor in named.items() if isinstance(named, Mapping) else ():
            # Error feedback would add NaN to every later gradient: no step would ever be applied again.
            if not isinstance(tensor, Tensor) or not tensor.isfinite().all():
                raise ValueError(f"`{slot}` of `{name}` in the compression state must be finite; got NaN or infinity")


def _check_ranks(saved: int, found: int, hint: str) -> None:
    if saved != found:
        raise ValueError(
            f"The number of ranks must be {saved}, as when this compression state was saved; got {found}{hint}"
        )
