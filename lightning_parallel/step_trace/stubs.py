"""Stubs for modules owned by other stages: same structure, no parameters, placeholder outputs.

A stub runs the module's own `forward` on placeholders once per input signature. It keeps a recipe of the outputs, which
layers of one kind share. A hook, or a list among its arguments, may also collect the outputs of a module. Such a module
runs each time, so that a placeholder is collected there too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.compat import patched
from lightning_parallel.compat.chance import random_state_kept
from lightning_parallel.compat.torch import (
    FakeTensor,
    buffers_of,
    computes_on_parts,
    forward_hooks_of,
    functional_calls_swap,
    non_persistent_buffers_of,
    parameters_of,
    pytree,
)
from lightning_parallel.step_trace.attributes import SavedAttributes, parameter_lists, replaced
from lightning_parallel.step_trace.interception import Call, CallSite, has_listeners, run_on_random_data
from lightning_parallel.step_trace.placeholder import (
    PlaceholderError,
    PlaceholderTensor,
    UnknownValue,
    draws_numbers,
    nothing_written,
)

__all__ = [
    "PLAIN",
    "StubOutputs",
    "autocast_dtype",
    "copy_args",
    "free_parameters",
    "named_placeholders",
    "note_tensor",
    "shards_shown",
    "stubbed",
    "write_back",
]

# Values that can be compared and never change, so that a recipe may depend on them.
PLAIN = (int, float, str, bool, type(None), torch.dtype)
_MOST_RECIPES = 1000


@dataclass(frozen=True)
class _OutputRecipe:
    """Describes the output of a module: each leaf is a shape, the position of an input, or a constant.

    Attributes:
        tree: Structure of the output; None for a single placeholder, the common case.
        leaves: (`placeholder`, tensor on the meta device) | (`input`, position) | (`constant`, value).
    """

    tree: pytree.TreeSpec | None
    leaves: tuple[tuple[str, Any], ...]


@dataclass
class _LastCall:
    """The last call and its recipe, found again by identity, which is faster than by signature."""

    state: Any
    args: Any
    kwargs: Any
    recipe: _OutputRecipe


class StubOutputs:
    """Infers the outputs of modules of other stages.

    Args:
        device: Where the stage computes.
        repeats: Run each module every time, and let it change objects among its arguments. Otherwise it gets copies:
            each layer reads only its own entries of a key-value cache, so entries of other stages may be missing.
    """

    def __init__(self, device: torch.device, repeats: bool = False) -> None:
        self.device = device
        self.repeats = repeats
        self._submodules: dict[nn.Module, list[nn.Module]] = {}
        self._recipes: dict[Any, _OutputRecipe | None] = {}
        self._last: _LastCall | None = None

    def infer(self, call: Call) -> Any:
        """Return the module's output, with placeholders for tensors.

        Raises:
            PlaceholderError: If the output cannot be inferred without data.
        """
        if self.repeats or has_listeners(self._all_submodules(call.module)):
            return self.run_stub(call)
        # Together with the arguments, this decides the shapes and dtypes of an output.
        state = (call.site.kind, call.module.training, autocast_dtype(self.device))
        recipe = self._recipe_of_last(state, call)
        if recipe is None:
            key = (state, _signature(call.args), _signature(call.kwargs))
            recipe = self._recipes.get(key)
            if recipe is None:
                # Sequence lengths vary without end in some data sets, so the cache has a limit.
                if len(self._recipes) >= _MOST_RECIPES:
                    self._recipes.clear()
                result, self._recipes[key] = self._record(call)
                return result
            self._last = _LastCall(state, call.args, call.kwargs, recipe)
        return self._follow(recipe, call)

    def repeated(
        self, site: CallSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PlaceholderTensor | None:
        """Return the output of a call that looks the same as the last one, as calls of equal layers mostly do.

        None for a call with another output than one placeholder, and for a module with listeners; see `infer`.
        """
        last = self._last
        if (
            last is None
            or last.recipe.tree is not None
            or len(args) != len(last.args)
            or len(kwargs) != len(last.kwargs)
            or self.repeats
        ):
            return None
        # Written out, as in `infer`: each call of a Python function would add a tenth to the time of a stub.
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if last.state != (site.kind, module.training, dtype):
            return None
        for new, old in zip(args, last.args):
            if type(new) is PlaceholderTensor:
                if type(old) is not PlaceholderTensor or new.signature != old.signature:
                    return None
            elif new is not old or type(new) is list or type(new) is dict:
                return None
        for name, new in kwargs.items():
            old = last.kwargs.get(name, self)
            if type(new) is PlaceholderTensor:
                if type(old) is not PlaceholderTensor or new.signature != old.signature:
                    return None
            elif new is not old or type(new) is list or type(new) is dict:
                return None
        modules = self._submodules.get(module)
        if modules is None:
            return None
        for child in modules:
            after, before = forward_hooks_of(child)
            if after or before or "forward" in child.__dict__:
                if has_listeners(modules):
                    return None
                break
        return PlaceholderTensor.__new__(PlaceholderTensor, last.recipe.leaves[0][1], self.device, site.provenance)

    def forget_arguments(self) -> None:
        """Forget the last call's arguments, which would keep the batch alive."""
        self._last = None

    def run_stub(self, call: Call, available: bool = False) -> Any:
        """Run the module on placeholders, or on random data if its code needs data.

        Args:
            call: The call.
            available: Whether the outputs count as available; see `PlaceholderTensor`.
        """
        return self._run(call, available)[0]

    def _all_submodules(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._submodules:
            self._submodules[module] = list(module.modules())
        return self._submodules[module]

    def _recipe_of_last(self, state: Any, call: Call) -> _OutputRecipe | None:
        """Return the recipe of the previous call if this one looks the same: layers mostly share their arguments."""
        last = self._last
        if last is not None and last.state == state and _same_call(last, call.args, call.kwargs):
            return last.recipe
        return None

    def _follow(self, recipe: _OutputRecipe, call: Call) -> Any:
        # New placeholders for each call, because each receives separate data.
        provenance = call.site.provenance
        if recipe.tree is None:
            return PlaceholderTensor(recipe.leaves[0][1], self.device, provenance)
        inputs: list[Any] = []
        if any(source == "input" for source, _ in recipe.leaves):
            inputs = pytree.tree_flatten((call.args, call.kwargs))[0]
        leaves = []
        for source, what in recipe.leaves:
            if source == "placeholder":
                leaves.append(PlaceholderTensor(what, self.device, provenance))
            else:
                leaves.append(inputs[what] if source == "input" else what)
        return pytree.tree_unflatten(leaves, recipe.tree)

    def _run(self, call: Call, available: bool = False) -> tuple[Any, bool]:
        """Return the module's output, and whether it changed a list or dict among its arguments."""
        arguments = (call.args, call.kwargs)
        originals: dict[int, Any] = {}
        # Tensor-parallel layers communicate in their forward; the ranks of other stages do not take part here.
        saved = SavedAttributes(call.module)
        with comm.skip_communication(), random_state_kept(), draws_numbers(False), nothing_written():
            try:
                given = copy_args(arguments, originals)
                with stubbed(call.module, self.device, available):
                    result = call.function(*given[0], **given[1])
            except Exception as error:
                saved.restore()

                # The code reads data, such as routing by content, so run it again on random data. With fresh copies,
                # because the first run may have changed some of them.
                def copied() -> Any:
                    originals.clear()
                    return copy_args(arguments, originals)

                try:
                    result, given = run_on_random_data(call, copied, self.device, available)
                except Exception:
                    raise PlaceholderError(
                        f"The shape of {call.site.provenance} cannot be inferred without real data"
                        f" ({_described(error)})"
                    ) from error
        # An output that is an argument, such as a mask, stays that very object.
        handed_on = {id(leaf) for leaf in pytree.tree_leaves(arguments)}

        def finished(leaf: Any) -> Any:
            if type(leaf) is PlaceholderTensor and id(leaf) not in handed_on:
                is_available = available or leaf.available
                if leaf.parameter is not None or leaf.device != self.device:
                    return PlaceholderTensor(leaf.meta, self.device, call.site.provenance, available=is_available)
                # The same object: a hook may have collected it, and gets its data if they are sent.
                leaf.provenance, leaf.available = call.site.provenance, is_available
                return leaf
            return originals.get(id(leaf), (leaf,))[0]

        # Later calls and stages must see the changes of this call to shared objects.
        if self.repeats:
            for original, duplicate in originals.values():
                getattr(original, "__dict__", {}).update(getattr(duplicate, "__dict__", {}))
        return pytree.tree_map(finished, result), write_back(arguments, given, finished)

    def _record(self, call: Call) -> tuple[Any, _OutputRecipe | None]:
        """Run the module; return its output, and a recipe for it, or None if there can be none."""
        inputs = pytree.tree_flatten((call.args, call.kwargs))[0]
        # Not by identity for plain values: equal small integers are one object, whatever their origin.
        positions = {id(leaf): index for index, leaf in enumerate(inputs) if not isinstance(leaf, PLAIN)}
        result, changed_arguments = self._run(call)
        if changed_arguments:
            return result, None
        leaves, tree = pytree.tree_flatten(result)
        recipe: list[tuple[str, Any]] = []
        for leaf in leaves:
            if id(leaf) in positions:
                recipe.append(("input", positions[id(leaf)]))
            elif type(leaf) is PlaceholderTensor:
                recipe.append(("placeholder", leaf.meta))
            elif isinstance(leaf, Tensor):
                return result, None  # real data, computed from the batch, so compute them again each time
            else:
                recipe.append(("constant", leaf))
        is_single = bool(leaves) and leaves[0] is result and recipe[0][0] == "placeholder"
        return result, _OutputRecipe(None if is_single else tree, tuple(recipe))


def _described(error: Exception) -> str:
    """Describe why a module could not run on placeholders."""
    if isinstance(error, (KeyError, AttributeError, IndexError)):
        # It ran alone, and on separate copies of objects.
        return (
            f"{type(error).__name__}: {error}; values that earlier layers leave for it in a shared object, such as"
            " keys and values, are missing here; return them from these layers"
        )
    return str(error)


@contextmanager
def stubbed(module: nn.Module, device: torch.device, available: bool = False) -> Iterator[None]:
    """Hide the parameters and buffers of `module` behind placeholders inside the block."""
    with replaced(module, lambda path, child: _stand_ins(child, path, device, available)):
        yield


@contextmanager
def shards_shown(module: nn.Module) -> Iterator[None]:
    """Let placeholders for sharded parameters of `module` itself have the shapes of the shards inside the block."""
    full = {
        name: value
        for name, value in vars(module).items()
        if type(value) is PlaceholderTensor and value.shard is not None
    }
    module.__dict__.update({name: value.again(is_shard=True) for name, value in full.items()})
    try:
        yield
    finally:
        module.__dict__.update(full)


def free_parameters(module: nn.Module, freed: set[int], device: torch.device, names: dict[int, str]) -> None:
    """Replace parameters of `module` itself, without its children, by placeholders permanently.

    Args:
        freed: `id`s of the parameters.
        device: The device that the placeholders claim to be on.
        names: Name in the model of each parameter, by `id`.
    """
    own = {key: value for key, value in parameters_of(module).items() if value is not None and id(value) in freed}
    placeholders = {}
    for key, value in own.items():
        name = names[id(value)]
        placeholders[id(value)] = PlaceholderTensor.like(value, f"the parameter `{name}`", device, name)
        # Not registered, so that `parameters()`, optimizers and `state_dict` hold this rank's parameters only.
        del parameters_of(module)[key]
        module.__dict__[key] = placeholders[id(value)]
    module.__dict__.update(parameter_lists(module, placeholders))


def _stand_ins(module: nn.Module, path: str, device: torch.device, available: bool) -> dict[str, Any]:
    """Return placeholders for the parameters and buffers that `module` itself still holds, by attribute.

    Buffers outside checkpoints are constants, such as inverse frequencies, and code may read them, so they are copied.
    """
    own = {name: value for name, value in parameters_of(module).items() if value is not None}
    held = {**own, **{name: value for name, value in buffers_of(module).items() if value is not None}}
    stand_ins: dict[str, Any] = {}
    for name, value in held.items():
        # An attribute of this name hides the registered tensor already, as in `named_placeholders`.
        if name in module.__dict__:
            continue
        if name in non_persistent_buffers_of(module) and not value.is_meta:
            stand_ins[name] = value.clone()
        else:
            provenance = f"`{path}.{name}`" if path else f"`{name}`"
            stand_ins[name] = PlaceholderTensor.like(value, provenance, device, available=available)
    # A placeholder that received data for the step is copied without them: stubs compute nothing. The code of a sharded
    # module computes with the shard, while the step sees the full tensor.
    for name, value in vars(module).items():
        if (
            type(value) is PlaceholderTensor
            and value.parameter
            and (value.value is not None or value.shard is not None)
        ):
            stand_ins[name] = value.again(is_shard=True)
    by_parameter = {id(value): stand_ins.get(name, vars(module).get(name)) for name, value in own.items()}
    return {**stand_ins, **parameter_lists(module, by_parameter)}


def copy_args(arguments: Any, originals: dict[int, Any]) -> Any:
    """Copy objects that a layer might change, such as a key-value cache.

    Args:
        arguments: The arguments of a call, of any structure; tensors and plain values are not copied.
        originals: Is filled with (original, copy) by the `id` of each copy.
    """

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, UnknownValue, *PLAIN)):
            return leaf
        memo: dict[int, Any] = {}
        _note_copies(leaf, memo, set())
        try:
            duplicate = copy.deepcopy(leaf, memo)
        except Exception:
            # An object that cannot be copied, such as a lock or a generator, is passed on itself.
            return leaf
        originals[id(duplicate)] = (leaf, duplicate)
        return duplicate

    return pytree.tree_map(copied, arguments)


def write_back(old: Any, new: Any, finished: Callable[[Any], Any]) -> bool:
    """Write the changes that a module made to copies of lists and dicts back to the originals.

    Args:
        old, new: The original arguments, and the copies in their state after the call.
        finished: Converts a value of `new` to a value for use outside the dry run.

    Returns:
        Whether a list or dict changed.
    """
    if type(new) is not type(old) or not isinstance(old, (tuple, list, dict)):
        return False
    before = old if isinstance(old, dict) else dict(enumerate(old))
    after = new if isinstance(new, dict) else dict(enumerate(new))
    changed = False
    for key in before.keys() & after.keys():
        changed |= write_back(before[key], after[key], finished)
    entries = {}
    for key, item in after.items():
        is_kept = key in before and _same(before[key], item, finished)
        entries[key] = before[key] if is_kept else pytree.tree_map(finished, item)
    is_unchanged = entries.keys() == before.keys() and all(entries[key] is item for key, item in before.items())
    # A tuple cannot be changed. The lists and dicts in it were changed above.
    if is_unchanged or isinstance(old, tuple):
        return changed
    # In place: the owner of the list, such as a model that collects hidden states, reads it after the call.
    old.clear()
    if isinstance(old, dict):
        old.update(entries)
    else:
        old.extend(entries.values())
    return True


def _same(old: Any, new: Any, finished: Callable[[Any], Any]) -> bool:
    if type(new) is type(old) and isinstance(old, (list, dict)):
        return True  # its entries are compared by themselves
    if type(new) is type(old) and isinstance(old, tuple):
        return len(old) == len(new) and all(_same(o, n, finished) for o, n in zip(old, new))
    return finished(new) is old or (isinstance(old, PLAIN) and new == old)


def note_tensor(value: Tensor, memo: dict[int, Any], shares_placeholders: bool = False) -> None:
    """Add a copy of a tensor that `deepcopy` rejects to its memo.

    Args:
        value: The tensor; if `deepcopy` can copy it, the memo does not change.
        memo: The memo of `deepcopy`.
        shares_placeholders: Whether a placeholder is its own copy.
    """
    # A copy of a piece would gather it.
    if (shares_placeholders and type(value) is PlaceholderTensor) or computes_on_parts(type(value)):
        memo[id(value)] = value
        return
    is_refused = type(value) is Tensor and value.requires_grad and not value.is_leaf
    # `deepcopy` copies the storage, which fails for a tensor without data.
    if is_refused or isinstance(value, FakeTensor):
        memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)


def _note_copies(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Add copies of tensors in `value` that `deepcopy` rejects, such as tensors with a history, to its memo."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        note_tensor(value, memo)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _note_copies(item, memo, seen)
    else:
        for item in (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values():
            _note_copies(item, memo, seen)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on `device`; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _same_call(last: _LastCall, args: Any, kwargs: Any) -> bool:
    """Return whether a call has the same arguments as the last one, by identity."""
    if len(args) != len(last.args) or len(kwargs) != len(last.kwargs):
        return False
    return all(map(_same_argument, args, last.args)) and all(
        name in last.kwargs and _same_argument(new, last.kwargs[name]) for name, new in kwargs.items()
    )


def _same_argument(new: Any, old: Any) -> bool:
    if type(new) is PlaceholderTensor:
        return type(old) is PlaceholderTensor and new.signature == old.signature
    return new is old and type(new) not in (list, dict)  # these may have changed since


def _signature(value: Any) -> Any:
    """Return the key of a recipe: shapes and dtypes of tensors, plain values, and types of everything else."""
    kind = type(value)
    if kind is PlaceholderTensor:
        return value.signature
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if kind is tuple or kind is list:
        return (kind, *map(_signature, value))
    if kind is dict:
        return tuple([(name, _signature(item)) for name, item in value.items()])
    return value if isinstance(value, PLAIN) else kind


@contextmanager
def named_placeholders(module: nn.Module, device: torch.device) -> Iterator[list[PlaceholderTensor]]:
    """Replace every parameter by a placeholder with its name inside the block, in `module.parameters()` too."""
    placeholders = {
        id(parameter): PlaceholderTensor.like(parameter, f"the parameter `{name}`", device, name)
        for name, parameter in module.named_parameters()
    }
    hidden = [
        (child, key, placeholders[id(value)])
        for child in module.modules()
        for key, value in parameters_of(child).items()
        if value is not None
    ]
    # Also lists of parameters that modules keep: a step may sum over one.
    kept = [(child, parameter_lists(child, placeholders)) for child in module.modules()]
    before = [(child, {name: vars(child)[name] for name in lists}) for child, lists in kept if lists]
    # An attribute of the instance takes precedence over `__getattr__`, by which `nn.Module` finds parameters.
    for child, key, placeholder in hidden:
        child.__dict__[key] = placeholder
    for child, lists in kept:
        child.__dict__.update(lists)
    try:
        with _answered_with(placeholders):
            yield list(placeholders.values())
    finally:
        for child, key, _ in hidden:
            del child.__dict__[key]
        for child, lists in before:
            child.__dict__.update(lists)


@contextmanager
def _answered_with(placeholders: dict[int, PlaceholderTensor]) -> Iterator[None]:
    """Let methods of modules that return or exchange parameters see the placeholders, by `id` of the parameter."""
    named, found, saved = nn.Module.named_parameters, nn.Module.get_parameter, nn.Module.state_dict

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, parameter in named(self, *args, **kwargs):
            yield name, placeholders.get(id(parameter), parameter)

    def get_parameter(self: nn.Module, target: str) -> Any:
        path, _, name = target.rpartition(".")
        shown = vars(self.get_submodule(path)).get(name)
        # The method of torch takes instances of `Parameter` only.
        return shown if isinstance(shown, PlaceholderTensor) else found(self, target)

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = saved(self, *args, **kwargs)
        # Parameters themselves, as for `keep_vars=True`. Detached tensors are full also in a sharded module.
        for key, value in state.items():
            state[key] = placeholders.get(id(value), value)
        return state

    def swap(own: Callable[..., Any], module: nn.Module, name: str, tensor: Any, **kwargs: Any) -> Any:
        if name not in vars(module) or name not in parameters_of(module):
            return own(module, name, tensor, **kwargs)
        shown, module.__dict__[name] = vars(module)[name], tensor
        return shown

    # Patch the class and not the instance: a step may sum over `parameters()` of submodules as well.
    with (
        patched(nn.Module, "named_parameters", named_parameters),
        patched(nn.Module, "get_parameter", get_parameter),
        patched(nn.Module, "state_dict", state_dict),
        functional_calls_swap(swap),
    ):
        yield
