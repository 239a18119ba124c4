"""Different compressors for different parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Optional

from lightning_parallel.compression.arguments import check_integer
from lightning_parallel.compression.compressor import Compressor, Dense
from lightning_parallel.compression.method import Method
from lightning_parallel.compression.reducer import Reducer

__all__ = ["Policy"]


class Policy(Reducer):
    """Chooses a compressor by parameter name: the first pattern that matches decides.

        Policy({"*.bias": None, "embed*": Quantize(8), "*": PowerSGD(4)})

    Parameters that no pattern matches, that are small, or that the chosen compressor does not accept (vectors) are
    averaged as they are.

    Args:
        rules: Shell pattern over parameter names (`*`, `?`, `[...]`) -> compressor; None for plain means.
        min_numel: Tensors with fewer elements are averaged as they are, whatever the pattern says.

    Raises:
        TypeError: If `rules` is no mapping, a pattern no string, or a rule neither a compressor nor None.
    """

    def __init__(self, rules: Mapping[str, Optional[Compressor]], min_numel: int = 0) -> None:
        super().__init__()
        if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
            raise TypeError(f"`rules` must map patterns of names to compressors, {{'*': PowerSGD(4)}}, got {rules!r}")
        wrong = {pattern: rule for pattern, rule in rules.items() if not isinstance(rule, (Compressor, type(None)))}
        if wrong:
            raise TypeError(f"the rules of a policy are compressors or None, got {wrong}")
        check_integer("min_numel", min_numel, least=0)
        self.rules, self.min_numel = dict(rules), min_numel
        self._dense = Dense()

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return all(rule.linear for rule in self.rules.values() if rule is not None)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return all(rule.unbiased for rule in self.rules.values() if rule is not None)

    @property
    def collective(self) -> str:  # type: ignore[override]
        found = {rule.collective for rule in self.rules.values() if rule is not None}
        return found.pop() if len(found) == 1 else "mixed" if found else "all_reduce"

    @property
    def slots(self) -> frozenset[str]:
        return frozenset().union(*(rule.slots for rule in self.rules.values() if rule is not None))

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that are first for none of the parameters `names`."""
        found = {self._pattern(name) for name in names}
        return [pattern for pattern in self.rules if pattern not in found]

    def _pattern(self, name: str) -> Optional[str]:
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        pattern = self._pattern(name)
        rule = None if pattern is None else self.rules[pattern]
        if rule is None or math.prod(shape) < self.min_numel:
            return self._dense
        return rule.method(name, shape, step)

    def __repr__(self) -> str:
        return f"Policy({self.rules}{f', min_numel={self.min_numel}' if self.min_numel else ''})"
