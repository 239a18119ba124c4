"""Amounts with a unit in common notation: `80GiB`, `400Gbit/s`, `10us`, `989TFLOP/s`."""

from __future__ import annotations

import re

__all__ = ["parse_bandwidth", "parse_bytes", "parse_flops", "parse_seconds"]

_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DECIMAL = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {f"{unit}i": 2.0 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([KMGTk]?i?)(bits?|bytes?|B|b)\s*", re.ASCII)


def parse_bytes(text: str) -> float:
    """Read an amount of memory, such as `80GiB` or `40GB`.

    Raises:
        ValueError: If there is no unit, or a unit of bits.
    """
    found = _AMOUNT.fullmatch(text)
    if found is None or found[3] not in ("B", "byte", "bytes"):
        raise ValueError(f"The memory must be in bytes, such as 80GiB or 80GB; got `{text}`")
    return _number(found, text)


def parse_bandwidth(text: str) -> float:
    """Read a bandwidth, such as `400Gbit/s` or `900GB/s`; returns bytes per second.

    Raises:
        ValueError: If the text is no bandwidth, or does not tell bits from bytes.
    """
    amount, _, per = text.strip().rpartition("/")
    if not amount and text.strip().endswith("ps"):  # 400Gbps
        amount, per = text.strip()[:-2] + "it", "s"
        amount = amount if amount.endswith("bit") else ""
    found = _AMOUNT.fullmatch(amount)
    if found is None or per != "s" or found[3] == "b":
        raise ValueError(
            f"The bandwidth must be in bits or bytes per second, such as 400Gbit/s or 50GB/s; got `{text}`"
        )
    return _number(found, text) / (8 if found[3].startswith("bit") else 1)


def parse_seconds(text: str) -> float:
    """Read a time, such as `10us`, `0.1ms` or `5min`; returns seconds.

    Raises:
        ValueError: If the text is not a number with a unit of time.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*(ns|us|ms|s|min|h)\s*", text)
    try:
        return float(found[1]) * _TIMES[found[2]]  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError(f"The time must have a unit, such as 10us, 0.1ms or 5min; got `{text}`") from None


def parse_flops(text: str) -> float:
    """Read a peak, such as `989TFLOP/s`; returns operations per second.

    Raises:
        ValueError: If the text is not a number with a unit.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([GTP])FLOP/?s\s*", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(f"The peak must be in operations per second, such as 989TFLOP/s; got `{text}`")
    return float(found[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[found[2].upper()]


def _number(found: re.Match[str], text: str) -> float:
    unit = found[2]
    factor = _BINARY.get(unit) or _DECIMAL.get(unit)
    value = float(found[1])
    if factor is None or not value:
        raise ValueError(f"The amount must be above 0, with a unit such as GiB or GB; got `{text}`")
    return value * factor
