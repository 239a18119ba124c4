"""What modules of other stages answer: their structure is kept, their parameters are gone, their outputs are ghosts.

An absent module is asked once per input signature, by running its own `forward` on ghosts, and the answer is
remembered. Layers of one kind share what they remember. A module whose outputs are also collected elsewhere, by a hook
or in a list that it was given, is asked each time, so that what is collected has a ghost for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_parallel import comm
from lightning_parallel.pipeline.ghost import Ghost, GhostError
from lightning_parallel.pipeline.made_up import is_listened_to, parameter_lists, replaced, run_made_up

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
        faithful: Ask each module each time, and let it change the objects it is given. Otherwise those are spared: a
            layer that is here finds in a key-value cache what it put there, and nobody else reads it.
    """

    def __init__(self, device: torch.device, faithful: bool = False) -> None:
        self.device, self.faithful = device, faithful
        self._inside: dict[nn.Module, list[nn.Module]] = {}
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
        inside = self._inside.get(module) or self._inside.setdefault(module, list(module.modules()))
        if self.faithful or is_listened_to(inside):
            return self.ask(origin, module, call, args, kwargs)
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

    def ask(self, origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any, live: bool = False) -> Any:
        """As `answer`, but run the module on ghosts in any case; on made-up data if it has to see some.

        Args:
            live: Whether what the module makes counts as present; see `Ghost`.
        """
        return self._play(origin, module, call, args, kwargs, live)[0]

    def _play(
        self, origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any, live: bool = False
    ) -> tuple[Any, bool]:
        """What the module returns, and whether it changed a list or dict that it was given."""
        originals: dict[int, Any] = {}
        with comm.dry_run(), _random_state_kept():
            try:
                given = spared((args, kwargs), originals)
                with absent(module, self.device, live):
                    result = call(*given[0], **given[1])
            except Exception as error:
                originals.clear()
                given = spared((args, kwargs), originals)
                try:
                    result, given = run_made_up(origin, module, call, given[0], given[1], self.device, live)
                except Exception:
                    raise GhostError(
                        f"cannot tell what {origin} looks like without computing it on true data ({error})"
                    ) from error
        handed_on = {id(leaf) for leaf in tree_leaves((args, kwargs))}

        def finished(leaf: Any) -> Any:
            if type(leaf) is Ghost and id(leaf) not in handed_on:
                return Ghost(leaf.meta, self.device, origin, live=live or leaf.live)
            return originals.get(id(leaf), (leaf,))[0]

        if self.faithful:
            for original, spare in originals.values():
                getattr(original, "__dict__", {}).update(getattr(spare, "__dict__", {}))
        return tree_map(finished, result), _adopt((args, kwargs), given, finished)

    def _ask(self, origin: str, module: nn.Module, call: Call, args: Any, kwargs: Any) -> tuple[Any, _Recipe | None]:
        inputs = tree_flatten((args, kwargs))[0]
        places = {id(leaf): place for place, leaf in enumerate(inputs) if not isinstance(leaf, _PLAIN)}
        result, changed = self._play(origin, module, call, args, kwargs)
        if changed:
            return result, None
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


@contextmanager
def absent(module: nn.Module, device: torch.device, live: bool = False) -> Iterator[None]:
    """Hide the parameters and buffers of `module` behind ghosts inside the block."""
    with replaced(module, lambda path, child: _stand_ins(child, path, device, live)):
        yield


def forget_parameters(module: nn.Module, names: set[int], device: torch.device, labels: dict[int, str]) -> None:
    """Replace for good the parameters of `module` itself whose ids are in `names` by ghosts called as in `labels`."""
    gone = {id(value): name for name, value in module._parameters.items() if value is not None and id(value) in names}
    ghosts = {}
    for key, name in gone.items():
        value = module._parameters.pop(name)
        assert value is not None
        ghosts[key] = Ghost.like(value, f"the parameter `{labels[key]}`", device, labels[key])
        module.__dict__[name] = ghosts[key]
    module.__dict__.update(parameter_lists(module, ghosts))


def _stand_ins(module: nn.Module, path: str, device: torch.device, live: bool) -> dict[str, Any]:
    """Ghosts for the parameters and buffers that `module` itself still holds, by attribute; copies of constants."""
    own = {name: value for name, value in module._parameters.items() if value is not None}
    held = {**own, **{name: value for name, value in module._buffers.items() if value is not None}}
    ghosts: dict[str, Any] = {
        name: value.clone()
        if name in module._non_persistent_buffers_set and not value.is_meta
        else Ghost.like(value, f"`{f'{path}.' if path else ''}{name}`", device, live=live)
        for name, value in held.items()
        if name not in module.__dict__
    }
    return {
        **ghosts,
        **parameter_lists(module, {id(value): ghosts.get(name, vars(module).get(name)) for name, value in own.items()}),
    }


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


def _adopt(old: Any, new: Any, finished: Callable[[Any], Any]) -> bool:
    """Bring what a module did to copies of lists and dicts back to the originals; tell whether it did anything."""
    if type(new) is not type(old) or not isinstance(old, (tuple, list, dict)):
        return False
    before = old if isinstance(old, dict) else dict(enumerate(old))
    after = new if isinstance(new, dict) else dict(enumerate(new))
    changed = any([_adopt(before[key], after[key], finished) for key in before.keys() & after.keys()])  # noqa: C419
    entries = {
        key: before[key] if key in before and _same(before[key], item, finished) else tree_map(finished, item)
        for key, item in after.items()
    }
    kept = entries.keys() == before.keys() and all(entries[key] is item for key, item in before.items())
    if kept or isinstance(old, tuple):
        return changed
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
    return finished(new) is old or (isinstance(old, _PLAIN) and new == old)


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
    return all(map(_alike_leaf, args, last_args)) and all(
        name in last_kwargs and _alike_leaf(new, last_kwargs[name]) for name, new in kwargs.items()
    )


def _alike_leaf(new: Any, old: Any) -> bool:
    if type(new) is Ghost:
        return type(old) is Ghost and new.signature == old.signature
    return new is old and type(new) not in (list, dict)  # which may have changed since


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
