"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Undo what a Trainer in this process leaves in the environment, such as `LOCAL_RANK`."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
