"""Tests that compare durations with sleeps: tried again where the machine is busy, and skipped where it stays so."""

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.harness import DurationError, RankError, alone

LATE_S = 0.001
"""A machine that wakes a tenth of its sleepers later than this is busy; single pauses, of a virtual one, are common."""
RETRY_S = 15.0
"""What may be spent on trying again, while all other tests wait; one try more may begin before it is over."""


@contextmanager
def durations() -> Iterator[None]:
    """Mark assertions that compare durations; all others of a test count on a busy machine too."""
    try:
        yield
    except AssertionError as failure:
        raise DurationError(*failure.args) from failure


class Sleep(torch.autograd.Function):
    """Passes tensors and gradients on after as many seconds."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s, sleep=time.sleep):
        ctx.backward_s, ctx.sleep = backward_s, sleep
        sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.sleep(ctx.backward_s)
        return gradient, None, None, None


class Lateness:
    """How late one in ten sleeps of another process ends, while the block runs; a thread would wait for Python."""

    tenth_s = 0.0

    def __enter__(self) -> "Lateness":
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("forkserver").Process(target=_sleep, args=(theirs,), daemon=True)
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("over")
        self.tenth_s = self._pipe.recv()
        self._process.join()


def _sleep(pipe: Connection) -> None:
    late_s = [0.0]
    pipe.send("ready")
    while not pipe.poll():
        began = time.perf_counter()
        time.sleep(0.005)
        late_s.append(time.perf_counter() - began - 0.005)
    pipe.send(sorted(late_s)[len(late_s) * 9 // 10])


def _is_of_durations(failure: AssertionError) -> bool:
    """Whether nothing but durations differed, on any rank; those that wait for one that failed hang."""
    if isinstance(failure, RankError):
        return "duration" in failure.kinds <= {"duration", "hang"}
    return isinstance(failure, DurationError)


def compares_durations(test: Callable[..., None]) -> Callable[..., None]:
    """Try `test` again, while other ranks wait, where `durations` differ; skip it where sleepers are late each time.

    Durations that differ on an idle machine are a failure, and so is everything outside of `durations`.
    """

    @functools.wraps(test)
    def attempt(*args: Any, **kwargs: Any) -> None:
        try:
            return test(*args, **kwargs)
        except AssertionError as failure:
            if not _is_of_durations(failure):
                raise
        was_idle, until = False, time.monotonic() + RETRY_S
        while True:
            lateness = Lateness()
            try:
                with alone(), lateness:
                    return test(*args, **kwargs)
            except AssertionError as failure:
                if not _is_of_durations(failure):
                    raise
                was_idle |= lateness.tenth_s < LATE_S
                if time.monotonic() < until:
                    continue
                if was_idle:
                    raise
                said = str(failure).strip().splitlines()
                pytest.skip(f"busy machine: sleepers are woken {1e3 * lateness.tenth_s:.0f} ms late ({said[-1:]})")

    return attempt
