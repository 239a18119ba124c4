"""Writes bytes in blocks with checksums, in this process or in a process of its own.

    python -I -S block_writer.py PARENT 5 6        5, 6: descriptors of memory that the process PARENT fills

The process imports only the standard library, so that it starts in a few hundredths of a second. Each line of JSON that
it reads asks for one file. It answers with lines that tell the bytes written so far. The last line has the checksums,
or the error. The process ends with its parent.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["BlockWriter"]

_TOLD_BYTES = 1 << 26
"""Bytes between two answers about a file that is being written."""
_LOOK_MS = 1000
"""Milliseconds between two looks for the parent: its other children may hold the pipe open after its end."""


class BlockWriter:
    """Writes the parts of a file.

    Args:
        stream: The file.
        block: Bytes under one checksum.
        seen: Called with the number of bytes of each piece.
    """

    def __init__(self, stream: Any, block: int, seen: Callable[[int], Any] | None = None) -> None:
        self._stream, self._block, self._seen = stream, block, seen
        self._size = self._crc = 0
        self._checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        """Write the next bytes of a part, which may end inside a block."""
        while len(data):
            rest = self._block - self._size % self._block
            piece, data = data[:rest], data[rest:]
            # Before the write, while the piece is in the processor's cache.
            self._crc = zlib.crc32(piece, self._crc)
            self._stream.write(piece)
            self._size += len(piece)
            if self._size % self._block == 0:
                self._checksums.append(self._crc)
                self._crc = 0
            if self._seen is not None:
                self._seen(len(piece))

    def end_part(self) -> tuple[int, list[int]]:
        """Return the bytes and the checksums of the part, and begin another part."""
        if self._size % self._block:
            self._checksums.append(self._crc)
        ended = self._size, self._checksums
        self._size, self._crc, self._checksums = 0, 0, []
        return ended


def _write_staged(request: dict[str, Any], descriptors: Sequence[int], seen: Callable[[int], None]) -> list[list[int]]:
    """Write a file from shared memory, and return the checksums of each part."""
    with open(request["path"], "wb") as stream:
        stream.write(request["head"].encode("latin-1"))
        sizes, found = request["sizes"], []
        total = sum(sizes)
        writer = BlockWriter(stream, request["block"], seen)
        # Empty memory cannot be mapped.
        memory = mmap.mmap(descriptors[request["memory"]], total, prot=mmap.PROT_READ) if total else b""
        begin = 0
        for size in sizes:
            with memoryview(memory) as view:
                writer.write(view[begin : begin + size])
            found.append(writer.end_part()[1])
            begin += size
        stream.flush()
        os.fsync(stream.fileno())
    return found


def _requests(parent: int) -> Iterator[bytes]:
    """Yield the lines of the parent until it ends."""
    received = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while os.getppid() == parent:
        if not poll.poll(_LOOK_MS):
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        *lines, received = (received + more).split(b"\n")
        yield from lines


def _answer(answer: dict[str, Any]) -> None:
    line = memoryview(json.dumps(answer).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


def _serve(parent: int, descriptors: Sequence[int]) -> None:
    # The training process decides about the end of a run. It gets the same signals, and may wait for this file. A
    # launcher may send them to the processes of other sessions too.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    for line in _requests(parent):
        written = told = 0

        def seen(count: int) -> None:
            nonlocal written, told
            written += count
            if os.getppid() != parent:
                os._exit(1)
            if written - told >= _TOLD_BYTES:
                told = written
                _answer({"written": written})

        try:
            checksums = _write_staged(json.loads(line), descriptors, seen)
        except OSError as error:
            _answer({"errno": error.errno, "error": error.strerror or str(error)})
        except Exception:
            _answer({"errno": None, "error": traceback.format_exc()})
        else:
            _answer({"written": written, "checksums": checksums})


if __name__ == "__main__":
    _serve(int(sys.argv[1]), [int(one) for one in sys.argv[2:]])
