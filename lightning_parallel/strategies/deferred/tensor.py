"""Tensors without data that record operations, and the mode of `deferred_init` that intercepts each operation."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.checkpoint import StoredTensor
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    forbid_data_access,
    make_subclass,
    mark_as_parameter,
    pytree,
)
from lightning_parallel.strategies.deferred.chain import (
    CONVERSIONS,
    EXPLICIT_GENERATOR,
    META,
    Contents,
    OperationLink,
    StorageLayout,
    StorageView,
    alias_of,
    contents_of,
    facts_of,
    generator_states,
    has_contents,
    packed_state,
    read_stored,
    scratch_tensor,
    value_of,
)

__all__ = ["THRESHOLD", "BuildMode", "DeferredTensor", "is_deferred", "materialize", "record_initializer"]

# Constructors read small tensors (`linspace(...).tolist()`), and the vectors of a layer are small next to its matrices.
# 16 Ki elements are 64 KiB in float32. The record of a random operation takes 5 KiB for the state of a generator.
THRESHOLD = 2**14

# An operation on two tensors runs both chains, so costs may double with each operation. Beyond this cost the data are
# kept. Stacking the experts of a layer costs a few operations per expert.
_MOST_COST = 1000
# Each nested chain takes some frames of Python's stack.
_MOST_NESTED = 64

_CPU = torch.device("cpu")
_aten = torch.ops.aten

# In-place samplers that read nothing: on any memory of the same layout they advance the generator equally.
_SAMPLERS = {
    _aten.uniform_,
    _aten.normal_,
    _aten.random_,
    _aten.exponential_,
    _aten.cauchy_,
    _aten.log_normal_,
    _aten.geometric_,
}
_SAMPLERS_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_NEW_LIKE = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.tril, _aten.triu),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full),
}
_OVERWRITING = _SAMPLERS | {_aten.zero_, _aten.fill_, _aten.copy_}

# These functions read data in C++ without asking the dispatcher.
_NUMBERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READERS = {getattr(Tensor, name) for name in (*_NUMBERS, "__repr__", "__format__")}
# The results of these functions share the memory of the tensor, so a write into a result changes the tensor.
_EXPORTERS = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_}

_is_making = False


def is_deferred(value: object) -> bool:
    """Return whether `value` is a tensor without data so far."""
    return isinstance(value, DeferredTensor)


def materialize(tensor: Tensor) -> Tensor:
    """Make the data of a deferred tensor, which stays deferred itself.

    Raises:
        RuntimeError: If an operation gives another shape than when it was recorded.
    """
    with _making_data(), torch.no_grad():
        return value_of(tensor, keep=False)


class DeferredTensor(Tensor):
    """A tensor on the meta device that reports the device of its future data.

    C++ must see the same device: otherwise `new_tensor` and `to` would make tensors on the meta device. The tensor
    shares its storage with plain meta tensors. The storage holds the record.
    """

    @staticmethod
    def __new__(cls, alias: Tensor) -> DeferredTensor:
        device = contents_of(alias).device
        return make_subclass(cls, alias, False, dispatch_device=True, device_for_backend_keys=device)

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def read_later(cls, stored: StoredTensor) -> DeferredTensor:
        """Return a deferred tensor that reads its data from a file when they are needed."""
        strides = torch.empty(stored.shape, device=META).stride()
        layout = StorageLayout(stored.dtype, torch.Size(stored.shape), strides, 0)
        return cls(_begun(layout, OperationLink(read_stored, (stored,), {}, _CPU, layout.num_bytes, made=layout)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.data.clone()
            if isinstance(self, nn.Parameter):
                # Without attributes, like torch: transformers marks initialised parameters with an attribute.
                copy = nn.Parameter(copy, self.requires_grad)
            else:
                vars(copy).update(deepcopy(vars(self), memo))
                copy.requires_grad_(self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = materialize(self)
        if isinstance(self, nn.Parameter):
            # The class of a deferred parameter is `DeferredTensor`, so pickle would lose the parameter.
            value = nn.Parameter(value, self.requires_grad)
        vars(value).update(vars(self))
        mark_as_parameter(value, False)
        return value.__reduce_ex__(protocol)

    def as_subclass(self, cls: type) -> Any:
        with _making_data(), torch.no_grad():
            return _exported(self).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READERS or func in _EXPORTERS:
            make = _exported if func in _EXPORTERS else partial(value_of, keep=True)
            with _making_data(), torch.no_grad():
                made = pytree.tree_map_only(DeferredTensor, make, (args, kwargs))
                result = func(*made[0], **made[1])
            return args[0] if func is Tensor.share_memory_ else result
        with DisableTorchFunctionSubclass():
            # For code that compares addresses to find shared memory. There are no data at this address.
            if func == Tensor.data_ptr:
                return contents_of(args[0]).address + args[0].storage_offset() * args[0].itemsize
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatched(func, types, args, kwargs or {}, None)


class BuildMode(TorchDispatchMode):
    """Intercepts every operation of the block."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold = threshold

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, types, args, kwargs or {}, self.threshold)


def _dispatched(func: Any, types: Any, args: Any, kwargs: dict[str, Any], threshold: int | None) -> Any:
    # Reading `.device` comes here too, because the class sets `dispatch_device`.
    if func is torch.ops.prim.device.default:
        return contents_of(args[0]).device
    has_other_classes = any(not issubclass(kind, DeferredTensor) for kind in types)
    if has_other_classes or (_is_making and threshold is not None):
        return func(*args, **kwargs)
    return _Invocation(func, args, kwargs, threshold).run()


def _has_memory(value: Any) -> bool:
    """Return whether a memory and a `StorageLayout` describe `value`: not a sparse or quantized tensor."""
    return not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_quantized)


@contextmanager
def _making_data() -> Iterator[None]:
    """Let operations pass without a record inside the block, even during a build."""
    global _is_making
    before = _is_making
    _is_making = True
    try:
        yield
    finally:
        _is_making = before


class _Invocation:
    """An operation with its arguments, during a build or, with `threshold` None, on deferred tensors after it."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], threshold: int | None) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.threshold = threshold
        self.facts = facts_of(func)
        self.leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.deferred = [tensor for tensor in tensors if is_deferred(tensor)]
        self.others = [tensor for tensor in tensors if not is_deferred(tensor)]
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in self.facts.written]
        self.written = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
        self.device = self._output_device()
        # A plain meta tensor for each deferred argument, and the argument for each plain meta tensor.
        self.aliases = {id(tensor): alias_of(tensor) for tensor in self.deferred}
        self.originals = {id(self.aliases[id(tensor)]): tensor for tensor in self.deferred}

    def run(self) -> Any:
        """Record the operation, or execute it."""
        if self.device == META:
            return self._on_meta()
        if not self.deferred:
            return self.func(*self.args, **self.kwargs) if self.threshold is None else self._create()
        if self.facts.changes_shape and is_deferred(self.written[0]):
            return self._reshape(self.written[0])
        return self._write() if self.written else self._read()

    def _output_device(self) -> torch.device:
        device = self.kwargs.get("device")
        if device is None:
            tensors = [*self.deferred, *self.others]
            # A scalar on the CPU may be combined with tensors of any device, so other devices decide.
            devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
            device = META if META in devices else devices[0] if devices else "cpu"
        device = torch.device(device)
        if device.type not in ("cpu", "meta") and device.index is None:
            # Devices of tensors have an index, and `cuda` does not equal `cuda:0`.
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return device

    def _call(self, replacement: Callable[[Tensor], Tensor], **options: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, replacement, (self.args, self.kwargs))
        return self.func(*args, **{**kwargs, **options})

    # ----------------------------------------------------------------------------------------- kinds of operations

    def _on_meta(self) -> Any:
        """Run an operation with a result on the meta device."""
        if any(map(is_deferred, self.written)):
            raise RuntimeError(
                f"`{self.func}` must not write a tensor on the meta device, which has no data, into another tensor"
            )
        result = self._call(lambda tensor: self.aliases.get(id(tensor), tensor))
        return pytree.tree_map_only(Tensor, lambda leaf: DeferredTensor(leaf) if has_contents(leaf) else leaf, result)

    def _create(self) -> Any:
        """Run an operation without deferred arguments; a large tensor of a factory function is deferred."""
        has_sources = any(not tensor.is_meta for tensor in self.others)
        is_factory = not has_sources and self.facts.takes_device and self.func.overloadpacket is not _aten.from_file
        made = self._on_aliases() if is_factory else None
        if not (isinstance(made, Tensor) and _has_memory(made) and made.numel() > (self.threshold or 0)):
            return self.func(*self.args, **self.kwargs)
        states = self._drawn()
        return DeferredTensor(self._begin(StorageLayout.of(made), states))

    def _read(self) -> Any:
        """Run an operation that writes nothing: a view shares the storage; a new tensor is deferred during a build."""
        made = self._on_aliases()
        leaves = pytree.tree_leaves(made)
        if leaves and all(isinstance(leaf, Tensor) and _is_view(leaf) for leaf in leaves):
            return self._wrapped(made)
        # Code that reads a tensor with data repeatedly would run the full chain each time. A conversion is recorded,
        # because its result replaces the tensor.
        has_data = any(contents_of(tensor).value is not None for tensor in self.deferred)
        has_data = has_data and self.func.overloadpacket not in CONVERSIONS
        if self.threshold is None or has_data or not (isinstance(made, Tensor) and self._has_known_layout(made)):
            return self._compute()
        if not self._can_be_recorded(_SAMPLERS_LIKE):
            return self._compute()
        states = self._drawn()
        return DeferredTensor(self._begin(StorageLayout.of(made), states))

    def _write(self) -> Any:
        """Run an operation that writes into its arguments."""
        target = self.written[0]
        is_single = len(self.written) == 1 and is_deferred(target) and self._can_be_recorded(_SAMPLERS)
        made = pytree.tree_leaves(self._on_aliases() if is_single else None)
        is_known = made and all(id(leaf) in self.originals for leaf in made)
        # An operation may have resized its target on meta, and a link has one layout.
        if not is_known or StorageLayout.of(self.aliases[id(target)]) != StorageLayout.of(target):
            return self._compute()
        contents, states = contents_of(target), self._drawn()
        num_bytes = target.untyped_storage().nbytes()
        # A source in the same storage needs the old chain, because the operation reads it while it writes.
        sources = [tensor for tensor in self.deferred if tensor is not target]
        is_whole = StorageLayout.of(target).fills(num_bytes) and contents not in map(contents_of, sources)
        parent = None if is_whole and self.func.overloadpacket in _OVERWRITING else contents.link
        args, kwargs = _captured(self.args, self.kwargs, contents)
        contents.extend(OperationLink(self.func, args, kwargs, contents.device, num_bytes, parent, states))
        return target if self.facts.num_returns else None

    def _reshape(self, target: Tensor) -> Any:
        """Run an operation that changes the shape of a tensor in place, or its storage."""
        contents, num_bytes = contents_of(target), target.untyped_storage().nbytes()
        before = StorageLayout.of(target)
        made = self._on_aliases()
        alias = self.aliases[id(target)]
        if made is None or not (has_contents(alias) or len(self.others) == 1):
            raise NotImplementedError(f"`{self.func}` is not supported on a deferred tensor")
        if not has_contents(alias):
            # `set_` to a tensor with data: both tensors share one memory from now on.
            Contents(alias, self.others[0].device).value = self.others[0].untyped_storage()
        elif target.untyped_storage().nbytes() != num_bytes:
            contents.settle()
            value = before.on(contents.value)  # type: ignore[arg-type]
            self._call(lambda tensor: value if tensor is target else tensor)
        return self._wrapped(made)

    def _compute(self) -> Any:
        """Execute an operation on the data of deferred tensors; keep these data, and return results with data."""
        written = {id(tensor) for tensor in self.written}
        for tensor in self.deferred:
            if id(tensor) in written:
                contents_of(tensor).settle()
        values = {id(tensor): value_of(tensor, keep=True) for tensor in self.deferred}
        result = self._call(lambda tensor: values.get(id(tensor), tensor))
        arguments = {id(values[id(tensor)]): tensor for tensor in self.deferred}
        if any(values[id(tensor)].shape != tensor.shape for tensor in self.deferred):
            raise NotImplementedError(f"`{self.func}` must not change the shape of a deferred tensor by `out=`")

        def returned(leaf: Tensor) -> Tensor:
            if id(leaf) in arguments:
                return arguments[id(leaf)]
            for tensor in self.deferred if leaf.layout == torch.strided else ():
                if leaf.untyped_storage() is contents_of(tensor).value:
                    contents_of(tensor).settle()  # a write into the result also changes the tensor
            return leaf

        return pytree.tree_map_only(Tensor, returned, result)

    # --------------------------------------------------------------------------------------------------- recording

    def _can_be_recorded(self, samplers: Container[Any]) -> bool:
        """Return whether a link can replace the operation.

        It may read chains and small tensors, and draw random numbers only as one of `samplers`. Other operations are
        executed: a record with a large tensor would keep its data in memory.
        """
        links = [link for link in (contents_of(tensor).link for tensor in self.deferred) if link is not None]
        if len(links) < len(self.deferred) or sum(link.cost for link in links) > _MOST_COST:
            return False
        if max(link.nesting for link in links) > _MOST_NESTED:
            return False
        most = THRESHOLD if self.threshold is None else self.threshold
        if any(tensor.numel() > most or not _has_memory(tensor) for tensor in self.others):
            return False
        is_sampler = self.func.overloadpacket in samplers or self.func is _aten.bernoulli_.float
        return is_sampler or not self.facts.is_random

    def _has_known_layout(self, made: Tensor) -> bool:
        """Return whether the meta kernel gives the strides of the real kernel: bits of sums may depend on strides.

        Compilers rely on the strides of the core operators; other operators, such as the decompositions of
        `torch.linalg`, may differ.
        """
        packet = self.func.overloadpacket
        is_core = torch.Tag.core in self.func.tags or torch.Tag.pointwise in self.func.tags
        # Files may store each expert separately; the model stacks them.
        is_stack = packet is _aten.stack and all(tensor.is_contiguous() for tensor in self.deferred)
        return _has_memory(made) and (is_core or is_stack or packet in _NEW_LIKE or made.dim() < 2)

    def _on_aliases(self) -> Any:
        """Run the operation on meta tensors; None if it cannot run there, or returns no tensors."""
        is_known = self.func.namespace == "aten" and not self.facts.is_data_dependent
        if not is_known or not all(map(_has_memory, self.others)):
            return None
        options = {"device": META} if self.facts.takes_device and (not self.deferred or "device" in self.kwargs) else {}
        try:
            result = self._call(self._on_meta_device, **options)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return None
        return [self.aliases[id(tensor)] for tensor in self.written] if result is None else result

    def _on_meta_device(self, tensor: Tensor) -> Tensor:
        return self.aliases[id(tensor)] if is_deferred(tensor) else StorageLayout.of(tensor).empty(META)

    def _drawn(self) -> dict[torch.device, Tensor] | None:
        """Run a random operation on a temporary, to advance the generators as in a build without deferral.

        Every later draw of the build depends on the generators, so the operation runs now, and its numbers are dropped.
        The states of the generators before the operation reproduce the numbers later.

        Returns:
            The states of the generators before the operation; None for an operation that draws nothing.
        """
        if not self.facts.is_random:
            return None
        states = _states(self.leaves, self.device)
        # With the same strides: the number and the order of the draws depend on the strides.
        self._call(lambda tensor: scratch_tensor(StorageLayout.of(tensor), tensor.device))
        return states

    def _begin(self, layout: StorageLayout, states: dict[torch.device, Tensor] | None) -> Tensor:
        args, kwargs = _captured(self.args, self.kwargs, None)
        return _begun(
            layout, OperationLink(self.func, args, kwargs, self.device, layout.num_bytes, None, states, layout)
        )

    def _wrapped(self, made: Any) -> Any:
        """Replace meta tensors by their arguments, or by new deferred tensors."""
        for tensor in filter(is_deferred, self.written):
            alias = self.aliases[id(tensor)]
            # `resize_`, `t_` and `set_` have changed the alias only: the argument has to follow.
            is_same_storage = alias.untyped_storage() is tensor.untyped_storage()
            if not is_same_storage or StorageLayout.of(alias) != StorageLayout.of(tensor):
                tensor.data = DeferredTensor(alias)

        def wrapped(leaf: Tensor) -> Tensor:
            return self.originals[id(leaf)] if id(leaf) in self.originals else DeferredTensor(leaf)

        return pytree.tree_map_only(Tensor, wrapped, made)


def _is_view(made: Tensor) -> bool:
    """Return whether a layout describes a meta tensor on the storage of a deferred tensor: no lazy conj or neg."""
    return has_contents(made) and not made.is_conj() and not made.is_neg()


def _begun(layout: StorageLayout, link: OperationLink) -> Tensor:
    """Return a plain meta tensor on a storage whose chain is `link`."""
    alias = layout.empty(META)
    Contents(alias, link.device, link)
    forbid_data_access(alias)
    return alias


def _captured(args: Any, kwargs: Any, own: Contents | None) -> Any:
    """Return arguments for a link that writes the storage of `own`; small tensors are copied, as they may change."""

    def captured(leaf: Any) -> Any:
        if isinstance(leaf, DeferredTensor):
            contents = contents_of(leaf)
            return StorageView(None if contents is own else contents.link, StorageLayout.of(leaf))
        if isinstance(leaf, torch.Generator):
            return EXPLICIT_GENERATOR
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(captured, (args, kwargs))


def _states(leaves: Iterable[Any], device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the generators that an operation draws from."""
    for leaf in leaves:
        # An operation with an explicit generator draws from this generator only.
        if isinstance(leaf, torch.Generator):
            return {leaf.device: packed_state(leaf.get_state())}
    return generator_states(device)


def _exported(tensor: Tensor) -> Tensor:
    """Return a deferred tensor with data that other code may write: the data replace the chain."""
    contents_of(tensor).settle()
    return value_of(tensor, keep=True)


def record_initializer(initialize: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Record a function that fills a tensor in place with random numbers, as one operation.

    Rejection sampling reads its numbers to decide whether it needs more. In a record of single operations, each read
    would keep the tensor in memory.
    """
    contents, device = contents_of(tensor), tensor.device
    if contents.link is None:
        # Settled data have no chain to extend, so the function writes the data now.
        initialize(tensor, *args, **kwargs)
        return
    states = _states([*args, *kwargs.values()], device)
    with _making_data(), torch.no_grad():
        initialize(scratch_tensor(StorageLayout.of(tensor), device), *args, **kwargs)
    num_bytes = tensor.untyped_storage().nbytes()
    # The initializer overwrites all elements of its tensor, so earlier operations do not matter.
    parent = None if StorageLayout.of(tensor).fills(num_bytes) else contents.link
    captured, options = _captured((tensor, *args), kwargs, contents)
    contents.extend(OperationLink(initialize, captured, options, device, num_bytes, parent, states))
