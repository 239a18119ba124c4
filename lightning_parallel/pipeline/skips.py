"""Skip connections over a split point: values that later stages need besides the arguments of their first layer.

    h = embed(x)            stage 0 runs `embed`, and sends its output along with the arguments of layer 2
    layers 0, 1
    layers 2, 3             stage 1: its stub of `embed` returns the received tensor, and the stage sends it on
    head(x + h)             stage 2: so does its stub, and the step continues as in one process

Dry runs find them (`dry_runs`). They travel from neighbour to neighbour with the activations. A separate connection
between distant stages would add an order of messages to keep. Gradients would come back out of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_parallel.compat.torch import pytree
from lightning_parallel.step_trace.interception import Call
from lightning_parallel.step_trace.placeholder import PlaceholderTensor, missing

__all__ = ["NO_SKIPS", "Skip", "StageSkips", "Skips"]


class Skip(NamedTuple):
    """A tensor that skips over a split point.

    Attributes:
        name: The module that returns it; for a parameter, its own name.
        call: The number of the module's call in a step; -1 for a parameter.
        leaf: Its position among the leaves of the output; -1 for values inside the module, which are not sent.
    """

    name: str
    call: int = -1
    leaf: int = 0

    @classmethod
    def inside(cls, name: str, call: int) -> Skip:
        """Return the value that represents all tensors that a call makes and does not return."""
        return cls(name, call, -1)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, which the step reads directly."""
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
        incoming: The tensors that come with the arguments of the stage's first layer.
        outgoing: The tensors that go to the next stage with the arguments of its first layer.
        supply: Returns the received tensor for a placeholder; None if there is none.

    Attributes:
        with_parameters: Whether there are parameters among them.
        kept: The tensors of `outgoing` that this stage has so far.
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
        """Run a call; received tensors replace placeholders in its output, and outgoing tensors are kept."""
        if not self._places:
            return run(call)
        # A skip names the n-th call of a module, which is the same on all stages.
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
        """Fill the placeholders of received parameters, before the step begins."""
        for skip in self.incoming:
            if skip.is_parameter:
                # `placeholders` lacks parameters that this stage holds: the step reads its own copy of these.
                for placeholder in placeholders.get(skip.name, ()):
                    value = self._pass(skip, placeholder)
                    if value is not placeholder:
                        placeholder.receive(value)

    def keep_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep the parameters of this stage that the next stage gets."""
        for skip in self.outgoing:
            # A received parameter is passed on as it came, even if another stage of this rank holds it.
            if skip.is_parameter and skip.name in parameters and skip not in self.kept:
                self._pass(skip, parameters[skip.name])

    def _pass(self, skip: Skip, value: Any) -> Any:
        if skip in self.incoming and missing(value):
            come = self.supply(skip, value)
            if come is not None:
                # Code that has collected the placeholder, such as a hook, also sees the data.
                value.receive(come)
                value = come
        if skip in self.outgoing and isinstance(value, Tensor) and not missing(value):
            # A copy: the step may change its own tensor in place, and the next stage will repeat that change itself.
            self.kept[skip] = value.clone()
        return value


NO_SKIPS = StageSkips((), (), lambda skip, placeholder: None)
