"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: many small processes share few cores


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Undo what a Trainer in this process leaves in the environment, such as `LOCAL_RANK`."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
