"""Exclusive times: every nanosecond is charged to one phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

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

    Args:
        now_ns: When the first window begins.
        absorbing: Phases that keep the time of all phases within them.
    """

    def __init__(self, now_ns: int, absorbing: Collection[str] = ()) -> None:
        self._phases = [OTHER]
        self._absorbing = frozenset(absorbing)
        self._charged: defaultdict[str, int] = defaultdict(int)
        self.last_ns = now_ns

    def enter(self, phase: str, now_ns: int) -> None:
        """Charge what follows to `phase`, until `leave`."""
        around = self._phases[-1]
        self._charged[around] += now_ns - self.last_ns
        self.last_ns = now_ns
        self._phases.append(around if around in self._absorbing else phase)

    def leave(self, now_ns: int) -> None:
        """Charge what follows to the phase around the current one."""
        phases = self._phases
        self._charged[phases[-1]] += now_ns - self.last_ns
        self.last_ns = now_ns
        if len(phases) > 1:
            phases.pop()

    def spend(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Charge the time between two moments to `phase`, as `enter` and `leave` would; nothing happened between."""
        around = self._phases[-1]
        self._charged[around] += start_ns - self.last_ns
        self._charged[around if around in self._absorbing else phase] += end_ns - start_ns
        self.last_ns = end_ns

    def move(self, phase: str, start_ns: int, end_ns: int, now_ns: int) -> int:
        """Charge the time between two moments to `phase` instead of the current one, as far as the latter has any."""
        self._charge(now_ns)
        current = self._phases[-1]
        moved = min(max(end_ns - start_ns, 0), self._charged[current])
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
