"""Records of tensor operations, and their replay: what `deferred_init` knows of the contents of a storage.

Each storage has a history, the operations that made and wrote it; running them again makes its contents.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.compat.torch import pytree, schema_of

__all__ = [
    "META",
    "OperationFacts",
    "RecordedOperation",
    "StorageHistory",
    "StorageLayout",
    "StorageView",
    "alias_of",
    "facts_of",
    "generator_states",
    "has_history",
    "history_of",
    "memory_reused",
    "packed_state",
    "read_values",
    "scratch_tensor",
    "shared_values",
    "values_of",
]


META = torch.device("meta")
_CPU = torch.device("cpu")
_order = count(1)


class StorageLayout(NamedTuple):
    """Where a tensor lies in its storage, and of which type it is."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> StorageLayout:
        """Return the layout of `tensor`."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor with this layout on `storage`."""
        plain = torch.empty(0, dtype=self.dtype, device=storage.device)
        return plain.set_(storage, self.offset, self.size, self.stride)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory from the first element to the last."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride))
        return (last + 1) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor of this shape and strides, without contents."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class StorageView:
    """A deferred tensor at one moment: a part of its storage, after the first `version` operations of its history."""

    history: StorageHistory
    version: int
    layout: StorageLayout
    is_conj: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Capture `tensor` as it is now."""
        if tensor.is_neg():
            raise NotImplementedError("A deferred tensor cannot be the imaginary part of a conjugate; `clone()` it")
        history = history_of(tensor)
        return cls(history, len(history.operations), StorageLayout.of(tensor), tensor.is_conj())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor, given its storage."""
        plain = self.layout.on(storage)
        return plain.conj() if self.is_conj else plain


class StorageHistory:
    """How a storage got its contents.

    Attributes:
        device: Where the data will be; the storage itself is on the meta device.
        is_reachable: Whether a tensor of the user still has the storage.
        operations: What made and wrote the storage, in order.
        address: A number that differs between storages, for code that compares `data_ptr()`.
        value: The contents, where they have been made to stay.
        is_shared: Whether others write the contents too, such as an array of numpy's: `value` stays what counts, and
            what is done to it is executed, not recorded.
    """

    def __init__(self, device: torch.device, storage: torch.UntypedStorage) -> None:
        self.device = device
        # Weak: the storage holds its history, which must die with the last tensor on it.
        self._storage = weakref.ref(storage)
        self.operations: list[RecordedOperation] = []
        # So far apart (16 TiB) that addresses inside of two storages never meet.
        self.address = next(_order) << 44
        self.value: torch.UntypedStorage | None = None
        self.is_shared = False

    @property
    def is_reachable(self) -> bool:
        return self._storage() is not None

    def needed_for(self, version: int, known: int | None = None) -> list[RecordedOperation]:
        """Return the operations that decide the contents after the first `version` ones.

        What was written before the last operation that overwrites everything is not needed, only the memory itself.

        Args:
            known: After how many operations the contents are there already.
        """
        if known is not None:
            return self.operations[known:version]
        first = max((index for index in range(1, version) if self.operations[index].overwrites), default=1)
        return [self.operations[0], *self.operations[first:version]]


class RecordedOperation:
    """One recorded operation.

    Attributes:
        order: Its place among all recorded operations.
        args, kwargs: Have a `StorageView` for each deferred tensor, and `EXPLICIT_GENERATOR` for a generator.
        default_dtype: The default floating-point type at the time; transformers sets it while it builds a model.
        states: Of the generators before a random operation, by device; the last one is that which it draws from.
        created: The new storages among its outputs: position of the output, history and layout.
        versions: Of the storages that it creates or writes, after it.
        overwrites: Whether it writes all of one storage without reading it.
    """

    EXPLICIT_GENERATOR = object()

    def __init__(self, func: Any, args: Any, kwargs: Any, states: Mapping[torch.device, Tensor] | None) -> None:
        self.order = next(_order)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.states = states
        self.default_dtype = torch.get_default_dtype()
        leaves = pytree.tree_leaves((args, kwargs))
        self.views = [leaf for leaf in leaves if isinstance(leaf, StorageView)]
        self.has_explicit_generator = any(leaf is self.EXPLICIT_GENERATOR for leaf in leaves)
        self.created: list[tuple[int, StorageHistory, StorageLayout]] = []
        self.versions: dict[StorageHistory, int] = {}
        self.overwrites = False

    def append_to(self, history: StorageHistory) -> None:
        """Make it the last operation of `history`."""
        history.operations.append(self)
        # Contents that were made before are out of date now.
        history.value = None
        self.versions[history] = len(history.operations)

    @property
    def histories(self) -> set[StorageHistory]:
        """Histories of all storages that the operation reads, writes or creates."""
        return {view.history for view in self.views} | {history for _, history, _ in self.created}

    def run(self, memory: dict[StorageHistory, torch.UntypedStorage]) -> None:
        """Run it again on the storages in `memory`, and put those there that it creates."""
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            outputs = pytree.tree_leaves(self._outputs(memory))
        finally:
            torch.set_default_dtype(default_dtype)
        for position, history, layout in self.created:
            memory[history] = self._checked(outputs[position], history, layout).untyped_storage()

    def _outputs(self, memory: dict[StorageHistory, torch.UntypedStorage]) -> Any:
        facts = facts_of(self.func)
        generator = None
        if self.states is not None:
            device = list(self.states)[-1]
            generator = torch.Generator(device=device)
            generator.set_state(self.states[device].clone())  # it would read the storage from the start

        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, StorageView):
                return leaf.on(memory[leaf.history])
            if isinstance(leaf, Tensor) and facts.changes_shape:
                return leaf.clone()  # `set_` makes it the contents of a tensor that is written afterwards
            return generator if leaf is self.EXPLICIT_GENERATOR else leaf

        args, kwargs = pytree.tree_map(resolved, (self.args, self.kwargs))
        if self.states is None or self.has_explicit_generator:
            return self.func(*args, **kwargs)
        if facts.takes_generator:
            return self.func(*args, **{**kwargs, "generator": generator})
        with _default_generators_at(self.states):
            return self.func(*args, **kwargs)

    def _checked(self, output: Tensor, history: StorageHistory, layout: StorageLayout) -> Tensor:
        made = StorageLayout.of(output)
        if made == layout and output.device == history.device:
            return output
        if (made.size, made.dtype, output.device) != (layout.size, layout.dtype, history.device):
            raise RuntimeError(f"`{self.func}` gave {layout} on {history.device} first, {made} on replay")
        # The kernel for meta tensors predicted other strides. Samplers fill a tensor in the order of its memory.
        if made.stride != layout.stride and any(operation.states for operation in history.operations[1:]):
            raise RuntimeError(f"`{self.func}` gave {layout} on the meta device and {made} on {history.device}")
        return layout.empty(history.device).copy_(output)


# --------------------------------------------------------------------------------------------------- tensors on meta

# The history is an attribute of the storage's Python object, which lives as long as the storage: tensors that share a
# storage share it, `parameter.data = other` takes it along, and it goes when nobody can ask for it any more.


def history_of(tensor: Tensor) -> StorageHistory:
    """Return the history of the storage of a deferred tensor."""
    return tensor.untyped_storage().history  # type: ignore[attr-defined]


def has_history(tensor: Tensor) -> bool:
    """Return whether the storage of `tensor` has a history."""
    return tensor.layout == torch.strided and hasattr(tensor.untyped_storage(), "history")


def alias_of(tensor: Tensor) -> Tensor:
    """Return a plain meta tensor that shares the storage of `tensor`."""
    plain = StorageLayout.of(tensor).on(tensor.untyped_storage())
    return plain.conj() if tensor.is_conj() else plain


# -------------------------------------------------------------------------------------------- schemas and generators


class OperationFacts(NamedTuple):
    """What the schema of an operation says; `written` are the positions and names of the arguments that it writes."""

    written: tuple[tuple[int, str], ...]
    num_returns: int
    returns_tensors: bool
    takes_device: bool
    takes_generator: bool
    is_random: bool
    is_data_dependent: bool
    changes_shape: bool


@cache
def facts_of(func: Any) -> OperationFacts:
    """Read the schema and the tags of the operation `func`."""
    schema = schema_of(func)
    arguments = {argument.name: argument for argument in schema.arguments}
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    # Operations of other libraries are not tagged with care: they may draw random numbers.
    is_random = torch.Tag.nondeterministic_seeded in func.tags or "generator" in arguments or func.namespace != "aten"
    return OperationFacts(
        written=written,
        num_returns=len(schema.returns),
        returns_tensors=any("Tensor" in str(returned.type) for returned in schema.returns),
        takes_device="device" in arguments,
        takes_generator="generator" in arguments and arguments["generator"].kwarg_only,
        is_random=is_random,
        is_data_dependent=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)),
        changes_shape=torch.Tag.inplace_view in func.tags,
    )


def generator_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the default generators that an operation on `device` may draw from, its own last."""
    return {each: packed_state(_get_state(each)) for each in dict.fromkeys((_CPU, device))}


_free_places: dict[int, list[Tensor]] = {}


def packed_state(state: Tensor) -> Tensor:
    """Copy a generator's state into memory that 256 of them share.

    Allocated one by one between the temporaries of a build, they would leave holes in the heap that are never quite
    large enough for the next temporary: it would grow by the size of the model.
    """
    places = _free_places.setdefault(state.numel(), [])
    if not places:
        places.extend(torch.empty(256, state.numel(), dtype=torch.uint8, device="cpu").unbind())
    return places.pop().copy_(state)


@contextmanager
def _default_generators_at(states: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """Set the default generators to `states` inside the block, for operations that take no generator."""
    before = {device: _get_state(device) for device in states}
    try:
        for device, state in states.items():
            _set_state(device, state.clone())
        yield
    finally:
        for device, state in before.items():
            _set_state(device, state)


def _get_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


Contents = dict[StorageHistory, tuple[int, torch.UntypedStorage]]

# During a build, what the last read has made: versions and contents.
_recent: Contents | None = None

# An initializer works on a few tensors at a time; more are a whole model, which must not be held.
_MAX_RECENT = 8


# During a build, memory for temporaries, by device.
_scratch: dict[torch.device, torch.UntypedStorage] | None = None


@contextmanager
def memory_reused() -> Iterator[None]:
    """Keep a few temporaries from one operation to the next inside the block.

    A read goes on from what the one before has made: rejection sampling (`nn.init.trunc_normal_`) reads after every
    round whether it needs another.
    """
    global _recent, _scratch
    before = _recent, _scratch
    _recent, _scratch = {}, {}
    try:
        yield
    finally:
        _recent, _scratch = before


def scratch_tensor(layout: StorageLayout, device: torch.device) -> Tensor:
    """Return a tensor of this shape and these strides, of any contents, to be used before the next call.

    During a build one piece of memory serves for all, for the reason that `packed_state` gives.
    """
    if _scratch is None:
        return layout.empty(device)
    if device not in _scratch or _scratch[device].nbytes() < layout.num_bytes:
        _scratch.pop(device, None)  # first: never both
        _scratch[device] = torch.UntypedStorage(layout.num_bytes, device=device)
    return layout._replace(offset=0).on(_scratch[device])


def values_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make the data of deferred tensors, which share memory where the tensors do.

    Raises:
        RuntimeError: If an operation gives a tensor of another shape, type or device than it did when recorded.
    """
    views = [StorageView.of(tensor) for tensor in tensors]
    memory = {view.history: view.history.value for view in views if view.history.value is not None}
    missing = {view.history: view.version for view in views if view.history not in memory}
    memory.update(_replay(missing, None) if missing else {})
    return [view.on(memory[view.history]) for view in views]


def shared_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `values_of`, for a caller that others give the memory to: from now on it is that of the deferred tensors."""
    values = values_of(tensors)
    for tensor, value in zip(tensors, values):
        history = history_of(tensor)
        history.value, history.is_shared = value.untyped_storage(), True
    return values


def read_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the data like `values_of`, for a caller that neither writes nor keeps them: not new ones each time.

    During a build they are made from the recent ones. Afterwards they are kept until the tensor is written, since these
    are tables that only a function knows, and that every step reads.
    """
    views = [StorageView.of(tensor) for tensor in tensors]
    if _recent is None:
        values = values_of(tensors)
        for view, value in zip(views, values):
            view.history.value = value.untyped_storage()
        return values
    memory = {view.history: view.history.value for view in views if view.history.value is not None}
    missing = {view.history: view.version for view in views if view.history not in memory}
    memory.update(_replay(missing, _recent) if missing else {})
    return [view.on(memory[view.history]) for view in views]


def _replay(
    wanted: Mapping[StorageHistory, int], recent: Contents | None
) -> dict[StorageHistory, torch.UntypedStorage]:
    """Make the storages of the histories `wanted`, after so many operations of each.

    Args:
        recent: Contents to go on from, which are written. What the next read may want takes their place.
    """
    known = {} if recent is None else dict(recent)
    operations = _operations_for(wanted, known)
    # Each pass that fails has removed an entry from `known`, so this ends.
    while operations is None:
        operations = _operations_for(wanted, known)
    last_use = {history: operation for operation in operations for history in operation.histories}
    used = {history: entry for history, entry in known.items() if history in last_use or history in wanted}
    versions = {history: version for history, (version, _) in used.items()}
    memory = {history: storage for history, (_, storage) in used.items()}
    # From here on `memory` alone holds contents, so that each is freed after its last use.
    known.clear()
    if recent is not None:
        recent.clear()
    for operation in operations:
        operation.run(memory)
        versions.update(operation.versions)
        for history in operation.histories:
            # What is only on the way goes at once: the peak is a few tensors, not those of the model.
            is_done = last_use[history] is operation and history not in wanted
            if is_done and (recent is None or not history.is_reachable):
                memory.pop(history, None)
    if recent is not None:
        reachable = [history for history in memory if history.is_reachable]
        if len(reachable) <= _MAX_RECENT:
            recent.update({history: (versions[history], memory[history]) for history in reachable})
    return memory


def _operations_for(wanted: Mapping[StorageHistory, int], known: Contents) -> list[RecordedOperation] | None:
    """Return what has to run, in order; None if some `known` contents had been changed too often, and were removed."""
    needed: dict[int, RecordedOperation] = {}
    seen: set[tuple[StorageHistory, int]] = set()
    pending = list(wanted.items())
    while pending:
        entry = pending.pop()
        if entry in seen:
            continue
        seen.add(entry)
        history, version = entry
        # Later contents cannot be turned back, only be made again from the start.
        if history in known and known[history][0] > version:
            del known[history]
            return None
        first = known[history][0] if history in known else None
        for operation in history.needed_for(version, first):
            # Running the operation would write once more into contents that are past it.
            past = [other for other, after in operation.versions.items() if other in known and known[other][0] >= after]
            if past:
                del known[past[0]]
                return None
            if operation.order not in needed:
                needed[operation.order] = operation
                pending += [(view.history, view.version) for view in operation.views if view.history is not history]
    return [needed[order] for order in sorted(needed)]
