"""Private names of DeepSpeed that the library cannot do without, each with the reason."""

from __future__ import annotations

__all__: list[str] = []
