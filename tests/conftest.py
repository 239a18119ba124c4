"""What holds for every test."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("tests", deadline=None, max_examples=60)  # a loaded machine takes its time
hypothesis.settings.load_profile("tests")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: many small processes share few cores

import tests.strict_order  # noqa: E402, F401 - NCCL's order in this process, if the environment says so


def pytest_xdist_auto_num_workers() -> int:
    """As many as this process may use: xdist's own count, of psutil, does not see `taskset`."""
    given = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    if given:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare a run without Ray's tests the imports of Ray, which take seconds in each worker."""
    _, _, excluded = str(config.getoption("markexpr")).partition("not")
    return True if collection_path.name == "test_ray.py" and "ray" in excluded else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark with `more` all cases of a `sweep` but one."""
    seen: Counter[str] = Counter()
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is None:
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name] != sweep.kwargs.get("kept", 0):
            item.add_marker("more")
        seen[name] += 1


_crashed: list[object] = []


def pytest_testnodedown(node: object, error: object) -> None:
    """Note a pytest worker that crashed: `make test` repeats failed tests, but a crash must stay a failure."""
    _crashed.extend([error] if error else [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End with the status of an internal error after a crash of a worker."""
    if _crashed:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Undo what a Trainer in this process leaves in the environment, such as `LOCAL_RANK`."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
