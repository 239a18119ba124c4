"""Make the contents of storages, by running the recorded operations again.

All operations that a storage depends on, through other storages too, run in their original order, so that each sees
its arguments as they were then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_parallel.strategies.deferred_records import Layout, RecordedOperation, StorageHistory, StorageView

__all__ = ["memory_reused", "read_values", "scratch_tensor", "values_of"]

Contents = dict[StorageHistory, tuple[int, torch.UntypedStorage]]

# During a build, what the last read has made: versions and contents.
_recent: Contents | None = None

# An initializer works on a few tensors at a time; more are a whole model, which must not be held.
_MAX_RECENT = 8


# During a build, memory for temporaries, by device.
_scratch: dict[torch.device, torch.UntypedStorage] | None = None


@contextmanager
def memory_reused() -> Iterator[None]:
    """Keep a few temporaries from one operation to the next inside the block.

    A read goes on from what the one before has made: rejection sampling (`nn.init.trunc_normal_`) reads after every
    round whether it needs another.
    """
    global _recent, _scratch
    before = _recent, _scratch
    _recent, _scratch = {}, {}
    try:
        yield
    finally:
        _recent, _scratch = before


def scratch_tensor(layout: Layout, device: torch.device) -> Tensor:
    """Return a tensor of this shape and these strides, of any contents, to be used before the next call.

    During a build one piece of memory serves for all, for the reason that `packed_state` gives.
    """
    if _scratch is None:
        return layout.empty(device)
    if device not in _scratch or _scratch[device].nbytes() < layout.num_bytes:
        _scratch.pop(device, None)  # first: never both
        _scratch[device] = torch.UntypedStorage(layout.num_bytes, device=device)
    return layout._replace(offset=0).on(_scratch[device])


def values_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make the data of deferred tensors, which share memory where the tensors do.

    Raises:
        RuntimeError: If an operation gives a tensor of another shape, type or device than it did when recorded.
    """
    views = [StorageView.of(tensor) for tensor in tensors]
    memory = {view.history: view.history.value for view in views if view.history.value is not None}
    missing = {view.history: view.version for view in views if view.history not in memory}
    memory.update(_replay(missing, None) if missing else {})
    return [view.on(memory[view.history]) for view in views]


def read_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `values_of`, for a caller that neither writes nor keeps them: there need not be new ones each time.

    During a build they are made from the recent ones. Afterwards they are kept until the tensor is written, since these
    are tables that only a function knows, and that every step reads.
    """
    views = [StorageView.of(tensor) for tensor in tensors]
    if _recent is None:
        values = values_of(tensors)
        for view, value in zip(views, values):
            view.history.value = value.untyped_storage()
        return values
    memory = {view.history: view.history.value for view in views if view.history.value is not None}
    missing = {view.history: view.version for view in views if view.history not in memory}
    memory.update(_replay(missing, _recent) if missing else {})
    return [view.on(memory[view.history]) for view in views]


def _replay(
    wanted: Mapping[StorageHistory, int], recent: Contents | None
) -> dict[StorageHistory, torch.UntypedStorage]:
    """Make the storages of the histories `wanted`, after so many operations of each.

    Args:
        recent: Contents to go on from, which are written. What the next read may want takes their place.
    """
    known = {} if recent is None else dict(recent)
    operations = _operations_for(wanted, known)
    while operations is None:
        operations = _operations_for(wanted, known)
    last_use = {history: operation for operation in operations for history in operation.histories}
    used = {history: entry for history, entry in known.items() if history in last_use or history in wanted}
    versions = {history: version for history, (version, _) in used.items()}
    memory = {history: storage for history, (_, storage) in used.items()}
    known.clear()
    if recent is not None:
        recent.clear()
    for operation in operations:
        operation.run(memory)
        versions.update(operation.versions)
        for history in operation.histories:
            is_done = last_use[history] is operation and history not in wanted
            if is_done and (recent is None or not history.is_reachable):
                memory.pop(history, None)
    if recent is not None:
        reachable = [history for history in memory if history.is_reachable]
        if len(reachable) <= _MAX_RECENT:
            recent.update({history: (versions[history], memory[history]) for history in reachable})
    return memory


def _operations_for(wanted: Mapping[StorageHistory, int], known: Contents) -> list[RecordedOperation] | None:
    """Return what has to run, in order; None if some `known` contents had been changed too often, and were removed."""
    needed: dict[int, RecordedOperation] = {}
    seen: set[tuple[StorageHistory, int]] = set()
    pending = list(wanted.items())
    while pending:
        entry = pending.pop()
        if entry in seen:
            continue
        seen.add(entry)
        history, version = entry
        if history in known and known[history][0] > version:
            del known[history]
            return None
        first = known[history][0] if history in known else None
        for operation in history.needed_for(version, first):
            past = [other for other, after in operation.versions.items() if other in known and known[other][0] >= after]
            if past:
                del known[past[0]]
                return None
            if operation.order not in needed:
                needed[operation.order] = operation
                pending += [(view.history, view.version) for view in operation.views if view.history is not history]
    return [needed[order] for order in sorted(needed)]
