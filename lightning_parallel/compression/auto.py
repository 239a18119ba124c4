"""Compress only where it pays: measured, not guessed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor import Compressor, Dense
from lightning_parallel.compression.memory import Memory
from lightning_parallel.compression.powersgd import PowerSGD
from lightning_parallel.compression.quantizers import Quantize
from lightning_parallel.compression.reducer import GroupLike, Method, Reducer, Step

__all__ = ["Auto"]

_log = logging.getLogger(__name__)
_WARM_UP = 1  # steps whose times are not counted: the first ones allocate


class Auto(Reducer):
    """Measures plain means and the candidates on the first gradients, then keeps the fastest for good.

    While it measures, gradients are averaged as they are; the candidates work on copies. The slowest rank's seconds
    count, so all ranks choose alike. The verdict is logged and kept in `verdict`.

    Args:
        candidates: Compressors to try; 8-bit quantization and PowerSGD of rank 4 when omitted.
        min_gain: Stay with plain means unless the fastest candidate saves this share of their time.
        steps: Steps to measure, after one that is not counted.
    """

    def __init__(self, candidates: Optional[list[Compressor]] = None, min_gain: float = 0.05, steps: int = 3) -> None:
        super().__init__()
        if steps < 1 or not 0 <= min_gain < 1:
            raise ValueError(f"`steps` must be positive and `min_gain` in [0, 1), got {steps} and {min_gain}")
        self.candidates = [Quantize(8), PowerSGD(4)] if candidates is None else list(candidates)
        self.min_gain, self.steps = min_gain, steps
        self.choice: Optional[Reducer] = None
        self.verdict = "still measuring"
        self._dense = Dense()
        self._seconds = [0.0] * (1 + len(self.candidates))

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self._chosen.linear

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self._chosen.unbiased

    @property
    def collective(self) -> str:  # type: ignore[override]
        return self._chosen.collective

    @property
    def _chosen(self) -> Reducer:
        return self._dense if self.choice is None else self.choice

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        return self._chosen.method(name, shape, step)

    def begin(self, group: GroupLike = None) -> Step:
        if self.choice is not None:
            return super().begin(group)
        return _MeasuringStep(self, group if isinstance(group, Group) else Group.of(group, axis="data_parallel"))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._verdict_state()}

    def gather_state(self, group: GroupLike = None, exact: bool = True) -> dict[str, Any]:
        state = super().gather_state(group, exact)
        return {**state, **self._verdict_state()} if state else state

    def load_state_dict(self, state: Mapping[str, Any], group: GroupLike = None) -> None:
        super().load_state_dict(state, group)
        index = state.get("choice", -1)
        self.choice = None if index < 0 else [self._dense, *self.candidates][index]
        self.verdict = state.get("verdict", self.verdict)

    def _verdict_state(self) -> dict[str, Any]:
        index = -1 if self.choice is None else [self._dense, *self.candidates].index(self.choice)
        return {"choice": index, "verdict": self.verdict}

    def _decide(self, group: Group, device: torch.device) -> None:
        seconds = torch.tensor(self._seconds, dtype=torch.float64, device=device)
        dense, *others = (comm.all_reduce_(seconds, group, "max") / self.steps).tolist()
        best = min(range(len(others)), key=others.__getitem__, default=None)
        gain = 1 - others[best] / dense if best is not None else 0.0
        wins = best is not None and gain >= self.min_gain
        self.choice = self.candidates[best] if wins and best is not None else self._dense
        times = ", ".join(f"{c!r} {s * 1e3:.2f} ms" for c, s in zip(self.candidates, others))
        self.verdict = (
            f"plain means take {dense * 1e3:.2f} ms a step, {times}: the best gains {gain:.0%}, at least "
            f"{self.min_gain:.0%} is asked for; using {self.choice!r}"
        )
        if group.rank == 0:
            _log.info("Gradient compression: %s", self.verdict)
        for candidate in self.candidates:
            candidate.memory = Memory()

    def __repr__(self) -> str:
        return f"Auto({self.candidates})" if self.choice is None else repr(self.choice)


class _MeasuringStep(Step):
    """A dense step beside which the candidates reduce copies."""

    reducer: Auto

    def __init__(self, reducer: Auto, group: Group) -> None:
        super().__init__(reducer, group)
        self._device = torch.device("cpu")

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        for index, candidate in enumerate(self.reducer.candidates):
            copies = {name: gradient.detach().clone() for name, gradient in named_gradients.items()}
            self._time(1 + index, lambda candidate=candidate, copies=copies: candidate.reduce_(copies, self.group))
        self._time(0, lambda: super(_MeasuringStep, self).reduce_(named_gradients, shards))
        self._device = next((gradient.device for gradient in named_gradients.values()), self._device)

    def commit(self) -> bool:
        finite = super().commit()
        if finite and self.reducer.step == _WARM_UP + self.reducer.steps:
            self.reducer._decide(self.group, self._device)
        return finite

    def _time(self, index: int, call: Any) -> None:
        comm.barrier(self.group)
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        if self.number >= _WARM_UP:
            self.reducer._seconds[index] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
