"""A reducer that chooses a compressor by parameter name, and the binding of reducers to modules."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Optional

from torch import nn

from lightning_parallel.compression.compressor import Compressor, Dense, check_integer
from lightning_parallel.compression.feedback import Method
from lightning_parallel.compression.reducer import Reducer

__all__ = ["Policy", "bind_to_module", "warn_of_unmatched"]


class Policy(Reducer):
    """Chooses a compressor by parameter name: the first pattern that matches decides.

        Policy({"*.bias": None, "embed*": Quantize(8), "*": PowerSGD(4)})

    The strategy averages a parameter uncompressed if no pattern matches it, if it is small, or if the chosen compressor
    does not accept it (vectors).

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, Policy, PowerSGD, Quantize

        policy = Policy({"*.bias": None, "embed*": Quantize(8), "*": PowerSGD(rank=4)})
        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(policy))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        rules: Shell pattern over parameter names (`*`, `?`, `[...]`) -> compressor; None averages uncompressed.
        min_numel: Tensors with fewer elements are averaged uncompressed, for any pattern.

    Raises:
        TypeError: If `rules` is not a mapping, a pattern is not a string, or a rule is neither a compressor nor None.
        ValueError: If there is no pattern.
    """

    def __init__(self, rules: Mapping[str, Optional[Compressor]], *, min_numel: int = 0) -> None:
        super().__init__()
        if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
            raise TypeError(f"`rules` must map patterns of names to compressors, {{'*': PowerSGD(4)}}; got {rules!r}")
        wrong = {pattern: rule for pattern, rule in rules.items() if not isinstance(rule, (Compressor, type(None)))}
        if wrong:
            raise TypeError(f"`rules` must hold compressors or None; got {wrong}")
        if not rules:
            raise ValueError("`rules` must hold at least one pattern, such as {'*': PowerSGD(4)}; got none")
        check_integer("min_numel", min_numel, least=0)
        self.rules = dict(rules)
        self.min_numel = min_numel
        self._dense = Dense()

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that any rule uses."""
        return frozenset().union(*(rule.slots for rule in self._compressors))

    @property
    def _compressors(self) -> list[Compressor]:
        return [rule for rule in self.rules.values() if rule is not None]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that are not the first to match any of `names`."""
        found = {self._pattern(name) for name in names}
        return [pattern for pattern in self.rules if pattern not in found]

    def _pattern(self, name: str) -> Optional[str]:
        # `fnmatch` would ignore case on some systems.
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def phase(self, step: int) -> Optional[Hashable]:
        """Return the phases of all rules; None if one is unknown."""
        phases = tuple(rule.phase(step) for rule in self._compressors)
        return None if None in phases else phases

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return the method of the first rule that matches, or the plain mean."""
        pattern = self._pattern(name)
        rule = None if pattern is None else self.rules[pattern]
        if rule is None or math.prod(shape) < self.min_numel:
            return self._dense
        return rule.method(name, shape, step)

    def __repr__(self) -> str:
        return f"Policy({self.rules}{f', min_numel={self.min_numel}' if self.min_numel else ''})"


# Weak on both sides: this table must keep neither a compressor nor a model alive.
_OWNERS: weakref.WeakKeyDictionary[Reducer, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def bind_to_module(module: nn.Module, reducer: Reducer) -> None:
    """Bind `reducer` to `module`; reset the reducer, with a warning, if it was used for another module.

    The memory of one module is wrong for another module.
    """
    owner = _OWNERS.get(reducer)
    if owner is not None and owner() is not module and reducer.step > 0:
        warnings.warn(
            f"{reducer!r} was used for {reducer.step} steps of another model. It is reset for this model.",
            stacklevel=2,
        )
        reducer.reset()
    _OWNERS[reducer] = weakref.ref(module)


def warn_of_unmatched(module: nn.Module, reducer: Reducer) -> None:
    """Warn of the patterns of a policy that match no parameter of `module` first: a name may be misspelt."""
    names = [name for name, _ in module.named_parameters()]
    unmatched = reducer.unmatched(names) if isinstance(reducer, Policy) else []
    if unmatched:
        warnings.warn(
            f"The patterns {unmatched} of the policy are not the first to match any parameter of "
            f"{type(module).__name__}, whose names look like {names[:3]}.",
            stacklevel=2,
        )
