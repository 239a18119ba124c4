"""Tensors without data that record what is done to them: the part of `deferred_init` that sees each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
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
from lightning_parallel.strategies.deferred.reads import read_later_as_meta
from lightning_parallel.strategies.deferred.records import (
    META,
    RecordedOperation,
    StorageHistory,
    StorageLayout,
    StorageView,
    alias_of,
    facts_of,
    generator_states,
    has_history,
    history_of,
    packed_state,
    read_values,
    scratch_tensor,
    shared_values,
    values_of,
)

__all__ = ["BuildMode", "DeferredTensor", "is_deferred", "materialize"]

_aten = torch.ops.aten

# In-place samplers that read nothing: any memory of the right layout moves the generator on as the tensor would.
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

# These read data in C++ without asking the dispatcher.
_NUMBERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_READERS = {getattr(Tensor, name) for name in (*_NUMBERS, "__repr__", "__format__")}
# What these return has the memory of the tensor: what is written there is written into the tensor.
_EXPORTERS = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_}

_is_making = False


def is_deferred(value: object) -> bool:
    """Return whether `value` is a tensor whose data are yet to be made."""
    return isinstance(value, DeferredTensor)


def materialize(tensor: Tensor) -> Tensor:
    """Make the data of a deferred tensor, which stays deferred itself.

    Raises:
        RuntimeError: If an operation gives another shape than it did when recorded.
    """
    with _making_data(), torch.no_grad():
        return values_of([tensor])[0]


class DeferredTensor(Tensor):
    """A tensor on the meta device that claims to be where its data will be.

    The claim has to hold in C++ too, where `new_tensor` and `to` would otherwise make tensors on the meta device. It
    shares its storage with plain meta tensors; the storage carries the record.
    """

    @staticmethod
    def __new__(cls, alias: Tensor) -> DeferredTensor:
        device = history_of(alias).device
        return make_subclass(cls, alias, False, dispatch_device=True, device_for_backend_keys=device)

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def read_later(cls, stored: StoredTensor) -> DeferredTensor:
        """Return a tensor whose data are read from a file when they are made."""
        return cls(read_later_as_meta(stored))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.data.clone()
            if isinstance(self, nn.Parameter):
                # As torch does, without attributes: transformers marks there what has been initialised.
                copy = nn.Parameter(copy, self.requires_grad)
            else:
                vars(copy).update(deepcopy(vars(self), memo))
                copy.requires_grad_(self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = materialize(self)
        if isinstance(self, nn.Parameter):
            # The class of a deferred parameter does not say that it is one.
            value = nn.Parameter(value, self.requires_grad)
        vars(value).update(vars(self))
        mark_as_parameter(value, False)
        return value.__reduce_ex__(protocol)

    def as_subclass(self, cls: type) -> Any:
        with _making_data(), torch.no_grad():
            return shared_values([self])[0].as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READERS or func in _EXPORTERS:
            make = shared_values if func in _EXPORTERS else read_values
            with _making_data(), torch.no_grad():
                made = pytree.tree_map_only(DeferredTensor, lambda tensor: make([tensor])[0], (args, kwargs))
                result = func(*made[0], **made[1])
            return args[0] if func is Tensor.share_memory_ else result
        with DisableTorchFunctionSubclass():
            # For code that compares addresses to find shared memory; there is nothing at this one.
            if func == Tensor.data_ptr:
                return history_of(args[0]).address + args[0].storage_offset() * args[0].itemsize
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatched(func, types, args, kwargs or {}, None)


class BuildMode(TorchDispatchMode):
    """Sees every operation of the block."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold = threshold

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, types, args, kwargs or {}, self.threshold)


def _dispatched(func: Any, types: Any, args: Any, kwargs: dict[str, Any], threshold: int | None) -> Any:
    # Reading `.device` comes here too, as the class answers for its device.
    if func is torch.ops.prim.device.default:
        return history_of(args[0]).device
    has_other_classes = any(not issubclass(kind, DeferredTensor) for kind in types)
    if has_other_classes or (_is_making and threshold is not None):
        return func(*args, **kwargs)
    return _Invocation(func, args, kwargs, threshold).run()


def _has_memory(value: Any) -> bool:
    """Whether `value`, if it is a tensor, is its memory and a `Layout`: neither sparse nor quantized."""
    return not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_quantized)


@contextmanager
def _making_data() -> Iterator[None]:
    """Let operations pass inside the block, also during a build."""
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
        # A plain meta tensor for each argument, and the argument for each of these.
        self.aliases = {id(tensor): alias_of(tensor) for tensor in self.deferred}
        self.originals = {id(self.aliases[id(tensor)]): tensor for tensor in self.deferred}

    def run(self) -> Any:
        """Record the operation, or execute it."""
        if self.device == META:
            return self._on_meta()
        if not self.deferred:
            return self.func(*self.args, **self.kwargs) if self.threshold is None else self._create()
        num_deferred = sum(map(is_deferred, self.written))
        if num_deferred and num_deferred < len(self.written):
            raise NotImplementedError(f"`{self.func}` must not write into deferred and other tensors at once")
        if num_deferred and any(history_of(tensor).is_shared for tensor in self.written):
            return self._write_shared()
        only_reads = not self.written and (not self.facts.returns_tensors or self.func.namespace != "aten")
        if only_reads or self.facts.is_data_dependent or (self.written and not num_deferred):
            return self._compute()
        return self._defer()

    def _output_device(self) -> torch.device:
        device = self.kwargs.get("device")
        if device is None:
            tensors = [*self.deferred, *self.others]
            # A scalar on the CPU may meet tensors of any device: these decide.
            devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
            device = META if META in devices else devices[0] if devices else "cpu"
        device = torch.device(device)
        if device.type not in ("cpu", "meta") and device.index is None:
            # Tensors know their index, and `cuda` does not equal `cuda:0` where devices are compared.
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return device

    def _call(self, replacement: Callable[[Tensor], Tensor], **options: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, replacement, (self.args, self.kwargs))
        return self.func(*args, **{**kwargs, **options})

    def _on_meta(self) -> Any:
        """Run an operation whose result the code wants on the meta device."""
        if any(map(is_deferred, self.written)):
            raise RuntimeError(
                f"`{self.func}` must not write a tensor on the meta device, which has no data, into another tensor"
            )
        result = self._call(lambda tensor: self.aliases.get(id(tensor), tensor))
        return pytree.tree_map_only(Tensor, lambda leaf: DeferredTensor(leaf) if has_history(leaf) else leaf, result)

    def _create(self) -> Any:
        """Run an operation without deferred arguments; what it makes is deferred if it is large."""
        is_factory = not self.others and self.facts.takes_device and self.func.overloadpacket is not _aten.from_file
        layout = self._layout() if is_factory else None
        if isinstance(layout, Tensor) and self._is_large(layout):
            args, kwargs = self._captured()
            return self._record(args, kwargs, *self._run_once(layout))
        return self._compute()

    def _compute(self) -> Any:
        """Execute an operation, with the data of deferred tensors; what it makes is deferred if it is large."""
        states = self._states() if self.facts.is_random else None
        result = self._call(self._data(is_borrowed=self.threshold is None or not self.facts.returns_tensors))
        if not self._is_reproducible(pytree.tree_leaves(result)):
            return result
        args, kwargs = self._captured()
        layout = pytree.tree_map(lambda leaf: StorageLayout.of(leaf).empty(META), result)
        return self._record(args, kwargs, states, layout)

    def _write_shared(self) -> Any:
        """Execute an operation on tensors whose memory others have, too."""
        if self.facts.changes_shape:
            sizes = [tensor.untyped_storage().nbytes() for tensor in self.written]
            layout = self._layout()
            if self.func.overloadpacket is _aten.set_ or sizes != [a.untyped_storage().nbytes() for a in self.written]:
                raise NotImplementedError(
                    f"`{self.func}` is not supported on a tensor whose memory `numpy()` or a similar call exposed"
                )
            return self._wrapped(layout)
        shared_values(self.written)
        self._call(self._data(is_borrowed=False))
        return self._wrapped(None)

    def _is_reproducible(self, outputs: list[Any]) -> bool:
        """Return whether a record may take the place of the outputs, which all have to be large and new."""
        if self.threshold is None or self.written or self.func.namespace != "aten" or not outputs:
            return False
        if any((self._is_large(tensor) and not tensor.is_meta) or not _has_memory(tensor) for tensor in self.others):
            return False  # data that the user brought: the record would hold another copy of them
        return all(
            type(output) is Tensor
            and self._is_large(output)
            and output.untyped_storage().nbytes() == output.numel() * output.itemsize
            and all(output.untyped_storage() is not tensor.untyped_storage() for tensor in self.others)
            for output in outputs
        )

    def _defer(self) -> Any:
        """Record an operation on deferred tensors."""
        args, kwargs = self._captured()  # first: the operation may change the shape of its arguments
        sizes = [tensor.untyped_storage().nbytes() for tensor in self.written]
        layout = self._layout()
        if not self.written and not (layout is not None and all(map(_has_memory, pytree.tree_leaves(layout)))):
            return self._compute()
        is_resized = sizes != [tensor.untyped_storage().nbytes() for tensor in self.written]
        creates = any(isinstance(leaf, Tensor) and not has_history(leaf) for leaf in pytree.tree_leaves(layout))
        writes = bool(self.written) and not self.facts.changes_shape
        if not creates and not writes and not is_resized:
            return self._wrapped(layout)
        if self.threshold is None and not self.written:
            return self._compute()
        must_run = layout is None or (creates and not self._has_known_layout(layout))
        return self._record(args, kwargs, *self._run_once(layout, must_run))

    def _has_known_layout(self, layout: Any) -> bool:
        """Return whether the meta kernel gives the strides of the true one, on which bits of sums may depend.

        Compilers rely on those of the core operators; others, such as the decompositions of `torch.linalg`, may differ.
        """
        is_core = torch.Tag.core in self.func.tags or torch.Tag.pointwise in self.func.tags
        if is_core or self.func.overloadpacket in _NEW_LIKE:
            return True
        return all(leaf.dim() < 2 for leaf in pytree.tree_leaves(layout) if isinstance(leaf, Tensor))

    def _layout(self) -> Any:
        """Run the operation on meta tensors; None if it has no kernel for them, or has wrong arguments."""
        if not all(map(_has_memory, self.others)):
            return None
        options = {"device": META} if self.facts.takes_device and (not self.deferred or "device" in self.kwargs) else {}
        try:
            result = self._call(self._on_meta_device, **options)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return None
        return [self.aliases[id(tensor)] for tensor in self.written] if result is None else result

    def _on_meta_device(self, tensor: Tensor) -> Tensor:
        return self.aliases[id(tensor)] if is_deferred(tensor) else StorageLayout.of(tensor).empty(META)

    def _captured(self) -> tuple[Any, Any]:
        """Return the arguments for the record: tensors with data are copied, since they may change later."""

        def captured(leaf: Any) -> Any:
            if isinstance(leaf, DeferredTensor):
                if history_of(leaf).is_shared:
                    return values_of([leaf])[0].clone()
                return StorageView.of(leaf)
            if isinstance(leaf, torch.Generator):
                return RecordedOperation.EXPLICIT_GENERATOR
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(captured, (self.args, self.kwargs))
        return args, kwargs

    def _data(self, is_borrowed: bool) -> Callable[[Tensor], Tensor]:
        """Make the data of the deferred arguments; borrowed ones are neither written nor part of a result."""
        make = read_values if is_borrowed and not self.written else values_of
        values = dict(zip(map(id, self.deferred), make(self.deferred)))
        return lambda tensor: values.get(id(tensor), tensor)

    def _states(self) -> dict[torch.device, Tensor]:
        for leaf in self.leaves:
            # An operation with a generator of its own draws from no other.
            if isinstance(leaf, torch.Generator):
                return {leaf.device: packed_state(leaf.get_state())}
        return generator_states(self.device)

    def _run_once(self, layout: Any, must_run: bool = False) -> tuple[dict[torch.device, Tensor] | None, Any]:
        """Execute a random operation, so that the generators move on, or one that `must_run`.

        Returns:
            The states of the generators before, and the layout of the outputs.
        """
        states = self._states() if self.facts.is_random else None
        packet = self.func.overloadpacket
        if packet in _SAMPLERS or packet in _SAMPLERS_LIKE or self.func is _aten.bernoulli_.float:
            # With the same strides: how many numbers are drawn, and in which order, depends on them.
            self._call(lambda tensor: scratch_tensor(StorageLayout.of(tensor), tensor.device))
        elif states is not None or must_run:
            result = self._call(self._data(is_borrowed=True))
            if not self.written:
                layout = pytree.tree_map_only(Tensor, lambda leaf: StorageLayout.of(leaf).empty(META), result)
        return states, layout

    def _is_large(self, tensor: Tensor) -> bool:
        return self.threshold is not None and _has_memory(tensor) and tensor.numel() > self.threshold

    def _record(self, args: Any, kwargs: Any, states: dict[torch.device, Tensor] | None, layout: Any) -> Any:
        operation = RecordedOperation(self.func, args, kwargs, states)
        operation.overwrites = self._overwrites(operation)
        for history in {history_of(tensor): None for tensor in self.written}:
            operation.append_to(history)
        for position, leaf in enumerate(pytree.tree_leaves(layout)):
            if isinstance(leaf, Tensor) and not has_history(leaf):
                history = StorageHistory(self.device, leaf.untyped_storage())
                operation.append_to(history)
                operation.created.append((position, history, StorageLayout.of(leaf)))
                leaf.untyped_storage().history = history  # type: ignore[attr-defined]
                forbid_data_access(leaf)
        return self._wrapped(layout)

    def _overwrites(self, operation: RecordedOperation) -> bool:
        if self.func.overloadpacket not in _OVERWRITING:
            return False
        written, *others = operation.views
        target = self.written[0]
        is_whole = target.untyped_storage().nbytes() == target.numel() * target.itemsize and target.is_contiguous()
        # A source in the same storage would be read while it is overwritten.
        return is_whole and all(view.history is not written.history for view in others)

    def _wrapped(self, layout: Any) -> Any:
        """Turn meta tensors into the arguments that they stand for, or into new deferred tensors."""
        for tensor in self.written:
            alias = self.aliases[id(tensor)]
            # `resize_`, `t_` and `set_` have changed the alias only: the argument has to follow.
            is_same_storage = alias.untyped_storage() is tensor.untyped_storage()
            if not is_same_storage or StorageLayout.of(alias) != StorageLayout.of(tensor):
                tensor.data = DeferredTensor(alias)
        if self.facts.num_returns == 0:
            return None
        if layout is None:
            return self.written[0] if self.facts.num_returns == 1 else tuple(self.written)

        def wrapped(leaf: Tensor) -> Tensor:
            return self.originals[id(leaf)] if id(leaf) in self.originals else DeferredTensor(leaf)

        return pytree.tree_map_only(Tensor, wrapped, layout)
