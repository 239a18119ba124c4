"""Run a step on the whole model while the model is divided: the reference of the proof.

No rank holds the whole model. The first rank of a replica runs the user's step on the module as it was before it was
divided. Parameters come from their owners when the step asks for them; gradients go to their owners as they appear.

    first rank                                      the other ranks
    the step asks for `layers.3.weight`
      ("send", names of its chunk)   ----------->   send their shards
      merges them, goes on
    backward: 32 MiB of gradients are there
      ("take", their names)          ----------->   receive their shards of them
    ("end", what the step gave)      ----------->   return it

Autograd keeps no parameter: what it would save of one is saved by name, and fetched again in backward. The gradients
and activations of a large model wait in a temporary file: the reference needs no more memory than the step it checks.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat.torch import mark_as_parameter, version_of
from lightning_parallel.pipeline.placeholder import PlaceholderTensor
from lightning_parallel.strategies.pinned import UnprovableError, communication_refused, doubled
from lightning_parallel.strategies.skeleton import Skeleton
from lightning_parallel.tensor.sharding import Shard

__all__ = ["Fetched", "Owners", "WholeModel", "run_reference"]

_CHUNK_BYTES = 32 << 20
"""Parameters that travel together, so that a small model needs few messages."""

_CACHE_BYTES = 256 << 20
"""A model up to this size is fetched once, and stays in memory with its gradients and activations."""

_ROOM_BYTES = 64 << 20
"""Full parameters of a larger model that are kept after they were used: backward begins with these."""

_SPOOLED_BYTES = 1 << 20
"""Tensors from this size on wait in a file, if the model is larger than the cache."""

# Of no other message: stages use 1 and 2, the measurement of links 900, tied parameters 1000 and more.
_TAG = 950


# ------------------------------------------------------------------------------------------------- spooled tensors


class _SpoolPlace(NamedTuple):
    """Where a tensor is in the file, and what it was."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spool:
    """Holds tensors in a temporary file, which goes with the last reference to it.

    A file that is read and written piece by piece is no memory of the process, as one that is mapped would be. Where
    there is no room on the disk, tensors stay in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with this object
        self._end = 0

    def put(self, tensor: Tensor) -> _SpoolPlace | Tensor:
        """Return what `get` needs to give the tensor back: a place, or the tensor itself."""
        is_plain = (
            type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain or tensor.nbytes < _SPOOLED_BYTES:
            return tensor
        data = _bytes_of(tensor.detach().cpu().contiguous())
        place = _SpoolPlace(self._end, tensor.shape, tensor.dtype, tensor.device)
        try:
            self._file.seek(place.offset)
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
                raise OSError("the temporary file of the self-check was truncated")
            data = data[count:]
        return tensor.to(held.device)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class SpooledTensors(MutableMapping[str, Tensor]):
    """Tensors by name, in a `Spool`; each access reads one of them."""

    def __init__(self) -> None:
        self._spool = Spool()
        self._held: dict[str, _SpoolPlace | Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.get(self._held[name])

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        held = self._spool.put(tensor)
        # A small one may be a view of all that came with it.
        self._held[name] = held.clone() if isinstance(held, Tensor) else held

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


# ------------------------------------------------------------------------------------------------- owners


class _Facts(NamedTuple):
    """What a rank holds of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Owners:
    """Where the tensors of the whole model are, and the messages that bring them to the first rank and back.

    Every rank of the replica constructs it at the same point.

    Args:
        module: The divided module.
        rules: How its tensors are sharded over the tensor axis, by name.
        groups: The mesh's groups.
        device: Where messages are.

    Attributes:
        replica: The ranks that hold the model together.
        taken: On every rank, what came back for each tensor that it holds: sums of gradients.
        is_talking: Whether the first rank is sending or receiving, which its user's code may not.
    """

    def __init__(self, module: nn.Module, rules: Mapping[str, Shard], groups: MeshGroups, device: torch.device) -> None:
        self.replica = groups.replica
        self.device = device
        self.rules = rules
        self.taken: MutableMapping[str, Tensor] = {}
        self.is_talking = False
        self._width = groups.tensor_parallel.size
        self.parameters = dict(module.named_parameters())
        buffers = {n: b for n, b in module.named_buffers() if not isinstance(b, PlaceholderTensor)}
        self.held: dict[str, Tensor] = {**self.parameters, **buffers}
        mine = {name: _Facts(tuple(t.shape), t.dtype, t.requires_grad) for name, t in self.held.items()}
        self._facts: dict[str, _Facts] = {}
        self._holders: dict[str, list[int]] = {}
        everyone = comm.all_gather_object((mine, list(buffers)), self.replica)
        for position, (theirs, _) in enumerate(everyone):
            for name, facts in theirs.items():
                self._facts.setdefault(name, facts)
                self._holders.setdefault(name, []).append(position)
        self.buffer_names = list(dict.fromkeys(name for _, names in everyone for name in names))
        self.parameter_names = [name for name in self._facts if name not in set(self.buffer_names)]

    def is_large(self) -> bool:
        """Tell whether the parameters of the whole model are more than may stay in memory."""
        sizes = (self.shape(name).numel() * self._facts[name].dtype.itemsize for name in self.parameter_names)
        return sum(sizes) > _CACHE_BYTES

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the full tensor."""
        rule = self.rules.get(name)
        shape = self._facts[name].shape
        return torch.Size(shape) if rule is None else rule.full_shape(shape)

    def facts(self, name: str) -> _Facts:
        """Return what the first of its holders holds."""
        return self._facts[name]

    def requires_grad(self, name: str) -> bool:
        """Tell whether a parameter is trained now; `toggle_optimizer` changes it within a step."""
        mine = self.parameters.get(name)
        return self._facts[name].requires_grad if mine is None else mine.requires_grad

    def _sources(self, name: str) -> list[int]:
        """Return the positions of the ranks whose shards make the full tensor."""
        first = self._holders[name][0]
        if name not in self.rules:
            return [first]
        stage = first // self._width
        return [stage * self._width + rank for rank in range(self._width)]

    def _part_shape(self, name: str, position: int) -> torch.Size:
        rule = self.rules.get(name)
        shape = self.shape(name)
        return shape if rule is None else rule.local_shape(shape, position % self._width)

    # ------------------------------------------------------------------------------------------ on the first rank

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return full tensors, as copies; only on the first rank, while the others `serve`."""
        with self._talking():
            return self._fetch(names)

    def _fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        self._tell("send", list(names))
        parts: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        pending = []
        for position in range(1, self.replica.size):
            theirs = [name for name in names if position in self._sources(name)]
            for dtype, of_dtype in self._by_dtype(theirs).items():
                shapes = [self._part_shape(name, position) for name in of_dtype]
                flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=self.device)
                work = comm.irecv(flat, self.replica, position, _TAG) if len(flat) else None
                pending.append((work, flat, position, of_dtype, shapes))
        for work, flat, position, of_dtype, shapes in pending:
            if work is not None:
                work.wait()
            for name, shape, piece in zip(of_dtype, shapes, flat.split([shape.numel() for shape in shapes])):
                parts[name][position] = piece.view(shape)
        full = {}
        for name in names:
            if 0 in self._sources(name):
                parts[name][0] = self.held[name].detach()
            rule = self.rules.get(name)
            in_order = [parts[name][position] for position in sorted(parts[name])]
            if rule is not None:
                full[name] = rule.merge(in_order)
            else:
                # Each with memory of its own: what was received alone has it.
                part = in_order[0]
                is_alone = 0 not in parts[name] and part.untyped_storage().nbytes() == part.nbytes
                full[name] = part if is_alone else part.clone()
        return full

    def give_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Add parts of full tensors to what their owners have taken; only on the first rank."""
        with self._talking():
            self._give_back(tensors)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        self.is_talking = True
        try:
            yield
        finally:
            self.is_talking = False

    def _give_back(self, tensors: Mapping[str, Tensor]) -> None:
        names = [name for name in tensors if name in self._holders]
        self._tell("take", [(name, tensors[name].dtype) for name in names])
        for position in range(1, self.replica.size):
            theirs = [name for name in names if position in self._holders[name]]
            kinds: dict[torch.dtype, list[str]] = {}
            for name in theirs:
                kinds.setdefault(tensors[name].dtype, []).append(name)
            for of_dtype in kinds.values():
                flat = _joined([self._part(name, tensors[name], position) for name in of_dtype])
                if len(flat):
                    comm.isend(flat.to(self.device), self.replica, position, _TAG).wait()
        for name in names:
            if 0 in self._holders[name]:
                part = self._part(name, tensors[name], 0)
                # A view would keep all of the full tensor.
                self._add(name, part.clone() if name in self.rules else part)

    def end(self, result: Any) -> None:
        """Let the other ranks return from `serve` with `result`."""
        self._tell("end", result)

    def _tell(self, command: str, argument: Any) -> None:
        comm.broadcast_object((command, argument), self.replica)

    def _part(self, name: str, full: Tensor, position: int) -> Tensor:
        rule = self.rules.get(name)
        return full if rule is None else rule.split(full, position % self._width)

    # ------------------------------------------------------------------------------------------- on the other ranks

    def serve(self) -> Any:
        """Do what the first rank asks for, until it ends; returns its result."""
        nothing: tuple[str, Any] = ("", None)
        while True:
            command, argument = comm.broadcast_object(nothing, self.replica)
            if command == "send":
                self._send(argument)
            elif command == "take":
                self._take(argument)
            else:
                return argument

    def _send(self, names: Sequence[str]) -> None:
        mine = [name for name in names if self.replica.rank in self._sources(name)]
        for of_dtype in self._by_dtype(mine).values():
            flat = _joined([self.held[name].detach() for name in of_dtype]).to(self.device)
            if len(flat):
                comm.isend(flat, self.replica, 0, _TAG).wait()

    def _take(self, entries: Sequence[tuple[str, torch.dtype]]) -> None:
        position = self.replica.rank
        kinds: dict[torch.dtype, list[str]] = {}
        for name, dtype in entries:
            if position in self._holders[name]:
                kinds.setdefault(dtype, []).append(name)
        for dtype, names in kinds.items():
            shapes = [self._part_shape(name, position) for name in names]
            flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=self.device)
            if len(flat):
                comm.irecv(flat, self.replica, 0, _TAG).wait()
            for name, shape, piece in zip(names, shapes, flat.split([shape.numel() for shape in shapes])):
                self._add(name, piece.view(shape))

    def _add(self, name: str, part: Tensor) -> None:
        known = self.taken.get(name)
        # Not on the device, which has to hold those of the sharded step beside the parameters.
        self.taken[name] = part.cpu() if known is None else known + part.cpu()

    def _by_dtype(self, names: Sequence[str]) -> dict[torch.dtype, list[str]]:
        kinds: dict[torch.dtype, list[str]] = {}
        for name in names:
            kinds.setdefault(self._facts[name].dtype, []).append(name)
        return kinds


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of tensors of one dtype one after the other; those of one as they are, without a copy."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


# ----------------------------------------------------------------------------------------------- the whole model


class _Saved(NamedTuple):
    """What autograd saves of a parameter: a view of it."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class WholeModel:
    """The parameters of the whole model on the first rank: fetched when they are read, and let go after it.

    Args:
        owners: Where they are.
        double: Whether floating-point parameters are converted to double precision.

    Attributes:
        precisions: In what the step has computed, as far as autograd saw it.
    """

    def __init__(self, owners: Owners, double: bool) -> None:
        self._owners = owners
        self._double = double
        self._chunk_of: dict[str, list[str]] = {}
        self._data: OrderedDict[str, Tensor] = OrderedDict()
        self._num_bytes = 0
        self._names: dict[int, str] = {}
        # One object for a parameter while somebody holds it: code compares parameters by identity.
        self._given: WeakValueDictionary[tuple[str, bool, bool], Tensor] = WeakValueDictionary()
        self._gradients: dict[str, Tensor] = {}
        self._gradient_bytes = 0
        self._anchor = torch.empty(0, device=owners.device, requires_grad=True)
        is_large = owners.is_large()
        self._room_bytes = _ROOM_BYTES if is_large else _CACHE_BYTES
        self._activations = Spool() if is_large else None
        self.precisions: set[torch.dtype] = set()
        chunk: list[str] = []
        size = 0
        for name in owners.parameter_names:
            facts = owners.facts(name)
            num_bytes = owners.shape(name).numel() * facts.dtype.itemsize
            if chunk and size + num_bytes > _CHUNK_BYTES:
                chunk, size = [], 0
            chunk.append(name)
            size += num_bytes
            self._chunk_of[name] = chunk

    def parameter(self, name: str) -> Tensor:
        """Return a parameter; where gradients are enabled, its gradient will go to its owners."""
        trains = torch.is_grad_enabled() and self._owners.requires_grad(name)
        key = (name, trains, torch.is_inference_mode_enabled())
        known = self._given.get(key)
        if known is not None:
            return known
        data = self._full(name)
        if trains:
            given: Tensor = Fetched.apply(self._anchor, lambda gradient: self._keep(name, gradient), data)
        else:
            given = data.view_as(data)
        mark_as_parameter(given, True)
        self._given[key] = given
        return given

    def _full(self, name: str) -> Tensor:
        if name not in self._data:
            with torch.no_grad(), torch.inference_mode(False):
                fetched = self._owners.fetch(self._chunk_of[name])
            for other in [other for other in fetched if other not in self._data]:
                # `.data` counts versions from zero.
                full = self._data[other] = (doubled(fetched[other]) if self._double else fetched[other]).data
                self._names[full.untyped_storage().data_ptr()] = other
                self._num_bytes += full.nbytes
            self._make_room(set(fetched))
        self._data.move_to_end(name)
        return self._data[name]

    def _make_room(self, kept: set[str]) -> None:
        for name in list(self._data):
            if self._num_bytes <= self._room_bytes:
                return
            # What the step has changed, such as a target network, is nowhere else.
            if name not in kept and version_of(self._data[name]) == 0:
                full = self._data.pop(name)
                self._num_bytes -= full.nbytes
                del self._names[full.untyped_storage().data_ptr()]

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
            if name is not None and self._data[name].dtype == tensor.dtype:
                return _Saved(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        # Without its history: an output of its own node would keep the node alive in a circle.
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
        # Nobody writes into a gradient that is held here; two parameters may have one and the same.
        self._gradients[name] = gradient if known is None else known + gradient
        self._gradient_bytes += 0 if known is not None else gradient.numel() * gradient.element_size()
        if self._gradient_bytes > _CHUNK_BYTES:
            self.deliver()

    @torch.no_grad()
    def deliver(self) -> None:
        """Give the gradients that are there to their owners."""
        gradients, self._gradients, self._gradient_bytes = self._gradients, {}, 0
        if gradients:
            self._owners.give_back(gradients)


class Fetched(Function):
    """Put a fetched parameter into the graph, and pass on its gradient."""

    # An output of a function instead of a leaf: the graph would hold a leaf until its gradient is there.

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
    """What the reference gave, on every rank.

    Attributes:
        result: What the step gave, as `run` returned it; only what can be pickled, and only small values.
        failure: Why there is none.
        precisions: In what it was computed.
        gradients: Of the parts of parameters that this rank holds.
        buffers: Those that the step changed, of this rank's.
    """

    result: Any
    failure: str
    precisions: set[torch.dtype]
    gradients: Mapping[str, Tensor]
    buffers: dict[str, Tensor]


def run_reference(skeleton: Skeleton, owners: Owners, run: Callable[[], Any], double: bool) -> Reference:
    """Run `run` on the whole model on the first rank of the replica; all its ranks call this.

    Args:
        skeleton: The module as it was.
        owners: Where its tensors are.
        run: Runs the step, forward and backward, and returns what is to be compared.
        double: Whether floating-point parameters and buffers are in double precision.
    """
    owners.taken = SpooledTensors() if owners.is_large() else {}
    if owners.replica.rank == 0:
        result, failure, precisions = _run_alone(skeleton, owners, run, double)
        owners.end((result, failure, precisions))
    else:
        result, failure, precisions = owners.serve()
    gradients, owners.taken = owners.taken, {}
    buffers = {name: gradients.pop(name) for name in owners.buffer_names if name in gradients}
    return Reference(result, failure, precisions, gradients, buffers)


def _run_alone(
    skeleton: Skeleton, owners: Owners, run: Callable[[], Any], double: bool
) -> tuple[Any, str, set[torch.dtype]]:
    model = WholeModel(owners, double)
    with torch.inference_mode(False):
        before = owners.fetch(owners.buffer_names)
        if double:
            before = {name: doubled(value) for name, value in before.items()}
        buffers = {name: value.clone() for name, value in before.items()}
    # Gradients of parameters that the user's code holds by other ways than the module.
    known = {name: parameter.grad for name, parameter in owners.parameters.items()}
    for parameter in owners.parameters.values():
        parameter.grad = None
    others = set(owners.replica.ranks) - {owners.replica.ranks[owners.replica.rank]}
    try:
        with (
            skeleton.put_on(model.parameter, buffers),
            model.saving_by_name(),
            communication_refused(others, lambda: owners.is_talking),
            _threads_of(owners.replica.size),
        ):
            result = run()
            buffers = skeleton.buffers()
        model.deliver()
        strays = {name: p.grad for name, p in owners.parameters.items() if p.grad is not None}
        if any(name in owners.rules for name in strays):
            raise UnprovableError(f"the step reaches `{next(iter(strays))}` by another way than its module")
        owners.give_back({name: gradient for name, gradient in strays.items() if gradient is not None})
        owners.give_back({n: value for n, value in buffers.items() if not _equal(value, before[n])})
    except Exception as error:
        # The user's code on a few samples, or a limit of this way to run it; the caller says so.
        return None, f"{type(error).__name__}: {error}", set()
    finally:
        for name, gradient in known.items():
            owners.parameters[name].grad = gradient
    return result, "", model.precisions


@contextmanager
def _threads_of(ranks: int) -> Iterator[None]:
    """Compute with the threads of `ranks` processes inside the block: the others wait, with theirs idle."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(before, min(ranks * before, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _equal(one: Tensor, two: Tensor) -> bool:
    # Changed, if one of them has a NaN: it is compared with that of the divided step all the same.
    return one.shape == two.shape and torch.equal(one, two)
