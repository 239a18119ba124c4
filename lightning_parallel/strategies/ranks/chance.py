"""The random generators of the ranks of a replica: compared before each batch, and put back if they part.

Code on rank zero alone that draws numbers, such as a callback that samples a picture, moves the generators of that
rank. From then on masks of activations that all ranks hold would differ, and so would the weights. What has drawn is
found by what the Trainer's profiler is told: hooks that run once in a while are watched, those of each batch a few
times only.
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
    """Keeps the generators of the ranks of a replica alike.

    Args:
        group: The ranks of the replica.
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

    def follow(self, trainer: Trainer, module: nn.Module, steps_draw_alike: bool, patches: Patches) -> None:
        """Watch hooks until `patches` are undone.

        Args:
            trainer: The Trainer.
            module: Its module, whose own generators count, too.
            steps_draw_alike: Whether steps draw from the global generators, as without a pipeline.
            patches: Undoes it.
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
        found = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            cuda = torch.cuda.default_generators[torch.cuda.current_device()]
            found = zlib.crc32(f"{cuda.initial_seed()} {cuda.get_offset()}".encode(), found)
        _, numbers, gauss = random.getstate()
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
        """Return what the ranks are to compare."""
        return f"{self.state()} {self._after_step}"

    def compare(self, notes: Sequence[Sequence[str]]) -> None:
        """Put the generators back to those of the first rank, with a warning, if they have parted.

        Args:
            notes: What `note` gave on each rank, split.

        Raises:
            RuntimeError: On every rank, if they parted inside of a step.
        """
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
        self._calls.clear()
        if name in self._told:
            return
        self._told.add(name)
        rank_zero_warn(
            f"{name} draws random numbers on some of the ranks {ranks} only. These ranks hold one replica and must draw"
            f" alike. Their generators are set to the state of the first rank. {_REMEDY}"
            " [LP032]"
        )

    def refuse(self, states: Sequence[str]) -> None:
        """Refuse a step that begins with other generators on some ranks.

        Raises:
            RuntimeError: On every rank.
        """
        if len(set(states)) > 1:
            name = _first_that_differs(comm.all_gather_object(self._drawn, self._group))
            raise RuntimeError(
                f"{name} draws random numbers before this step on some of the ranks {list(self._group.ranks)} only."
                f" These ranks hold one replica and must draw alike. {_REMEDY}"
                " [LP032]"
            )


def _first_that_differs(drawn: Sequence[list[tuple[str, int]]]) -> str:
    """Name the hook that drew on some ranks only."""
    for number in range(max(map(len, drawn), default=0)):
        entries = [listed[number] if number < len(listed) else None for listed in drawn]
        if len(set(entries)) > 1:
            action = next(entry for entry in entries if entry is not None)[0]
            return f"`{action.rpartition(']')[2]}`"
    return "A hook of each batch"
