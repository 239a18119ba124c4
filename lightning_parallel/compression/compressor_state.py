"""The state of a reducer: tensors by slot and parameter name, as a transaction, and on its way to a checkpoint.

What a step writes replaces the old values at `commit` only. Parameters of one shape are kept in one stacked tensor, so
that methods work on a batch. Each stack has two buffers: a step reads the current one and writes the other, and
committing exchanges them. Nothing is copied, and dropping a step restores every bit, at the price of a second buffer.
What is held (`Memory.hold`) has one buffer, changed in place: a dropped step leaves zeros there.

In a checkpoint a state is `{"version", "layout", "step", "world_size", slot: {parameter: tensor}, ...}`:

    layout      made by           what a slot holds per parameter
    local       state_dict()      this rank's tensor
    stacked     gather_state()    (ranks, *shape); replicated slots as they are
    mean        gather_state()    the mean over the ranks; replicated slots as they are
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group

__all__ = ["Memory", "gather_state", "gather_states", "local_state", "values_for"]


class _StackKey(NamedTuple):
    slot: str
    names: tuple[str, ...]


class _Stack(NamedTuple):
    """The tensors of several parameters in one, (names, *shape), and its rows."""

    tensor: Tensor
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Stack:
        """Return the stack with its rows, which are views."""
        return cls(tensor, tensor.unbind())

    def fits(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether it is of `shape`, all of it, and so on."""
        return self.tensor.shape == shape and self.tensor.dtype == dtype and self.tensor.device == device


class Memory:
    """Named tensors in slots (`residual`, `left`, ...), changed by staging and committing."""

    def __init__(self) -> None:
        self._current: dict[str, dict[str, Tensor]] = {}
        self._buffers: dict[_StackKey, list[_Stack]] = {}  # [current] or [spare, current]
        self._complete: set[_StackKey] = set()  # those whose current rows are what `_current` has, all of them
        self._staged: dict[_StackKey, _Stack] = {}
        self._held: dict[_StackKey, _Stack] = {}  # in this step
        self._discarded: list[_StackKey] = []

    def holds(self, slot: str, name: str) -> bool:
        """Return whether there is a committed tensor."""
        return name in self._current.get(slot, {})

    def read(self, slot: str, name: str, device: torch.device, shape: Sequence[int | None]) -> Tensor | None:
        """Return the committed tensor, on `device`; None if there is none yet.

        Args:
            shape: The expected one; None stands for any extent.

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

    def read_stack(
        self, slot: str, names: tuple[str, ...], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return the committed tensors (names, *shape) where they lie in one; None if they do not: `read` them."""
        key = _StackKey(slot, names)
        if key not in self._complete:
            return None
        stack = self._buffers[key][-1]
        return stack.tensor if stack.fits((len(names), *shape), dtype, device) else None

    def stage(
        self, slot: str, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised tensor (names, *shape) whose rows become the new values of `names` at `commit`.

        Within one step the same names give the same tensor.
        """
        key = _StackKey(slot, tuple(names))
        if key in self._staged:
            return self._staged[key].tensor
        buffers = self._buffers.get(key, [])
        size = (len(names), *shape)
        spare = buffers[0] if len(buffers) == 2 else None
        if spare is None or not spare.fits(size, dtype, device):
            spare = _Stack.of(torch.empty(size, dtype=dtype, device=device))
        self._staged[key] = spare
        return spare.tensor

    def hold(
        self, slot: str, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the values of `names` in one tensor (names, *shape), zeros at first, to be changed in place.

        There is no second buffer: if the step is rolled back they are zeros.
        """
        key = _StackKey(slot, tuple(names))
        size = (len(names), *shape)
        if key not in self._complete or not self._buffers[key][-1].fits(size, dtype, device):
            made = _Stack.of(torch.zeros(size, dtype=dtype, device=device))
            for name, row in zip(names, made.rows):
                old = self.read(slot, name, device, shape)
                if old is not None:
                    row.copy_(old)
            self._install(key, [made])
            self._forget_regrouped([key])
        self._buffers[key] = self._buffers[key][-1:]
        self._held[key] = self._buffers[key][-1]
        return self._held[key].tensor

    def discard(self, slot: str, names: Sequence[str]) -> None:
        """Remove the values of `names` in `slot` at `commit`."""
        self._discarded.append(_StackKey(slot, tuple(names)))

    def commit(self) -> None:
        """Replace the old values by the staged ones."""
        for key in self._discarded:
            slot = self._current.get(key.slot, {})
            for name in key.names:
                slot.pop(name, None)
            gone = set(key.names)
            self._complete -= {other for other in self._complete if other.slot == key.slot and gone & {*other.names}}
        new = [key for key in self._staged if key not in self._buffers]
        for key, stack in self._staged.items():
            # The tensor staged becomes the current one, and the current one the spare for the next step.
            self._install(key, [*self._buffers.get(key, [])[-1:], stack])
        if new:
            self._forget_regrouped(new)
        self._staged, self._held, self._discarded = {}, {}, []

    def rollback(self) -> None:
        """Keep the old values, and the staged tensors as spare buffers; what was held becomes zero."""
        for key, stack in self._staged.items():
            if key in self._buffers:
                self._buffers[key] = [stack, self._buffers[key][-1]]
        for stack in self._held.values():
            stack.tensor.zero_()
        self._staged, self._held, self._discarded = {}, {}, []

    def _install(self, key: _StackKey, stacks: list[_Stack]) -> None:
        """Keep `stacks`, and the rows of the last one as the values."""
        self._buffers[key] = stacks
        self._current.setdefault(key.slot, {}).update(zip(key.names, stacks[-1].rows))
        self._complete.add(key)

    def _forget_regrouped(self, new: Sequence[_StackKey]) -> None:
        """Drop stacks whose names are now in `new` ones, with others, as after buckets were rebuilt."""
        # Their rows are no longer read; kept, they would be as large as the memory itself.
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
        self._buffers, self._complete, self._staged, self._held, self._discarded = {}, set(), {}, {}, []

    @property
    def num_bytes(self) -> int:
        """Bytes held, with the second buffers."""
        stacked = {id(stack.tensor): stack.tensor for stacks in self._buffers.values() for stack in stacks}
        named = {(key.slot, name) for key in self._buffers for name in key.names}
        loose = [tensor for slot, name, tensor in self.items() if (slot, name) not in named]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*stacked.values(), *loose))


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, found) for found, want in zip(shape, wanted))


VERSION = 1
LAYOUTS = ("local", "stacked", "mean")
COMBINED = ("mesh", "parts", "pieces")  # of several states, by the strategies that cut models
REPLICATED = {"left", "right", "mean_estimate"}  # equal on all ranks by construction
CHUNKED = {"server_residual"}  # rank r holds part r of the flattened parameter: an addition to the mean of `residual`

Slots = dict[str, dict[str, Tensor]]
_Layout = tuple[Sequence[int], torch.dtype]


def local_state(memory: Memory, step: int, world_size: int) -> dict[str, Any]:
    """Return a copy of this rank's state."""
    state = _header("local", step, world_size)
    for slot, name, tensor in memory.items():
        state.setdefault(slot, {})[name] = tensor.detach().clone()
    return state


def gather_state(memory: Memory, step: int, group: Group, exact: bool) -> dict[str, Any]:
    """Return the state of all ranks, on the first one, with its tensors on the CPU."""
    first = group.rank == 0
    state = _header("stacked" if exact else "mean", step, group.size)
    # Otherwise the messages below would pair up different parameters, or wait forever.
    comm.agree("the parameters of the compression state", [(slot, name) for slot, name, _ in memory.items()], group)
    folded: Slots = {}
    # Tensor by tensor, and between hosts where they can: the state of many ranks is larger than a device.
    for slot, name, tensor in memory.items():
        if slot in REPLICATED:
            value = tensor.detach().to("cpu", copy=True) if first else tensor
        elif exact or slot in CHUNKED:
            rows = [row for row in _gather_on_host(tensor, group) if row is not None]
            value = torch.stack(rows) if first else tensor
        else:
            value = tensor.detach().to(group.host_device, copy=True)
            value = comm.all_reduce_(value, group, between_hosts=group.host_device == "cpu").div_(group.size).cpu()
        target = folded if slot in CHUNKED and not exact else state
        if first:
            target.setdefault(slot, {})[name] = value
    # Without residuals, as in `ef21`, what the parts hold belongs to nobody once there are other ranks.
    _fold_chunks(state, folded if "residual" in state else {})
    return state if first else {}


def gather_states(state: Mapping[str, Any], group: Group) -> list[dict[str, Any]]:
    """Gather a state, or an empty dict, per rank of `group` on the first, tensors on the CPU; the others get nothing.

    Tensor by tensor: pickled, they would pass through the memory of every rank's device, and of all ranks at once.
    """
    tensors = {
        (slot, name): tensor
        for slot, named in state.items()
        if isinstance(named, Mapping)
        for name, tensor in named.items()
    }
    others = {key: value for key, value in state.items() if not isinstance(value, Mapping)}
    layouts = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    everyone = comm.all_gather_object((others, layouts), group)
    gathered: list[dict[str, Any]] = [dict(found) for found, _ in everyone] if group.rank == 0 else []
    for slot, name in sorted(set().union(*(found for _, found in everyone))):
        # A rank may be without this tensor: that of another stage of a pipeline.
        key = (slot, name)
        rows = _gather_on_host(tensors.get(key), group, [found.get(key) for _, found in everyone])
        for found, row in zip(gathered, rows):
            if row is not None:
                found.setdefault(slot, {})[name] = row
    return gathered


def _gather_on_host(
    tensor: Optional[Tensor], group: Group, layouts: Optional[Sequence[Optional[_Layout]]] = None
) -> list[Optional[Tensor]]:
    """Gather one tensor per rank on the CPU of the first, by position; the others get nothing.

    On a device it takes no memory where hosts can exchange messages, and that of one more tensor elsewhere.

    Args:
        tensor: This rank's, on any device; None if it has none.
        group: The group.
        layouts: Shape and dtype of each rank's, None for ranks without one; where they are not all alike.
    """
    is_host = group.host_device == "cpu"
    mine = None if tensor is None else tensor.detach().contiguous()
    if group.rank > 0:
        if mine is not None:
            comm.isend(mine.to(group.host_device), group, 0, between_hosts=is_host).wait()
        return []
    if layouts is None:
        assert mine is not None
        layouts = [(mine.shape, mine.dtype)] * group.size
    gathered = [None if mine is None else mine.to("cpu", copy=True)]
    # One after the other: the first rank holds what it keeps, and what it receives.
    for source in range(1, group.size):
        layout = layouts[source]
        if layout is None:
            gathered.append(None)
            continue
        received = torch.empty(tuple(layout[0]), dtype=layout[1], device=group.host_device)
        gathered.append(comm.irecv(received, group, source, between_hosts=is_host).wait().cpu())
    return gathered


def values_for(state: Mapping[str, Any], group: Group, wanted: Optional[frozenset[str]] = None) -> Slots:
    """Return the slots that this rank of `group` continues with.

    Args:
        wanted: The slots that the reducer uses, which may be another one than the one that saved them; None for all.

    Raises:
        ValueError: If `state` was not made by this module, or is damaged.
    """
    _check(state)
    if state["layout"] in COMBINED:
        _warn(f"The compression state belongs to a sharded or split model (`{state['layout']}`)", group)
        return {}
    slots: Slots = {slot: dict(named) for slot, named in state.items() if isinstance(named, Mapping)}
    same = state["world_size"] == group.size
    if state["layout"] == "local" and not same:
        raise ValueError(
            f"The number of ranks must be {state['world_size']}, as when this compression state was saved; got"
            f" {group.size}. A state of `gather_state()` loads with any number of ranks"
        )
    stacked = state["layout"] == "stacked"
    unused = set() if wanted is None else slots.keys() - wanted
    # A part belongs to the rank that owns it: among other ranks, or in a compressor without parts, it has no owner and
    # is added to the residuals instead.
    folds = wanted is not None and "residual" in wanted
    chunks: Slots = {}
    for slot in slots.keys() & CHUNKED:
        if stacked and (not same or (slot in unused and folds)):
            chunks[slot] = slots[slot]
    for slot in slots.keys() - REPLICATED - chunks.keys() if stacked else ():
        slots[slot] = {name: rows[group.rank] if same else rows.mean(0) for name, rows in slots[slot].items()}
    for slot in chunks.keys() | unused:
        del slots[slot]
    _fold_chunks(slots, chunks if "residual" in slots else {})
    lost = unused - REPLICATED - chunks.keys()
    if lost:
        listed = ", ".join(f"`{slot}`" for slot in sorted(lost))
        _warn(f"The compression state holds {listed}, which this compressor does not use", group)
    return slots


def _warn(what: str, group: Group) -> None:
    if group.rank == 0:
        warnings.warn(f"{what}. Gradients that were not sent yet are lost.", stacklevel=2)


def _check(state: Mapping[str, Any]) -> None:
    if isinstance(state, Mapping) and state.get("layout") in COMBINED:
        return
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, Mapping) else state
        raise ValueError(f"The compression state must have version {VERSION}; got {found!r}")
    missing = {"layout", "step", "world_size"} - state.keys()
    if missing or state["layout"] not in LAYOUTS:
        raise ValueError(
            f"The compression state must have `step`, `world_size`, and a `layout` of {', '.join(LAYOUTS)}; got the "
            f"layout {state.get('layout')!r} and the keys {sorted(map(str, state))}"
        )
    for slot, named in state.items():
        for name, tensor in named.items() if isinstance(named, Mapping) else ():
            # Error feedback would add it to every later gradient: no step would ever be applied again.
            if not tensor.isfinite().all():
                raise ValueError(f"`{slot}` of `{name}` in the compression state must be finite; got NaN or infinity")
            ranks = len(tensor) if tensor.dim() else 0
            if state["layout"] == "stacked" and slot not in REPLICATED and ranks != state["world_size"]:
                raise ValueError(
                    f"`{slot}` of `{name}` in the compression state must hold a row for each of the "
                    f"{state['world_size']} ranks; got {ranks}"
                )


def _fold_chunks(slots: dict[str, Any], chunks: Slots) -> None:
    """Add each parameter's `chunks`, (ranks, chunk), to its residual."""
    for named in chunks.values():
        for name, parts in named.items():
            residual = slots["residual"][name]
            slots["residual"][name] = residual + parts.flatten()[: residual.numel()].view_as(residual)


def _header(layout: str, step: int, world_size: int) -> dict[str, Any]:
    return {"version": VERSION, "layout": layout, "step": step, "world_size": world_size}
