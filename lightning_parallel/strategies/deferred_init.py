"""Build a model without holding it: large tensors record how they are made, and are made later, whole or in part.

    with deferred_init("cuda"):
        model = Model()                                   # parameters have a shape, a dtype and a device, but no data
    materialize_module(model, device, owned, keep)        # what this rank owns, and of that its shard

Every bit is what the same code gives without this module, and after the build all random generators stand where they
would stand then. A random operation is therefore also executed when it is recorded, on temporaries that are dropped,
and the generator's state before it is part of the record.

    empty(4096, 4096)        -> recorded
    kaiming_uniform_(w)      -> recorded with the state; executed on a temporary, so that the generator moves on
    w[padding] = 0           -> recorded
    w.norm().item()          -> all of this is replayed, the number returned, the data dropped

Small tensors are made at once, and data that the user brings (numpy arrays, checkpoints) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import mark_as_parameter, move_tensor_hooks, swap_tensor_impl
from lightning_parallel.strategies.deferred_records import (
    META,
    Layout,
    history_of,
    memory_reused,
    settle_history,
    values_of,
)
from lightning_parallel.strategies.deferred_tensor import (
    BuildMode,
    DeferredTensor,
    is_deferred,
    making_data,
    materialize,
    without_rest,
)

__all__ = ["THRESHOLD", "deferred_init", "is_deferred", "materialize", "materialize_module", "release", "replace_data"]

# Constructors read small tensors (`linspace(...).tolist()`), and the vectors of a layer weigh little next to its
# matrices. 16 Ki elements are 64 KiB in float32; the record of a random operation takes 5 KiB, a generator's state.
THRESHOLD = 2**14

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@contextmanager
def deferred_init(device: torch.device | str | None = None, threshold: int = THRESHOLD) -> Iterator[None]:
    """Record how large tensors are made inside the block, instead of making them.

    Tensors that the code itself puts on the meta device (`torch.device("meta")`, `skip_init`) have no record and stay
    there. The context may be entered again for a model that is still deferred, such as to change its dtype. Outside of
    it changes in place are still recorded, but whatever else is computed from deferred tensors is computed at once,
    and the data are kept until the tensor is written or replaced.

    Tensors are deferred in this thread only. Subclasses of `nn.Parameter` get their data at once.

    Args:
        device: Where tensors are made for which the code gives no device, as by `with torch.device(device)`.
        threshold: Number of elements above which a tensor is deferred.
    """
    with memory_reused(), _parameter_subclasses_made(), _AssignmentMode(), BuildMode(threshold):
        if device is None:
            yield
        else:
            with torch.device(device):
                yield


def materialize_module(
    module: nn.Module,
    device: torch.device | str,
    owned: Callable[[str], bool] = lambda name: True,
    keep: Callable[[str, Tensor], Tensor] = lambda name, full: full,
) -> None:
    """Give `module` the data of its parameters, buffers and other tensors, in place and one after the other.

    Tensors that are tied, or share memory, still do so afterwards. Deferred tensors that are not owned become plain
    tensors on the meta device; others that are not owned stay as they are.

    Args:
        module: The model, with the tensors in attributes of its modules and in lists, tuples and dicts among these.
        device: Where the data go.
        owned: Whether this rank needs the tensor of that name; a tied one is needed if it is under any of its names.
        keep: Takes the part that this rank needs from the full tensor of that name, deferred or not.
    """
    groups: dict[int, list[tuple[Tensor, list[str]]]] = {}
    with making_data(), torch.no_grad():
        for tensor, names in _tensors_of(module):
            memory = id(history_of(tensor)) if is_deferred(tensor) else id(tensor)
            groups.setdefault(memory, []).append((tensor, [name for name in names if owned(name)]))
        for memory in list(groups):
            group = groups.pop(memory)
            if is_deferred(group[0][0]):
                _materialize_together(group, torch.device(device), keep)
            elif group[0][1]:
                _keep_part(*group[0], torch.device(device), keep)
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()  # cuDNN wants them in one piece, as they would be after construction on CUDA


def release(module: nn.Module) -> None:
    """Drop the records of all deferred tensors of `module`, which become plain tensors on the meta device."""
    materialize_module(module, META, owned=lambda name: False)


# ------------------------------------------------------------------------------- what does not reach the dispatcher


class _AssignmentMode(TorchFunctionMode):
    """Handles `tensor.data = value`, which never reaches the dispatcher, if only one of the two is deferred."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET_DATA or is_deferred(args[0]) == is_deferred(args[1]):
            return func(*args, **(kwargs or {}))
        target, value = args
        if type(target) in (Tensor, nn.Parameter, DeferredTensor):
            replace_data(target, value.detach())
        else:  # lazy parameters and the like give themselves another class afterwards
            target.data = materialize(value)
        return None


@contextmanager
def _parameter_subclasses_made() -> Iterator[None]:
    """Make the data at once that a subclass of `nn.Parameter` is constructed from.

    A deferred parameter has the class `DeferredTensor` and becomes an `nn.Parameter` later: the subclass would be lost.
    """

    def construct(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not nn.Parameter and is_deferred(data):
            data = materialize(data)
        return before(cls, data, *args, **kwargs)

    with patched(nn.Parameter, "__new__", staticmethod(construct)) as before:
        yield


# ------------------------------------------------------------------------------------------------- data in place


def _materialize_together(
    group: list[tuple[Tensor, list[str]]], device: torch.device, keep: Callable[[str, Tensor], Tensor]
) -> None:
    """Replace deferred tensors that share memory, given with the names under which they are owned."""
    needed = [(tensor, names[0]) for tensor, names in group if names]
    fulls = values_of([tensor for tensor, _ in needed])
    data = fulls[0].untyped_storage() if fulls else None
    storage = group[0][0].untyped_storage()
    for tensor, names in group:
        if not names:
            replace_data(tensor, Layout.of(tensor).empty(META))
    is_kept_whole = bool(needed)
    for (tensor, name), full in zip(needed, fulls):
        kept = without_rest(keep(name, full), full).to(device)
        is_kept_whole = is_kept_whole and kept.untyped_storage() is data
        replace_data(tensor, kept)
    # A view of these tensors that only a function knows goes on as a view, or else must not give initial values.
    settle_history(storage, data if is_kept_whole else None)


def _keep_part(tensor: Tensor, names: list[str], device: torch.device, keep: Callable[[str, Tensor], Tensor]) -> None:
    full = tensor.detach()
    kept = without_rest(keep(names[0], full), full).to(device)
    if kept is not full:
        tensor.data = kept


_REGISTRIES = frozenset(vars(nn.Module()))


def _tensors_of(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return all tensors of a model, each once, with all its registered names, or with that of an attribute."""
    found = _registered_tensors("", module)
    seen: set[int] = set()

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found.setdefault(id(value), (value, [name]))
        elif id(value) not in seen and isinstance(value, (nn.Module, list, tuple, dict)):
            seen.add(id(value))
            if isinstance(value, nn.Module):
                visit_attributes(name, value)
            else:
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    visit(f"{name}.{key}", item)

    def visit_attributes(prefix: str, root: nn.Module) -> None:
        for key, entry in _registered_tensors(prefix, root).items():
            found.setdefault(key, entry)
        for path, child in root.named_modules(prefix=prefix):
            seen.add(id(child))
            for key, value in vars(child).items():
                if key not in _REGISTRIES:
                    visit(f"{path}.{key}".lstrip("."), value)

    visit_attributes("", module)
    return list(found.values())


def _registered_tensors(prefix: str, root: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """Return parameters and buffers by id."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for path, child in root.named_modules(prefix=prefix, remove_duplicate=False):
        named = [
            *child.named_parameters(path, recurse=False, remove_duplicate=False),
            *child.named_buffers(path, recurse=False, remove_duplicate=False),
        ]
        for name, tensor in named:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return found


def replace_data(target: Tensor, value: Tensor) -> None:
    """Give `target` the data of `value` and the class that goes with it; it stays the same object everywhere."""
    is_parameter = isinstance(target, nn.Parameter)
    before = type(target)
    if is_parameter:
        value = nn.Parameter(value, target.requires_grad)
    after = type(value)
    move_tensor_hooks(target, value)
    swap_tensor_impl(target, value)
    target.__class__ = after
    value.__class__ = before
    mark_as_parameter(target, is_parameter and after is DeferredTensor)
