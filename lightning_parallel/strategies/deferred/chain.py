"""Chains of operations, which give a storage without data its contents.

    randn(4096, 4096), state of the generator  <-  mul_(0.02)  <-  fill_(0) of one row

A chain is immutable. An operation that writes a part of a storage extends the chain of the storage. An operation that
overwrites the full storage, or makes a new tensor, begins a new chain. A link captures each tensor that it reads as the
current chain of the tensor, so later writes do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.checkpoint.reader import StoredTensor, take_part
from lightning_parallel.compat.torch import pytree, schema_of, to_copy
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "CONVERSIONS",
    "EXPLICIT_GENERATOR",
    "META",
    "Contents",
    "OperationFacts",
    "OperationLink",
    "StorageLayout",
    "StorageView",
    "alias_of",
    "contents_of",
    "facts_of",
    "generator_states",
    "has_contents",
    "packed_state",
    "read_part",
    "read_stored",
    "scratch_reused",
    "scratch_tensor",
    "stored_origin",
    "value_of",
]

META = torch.device("meta")
EXPLICIT_GENERATOR = object()
"""Stands for a generator among the arguments of a link."""
_CPU = torch.device("cpu")
_aten = torch.ops.aten
CONVERSIONS = {to_copy, _aten.clone, _aten.copy_}
_storages = count(1)


class StorageLayout(NamedTuple):
    """Holds the dtype of a tensor and its position in its storage."""

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

    def fills(self, num_bytes: int) -> bool:
        """Return whether the elements lie in order in a storage of `num_bytes`, and fill it."""
        is_exact = self.offset == 0 and self.num_bytes == num_bytes == self.size.numel() * self.dtype.itemsize
        return is_exact and self.empty(META).is_contiguous()


@dataclass(frozen=True, eq=False)
class StorageView:
    """A tensor among the arguments of a link.

    Attributes:
        link: The link that makes the storage of the tensor; None for the storage that the current link writes.
        layout: The position of the tensor in the storage.
    """

    link: OperationLink | None
    layout: StorageLayout


class OperationLink:
    """One operation of a chain, and the chain before it.

    Args:
        func: The operation.
        args, kwargs: Arguments, with a `StorageView` for each deferred tensor and `EXPLICIT_GENERATOR` for a generator.
        device: The device of the storage.
        num_bytes: The size of the storage.
        parent: The chain before the operation; None if the operation makes a new tensor or overwrites the storage.
        states: States of the generators before a random operation, by device.
        made: The layout of the new tensor; None if the operation writes into the storage of the chain.

    Attributes:
        cost: Operations that run to make the storage. An operation that reads two chains runs both chains.
        nesting: Depth of chains that run inside each other.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        device: torch.device,
        num_bytes: int,
        parent: OperationLink | None = None,
        states: Mapping[torch.device, Tensor] | None = None,
        made: StorageLayout | None = None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.device = device
        self.num_bytes = num_bytes
        self.parent = parent
        self.states = states
        self.made = made
        # transformers changes the default dtype during a build, and the link may run later.
        self.default_dtype = torch.get_default_dtype()
        leaves = pytree.tree_leaves((args, kwargs))
        self.sources = {leaf.link for leaf in leaves if isinstance(leaf, StorageView) and leaf.link is not None}
        self.has_explicit_generator = any(leaf is EXPLICIT_GENERATOR for leaf in leaves)
        before = () if parent is None else (parent,)
        self.cost: int = 1 + sum(link.cost for link in (*self.sources, *before))
        self.nesting: int = max(
            (*(1 + link.nesting for link in self.sources), *(link.nesting for link in before)), default=0
        )

    def make_storage(self) -> torch.UntypedStorage:
        """Run the chain up to this link, and return a new storage.

        Raises:
            RuntimeError: If an operation gives a tensor of another shape, type or device than when it was recorded.
        """
        # A loop, because a chain may be longer than the stack of Python.
        chain: list[OperationLink] = []
        link: OperationLink | None = self
        while link is not None:
            chain.append(link)
            link = link.parent
        storage: torch.UntypedStorage | None = None
        while chain:
            link = chain.pop()
            storage = link.run(storage, any(later.states is not None for later in chain))
        assert storage is not None
        return storage

    def run(self, storage: torch.UntypedStorage | None, is_drawn_later: bool) -> torch.UntypedStorage:
        """Run the operation of this link alone, and return the storage of the chain.

        Args:
            storage: The storage from the chain before the link; None if the link begins a chain.
            is_drawn_later: Whether a later operation of the chain fills the storage with random numbers.
        """
        if storage is None and self.made is None:
            storage = torch.UntypedStorage(self.num_bytes, device=self.device)
        # Made for this operation, and dropped after it: the peak is a few tensors, not the tensors of the model.
        memory = {link: link.make_storage() for link in self.sources}
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            output = self._call(storage, memory)
        finally:
            torch.set_default_dtype(default_dtype)
        if self.made is None:
            assert storage is not None
            return storage
        return self._checked(output, self.made, is_drawn_later).untyped_storage()

    def _call(self, own: torch.UntypedStorage | None, memory: Mapping[OperationLink, torch.UntypedStorage]) -> Any:
        generator = None
        if self.states is not None and self.has_explicit_generator:
            ((device, state),) = self.states.items()
            generator = torch.Generator(device=device)
            # A clone: from a view of shared memory, the generator would read the start of the memory instead.
            generator.set_state(state.clone())

        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, StorageView):
                storage = own if leaf.link is None else memory[leaf.link]
                assert storage is not None
                return leaf.layout.on(storage)
            return generator if leaf is EXPLICIT_GENERATOR else leaf

        args, kwargs = pytree.tree_map(resolved, (self.args, self.kwargs))
        if self.states is None or self.has_explicit_generator:
            return self.func(*args, **kwargs)
        with _default_generators_at(self.states):
            return self.func(*args, **kwargs)

    def _checked(self, output: Tensor, layout: StorageLayout, is_drawn_later: bool) -> Tensor:
        found = StorageLayout.of(output)
        if found == layout and output.device == self.device:
            return output
        if (found.size, found.dtype, output.device) != (layout.size, layout.dtype, self.device):
            raise RuntimeError(f"`{self.func}` gave {layout} on {self.device} first, {found} on replay")
        # The kernel for meta tensors predicted other strides. Samplers fill a tensor in the order of its memory.
        if found.stride != layout.stride and is_drawn_later:
            raise RuntimeError(f"`{self.func}` gave {layout} on the meta device and {found} on {self.device}")
        # Later operations address the storage by the recorded strides.
        return layout.empty(self.device).copy_(output)


# --------------------------------------------------------------------------------------------------- tensors on meta


class Contents:
    """The contents of a storage on the meta device: the chain that makes them, or the data.

    The contents are an attribute of the storage's Python object, which lives as long as the storage. Tensors with one
    storage therefore share the contents, and `parameter.data = other` moves them. They are freed with the last tensor.

    Attributes:
        device: The device of the data.
        link: The end of the chain. None once the data are settled: operations then write `value`.
        value: The data, if an operation has read them.
        address: A number that differs between storages, for code that compares `data_ptr()`.
    """

    def __init__(self, alias: Tensor, device: torch.device, link: OperationLink | None = None) -> None:
        self.device = device
        self.link = link
        self.value: torch.UntypedStorage | None = None
        # The addresses are 16 TiB apart, so addresses inside two storages never overlap.
        self.address = next(_storages) << 44
        alias.untyped_storage().contents = self  # type: ignore[attr-defined]

    def extend(self, link: OperationLink) -> None:
        """Make `link` the end of the chain, and drop data from before the link."""
        self.link = link
        self.value = None

    def settle(self) -> None:
        """Make the data and keep them: from now on they replace the chain."""
        if self.value is None and self.link is not None:
            self.value = self.link.make_storage()
        self.link = None

    def forget(self) -> None:
        """Drop data that the chain can make again."""
        if self.link is not None:
            self.value = None


def contents_of(tensor: Tensor) -> Contents:
    """Return the contents of the storage of a deferred tensor."""
    return tensor.untyped_storage().contents  # type: ignore[attr-defined]


def has_contents(tensor: Tensor) -> bool:
    """Return whether the storage of `tensor` is the storage of a deferred tensor."""
    return tensor.layout == torch.strided and hasattr(tensor.untyped_storage(), "contents")


def value_of(tensor: Tensor, keep: bool) -> Tensor:
    """Return a deferred tensor with data.

    Args:
        tensor: The deferred tensor.
        keep: Keep the data for the next call, until the tensor is written. The caller must not write them.
    """
    contents = contents_of(tensor)
    storage = contents.value
    if storage is None:
        assert contents.link is not None
        storage = contents.link.make_storage()
        if keep:
            contents.value = storage
    return StorageLayout.of(tensor).on(storage)


def alias_of(tensor: Tensor) -> Tensor:
    """Return a plain meta tensor that shares the storage of `tensor`."""
    return StorageLayout.of(tensor).on(tensor.untyped_storage())


# ------------------------------------------------------------------------------------------------- tensors from files


def read_stored(stored: StoredTensor) -> Tensor:
    """Read a tensor of a file: the operation that begins the chain of a deferred tensor from a file."""
    value = stored.read()
    # A copy, because the memory of the reader is temporary.
    return torch.empty_like(value).copy_(value)


def stored_origin(tensor: Tensor) -> tuple[StoredTensor, list[torch.dtype]] | None:
    """Return the file's tensor that a deferred tensor copies, and the dtypes of the copies in order; None otherwise.

    Only copies of full tensors count, element by element. A copy may change the dtype.
    """
    dtypes: list[torch.dtype] = []
    view = StorageView(contents_of(tensor).link, StorageLayout.of(tensor))
    while True:
        link, layout = view.link, view.layout
        # An operation with a parent keeps a part of the earlier contents, so the tensor is no full copy.
        if link is None or link.parent is not None or not layout.fills(link.num_bytes):
            return None
        if link.func is read_stored:
            (stored,) = link.args
            return (stored, dtypes) if (layout.size, layout.dtype) == (stored.shape, stored.dtype) else None
        packet = getattr(link.func, "overloadpacket", None)
        if packet not in CONVERSIONS:
            return None
        # A view with other dimensions or another dtype than the written tensor is not a copy of the source.
        copied, source = (link.args[0].layout, link.args[1]) if packet is _aten.copy_ else (link.made, link.args[0])
        if copied != layout or not isinstance(source, StorageView) or source.layout.size != layout.size:
            return None
        # A conversion from complex to real numbers warns, and the replay would warn a second time.
        if source.layout.dtype.is_complex != layout.dtype.is_complex:
            return None
        dtypes.insert(0, layout.dtype)
        view = source


def read_part(deferred: Tensor, rule: Shard | None, rank: int) -> Tensor | None:
    """Read the part of `rank` of a deferred tensor from its file, into new memory; None without a file."""
    origin = stored_origin(deferred)
    if origin is None:
        return None
    stored, dtypes = origin
    part = stored if rule is None else take_part(stored, rule, rank)
    value = part.read() if isinstance(part, StoredTensor) else part
    # Each conversion in turn: from float32 to bfloat16 and back, values are rounded.
    for dtype in dtypes:
        value = value.to(dtype)
    return torch.empty_like(value, device=deferred.device).copy_(value)


# -------------------------------------------------------------------------------------------- schemas and generators


class OperationFacts(NamedTuple):
    """Holds facts from the schema of an operation; `written` has position and name of each written argument."""

    written: tuple[tuple[int, str], ...]
    num_returns: int
    takes_device: bool
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
    # Operations of other libraries may lack the tag, and may still draw random numbers.
    is_random = torch.Tag.nondeterministic_seeded in func.tags or "generator" in arguments or func.namespace != "aten"
    return OperationFacts(
        written=written,
        num_returns=len(schema.returns),
        takes_device="device" in arguments,
        is_random=is_random,
        is_data_dependent=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)),
        changes_shape=torch.Tag.inplace_view in func.tags,
    )


def generator_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the default generators that an operation on `device` may draw from."""
    return {each: packed_state(_get_state(each)) for each in dict.fromkeys((_CPU, device))}


_free_places: dict[int, list[Tensor]] = {}


def packed_state(state: Tensor) -> Tensor:
    """Copy a generator's state into memory that 256 states share.

    Separate allocations between the temporaries of a build would leave holes in the heap, each too small for the next
    temporary. The heap would grow by the size of the model.
    """
    places = _free_places.setdefault(state.numel(), [])
    if not places:
        places.extend(torch.empty(256, state.numel(), dtype=torch.uint8, device="cpu").unbind())
    return places.pop().copy_(state)


@contextmanager
def _default_generators_at(states: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """Set the default generators to `states` inside the block."""
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


# During a build, memory for temporaries, by device.
_scratch: dict[torch.device, torch.UntypedStorage] | None = None


@contextmanager
def scratch_reused() -> Iterator[None]:
    """Keep the memory for temporaries from one operation to the next inside the block."""
    global _scratch
    before, _scratch = _scratch, {}
    try:
        yield
    finally:
        _scratch = before


def scratch_tensor(layout: StorageLayout, device: torch.device) -> Tensor:
    """Return a tensor of this shape and these strides, with undefined contents, for use before the next call.

    During a build, all calls share one piece of memory, for the reason in `packed_state`.
    """
    if _scratch is None:
        return layout.empty(device)
    if device not in _scratch or _scratch[device].nbytes() < layout.num_bytes:
        _scratch.pop(device, None)  # first: never both
        _scratch[device] = torch.UntypedStorage(layout.num_bytes, device=device)
    return layout._replace(offset=0).on(_scratch[device])
