"""Compares the random generators of the ranks of a replica before each batch, and makes them equal again.

Code on rank zero alone may draw numbers, such as a callback that samples a picture. Then the generators differ, and so
do dropout masks and replicated weights. The Trainer reports each hook to its profiler, so this module finds the hook
that has drawn. It watches rare hooks always, and hooks of each batch only a few times.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import wraps
from typing import Any

import numpy
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.pipeline.random_streams import OwnGenerators
from lightning_parallel.strategies.ranks.replicas import share_random_state

__all__ = ["SharedChance"]

_OF_EACH_BATCH = ("batch", "step", "backward", "zero_grad", "_next", "on_before_", "configure_gradient", "closure")
_FIRST_CALLS = 3
_REMEDY = (
    "Draw on all ranks, and apply the condition on the rank (`is_global_zero`, `rank_zero_only`) only to the code"
    " after it. Or draw from a separate generator (`torch.Generator`) or inside `torch.random.fork_rng()`"
)


class SharedChance:
    """Keeps the random generators of the ranks of a replica equal.

    Args:
        group: The ranks of the replica.

    Attributes:
        noted: The state on which the ranks agreed before the batch.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._generators = OwnGenerators()
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int]] = []
        self._drawn: list[tuple[str, int]] = []
        self._told: set[str] = set()
        self._after_step = 0
        self._steps_draw_alike = False
        self.noted = ""

    def follow(self, trainer: Trainer, module: nn.Module, steps_draw_alike: bool, patches: Patches) -> None:
        """Watch hooks until `patches` are undone.

        Args:
            trainer: The Trainer.
            module: The module, which may have own generators.
            steps_draw_alike: Whether all ranks draw the same numbers in a step, as without a pipeline.
            patches: The patches of the run.
        """
        self._generators = OwnGenerators(module.modules())
        self._steps_draw_alike = steps_draw_alike
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        start, stop = profiler.start, profiler.stop

        @wraps(start)
        def started(action: str, *args: Any, **kwargs: Any) -> Any:
            if self._is_watched(action):
                self._open.append((action, self.state()))
            return start(action, *args, **kwargs)

        @wraps(stop)
        def stopped(action: str, *args: Any, **kwargs: Any) -> Any:
            result = stop(action, *args, **kwargs)
            if self._open and self._open[-1][0] == action:
                state = self.state()
                if self._open.pop()[1] != state:
                    self._drawn.append((action, state))
            return result

        patches.replace(profiler, "start", started)
        patches.replace(profiler, "stop", stopped)

    def _is_watched(self, action: str) -> bool:
        self._calls[action] += 1
        is_frequent = any(part in action for part in _OF_EACH_BATCH)
        return not is_frequent or self._calls[action] <= _FIRST_CALLS

    def state(self) -> int:
        """Return a number for the state of all generators, without waiting for a device."""
        # A CUDA generator draws by its seed and offset, which the host knows without the device.
        found = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            cuda = torch.cuda.default_generators[torch.cuda.current_device()]
            found = zlib.crc32(f"{cuda.initial_seed()} {cuda.get_offset()}".encode(), found)
        _, numbers, gauss = random.getstate()
        # The hash of a tuple of integers is equal in all processes, unlike the hash of a text.
        found = zlib.crc32(f"{hash(numbers)} {gauss}".encode(), found)
        others: Any = numpy.random.get_state(legacy=False)
        if isinstance(others["state"], dict) and "key" in others["state"]:
            found = zlib.crc32(others["state"]["key"].tobytes(), found)
            others = others["state"]["pos"], others["gauss"]
        found = zlib.crc32(repr(others).encode(), found)
        for state in self._generators.states():
            found = zlib.crc32(state, found)
        return found

    def end_step(self) -> None:
        """Note the state at the end of a step."""
        self._after_step = self.state() if self._steps_draw_alike else 0

    def note(self) -> str:
        """Return two states for the comparison: the present state, and the state at the end of the last step."""
        self.noted = str(self.state())
        return f"{self.noted} {self._after_step}"

    def compare(self, notes: Sequence[Sequence[str]]) -> None:
        """Set the generators to the state of the first rank, with a warning, if they differ.

        Args:
            notes: The result of `note` on each rank, split.

        Raises:
            RuntimeError: On every rank, if only some ranks have drawn inside a step.
        """
        # All ranks have the same notes, so all reach the same collectives below.
        states, after_steps = zip(*notes)
        drawn, self._drawn = self._drawn, []
        self._open.clear()
        if len(set(states)) == 1:
            return
        ranks = ", ".join(str(rank) for rank in self._group.ranks)
        if len(set(after_steps)) > 1:
            raise RuntimeError(
                f"Only some of the ranks {ranks} have drawn random numbers in the last step. These ranks hold one"
                " replica: their dropout masks and shared weights would differ. Draw on all ranks, without a"
                " condition on the rank (`global_rank`, `is_global_zero`) [LP032]"
            )
        name = _first_that_differs(comm.all_gather_object(drawn, self._group))
        share_random_state(self._group)
        self._generators.restore(comm.broadcast_object(self._generators.states(), self._group))
        self.noted = str(self.state())
        # Watch frequent hooks again, so that the next difference has a name.
        self._calls.clear()
        if name in self._told:
            return
        self._told.add(name)
        rank_zero_warn(
            f"{name} draws random numbers on some of the ranks {ranks} only. These ranks hold one replica and must draw"
            f" alike. Their generators are set to the state of the first rank. {_REMEDY}"
            " [LP032]"
        )

    def refuse(self, states: Sequence[str], group: Group) -> None:
        """Refuse a step that begins with different generators on the ranks.

        Args:
            states: The result of `state` on each rank of `group`.
            group: The ranks that compare their states, all ranks of the replica or some of them.

        Raises:
            RuntimeError: On every rank of `group`.
        """
        if len(set(states)) > 1:
            raise RuntimeError(self.refusal(comm.all_gather_object(self._drawn, group), group))

    def refusal(self, drawn: Sequence[list[tuple[str, int]]], group: Group) -> str:
        """Return the error about different generators, given the draws of each rank, or of no other rank."""
        return (
            f"{_first_that_differs(drawn or [self._drawn, []])} draws random numbers before this step on some of the"
            f" ranks {list(group.ranks)} only. These ranks hold one replica and must draw alike. {_REMEDY} [LP032]"
        )


def _first_that_differs(drawn: Sequence[list[tuple[str, int]]]) -> str:
    """Return the name of the hook that has drawn on some ranks only."""
    for number in range(max(map(len, drawn), default=0)):
        entries = [listed[number] if number < len(listed) else None for listed in drawn]
        if len(set(entries)) > 1:
            action = next(entry for entry in entries if entry is not None)[0]
            return f"`{action.rpartition(']')[2]}`"
    return "A hook of each batch"
