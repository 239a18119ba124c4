"""Exclusive times: every nanosecond is charged to one phase."""

from __future__ import annotations

from collections import defaultdict

__all__ = ["OTHER", "Ledger"]

OTHER = "other"
"""The phase of time in which no phase was running."""


class Ledger:
    """Exclusive times of nested phases.

    >>> ledger = Ledger(now_ns=0)
    >>> ledger.enter("optimizer", 10)
    >>> ledger.enter("forward", 20)
    >>> ledger.leave(50)
    >>> ledger.leave(55)
    >>> ledger.close(60)
    {'other': 15, 'optimizer': 15, 'forward': 30}
    """

    def __init__(self, now_ns: int) -> None:
        self._phases = [OTHER]
        self._charged: defaultdict[str, int] = defaultdict(int)
        self.last_ns = now_ns

    def enter(self, phase: str, now_ns: int) -> None:
        """Charge what follows to `phase`, until `leave`."""
        self._charge(now_ns)
        self._phases.append(phase)

    def leave(self, now_ns: int) -> None:
        """Charge what follows to the phase around the current one."""
        self._charge(now_ns)
        if len(self._phases) > 1:
            self._phases.pop()

    def move(self, phase: str, duration_ns: int, now_ns: int) -> int:
        """Charge the last `duration_ns` to `phase` instead of the current one, as far as the latter has any."""
        self._charge(now_ns)
        current = self._phases[-1]
        moved = min(max(duration_ns, 0), self._charged[current])
        self._charged[current] -= moved
        self._charged[phase] += moved
        return moved

    def close(self, now_ns: int) -> dict[str, int]:
        """End the window; its nanoseconds by phase add up to its length. The next window begins."""
        self._charge(now_ns)
        charged, self._charged = self._charged, defaultdict(int)
        return dict(charged)

    def _charge(self, now_ns: int) -> None:
        self._charged[self._phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns
