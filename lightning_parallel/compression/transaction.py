"""Steps of a compressor whose gradients come bit by bit, from whoever runs backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional

from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer, ReductionStep

__all__ = ["Transaction", "fill"]

FIRST_BYTES = 1 << 20  # a small first portion, so that communication starts early


class Transaction:
    """The step of `compressor` that is open, if any.

    Args:
        scaler: Anything with `get_scale()`, such as a `torch.amp.GradScaler`: what the gradients are multiplied by.
    """

    def __init__(self, compressor: Reducer, scaler: Optional[Any] = None) -> None:
        self.compressor, self.scaler = compressor, scaler
        self.counted = True
        self._step: ReductionStep | None = None

    def step(self, group: Group) -> ReductionStep:
        """The open step; a new one begins when there is none."""
        if self._step is None:
            self.compressor.scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
            self._step = self.compressor.begin(group)
        return self._step

    def finish(self) -> bool:
        """Commit the open step; whether the last one counted."""
        step, self._step = self._step, None
        if step is not None:
            self.counted = step.commit()
        return self.counted

    def abandon(self) -> None:
        """Forget the open step."""
        step, self._step = self._step, None
        if step is not None:
            step.rollback()


def fill(names: Iterable[str], sizes: Mapping[str, int], portion_bytes: int) -> list[list[str]]:
    """Divide `names`, in order, into portions of about `portion_bytes`, given the bytes of each; the first is small."""
    portions: list[list[str]] = [[]]
    room = min(FIRST_BYTES, portion_bytes)
    for name in names:
        if room <= 0:
            portions.append([])
            room = portion_bytes
        portions[-1].append(name)
        room -= sizes[name]
    return portions
