"""Tests that compare durations with sleeps: tried again where the machine is busy, and skipped where it stays so."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

LATE_S = 0.002
"""A thread that wakes later than this after its sleep shares its processor with others."""


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
    """Try `test` up to three times while the machine wakes sleepers late; then skip it, with the reason."""

    @functools.wraps(test)
    def attempt(*args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            with Lateness() as lateness:
                try:
                    return test(*args, **kwargs)
                except AssertionError as failure:
                    said = str(failure).strip().splitlines()
            if lateness.worst_s < LATE_S:
                break
        else:
            pytest.skip(f"busy machine: sleepers are woken {1e3 * lateness.worst_s:.0f} ms late ({said[-1:]})")
        return test(*args, **kwargs)

    return attempt
