"""Writes a checkpoint again and again: VALUE PATH."""

import sys
from pathlib import Path

from tests.checkpoint.test_sharded_files import write

value, path = sys.argv[1:]
for step in range(15):
    write(path, float(value), step=step)
Path(path).with_name(f"{value}.over").touch()
