"""Restores copies of a divided module that code makes during a run, such as averages and teachers.

Each submodule that the division has changed carries a mark. `deepcopy` copies the mark, which reports the copy. Copies
that live at the end of a run get back their classes and full tensors. The next run divides them with the module.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState, innermost_users_line
from lightning_parallel.compat.lightning import DEVICE_OF_MODULE
from lightning_parallel.compat.torch import BUFFERS, PARAMETERS, buffers_of, parameters_of
from lightning_parallel.pipeline.placeholder import PlaceholderTensor
from lightning_parallel.strategies.whole.saved_modules import forget_watchers
from lightning_parallel.strategies.whole.skeleton import ModuleChange, fill_in_full, strip_division, take_out_full
from lightning_parallel.tensor.sharding import Shard

__all__ = ["MARK", "ModuleCopies"]

MARK = "_parallel_mark"

Fetch = Callable[[str, torch.dtype, Tensor | None], Tensor]
"""Returns a full tensor by its first name, its dtype and the part of this rank; every rank calls it."""


@dataclass(eq=False)
class _Mark:
    """Reports copies of the module that carries it.

    Attributes:
        copies: Notes the copies.
        path: Path of the original module.
        owner: The module that carries the mark.
        divided: Class and attributes of a divided copy, while the copy is restored; None otherwise.
    """

    copies: ModuleCopies
    path: str
    owner: ref[nn.Module]
    divided: tuple[type, dict[str, Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark | None:
        owner = self.owner()
        # `deepcopy` enters the new module into `memo` before it copies the attributes, so the copy is known here.
        duplicate = memo.get(id(owner))
        if duplicate is None or self.divided is not None or not self.copies.is_noting:
            return None
        mark = _Mark(self.copies, self.path, ref(duplicate))
        self.copies.note(mark, memo)
        return mark

    def __reduce__(self) -> Any:
        # A mark refers to this process. A pickle of the module, such as a checkpoint, gets None instead.
        return type(None), ()


@dataclass(eq=False)
class _CopiedTogether:
    """Groups modules of one `deepcopy`, by path. The key is equal on all ranks that made the same copy."""

    key: tuple[str, str, int]
    members: dict[str, ref[nn.Module]] = field(default_factory=dict)

    def alive(self) -> dict[str, nn.Module]:
        found = {path: member() for path, member in self.members.items()}
        return {path: member for path, member in found.items() if member is not None}


class ModuleCopies:
    """Knows the copies of a divided module.

    Args:
        module: The divided module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._state = ParallelState.of(module)
        self._changes: dict[str, ModuleChange] = {}
        self._families: list[_CopiedTogether] = []
        self._made: Counter[tuple[str, str]] = Counter()

    @property
    def is_noting(self) -> bool:
        """Whether copies made now are the user's, not copies by this library."""
        states = self._state.full_states
        return states is not None and not states.is_paused

    def __bool__(self) -> bool:
        return any(family.alive() for family in self._families)

    def tensors(self) -> Iterator[Tensor]:
        """Return the parameters and buffers of the copies."""
        for family in self._families:
            for child in family.alive().values():
                own = (*parameters_of(child).values(), *buffers_of(child).values())
                yield from (tensor for tensor in own if tensor is not None)

    def mark(self, module: nn.Module) -> None:
        """Mark the submodules that the division has changed, so that their copies are reported."""
        paths = {id(child): path for path, child in module.named_modules()}
        # A copy may have become a part of the module itself.
        for family in self._families:
            family.members = {path: one for path, one in family.members.items() if id(one()) not in paths}
        self._changes = {
            paths[id(child)]: change for child, change in self._state.skeleton.changes if id(child) in paths
        }
        for path in self._changes:
            child = module.get_submodule(path)
            vars(child)[MARK] = _Mark(self, path, ref(child))

    def change_of(self, child: nn.Module) -> ModuleChange | None:
        """Return the changes by the division in a copy; None if `child` is no copy."""
        mark = vars(child).get(MARK)
        if mark is None or mark.owner() is not child or mark.divided is not None or mark.path not in self._changes:
            return None
        return _of_copy(child, self._changes[mark.path], vars(child))

    def originals_of(self, modules: Mapping[str, nn.Module]) -> dict[str, str]:
        """Return the name of the original for the name of each tensor of a copy.

        Args:
            modules: Copies and other modules, by path.
        """
        found: dict[str, str] = {}
        for path, child in modules.items():
            change = self.change_of(child)
            if change is not None:
                for key, name in {**change.parameters, **change.buffers}.items():
                    if name is not None:
                        found[f"{path}.{key}"] = name
        return found

    def unmark(self, module: nn.Module) -> None:
        """Remove the marks of `module`."""
        for child in module.modules():
            vars(child).pop(MARK, None)

    def note(self, mark: _Mark, memo: dict[int, Any]) -> None:
        """Note a copy that `deepcopy` makes."""
        family = memo.get(id(self))
        if family is None:
            line = (innermost_users_line(), mark.path)
            self._made[line] += 1
            family = memo[id(self)] = _CopiedTogether((*line, self._made[line]))
            self._families.append(family)
        family.members[mark.path] = mark.owner

    def watch(self, hook: Callable[[nn.Module, str], None]) -> None:
        """Call `hook` with each copy from earlier runs, and the path of its original."""
        for family in self._families:
            for path, owner in family.alive().items():
                if path in self._changes:
                    hook(owner, path)

    # -------------------------------------------------------------------------------------- restored, and divided

    def restore(self, replica: Group, fetch: Fetch, is_mine: bool = True) -> None:
        """Give full tensors to the copies that live on all ranks of the replica; all of these ranks call it.

        Args:
            replica: The replica.
            fetch: Gathers a tensor.
            is_mine: Whether this rank gets the full tensors.
        """
        # A copy may exist on one rank only, and all ranks must take part in the exchanges below.
        if not comm.on_any_rank([bool(self._families)], replica)[0]:
            return
        # Free dead copies in reference cycles: their tensors would be gathered for nothing.
        gc.collect()
        self._families = [family for family in self._families if family.alive()]
        mine = {family.key: list(family.alive()) for family in self._families}
        everyone = comm.all_gather_object((dict(self._made), mine), replica)
        families = {family.key: family for family in self._families}
        for key, paths in everyone[0][1].items():
            is_everywhere = all(key in alive and made.get(key[:2]) == self._made[key[:2]] for made, alive in everyone)
            # One rank alone may copy, too. Copies of different ranks can be matched only if their counts are equal.
            if is_everywhere and len({made[key[:2]] for made, _ in everyone}) == 1:
                common = [path for path in paths if all(path in alive[key] for _, alive in everyone)]
                self._restore(families[key], common, replica, fetch, is_mine)

    def _restore(self, family: _CopiedTogether, paths: list[str], replica: Group, fetch: Fetch, is_mine: bool) -> None:
        alive = family.alive()
        members = [
            (alive[path], self._changes[path]) for path in paths if path in self._changes and MARK in vars(alive[path])
        ]
        held: dict[str, Tensor] = {}
        for child, change in members:
            for own, names in ((parameters_of(child), change.parameters), (buffers_of(child), change.buffers)):
                for key, name in names.items():
                    value = own.get(key)
                    if name is not None and value is not None and not isinstance(value, PlaceholderTensor):
                        held[name] = value
        facts = {n: (value.dtype, value.device.type, value.requires_grad) for n, value in held.items()}
        everyone = comm.all_gather_object(facts, replica)
        # Reversed, so that all ranks take the facts of the first rank that holds the tensor.
        described = {name: fact for facts in reversed(everyone) for name, fact in facts.items()}
        wanted = {n for _, c in members for n in (*c.parameters.values(), *c.buffers.values()) if n is not None}
        if any(name not in described for name in wanted):
            return  # code has taken a part out of the copy
        tensors: dict[str, Tensor] = {}
        # Sorted, since `fetch` communicates and all ranks must call it in one order.
        for name in sorted(wanted):
            dtype, device, is_trained = described[name]
            mine = held.get(name)
            full = fetch(name, dtype, mine)
            if not is_mine:
                continue
            is_parameter = any(name in change.parameters.values() for _, change in members)
            if mine is None:
                full = full.to(device).clone()
                tensors[name] = nn.Parameter(full, is_trained) if is_parameter else full
                continue
            if mine.shape != full.shape:
                # A gradient with the shape of the shard would not fit the full tensor.
                mine.grad = None
                mine.data = full.to(mine.device)
            tensors[name] = mine
        for child, change in members if is_mine else ():
            _restore_copy(child, change, vars(child)[MARK], tensors)

    def divide_again(self, rules: Mapping[str, Shard], rank: int) -> None:
        """Divide the restored copies again.

        Args:
            rules: How tensors are sharded over the tensor axis, by name.
            rank: Position on that axis.
        """
        seen: set[int] = set()
        for child, change in self._restored():
            mark = vars(child)[MARK]
            kind, divided = mark.divided
            mark.divided = None
            take_out_full(child, change, divided)
            child.__class__ = kind
            for own, names in ((parameters_of(child), change.parameters), (buffers_of(child), change.buffers)):
                for key, tensor in own.items():
                    rule = rules.get(names.get(key) or "")
                    # A tied tensor has several names, and must be sharded once only.
                    if tensor is None or rule is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    tensor.grad = None
                    tensor.data = rule.split(tensor.data, rank).clone()

    def _restored(self) -> Iterator[tuple[nn.Module, ModuleChange]]:
        for family in self._families:
            for path, child in family.alive().items():
                mark = vars(child).get(MARK)
                if mark is not None and mark.divided is not None:
                    yield child, _of_copy(child, self._changes[path], mark.divided[1])


def _restore_copy(child: nn.Module, change: ModuleChange, mark: _Mark, tensors: Mapping[str, Tensor]) -> None:
    own = vars(child)
    kept = (*change.added, *change.attributes, *change.lists, *change.entries, PARAMETERS, BUFFERS)
    mark.divided = type(child), {name: own[name] for name in kept if name in own}
    strip_division(child, _of_copy(child, change, own))
    fill_in_full(child, change, tensors)
    forget_watchers(child)


def _of_copy(child: nn.Module, change: ModuleChange, divided: Mapping[str, Any]) -> ModuleChange:
    """Return the changes by the division in a copy, whose attributes are copies, too."""
    names = (*change.added, *change.attributes)
    attributes = {name: copy.deepcopy(value) for name, value in change.attributes.items() if name != DEVICE_OF_MODULE}
    after = {name: divided[name] for name in names if name in divided}
    return replace(change, attributes=attributes, after=after)
