"""Skip connections over a cut: what later stages need besides the arguments of their first layer.

    h = embed(x)            stage 0 runs `embed`, and sends its output along with what layer 2 gets
    layers 0, 1
    layers 2, 3             stage 1: its stub of `embed` returns what has come, and it sends that on
    head(x + h)             stage 2: so does its own, and the step goes on as in one process

Dry runs find them (`dry_runs`). They travel from neighbour to neighbour with the activations: a connection of its own
between distant stages would be one more order of messages to keep, and gradients would come back out of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.interception import Call
from lightning_parallel.pipeline.placeholder import PlaceholderTensor, missing

__all__ = ["NO_SKIPS", "Skip", "StageSkips", "Skips"]


class Skip(NamedTuple):
    """A tensor that skips over a cut.

    Attributes:
        name: The module that returns it, or the parameter that it is.
        call: The number of the module's call in a step; -1 for a parameter.
        leaf: Its position among the tensors that the call returns; -1 for what is made inside, which cannot be sent.
    """

    name: str
    call: int = -1
    leaf: int = 0

    @classmethod
    def inside(cls, name: str, call: int) -> Skip:
        """Return what stands for all that a call makes and does not return."""
        return cls(name, call, -1)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, which the step reads by itself."""
        return self.call < 0

    def __str__(self) -> str:
        if self.leaf < 0:
            return f"a tensor that `{self.name}` makes and does not return"
        return f"`{self.name}`" if self.is_parameter else f"the output of `{self.name}`"


Skips = tuple[tuple[Skip, ...], ...]
"""For each stage, the tensors that come with the arguments of its first layer."""


class StageSkips:
    """The skip connections of one stage, for one microbatch.

    Args:
        incoming: What comes with the arguments of the stage's first layer.
        outgoing: What the next stage gets with its own.
        supply: Returns the tensor that has come, for a placeholder; None if there is none.

    Attributes:
        with_parameters: Whether there are parameters among them.
        kept: What this stage has of `outgoing` so far.
    """

    def __init__(
        self,
        incoming: Iterable[Skip],
        outgoing: Iterable[Skip],
        supply: Callable[[Skip, PlaceholderTensor], Tensor | None],
    ) -> None:
        self.incoming = frozenset(incoming)
        self.outgoing = frozenset(outgoing)
        self.supply = supply
        self.with_parameters = any(skip.is_parameter for skip in self.incoming | self.outgoing)
        self.kept: dict[Skip, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._places: dict[tuple[str, int], list[Skip]] = {}
        for skip in self.incoming | self.outgoing:
            self._places.setdefault((skip.name, skip.call), []).append(skip)

    def call(self, call: Call, run: Callable[[Call], Any]) -> Any:
        """Run a call; what has come takes the places of placeholders in its output, and what is to be sent is kept."""
        if not self._places:
            return run(call)
        number = self._calls[call.site.name]
        self._calls[call.site.name] += 1
        output = run(call)
        skips = self._places.get((call.site.name, number))
        if skips is None:
            return output
        leaves, tree = pytree.tree_flatten(output)
        for skip in skips:
            leaves[skip.leaf] = self._pass(skip, leaves[skip.leaf])
        return pytree.tree_unflatten(leaves, tree)

    def receive_parameters(self, placeholders: Mapping[str, Sequence[PlaceholderTensor]]) -> None:
        """Fill the placeholders of parameters that have come, before the step begins."""
        for skip in self.incoming:
            if skip.is_parameter:
                # None in a layer of this stage, of which the step reads its own before the layers, too.
                for placeholder in placeholders.get(skip.name, ()):
                    value = self._pass(skip, placeholder)
                    if value is not placeholder:
                        placeholder.receive(value)

    def keep_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep the parameters of this stage that the next one gets."""
        for skip in self.outgoing:
            # What this stage has been sent it passes on, even where another stage of its rank holds the parameter.
            if skip.is_parameter and skip.name in parameters and skip not in self.kept:
                self._pass(skip, parameters[skip.name])

    def _pass(self, skip: Skip, value: Any) -> Any:
        if skip in self.incoming and missing(value):
            come = self.supply(skip, value)
            if come is not None:
                # Whoever has collected it, as hooks do, sees the data, too.
                value.receive(come)
                value = come
        if skip in self.outgoing and isinstance(value, Tensor) and not missing(value):
            # A copy: the step may change its own in place, as the next stage will by itself.
            self.kept[skip] = value.clone()
        return value


NO_SKIPS = StageSkips((), (), lambda skip, placeholder: None)
