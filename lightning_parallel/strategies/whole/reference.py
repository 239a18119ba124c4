"""Run a step on the full model while the model is sharded or split: the reference of the self-check.

No rank holds the full model. The first rank of a replica runs the user's step on the undivided module. It fetches
parameters from their owners when the step reads them, and sends gradients to their owners as they appear. The other
ranks serve. If all ranks ran the step, they would share the cores of a host, and the self-check would take 1.5 times as
long.

    first rank                                      the other ranks
    the step asks for `layers.3.weight`
      ("send", names of its chunk)   ----------->   send their shards
      merges them, goes on
    backward: 32 MiB of gradients are there
      ("take", their names)          ----------->   receive their shards of them
    ("end", the results)             ----------->   return them

Before each transfer, all ranks report whether they are ready: an error on one rank raises on all ranks.

A model up to an eighth of the free memory is fetched once and stays there. Of a larger model autograd keeps no
parameter: a view of a parameter is saved by name, and fetched again in backward. Its gradients and activations wait in
a temporary file: the reference needs no more memory than the step itself.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel import comm
from lightning_parallel.checkpoint import Inventory
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat.torch import mark_as_parameter, version_of
from lightning_parallel.planner.hardware import free_memory
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.strategies.whole.pinned import ReferenceRunError, RefusedCalls, communication_refused, doubled
from lightning_parallel.strategies.whole.skeleton import Skeleton
from lightning_parallel.tensor.sharding import REPLICATED

__all__ = ["Blame", "Fetched", "Owners", "WholeModel", "return_free_memory", "run_reference"]

Blame = Literal["", "user", "check", "unknown"]
"""Whose fault a failed run on the full model is: the step communicates by itself, or the self-check has failed."""

_CHUNK_BYTES = 32 << 20
"""Parameters that travel together, so that a small model needs few messages."""

_CACHE_BYTES = 256 << 20
"""A model up to this size is fetched once, and stays in memory with its gradients and activations."""

_CACHE_SHARE = 1 / 8
"""A model up to this share of the free memory, too: with gradients and activations it takes a few times its size."""

_ROOM_BYTES = 64 << 20
"""Full parameters of a larger model that are kept after use: backward begins with the last ones."""

_SPOOLED_BYTES = 1 << 20
"""Tensors from this size on wait in a file, if the model is larger than the cache."""

_KEPT_FREE_BYTES = 128 << 20
"""Bytes of messages after which free memory of the process goes back to the system."""

_LEAF_BYTES = 64 << 20
"""Models up to this size have their gradients in `.grad`, as in one process."""

# Stages use the tags 1 and 2, the measurement of links 900, tied parameters 1000 and more.
_TAG = 950


# ------------------------------------------------------------------------------------------------- spooled tensors


class _SpoolPlace(NamedTuple):
    """The place of a tensor in the file, and its properties."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spool:
    """Holds tensors in a temporary file, which is deleted with the last reference to this object.

    The file is read and written, not mapped: a mapped file would count as memory of the process. If the disk is full,
    tensors stay in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with this object
        self._end = 0

    def put(self, tensor: Tensor) -> _SpoolPlace | Tensor:
        """Return a handle for `get`: a place in the file, or the tensor itself."""
        is_plain = (
            type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain or tensor.nbytes < _SPOOLED_BYTES:
            return tensor
        # Only plain strided tensors reach this line, so their bytes are their values.
        data = _bytes_of(tensor.detach().cpu().contiguous())
        place = _SpoolPlace(self._end, tensor.shape, tensor.dtype, tensor.device)
        try:
            self._file.seek(place.offset)
            # An unbuffered write may write fewer bytes than it was given.
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            return tensor
        self._end += tensor.nbytes
        return place

    def get(self, held: _SpoolPlace | Tensor) -> Tensor:
        """Return a tensor on its device.

        Raises:
            OSError: If the file cannot be read.
        """
        if isinstance(held, Tensor):
            return held
        tensor = torch.empty(held.shape, dtype=held.dtype)
        data = _bytes_of(tensor)
        self._file.seek(held.offset)
        while data:
            count = self._file.readinto(data)
            if not count:
                raise OSError("The temporary file of the self-check is truncated")
            data = data[count:]
        return tensor.to(held.device)


def return_free_memory(device: torch.device) -> None:
    """Return free memory of this process to the system, if tensors of `device` are in it; glibc alone can do it."""
    # glibc keeps freed blocks of up to 32 MiB in its heap, where blocks of other sizes leave holes. A reference run
    # fetches and frees the full model piece by piece, and would end with half of the model in such holes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if device.type == "cpu" and os.name == "posix" else None
    if trim is not None:
        trim(0)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class SpooledTensors(MutableMapping[str, Tensor]):
    """Tensors by name, in a `Spool`; each access reads one tensor."""

    def __init__(self) -> None:
        self._spool = Spool()
        self._held: dict[str, _SpoolPlace | Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.get(self._held[name])

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        held = self._spool.put(tensor)
        # A small tensor may be a view of a large message, which it would keep in memory.
        self._held[name] = held.clone() if isinstance(held, Tensor) else held

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


# ------------------------------------------------------------------------------------------------- owners


_OWN_REFERENCES = 2
"""References to a tensor that only a dict holds, as an argument of `sys.getrefcount`."""


def _cache_bytes(groups: MeshGroups, device: torch.device) -> int:
    """Return the largest model that the first rank may keep in memory; all ranks of the replica call this."""
    # Gradients wait in the memory of the host. Other replicas may share it, and start at the same time.
    free = min(free_memory(place) for place in (device, torch.device("cpu")))
    replicas = groups.world.size // groups.replica.size
    mine = max(_CACHE_BYTES, int(free * _CACHE_SHARE / replicas))
    return min(comm.all_gather_object(mine, groups.model))


class Owners:
    """Exchanges tensors of the full model between their owners and the first rank of the replica.

    Args:
        module: The divided module.
        inventory: The tensors of the full model.
        groups: The mesh's groups.
        device: The device of messages.

    Attributes:
        replica: The ranks that hold the model together.
        taken: The gradients of this rank's shards, by name.
        values: The new values of this rank's shards of buffers and parameters that the step wrote into, by name.
        is_talking: Whether the first rank is sending or receiving. The user's code must not communicate by itself.
        cache_bytes: The largest model that stays in memory, the same on all ranks of the replica.
        failure: Why the ranks could not exchange tensors. It is kept because the user's code may catch the error.
    """

    def __init__(self, module: nn.Module, inventory: Inventory, groups: MeshGroups, device: torch.device) -> None:
        self.inventory = inventory
        self.replica = groups.model
        self.device = device
        self.rules = inventory.rules
        self.taken: MutableMapping[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.is_talking = False
        self.failure = ""
        self._moved_bytes = 0
        self.cache_bytes = _cache_bytes(groups, device)
        self._width = groups.tensor_parallel.size
        self.parameters = dict(module.named_parameters())
        buffers = {n: b for n, b in module.named_buffers() if not isinstance(b, PlaceholderTensor)}
        self.held: dict[str, Tensor] = {**self.parameters, **buffers}
        own = {name: held for name, held in inventory.tensors.items() if not held.is_alias}
        self.buffer_names = [name for name, held in own.items() if held.is_buffer]
        self.parameter_names = [name for name, held in own.items() if not held.is_buffer]

    def is_large(self) -> bool:
        """Tell whether the parameters of the full model are too large to stay in memory."""
        return self.inventory.total_bytes > self.cache_bytes

    def requires_grad(self, name: str) -> bool:
        """Tell whether a parameter is trained now; `toggle_optimizer` changes it within a step."""
        mine = self.parameters.get(name)
        return self.inventory.tensors[name].trains if mine is None else mine.requires_grad

    def _ranks_of(self, stages: Iterable[int]) -> list[int]:
        """Return the positions in the replica of all tensor-parallel ranks of stages."""
        return [stage * self._width + rank for stage in stages for rank in range(self._width)]

    def _holders(self, name: str) -> list[int]:
        """Return the positions in the replica of the ranks that hold a tensor or a shard of it."""
        return self._ranks_of(self.inventory.tensors[name].stages)

    def _sources(self, name: str) -> list[int]:
        """Return the positions of the ranks whose shards make the full tensor."""
        ranks = self._ranks_of(self.inventory.tensors[name].stages[:1])
        return ranks if name in self.rules else ranks[:1]

    def _part(self, name: str, full: Tensor, position: int) -> Tensor:
        """Return the part of a rank; all of a tensor that the step has made in another shape."""
        rule = self.rules.get(name, REPLICATED) if full.shape == self.inventory.full_shape(name) else REPLICATED
        return rule.split(full, position % self._width)

    # ------------------------------------------------------------------------------------------ on the first rank

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return full tensors, as copies; only on the first rank, while the other ranks `serve`."""
        with self._talking():
            self._tell("send", list(names))
            parts = self._exchange(
                lambda: ({}, {position: self._forms(names, position) for position in range(1, self.replica.size)})
            )
            # Shards are merged into new memory, but a full tensor of this rank would be the parameter itself.
            own = {name: self.held[name].detach() for name in names if 0 in self._sources(name)}
            parts[0] = {name: tensor if name in self.rules else tensor.clone() for name, tensor in own.items()}
            full = {}
            for name in names:
                in_order = [parts[position][name] for position in self._sources(name)]
                merged = self.rules.get(name, REPLICATED).merge(in_order)
                # Each tensor gets its own memory; a message with one tensor has it already.
                is_alone = merged.untyped_storage().nbytes() == merged.nbytes
                full[name] = merged if is_alone else merged.clone()
        del parts, own
        self._count(full.values())
        return full

    def _forms(self, names: Sequence[str], position: int) -> dict[str, Tensor]:
        """Return the forms of the parts that a rank sends."""
        forms = {}
        for name in names:
            if position in self._sources(name):
                # By the shape: to split a tensor without data takes longer than the message of a small tensor.
                rule, full_shape = self.rules.get(name, REPLICATED), self.inventory.full_shape(name)
                shape = rule.local_shape(full_shape, position % self._width)
                forms[name] = _form(shape, self.inventory.tensors[name].dtype)
        return forms

    def give_back(self, tensors: Mapping[str, Tensor], are_values: bool = False) -> None:
        """Send the shards of full tensors to their owners; only on the first rank.

        Args:
            tensors: Gradients, which are added to earlier gradients, or new values.
            are_values: Whether the tensors are new values of buffers and parameters.
        """
        known = {name: value for name, value in tensors.items() if name in self.inventory.tensors}
        with self._talking():
            self._tell("take", ({name: _form(value.shape, value.dtype) for name, value in known.items()}, are_values))
            self._exchange(
                lambda: ({position: self._parts_of(known, position) for position in range(1, self.replica.size)}, {})
            )
            self._add(self._parts_of(known, 0), are_values)
        self._count(known.values())

    def _count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were sent or fetched, and return free memory from time to time."""
        self._moved_bytes += sum(tensor.nbytes for tensor in tensors) if self.is_large() else 0
        if self._moved_bytes > _KEPT_FREE_BYTES:
            self._moved_bytes = 0
            return_free_memory(self.device)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        self.is_talking = True
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            raise
        finally:
            self.is_talking = False

    def _agree(self, prepare: Callable[[], None]) -> None:
        """Prepare the next transfer on every rank; raise on all ranks if one rank cannot."""
        # After this point each rank only sends or receives, so that no rank waits for a failed one.
        error: Exception | None = None
        try:
            if self.failure:
                raise RuntimeError(self.failure)
            prepare()
        except Exception as failure:
            error = failure
        comm.raise_together(error, self.replica)

    def _exchange(self, prepare: Callable[[], tuple[_Parts, _Parts]]) -> _Parts:
        """Send and receive tensors, in one message for each rank and dtype.

        Args:
            prepare: Returns the tensors to send, and the forms of the tensors to receive.
        """
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, dict[str, Tensor], Tensor]] = []

        def allocate() -> None:
            sent, expected = prepare()
            for position, parts in _by_dtype(sent):
                outgoing.append((position, _joined(list(parts.values())).to(self.device)))
            for position, forms in _by_dtype(expected):
                dtype = next(iter(forms.values())).dtype
                size = sum(form.numel() for form in forms.values())
                incoming.append((position, forms, torch.empty(size, dtype=dtype, device=self.device)))

        self._agree(allocate)
        # All receives start before the first wait, so that owners can send at the same time.
        works = [comm.irecv(flat, self.replica, position, _TAG) for position, _, flat in incoming if len(flat)]
        for position, flat in outgoing:
            if len(flat):
                comm.isend(flat, self.replica, position, _TAG).wait()
        for work in works:
            work.wait()
        found: _Parts = {}
        for position, forms, flat in incoming:
            pieces = flat.split([form.numel() for form in forms.values()])
            named = zip(forms.items(), pieces)
            found.setdefault(position, {}).update({name: piece.view(form.shape) for (name, form), piece in named})
        return found

    def _parts_of(self, full: Mapping[str, Tensor], position: int) -> dict[str, Tensor]:
        """Return the parts of full tensors, or of their forms, that a rank holds."""
        return {n: self._part(n, value, position) for n, value in full.items() if position in self._holders(n)}

    def end(self, result: Any) -> str:
        """Let the other ranks return from `serve` with `result`; returns why one of them could not serve."""
        self._tell("end", result)
        return self._last_failure()

    def _last_failure(self) -> str:
        return next(filter(None, comm.all_gather_object(self.failure, self.replica)), "")

    def _tell(self, command: str, argument: Any) -> None:
        comm.broadcast_object((command, argument), self.replica)

    # ------------------------------------------------------------------------------------------- on the other ranks

    def serve(self) -> tuple[Any, str]:
        """Execute the commands of the first rank until it ends; return its result, and why a rank could not serve."""
        nothing: tuple[str, Any] = ("", None)
        while True:
            command, argument = comm.broadcast_object(nothing, self.replica)
            if command == "end":
                return argument, self._last_failure()
            try:
                if command == "send":
                    self._send(argument)
                else:
                    self._take(*argument)
            except Exception as error:
                # The first rank learns of the error with its next command. It has its tensors now, or has raised, too.
                self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _send(self, names: Sequence[str]) -> None:
        rank = self.replica.rank
        self._exchange(lambda: ({0: {n: self.held[n].detach() for n in names if rank in self._sources(n)}}, {}))

    def _take(self, forms: Mapping[str, Tensor], are_values: bool) -> None:
        found = self._exchange(lambda: ({}, {0: self._parts_of(forms, self.replica.rank)}))
        self._add(found.get(0, {}), are_values)

    def _add(self, parts: Mapping[str, Tensor], are_values: bool) -> None:
        for name, part in parts.items():
            # In the host's memory: the device has to hold the gradients of the divided step beside the parameters.
            part = part.cpu()
            if are_values:
                self.values[name] = part
            else:
                known = self.taken.get(name)
                self.taken[name] = part if known is None else known + part


_Parts = dict[int, dict[str, Tensor]]
"""Parts of tensors, by the position of the other rank and by name; or their forms, which are on the meta device."""


def _form(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _by_dtype(parts: _Parts) -> Iterator[tuple[int, dict[str, Tensor]]]:
    for position, named in parts.items():
        # In the order of the names on both ranks: messages with one tag match by their order.
        for dtype in dict.fromkeys(part.dtype for part in named.values()):
            yield position, {name: part for name, part in named.items() if part.dtype == dtype}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of tensors of one dtype in one tensor; a single tensor is not copied if possible."""
    # The gradient of a sum is one number, expanded.
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


# ----------------------------------------------------------------------------------------------- the whole model


class _Saved(NamedTuple):
    """A view of a parameter that autograd saves."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class WholeModel:
    """Gives the parameters of the full model to the first rank: fetches a parameter for a read, and frees it later.

    A parameter is one tensor for the whole run: code compares parameters by identity, and asks for gradients by them.

    Args:
        owners: Exchanges tensors with their owners.
        double: Whether floating-point parameters are converted to double precision.
        keeps: Whether all parameters and gradients are kept: a step with manual optimization may read and change them.

    Attributes:
        precisions: The precisions in which the step has computed, as far as autograd saw them.
    """

    def __init__(self, owners: Owners, double: bool, keeps: bool = False) -> None:
        self._owners = owners
        self._double = double
        self._chunk_of: dict[str, list[str]] = {}
        self._data: OrderedDict[str, Tensor] = OrderedDict()
        self._num_bytes = 0
        self._names: dict[int, str] = {}
        self._given: dict[tuple[str, bool], Tensor] = {}
        self._empty: set[tuple[str, bool]] = set()
        self._gradients: dict[str, Tensor] = {}
        self._gradient_bytes = 0
        # An input of `Fetched` that requires a gradient: without it, autograd would record no node.
        self._anchor = torch.empty(0, device=owners.device, requires_grad=True)
        is_large = owners.is_large()
        self._room_bytes = _ROOM_BYTES if is_large else owners.cache_bytes
        self._activations = Spool() if is_large else None
        self._by_id: dict[int, str] = {}
        self.precisions: set[torch.dtype] = set()
        chunk: list[str] = []
        size = total = 0
        for name in owners.parameter_names:
            num_bytes = owners.inventory.full_shape(name).numel() * owners.inventory.tensors[name].dtype.itemsize
            if chunk and size + num_bytes > _CHUNK_BYTES:
                chunk, size = [], 0
            chunk.append(name)
            size += num_bytes
            total += num_bytes
            self._chunk_of[name] = chunk
        self._has_leaves = keeps or total <= min(_LEAF_BYTES, owners.cache_bytes)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter; where gradients are enabled, its gradient will go to its owners."""
        trains = self._has_leaves or (torch.is_grad_enabled() and self._owners.requires_grad(name))
        key = (name, trains)
        known = self._given.get(key)
        if known is not None:
            if key in self._empty:
                known.data = self._full(name)
                self._empty.remove(key)
            return known
        data = self._full(name)
        with torch.inference_mode(False), torch.set_grad_enabled(trains and not self._has_leaves):
            if self._has_leaves:
                given = data.detach().requires_grad_(self._owners.requires_grad(name))
            elif trains:
                given = Fetched.apply(self._anchor, lambda gradient: self._keep(name, gradient), data)
            else:
                given = data.view_as(data)
        mark_as_parameter(given, True)
        self._given[key] = given
        return given

    def whole(self, parameter: Tensor) -> Tensor:
        """Return the full parameter for this rank's shard; another tensor unchanged."""
        if not self._by_id:
            self._by_id = {id(value): name for name, value in self._owners.parameters.items()}
        name = self._by_id.get(id(parameter))
        return parameter if name is None else self.parameter(name)

    def train_as_owned(self) -> None:
        """Set `requires_grad` of full parameters as of this rank's shards, after an optimizer was toggled."""
        for (name, _), given in self._given.items():
            if self._has_leaves and name in self._owners.parameters:
                given.requires_grad_(self._owners.parameters[name].requires_grad)

    def _full(self, name: str) -> Tensor:
        if name not in self._data:
            with torch.no_grad(), torch.inference_mode(False):
                fetched = self._owners.fetch(self._chunk_of[name])
            for other in [other for other in fetched if other not in self._data]:
                # `.data` starts a version counter at zero, so a later version means that the step wrote into it.
                full = self._data[other] = (doubled(fetched[other]) if self._double else fetched[other]).data
                # By the memory: autograd saves views of a parameter, such as its transpose.
                self._names[full.untyped_storage().data_ptr()] = other
                self._num_bytes += full.nbytes
            self._make_room(set(fetched))
        self._data.move_to_end(name)
        return self._data[name]

    def _make_room(self, kept: set[str]) -> None:
        if self._has_leaves:
            return
        for name in list(self._data):
            if self._num_bytes <= self._room_bytes:
                return
            # Keep a parameter that the step has changed, such as in a target network: the owners have the old value.
            if name not in kept and version_of(self._data[name]) == 0 and self._let_go(name):
                full = self._data.pop(name)
                self._num_bytes -= full.nbytes
                del self._names[full.untyped_storage().data_ptr()]

    def _let_go(self, name: str) -> bool:
        """Free the data of the tensors that were given for a parameter, unless other code holds one of them."""
        keys = [key for key in ((name, True), (name, False)) if key in self._given]
        # The dict and the argument hold the tensor; more references come from the step or from autograd.
        if any(sys.getrefcount(self._given[key]) > _OWN_REFERENCES or version_of(self._given[key]) for key in keys):
            return False
        for key in keys:
            # The object keeps its place in autograd's graph. One expanded element has the shape but takes no memory.
            given = self._given[key]
            given.data = given.new_empty(()).expand(given.shape)
        self._empty.update(keys)
        return True

    def written(self) -> dict[str, Tensor]:
        """Return the parameters that the step has changed."""
        found = {}
        for key, given in self._given.items():
            data = self._data.get(key[0])
            # An empty tensor was not written, see `_let_go`. Its data may be here again, for backward alone.
            if data is None or key in self._empty:
                continue
            if version_of(data) or given.data_ptr() != data.data_ptr():
                found[key[0]] = given.detach()
        return found

    def close(self) -> None:
        """Free all tensors: reference cycles would keep them until the next garbage collection."""
        self._given.clear()
        self._data.clear()
        self._gradients.clear()

    @contextmanager
    def saving_by_name(self) -> Iterator[None]:
        """Let autograd save views of parameters by name inside the block."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.is_floating_point():
            self.precisions.add(tensor.dtype)
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            name = self._names.get(tensor.untyped_storage().data_ptr())
            # `view(dtype)` shares the memory, but `as_strided` of the parameter could not make such a view again.
            if name is not None and self._data[name].dtype == tensor.dtype:
                return _Saved(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        # Detach it: a node that saves its own output with history would keep itself alive in a reference cycle.
        saved = tensor.detach() if type(tensor) is Tensor else tensor
        return saved if self._activations is None else self._activations.put(saved)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _SpoolPlace):
            assert self._activations is not None
            return self._activations.get(saved)
        if not isinstance(saved, _Saved):
            return saved
        return self._full(saved.name).as_strided(saved.size, saved.stride, saved.offset)

    # ----------------------------------------------------------------------------------------------- gradients

    def _keep(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.detach()
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        known = self._gradients.get(name)
        # Add out of place: autograd may pass one gradient tensor to two parameters.
        self._gradients[name] = gradient if known is None else known + gradient
        self._gradient_bytes += 0 if known is not None else gradient.numel() * gradient.element_size()
        # Send gradients during backward, so that the first rank never holds the gradients of the full model.
        if self._gradient_bytes > _CHUNK_BYTES:
            self.deliver()

    @torch.no_grad()
    def deliver(self, is_last: bool = False) -> None:
        """Send the gradients so far to their owners; at the end also the gradients in `.grad`."""
        if is_last and self._has_leaves:
            for (name, _), given in self._given.items():
                if given.grad is not None:
                    self._gradients[name] = given.grad.to_dense() if given.grad.is_sparse else given.grad
        gradients, self._gradients, self._gradient_bytes = self._gradients, {}, 0
        if gradients:
            self._owners.give_back(gradients)


class Fetched(Function):
    """Put a fetched parameter into the graph, and pass on its gradient."""

    # The parameter is an output of this function, not a leaf: the graph would hold a leaf until its gradient exists.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, keep: Callable[[Tensor], None], data: Tensor) -> Tensor:
        ctx.keep = keep
        return data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.keep(gradient)
        return None, None, None


# ----------------------------------------------------------------------------------------------------- the run


@dataclass
class Reference:
    """The results of the reference, on every rank.

    Attributes:
        result: The small values that `run` returned, which travel by pickle.
        failure: Why there is no result.
        blame: Whose fault the failure is.
        precisions: The precisions of the run.
        gradients: The gradients of this rank's shards.
        values: This rank's shards of buffers and parameters that the step wrote into.
    """

    result: Any
    failure: str
    blame: Blame
    precisions: set[torch.dtype]
    gradients: MutableMapping[str, Tensor]
    values: dict[str, Tensor]


class _Outcome(NamedTuple):
    """The last message of the first rank to the other ranks."""

    result: Any = None
    failure: str = ""
    blame: Blame = ""
    precisions: frozenset[torch.dtype] = frozenset()


def run_reference(
    skeleton: Skeleton, owners: Owners, run: Callable[[WholeModel], Any], double: bool, keeps: bool = False
) -> Reference:
    """Run `run` on the full model on the first rank of the replica; all ranks of the replica call this.

    Args:
        skeleton: The undivided module.
        owners: Exchanges tensors with their owners.
        run: Runs the step, forward and backward, and returns the values to compare.
        double: Whether floating-point parameters and buffers are in double precision.
        keeps: See `WholeModel`.
    """
    owners.taken = _store(owners)
    owners.values = {}
    owners.failure = ""
    if owners.replica.rank == 0:
        outcome = _run_alone(skeleton, owners, run, double, keeps)
        outcome = _sendable(outcome)
        failure = owners.end(outcome)
    else:
        outcome, failure = owners.serve()
    if failure and not outcome.failure:
        outcome = _Outcome(failure=failure, blame="check")
    found = Reference(
        outcome.result, outcome.failure, outcome.blame, set(outcome.precisions), owners.taken, owners.values
    )
    # The caller holds the gradients now; the next run begins with none.
    owners.taken = {}
    owners.values = {}
    return found


def _store(owners: Owners) -> MutableMapping[str, Tensor]:
    try:
        return SpooledTensors() if owners.is_large() else {}
    except OSError:  # no temporary file on this rank
        return {}


def _sendable(outcome: _Outcome) -> _Outcome:
    """Return an outcome that can be pickled: an error during the message would leave the other ranks waiting."""
    try:
        pickle.dumps(outcome)
    except Exception as error:
        return _Outcome(
            failure=f"the results of the step cannot be sent ({type(error).__name__}: {error})", blame="check"
        )
    return outcome


def _run_alone(
    skeleton: Skeleton, owners: Owners, run: Callable[[WholeModel], Any], double: bool, keeps: bool
) -> _Outcome:
    # The user's code may reach shards other than through the module. A gradient of a shard shows it after the step.
    known = {name: parameter.grad for name, parameter in owners.parameters.items()}
    # Without old gradients, any gradient of a shard after the step comes from the step itself.
    for parameter in owners.parameters.values():
        parameter.grad = None
    others = set(owners.replica.ranks) - {owners.replica.ranks[owners.replica.rank]}
    model: WholeModel | None = None
    calls = RefusedCalls()
    is_users = False
    try:
        model = WholeModel(owners, double, keeps)
        with torch.inference_mode(False):
            before = owners.fetch(owners.buffer_names)
            if double:
                before = {name: doubled(value) for name, value in before.items()}
            buffers = {name: value.clone() for name, value in before.items()}
        with (
            skeleton.put_on(model.parameter, buffers),
            model.saving_by_name(),
            communication_refused(others, lambda: owners.is_talking, calls),
            _threads_of(owners.replica.size),
        ):
            is_users = True
            result = run(model)
            is_users = False
            buffers = skeleton.buffers()
        _deliver(owners, model, {n: value for n, value in buffers.items() if not _equal(value, before[n])})
        return _Outcome(result, precisions=frozenset(model.precisions))
    except Exception as error:
        # Either the user's code fails on a few samples, or the self-check has a limit: the caller finds the cause.
        blame: Blame = "unknown" if is_users else "check"
        if owners.failure or calls.ours or isinstance(error, ReferenceRunError):
            blame = "check"
        elif is_users and calls.users:
            blame = "user"
        return _Outcome(failure=calls.users or f"{type(error).__name__}: {error}", blame=blame)
    finally:
        if model is not None:
            model.close()
        for name, gradient in known.items():
            owners.parameters[name].grad = gradient


def _deliver(owners: Owners, model: WholeModel, buffers: Mapping[str, Tensor]) -> None:
    """Send the last gradients, and changed buffers and parameters, to their owners."""
    model.deliver(is_last=True)
    strays = {name: p.grad for name, p in owners.parameters.items() if p.grad is not None}
    if any(name in owners.rules for name in strays):
        raise RuntimeError(f"the step reaches `{next(iter(strays))}` other than through its module")
    owners.give_back({name: gradient for name, gradient in strays.items() if gradient is not None})
    owners.give_back({**buffers, **model.written()}, are_values=True)


@contextmanager
def _threads_of(ranks: int) -> Iterator[None]:
    """Compute with the threads of `ranks` processes inside the block: the other ranks wait, with idle threads."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(before, min(ranks * before, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _equal(one: Tensor, two: Tensor) -> bool:
    # `torch.equal` is false for NaN, so a buffer with a NaN counts as changed and is compared with the parallel step.
    return one.shape == two.shape and torch.equal(one, two)
