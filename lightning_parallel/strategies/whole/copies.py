"""Restores copies of a divided module that code makes during a run, such as averages and teachers.

Each submodule that the division has changed carries a mark. `deepcopy` copies the mark, which reports the copy. Copies
that live at the end of a run get back their classes and full tensors. The next run divides them with the module.
"""

from __future__ import annotations

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
from lightning_parallel.compat.torch import buffers_of, parameters_of
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.strategies.whole.saved_modules import forget_watchers
from lightning_parallel.strategies.whole.skeleton import ModuleForm, division_of
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
        restored: Form, class and attributes of a divided copy, while the copy is restored; None otherwise.
    """

    copies: ModuleCopies
    path: str
    owner: ref[nn.Module]
    restored: tuple[ModuleForm, type, dict[str, Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark | None:
        owner = self.owner()
        # `deepcopy` enters the new module into `memo` before it copies the attributes, so the copy is known here.
        duplicate = memo.get(id(owner))
        if duplicate is None or self.restored is not None or not self.copies.is_noting:
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
        self._forms: dict[str, ModuleForm] = {}
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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the copies, each with the name of its original."""
        for path, child in self.modules():
            names = self._forms[path].parameters
            for key, parameter in parameters_of(child).items():
                if parameter is not None and (name := names.get(key)) is not None:
                    yield name, parameter

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the copied modules, each with the path of its original."""
        for family in self._families:
            yield from ((path, child) for path, child in family.alive().items() if path in self._forms)

    def mark(self, module: nn.Module) -> None:
        """Mark the submodules that the division has changed, so that their copies are reported."""
        paths = {id(child): path for path, child in module.named_modules()}
        # A copy may have become a part of the module itself.
        for family in self._families:
            family.members = {path: one for path, one in family.members.items() if id(one()) not in paths}
        self._forms = {paths[id(child)]: form for child, form in self._state.skeleton.forms if id(child) in paths}
        for path in self._forms:
            child = module.get_submodule(path)
            vars(child)[MARK] = _Mark(self, path, ref(child))

    def originals_of(self, modules: Mapping[str, nn.Module]) -> dict[str, str]:
        """Return the name of the original for the name of each tensor of a copy.

        Args:
            modules: Copies and other modules, by path.
        """
        found: dict[str, str] = {}
        for path, child in modules.items():
            mark = vars(child).get(MARK)
            if mark is None or mark.owner() is not child or mark.restored is not None or mark.path not in self._forms:
                continue
            form = self._forms[mark.path]
            for key, name in {**form.parameters, **form.buffers}.items():
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
                if path in self._forms:
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
        # A copy has a copy of the record of its original.
        members = [
            (alive[path], replace(self._forms[path], division=division_of(alive[path])))
            for path in paths
            if path in self._forms and MARK in vars(alive[path])
        ]
        held: dict[str, Tensor] = {}
        for child, form in members:
            for own, names in ((parameters_of(child), form.parameters), (buffers_of(child), form.buffers)):
                for key, name in names.items():
                    value = own.get(key)
                    if name is not None and value is not None and not isinstance(value, PlaceholderTensor):
                        held[name] = value
        facts = {n: (value.dtype, value.device.type, value.requires_grad) for n, value in held.items()}
        everyone = comm.all_gather_object(facts, replica)
        # Reversed, so that all ranks take the facts of the first rank that holds the tensor.
        described = {name: fact for facts in reversed(everyone) for name, fact in facts.items()}
        wanted = {n for _, f in members for n in (*f.parameters.values(), *f.buffers.values()) if n is not None}
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
            is_parameter = any(name in form.parameters.values() for _, form in members)
            if mine is None:
                full = full.to(device).clone()
                tensors[name] = nn.Parameter(full, is_trained) if is_parameter else full
                continue
            if mine.shape != full.shape:
                # A gradient with the shape of the shard would not fit the full tensor.
                mine.grad = None
                mine.data = full.to(mine.device)
            tensors[name] = mine
        for child, form in members if is_mine else ():
            vars(child)[MARK].restored = form, *form.undo(child)
            form.fill_in(child, tensors)
            forget_watchers(child)

    def divide_again(self, rules: Mapping[str, Shard], rank: int) -> None:
        """Divide the restored copies again.

        Args:
            rules: How tensors are sharded over the tensor axis, by name.
            rank: Position on that axis.
        """
        seen: set[int] = set()
        for child in [child for family in self._families for child in family.alive().values()]:
            mark = vars(child).get(MARK)
            if mark is None or mark.restored is None:
                continue
            form, kind, divided = mark.restored
            mark.restored = None
            form.redo(child, kind, divided)
            for own, names in ((parameters_of(child), form.parameters), (buffers_of(child), form.buffers)):
                for key, tensor in own.items():
                    rule = rules.get(names.get(key) or "")
                    # A tied tensor has several names, and must be sharded once only.
                    if tensor is None or rule is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    tensor.grad = None
                    tensor.data = rule.split(tensor.data, rank).clone()
