"""State dicts of a divided module and of its submodules: full tensors under all names, as in one process.

Copies of weights are made by them (target networks, moving averages, teachers, `torch.save`): a part of a matrix would
be saved or compared without a word. So `state_dict()` gathers what this rank lacks, and all ranks have to call it;
`load_state_dict` takes this rank's part of what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import buffers_of, non_persistent_buffers_of, parameters_of
from lightning_parallel.strategies.message_order import MessageOrder
from lightning_parallel.tensor.sharding import Shard

__all__ = ["FullStates"]


class _Entry(NamedTuple):
    """A tensor of a module's state: where it is, and what a rank there holds of it."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FullStates:
    """Lets the state dicts of a module and its submodules hold full tensors.

    Every rank of the replica constructs it at the same point.

    Args:
        module: The divided module.
        groups: The mesh's groups.
        rules: How its tensors are sharded over the tensor axis, by name.
        device: Where messages are.
    """

    def __init__(self, module: nn.Module, groups: MeshGroups, rules: Mapping[str, Shard], device: torch.device) -> None:
        self._state = ParallelState.of(module)
        if self._state.full_states is not None:
            self._state.full_states.remove()
        self._state.full_states = self
        self._tensor_group = groups.tensor_parallel
        self._pipeline_group = groups.pipeline_parallel
        if self._state.order is not None:
            self._tensor_group = self._tensor_group.guarded_by(self._state.order)
        if self._pipeline_group.size > 1:
            self._pipeline_group = self._pipeline_group.guarded_by(MessageOrder(groups.replica))
        self._rules = rules
        self._device = device
        self._is_paused = False
        self._hooks: list[Any] = []
        # By `id`: the hash of a metric changes with its state.
        self._paths: dict[int, str] = {}
        self._entries: dict[str, dict[str, _Entry]] = {}
        last_rank = 0 if self._state.engine is None else self._state.engine.last_rank
        everyone = comm.all_gather_object(_held(module), groups.pipeline_parallel)
        order = self._state.names
        for stage, held in enumerate(everyone):
            for path, own in held.items():
                entries = self._entries.setdefault(path, {})
                for key, (shape, dtype, is_buffer) in own.items():
                    # Steps that update a buffer of all stages end on the last one.
                    if key not in entries or (is_buffer and stage == last_rank):
                        entries[key] = _Entry(stage, shape, dtype)
        for path, entries in self._entries.items():
            names = [f"{path}.{key}" if path else key for key in entries]
            is_everywhere = all(held.get(path, {}).keys() == entries.keys() for held in everyone)
            if is_everywhere and not any(name in rules for name in names):
                continue
            if order is not None:
                position = {name: index for index, name in enumerate(order.state)}
                ends = sorted(zip(names, entries), key=lambda pair: position.get(pair[0], 0))
                self._entries[path] = {key: entries[key] for _, key in ends}
            self._watch(module.get_submodule(path), path)

    def _watch(self, owner: nn.Module, path: str) -> None:
        self._paths[id(owner)] = path
        # Functions, since torch marks what it is given, which methods do not allow.
        self._hooks.append(owner.register_state_dict_post_hook(lambda *arguments: self._save(*arguments)))
        self._hooks.append(owner.register_load_state_dict_pre_hook(lambda *arguments: self._load(*arguments)))

    def remove(self) -> None:
        """Let state dicts hold this rank's part again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._state.full_states = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave state dicts alone inside the block, for those who gather what they need by themselves."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _path_of(self, owner: nn.Module) -> str | None:
        """Return the path of a module; None for copies, which have the hooks of their original."""
        return None if self._is_paused else self._paths.get(id(owner))

    def __deepcopy__(self, memo: dict[int, Any]) -> FullStates:
        return self

    @torch.no_grad()
    def _save(self, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        path = self._path_of(owner)
        if path is None:
            return
        engine = self._state.engine
        if engine is not None and engine.model.is_running:
            raise RuntimeError(
                f"the state dict of `{path or type(owner).__name__}` is asked for inside a step, which the stages of a"
                " pipeline run one after the other, so that none has what the others hold; move it into a hook that"
                " all ranks run, such as `on_train_batch_end`"
            )
        full = {key: self._full(owner, path, key, entry) for key, entry in self._entries[path].items()}
        # What a stage lacks would come last: names have the order of one process.
        others = [key for key in state if key.startswith(prefix) and key[len(prefix) :] not in full]
        for key, value in full.items():
            state.pop(prefix + key, None)
            state[prefix + key] = value
        for key in others:
            state[key] = state.pop(key)

    def _full(self, owner: nn.Module, path: str, key: str, entry: _Entry) -> Tensor:
        tensor: Tensor | None = parameters_of(owner).get(key)
        tensor = buffers_of(owner).get(key) if tensor is None else tensor
        group = self._pipeline_group
        if group.size > 1:
            is_mine = group.rank == entry.stage and tensor is not None
            sent = tensor.detach().contiguous().clone() if is_mine and tensor is not None else None
            if sent is None:
                sent = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            tensor = comm.broadcast_(sent, group, entry.stage)
        assert tensor is not None
        rule = self._rules.get(f"{path}.{key}" if path else key)
        if rule is None:
            return tensor.detach()
        sizes = [rule.local_size(rank) for rank in range(self._tensor_group.size)]
        gathered = comm.all_gather(tensor.detach(), self._tensor_group, rule.dim, sizes)
        return rule.merge(gathered.split(sizes, rule.dim))

    def _load(self, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        path = self._path_of(owner)
        if path is None:
            return
        for key in self._entries[path]:
            given = state.get(prefix + key)
            if parameters_of(owner).get(key) is None and buffers_of(owner).get(key) is None:
                state.pop(prefix + key, None)  # on another stage
                continue
            rule = self._rules.get(f"{path}.{key}" if path else key)
            if rule is not None and isinstance(given, Tensor) and given.shape[rule.dim] == rule.full_size:
                state[prefix + key] = rule.split(given, self._tensor_group.rank)


_Own = dict[str, tuple[tuple[int, ...], torch.dtype, bool]]


def _held(module: nn.Module) -> dict[str, _Own]:
    """Return shape and dtype of the tensors in the state of each submodule, and whether they are buffers."""
    found: dict[str, _Own] = {}
    for path, child in module.named_modules():
        own: _Own = {}
        for key, parameter in parameters_of(child).items():
            if parameter is not None:
                own[key] = (tuple(parameter.shape), parameter.dtype, False)
        for key, buffer in buffers_of(child).items():
            if buffer is not None and key not in non_persistent_buffers_of(child):
                own[key] = (tuple(buffer.shape), buffer.dtype, True)
        if own:
            found[path] = own
    return found
