"""What holds for every test."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("tests", deadline=None, max_examples=60)  # a loaded machine takes its time
hypothesis.settings.load_profile("tests")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: many small processes share few cores


def pytest_xdist_auto_num_workers() -> int:
    """As many as this process may use: xdist's own count, of psutil, does not see `taskset`."""
    given = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    if given:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Undo what a Trainer in this process leaves in the environment, such as `LOCAL_RANK`."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
