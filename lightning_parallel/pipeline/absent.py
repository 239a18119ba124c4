"""What modules of other stages answer: their structure is kept, their parameters are gone, their outputs are ghosts.

An absent module is asked once per input signature, by running its own `forward` on ghosts, and the answer is
remembered. Layers of one kind share what they remember.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_parallel import comm
from lightning_parallel.pipeline.ghost import Ghost, GhostError

__all__ = ["Answers", "Call", "absent", "autocast_dtype", "forget_parameters", "spared"]

Call = Callable[..., Any]

_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class _Recipe:
    """How to answer without running: each leaf is a shape, the position of an input, or a constant."""

    tree: TreeSpec | None
    leaves: tuple[tuple[str, Any], ...]


class Answers:
    """What absent modules return.

    Args:
        device: Where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recipes: dict[Any, _Recipe | None] = {}
        self._last: tuple[Any, Any, Any, _Recipe] | None = None

    def answer(self, name: str, kind: object, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """What `module` would return for these arguments, without data.

        Args:
            name: Of the module, for messages.
            kind: Modules of equal kind answer alike.
            call: Runs the module.

        Raises:
            GhostError: If the module cannot answer.
        """
        origin = f"the output of `{name}`"
        state = (kind, module.training, autocast_dtype(self.device))
        recipe = self._last[3] if self._last and _alike(self._last, state, args, kwargs) else None
        if recipe is None:
            key = (state, _signature(args), _signature(kwargs))
            recipe = self._recipes.get(key)
            if recipe is None:
                result, self._recipes[key] = self._ask(origin, module, call, args, kwargs)
                return result
            self._last = (state, args, kwargs, recipe)
        if recipe.tree is None:
            return Ghost(recipe.leaves[0][1], self.device, origin)
        inputs = tree_flatten((args, kwargs))[0] if any(how == "input" for how, _ in recipe.leaves) else []
        leaves = [self._leaf(how, what, inputs, origin) for how, what in recipe.leaves]
        return tree_unflatten(leaves, recipe.tree)

    def forget_arguments(self) -> None:
        """Let go of the last call's arguments."""
        self._last = None

    def ask(self, origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """As `answer`, but run the module on ghosts in any case; on made-up data if it has to see some."""
        originals: dict[int, Any] = {}
        with comm.rehearsal(), _random_state_kept():
            try:
                with absent(module, self.device):
                    spare_args, spare_kwargs = spared((args, kwargs), originals)
                    result = call(*spare_args, **spare_kwargs)
            except Exception as error:
                try:
                    result = self._ask_made_up(module, call, *spared((args, kwargs), originals))
                except Exception:
                    raise GhostError(
                        f"cannot tell what {origin} looks like without computing it on true data ({error})"
                    ) from error
        handed_on = {id(leaf) for leaf in tree_leaves((args, kwargs))}

        def finished(leaf: Any) -> Any:
            if type(leaf) is Ghost and id(leaf) not in handed_on:
                return Ghost(leaf.meta, self.device, origin)
            return originals.get(id(leaf), (leaf,))[0]

        return tree_map(finished, result)

    def _ask(self, origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        inputs = tree_flatten((args, kwargs))[0]
        places = {id(leaf): place for place, leaf in enumerate(inputs) if not isinstance(leaf, _PLAIN)}
        result = self.ask(origin, module, call, args, kwargs)
        leaves, tree = tree_flatten(result)
        recipe: list[tuple[str, Any]] = []
        for leaf in leaves:
            if id(leaf) in places:
                recipe.append(("input", places[id(leaf)]))
            elif type(leaf) is Ghost:
                recipe.append(("ghost", leaf.meta))
            elif isinstance(leaf, Tensor):
                return result, None  # computed from the batch: to be computed again each time
            else:
                recipe.append(("constant", leaf))
        single = leaves and leaves[0] is result and recipe[0][0] == "ghost"
        return result, _Recipe(None if single else tree, tuple(recipe))

    def _leaf(self, how: str, what: Any, inputs: list[Any], origin: str) -> Any:
        if how == "ghost":
            return Ghost(what, self.device, origin)
        return inputs[what] if how == "input" else what

    def _ask_made_up(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Run the module on made-up data, and parameters where it has none; keep the shapes of what it returns."""
        inputs, tree = tree_flatten((args, kwargs))
        data = [_made_up(leaf, self.device) if isinstance(leaf, Ghost) else leaf for leaf in inputs]
        handed_on = {id(made): leaf for made, leaf in zip(data, inputs)}
        args, kwargs = tree_unflatten(data, tree)
        with torch.no_grad(), _replaced(module, lambda path, child: _data(child, self.device)):
            result = call(*args, **kwargs)

        def finished(tensor: Tensor) -> Tensor:
            return handed_on[id(tensor)] if id(tensor) in handed_on else Ghost.like(tensor, "", self.device)

        return tree_map_only(Tensor, finished, result)


@contextmanager
def absent(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Hide the parameters and buffers of `module` behind ghosts inside the block."""
    with _replaced(module, lambda path, child: _stand_ins(child, path, device)):
        yield


@contextmanager
def _replaced(module: nn.Module, stand_ins: Callable[[str, nn.Module], dict[str, Any]]) -> Iterator[None]:
    """Put attributes, as `stand_ins` gives them for each submodule and its path, in front of its own."""
    replaced = []
    for path, child in module.named_modules():
        attributes = stand_ins(path, child)
        replaced.append((child, {name: vars(child)[name] for name in attributes if name in vars(child)}, attributes))
        child.__dict__.update(attributes)
    try:
        yield
    finally:
        for child, before, attributes in replaced:
            for name in attributes:
                del child.__dict__[name]
            child.__dict__.update(before)


def forget_parameters(module: nn.Module, names: set[int], device: torch.device, labels: dict[int, str]) -> None:
    """Replace for good the parameters of `module` itself whose ids are in `names` by ghosts called as in `labels`."""
    gone = {id(value): name for name, value in module._parameters.items() if value is not None and id(value) in names}
    ghosts = {}
    for key, name in gone.items():
        value = module._parameters.pop(name)
        assert value is not None
        ghosts[key] = Ghost.like(value, f"the parameter `{labels[key]}`", device, labels[key])
        module.__dict__[name] = ghosts[key]
    module.__dict__.update(_lists(module, ghosts))


def _stand_ins(module: nn.Module, path: str, device: torch.device) -> dict[str, Any]:
    """Ghosts for the parameters and buffers that `module` itself still holds, by attribute; copies of constants."""
    own = {name: value for name, value in module._parameters.items() if value is not None}
    held = {**own, **{name: value for name, value in module._buffers.items() if value is not None}}
    ghosts: dict[str, Any] = {
        name: value.clone()
        if name in module._non_persistent_buffers_set and not value.is_meta
        else Ghost.like(value, f"`{f'{path}.' if path else ''}{name}`", device)
        for name, value in held.items()
        if name not in module.__dict__
    }
    return {
        **ghosts,
        **_lists(module, {id(value): ghosts.get(name, vars(module).get(name)) for name, value in own.items()}),
    }


def _data(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """Tensors with data for the parameters and buffers of `module` itself, made up where they are not here."""
    data: dict[str, Any] = {}
    places: dict[int, Any] = {}
    hidden = {name: value for name, value in vars(module).items() if isinstance(value, Ghost)}
    for name, value in {**hidden, **module._parameters, **module._buffers}.items():
        if value is not None:
            is_here = not (value.is_meta or isinstance(value, Ghost))
            data[name] = _made_up(value, device) if not is_here else value.clone() if name in module._buffers else value
            places.update({id(other): data[name] for other in (value, hidden.get(name))})
    return {**data, **_lists(module, places)}


def _lists(module: nn.Module, stand_ins: dict[int, Any]) -> dict[str, list[Any]]:
    """The lists of parameters that `module` keeps, as recurrent layers do, with those that stand in, by id."""
    return {
        name: [stand_ins.get(id(item), item) for item in value]
        for name, value in vars(module).items()
        if isinstance(value, list) and any(id(item) in stand_ins for item in value)
    }


def _made_up(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, Ghost) and tensor.value is not None:
        return tensor.value
    shape, dtype = tensor.signature if isinstance(tensor, Ghost) else (tensor.shape, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def spared(arguments: Any, originals: dict[int, Any]) -> Any:
    """Copy objects that a layer might change, such as a key-value cache; notes copy and original by the copy's id."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, *_PLAIN)):
            return leaf
        memo: dict[int, Any] = {}
        _note_copies(leaf, memo, set())
        try:
            spare = copy.deepcopy(leaf, memo)
        except Exception:
            return leaf
        originals[id(spare)] = (leaf, spare)
        return spare

    return tree_map(copied, arguments)


def _note_copies(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Copy tensors with a history, which `deepcopy` refuses to, from anywhere inside `value` into its memo."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.requires_grad and not value.is_leaf:
            memo[id(value)] = value.detach().clone().requires_grad_()
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _note_copies(item, memo, seen)
    else:
        for item in (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values():
            _note_copies(item, memo, seen)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on `device`, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _alike(last: tuple[Any, Any, Any, _Recipe], state: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call has the signature of the last one, judged by identity: layers mostly share their arguments."""
    last_state, last_args, last_kwargs, _ = last
    if state != last_state or len(args) != len(last_args) or len(kwargs) != len(last_kwargs):
        return False
    for new, old in zip(args, last_args):
        if new is not old and not (type(new) is Ghost and type(old) is Ghost and new.signature == old.signature):
            return False
    for name, new in kwargs.items():
        old = last_kwargs.get(name, _alike)
        if new is not old and not (type(new) is Ghost and type(old) is Ghost and new.signature == old.signature):
            return False
    return True


def _signature(value: Any) -> Any:
    """What the answer may depend on: shapes and dtypes of tensors, plain values, the types of everything else."""
    kind = type(value)
    if kind is Ghost:
        return value.signature
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if kind is tuple or kind is list:
        return (kind, *map(_signature, value))
    if kind is dict:
        return tuple([(name, _signature(item)) for name, item in value.items()])
    return value if isinstance(value, _PLAIN) else kind
