"""Tests that compare durations with sleeps: tried again where the machine is busy, and skipped where it stays so."""

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.harness import DurationError, RankError

LATE_S = 0.002
"""A process that wakes later than this after its sleep shares its processor with others."""


@contextmanager
def durations() -> Iterator[None]:
    """Mark assertions that compare durations; all others of a test count on a busy machine too."""
    try:
        yield
    except AssertionError as failure:
        raise DurationError(*failure.args) from failure


class Lateness:
    """How late a process that only sleeps is woken at worst, while the block runs; a thread would wait for Python."""

    worst_s = 0.0

    def __enter__(self) -> "Lateness":
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("forkserver").Process(target=_sleep, args=(theirs,), daemon=True)
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("over")
        self.worst_s = self._pipe.recv()
        self._process.join()


def _sleep(pipe: Connection) -> None:
    worst_s = 0.0
    pipe.send("ready")
    while not pipe.poll():
        began = time.perf_counter()
        time.sleep(0.005)
        worst_s = max(worst_s, time.perf_counter() - began - 0.005)
    pipe.send(worst_s)


def _is_of_durations(failure: AssertionError) -> bool:
    """Whether nothing but durations differed, on any rank; those that wait for one that failed hang."""
    if isinstance(failure, RankError):
        return "duration" in failure.kinds <= {"duration", "hang"}
    return isinstance(failure, DurationError)


def compares_durations(test: Callable[..., None]) -> Callable[..., None]:
    """Try `test` up to three times where `durations` differ and sleepers are woken late; then skip it, with the reason.

    Durations that differ on an idle machine are a failure, and so is everything outside of `durations`.
    """

    @functools.wraps(test)
    def attempt(*args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            lateness = Lateness()
            try:
                with lateness:
                    return test(*args, **kwargs)
            except AssertionError as failure:
                if lateness.worst_s < LATE_S or not _is_of_durations(failure):
                    raise
                said = str(failure).strip().splitlines()
        pytest.skip(f"busy machine: sleepers are woken {1e3 * lateness.worst_s:.0f} ms late ({said[-1:]})")

    return attempt
