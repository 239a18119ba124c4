"""What may replace the plain mean of gradients, and its step beside a backward that still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_parallel.comm import Worker

__all__ = ["Beside", "MeanReducer", "MeanStep"]


class MeanStep(Protocol):
    """One optimizer step of a `MeanReducer`; it ends in `commit` or in `rollback`."""

    @property
    def finite(self) -> bool:
        """Whether every gradient so far was finite on every rank."""

    def reduce_(self, named_gradients: Mapping[str, Tensor]) -> None:
        """Replace a part of the gradients by their (approximate) mean, in place."""

    def commit(self) -> bool:
        """Keep what the step has left for the next ones."""

    def rollback(self) -> None:
        """Forget the step."""


class MeanReducer(Protocol):
    """What replaces the plain mean, such as a gradient compressor."""

    def begin(self, group: Any) -> MeanStep:
        """Start a step over `group`."""


class Beside:
    """The step of a compressor that runs on a worker while backward goes on."""

    def __init__(self, step: MeanStep, worker: Worker) -> None:
        self.step, self._worker = step, worker
        self._results: list[Callable[[], dict[str, Tensor]]] = []

    def launch(self, gradients: dict[str, Tensor]) -> None:
        self._results.append(self._worker.submit(lambda: self._means(gradients)))

    @torch.no_grad()
    def _means(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        means = {name: gradient.detach().clone() for name, gradient in gradients.items()}
        self.step.reduce_(means)
        return means

    def wait(self) -> dict[str, Tensor]:
        """The means of all buckets."""
        try:
            return {name: mean for result in self._results for name, mean in result().items()}
        except BaseException:
            self.step.rollback()
            raise
