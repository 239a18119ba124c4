"""Tests that compare durations with sleeps: tried again where the machine is busy, and skipped where it stays so."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LATE_S = 0.002
"""A thread that wakes later than this after its sleep shares its processor with others."""


class DurationError(AssertionError):
    """A duration is not what it should be, which on a busy machine proves nothing."""


@contextmanager
def durations() -> Iterator[None]:
    """Mark assertions that compare durations; all others of a test count on a busy machine too."""
    try:
        yield
    except AssertionError as failure:
        raise DurationError(*failure.args) from failure


class Lateness:
    """How late a thread that only sleeps is woken at worst, while the block runs."""

    worst_s = 0.0

    def __enter__(self) -> "Lateness":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()
        return self

    def _sleep(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            time.sleep(0.005)
            self.worst_s = max(self.worst_s, time.perf_counter() - began - 0.005)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def compares_durations(test: Callable[..., None]) -> Callable[..., None]:
    """Try `test` up to three times where `durations` differ and sleepers are woken late; then skip it, with the reason.

    Durations that differ on an idle machine are a failure, and so is everything outside of `durations`.
    """

    @functools.wraps(test)
    def attempt(*args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            with Lateness() as lateness:
                try:
                    return test(*args, **kwargs)
                except AssertionError as failure:
                    if DurationError.__name__ not in f"{type(failure)} {failure}":  # a rank's traceback names it too
                        raise
                    said = str(failure).strip().splitlines()
            if lateness.worst_s < LATE_S:
                return test(*args, **kwargs)
        pytest.skip(f"busy machine: sleepers are woken {1e3 * lateness.worst_s:.0f} ms late ({said[-1:]})")

    return attempt
