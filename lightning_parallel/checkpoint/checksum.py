"""A checksum that ranks can compute together: each of the part that it reads, and the sum is that of the whole.

The bytes of a tensor are taken as words of four bytes, each multiplied by a weight that depends on its position alone,
and added modulo 2^64. A change of one word always shows, since weights are odd; other changes stay unseen by a chance
of about 2^-32. It guards against faults, not against forgery.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

__all__ = ["WORD", "add_checksums", "checksum", "checksum_of_runs"]

WORD = 4
_MASK = (1 << 64) - 1
_CHUNK = 1 << 16
"""Words multiplied at a time: their products and weights stay in the processor's cache."""

_LONG_RUN = 1024
"""Bytes from which on runs are taken one by one, by the faster dot product."""

Array = np.ndarray[Any, np.dtype[Any]]


def _mixed(numbers: Array) -> Array:
    """Spread numbers over 64 bits, the same on every machine; `splitmix64`, https://prng.di.unimi.it/splitmix64.c."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@cache
def _weights() -> Array:
    """Return an odd weight of 31 bits for each word of a chunk."""
    return ((_mixed(np.arange(1, _CHUNK + 1)) >> np.uint64(33)) | np.uint64(1)).astype(np.int64)


def _factors(chunks: Array) -> Array:
    """Return the odd factor of each chunk, by its number."""
    return (_mixed(chunks + _CHUNK + 1) | np.uint64(1)).astype(np.int64)


@lru_cache(1 << 16)
def _factor(chunk: int) -> int:
    return int(_factors(np.array([chunk]))[0])


def _words(data: Array) -> Array:
    """View bytes as words; zeros fill up the last one."""
    missing = -len(data) % WORD
    return (np.concatenate([data, np.zeros(missing, np.uint8)]) if missing else data).view("<i4")


def checksum(data: Array, first_word: int = 0) -> int:
    """Return the checksum of bytes that lie one behind the other.

    Args:
        data: (bytes,), uint8.
        first_word: Number of words before them in the tensor.
    """
    words, weights = _words(data), _weights()
    total = at = 0
    while at < len(words):
        position = (first_word + at) % _CHUNK
        part = words[at : at + _CHUNK - position]
        # Integers wrap around, in numpy without a word, and so does the sum here.
        dot = np.dot(part.astype(np.int64), weights[position : position + len(part)])
        total += int(dot) * _factor((first_word + at) // _CHUNK)
        at += len(part)
    return total & _MASK


def checksum_of_runs(rows: Array, first_word: int, stride: int) -> int:
    """Return the checksum of runs of bytes at equal distances.

    Args:
        rows: (runs, bytes), uint8; the bytes of a run are whole words.
        first_word: Position of the first run.
        stride: Words from the start of one run to that of the next.
    """
    if rows.shape[1] >= _LONG_RUN:
        return sum(checksum(row, first_word + stride * index) for index, row in enumerate(rows)) & _MASK
    weights, total = _weights(), 0
    words = np.ascontiguousarray(rows).view("<i4")
    step = max(1, 4 * _CHUNK // max(1, words.shape[1]))
    within = np.arange(words.shape[1], dtype=np.int64)
    for begin in range(0, len(words), step):
        part = words[begin : begin + step].astype(np.int64)
        starts = first_word + stride * np.arange(begin, begin + len(part), dtype=np.int64)
        positions = starts[:, None] + within
        part *= weights[positions % _CHUNK]
        part *= _factors(positions // _CHUNK)
        total += int(part.sum())
    return total & _MASK


def add_checksums(one: int, other: int) -> int:
    """Return the checksum of two parts that have no word in common."""
    return (one + other) & _MASK
