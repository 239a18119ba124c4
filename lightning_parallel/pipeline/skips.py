"""Skip connections over a split point: values that later stages need besides the arguments of their first layer.

    h = embed(x)            stage 0 runs `embed`, and sends its output along with the arguments of layer 2
    layers 0, 1
    layers 2, 3             stage 1: its stub of `embed` returns the received tensor, and the stage sends it on
    head(x + h)             stage 2: so does its stub, and the step continues as in one process

They are found in the record of the step. They travel from neighbour to neighbour with the activations. A separate
connection between distant stages would add an order of messages to keep. Gradients would come back out of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_parallel.compat.torch import pytree
from lightning_parallel.step_trace.interception import Call, CallSite
from lightning_parallel.step_trace.placeholder import PlaceholderTensor, missing
from lightning_parallel.step_trace.record import ModuleCall, Operation, StepTrace

__all__ = ["NO_SKIPS", "Places", "Skip", "StageSkips", "Skips", "find_skips"]


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

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, which the step reads directly."""
        return self.call < 0

    def __str__(self) -> str:
        return f"`{self.name}`" if self.is_parameter else f"the output of `{self.name}`"


Skips = tuple[tuple[Skip, ...], ...]
"""For each stage, the tensors that come with the arguments of its first layer."""


@dataclass(frozen=True)
class Places:
    """The layers, parameters and modules of each stage.

    Attributes:
        stage_of: The stage of each layer.
        parameter_stages: The stages of each parameter, by name.
        module_stages: The stages of each module outside the layers, by name.
    """

    stage_of: tuple[int, ...]
    parameter_stages: Mapping[str, tuple[int, ...]]
    module_stages: Mapping[str, tuple[int, ...]]


def find_skips(trace: StepTrace, site_of: Mapping[nn.Module, CallSite], places: Places) -> Skips:
    """Return the connections over the split points of `places`, by arithmetic on the recorded step.

    A stage has the values that it receives for its first layer, the values that its modules return, and values computed
    from these. A value that it lacks is sent along from the stage that makes it. If that is not possible, the dry run
    of the stage says why.

    Args:
        trace: The record of the step.
        site_of: The layers, and the modules outside the layers.
        places: How the model is split.
    """
    return _Connections(trace, site_of, places).found()


@dataclass(frozen=True)
class _SiteCall:
    """A recorded call of a layer, or of a module outside the layers.

    Attributes:
        call: The call.
        name: The name of the module.
        index: The position of the layer; None for a module outside the layers.
        number: The number of this call among the calls of the module.
    """

    call: ModuleCall
    name: str
    index: int | None
    number: int


_OF_INSIDE = frozenset([Skip("", 0, -1)])
"""The source of a value that a module computes and does not return; nobody can send it."""


class _Stage:
    """The way of one stage through the recorded step.

    Args:
        stage: The stage.
        sent: The values that it receives besides the arguments of its first layer.
        places: How the model is split.

    Attributes:
        ran: The outputs of its modules.
        entry: The arguments of its first layer that it receives.
        lacking: The sources of the first value that it needs and lacks; empty if it lacks none.
    """

    def __init__(self, stage: int, sent: set[Skip], places: Places) -> None:
        self.stage = stage
        self.sent = sent
        self.places = places
        self.ran: set[Skip] = set()
        self.entry: list[PlaceholderTensor] = []
        self.lacking: frozenset[Skip] = frozenset()
        # The first stage receives nothing, so it has its parameters from the start.
        self._entered = stage == 0
        # For each value, by `id`, the sources that it is computed from and that this stage lacks.
        self._lacks: dict[int, frozenset[Skip]] = {}

    def lacks(self, value: Any) -> frozenset[Skip]:
        """Return the missing sources of a value; none for a value that the stage has."""
        if type(value) is not PlaceholderTensor:
            return frozenset()
        if value.parameter is None:
            return self._lacks.get(id(value), _OF_INSIDE)
        source = Skip(value.parameter)
        is_held = self._entered and self.stage in self.places.parameter_stages[source.name]
        return frozenset() if is_held or source in self.sent else frozenset([source])

    def operate(self, operation: Operation) -> None:
        """Follow an operation of the step's own code."""
        if operation.function is None:
            self._need(operation.inputs)
            return
        missing = frozenset[Skip]().union(*map(self.lacks, operation.inputs))
        results = [leaf for leaf in pytree.tree_leaves(operation.output) if isinstance(leaf, Tensor)]
        self._lacks.update({id(leaf): missing for leaf in results})

    def call(self, site: _SiteCall) -> bool:
        """Follow the call of an intercepted module; return whether the stage ends there."""
        arguments = pytree.tree_leaves((site.call.args, site.call.kwargs))
        where = None if site.index is None else self.places.stage_of[site.index]
        if where is not None and where >= self.stage and not self._entered:
            self.entry = [leaf for leaf in arguments if self.lacks(leaf)]
            self._entered = True
            self._lacks.update({id(leaf): frozenset() for leaf in self.entry})
        if where is not None and where > self.stage:
            return True
        runs = self._entered if where is None else where == self.stage
        if runs:
            self._need(arguments)
        given = {id(leaf) for leaf in arguments}
        for position, leaf in enumerate(pytree.tree_leaves(site.call.output)):
            skip = Skip(site.name, site.number, position)
            if runs and isinstance(leaf, Tensor):
                self.ran.add(skip)
            if id(leaf) not in given:
                self._lacks[id(leaf)] = frozenset() if runs or skip in self.sent else frozenset([skip])
        return False

    def end(self, output: Any) -> None:
        """End the step, whose result the last stage needs."""
        self._need(pytree.tree_leaves(output))

    def _need(self, values: Iterable[Any]) -> None:
        self.lacking = self.lacking or next(filter(None, map(self.lacks, values)), frozenset())


class _Connections:
    """The search of `find_skips`."""

    def __init__(self, trace: StepTrace, site_of: Mapping[nn.Module, CallSite], places: Places) -> None:
        self.trace = trace
        self.places = places
        self.skips: list[set[Skip]] = [set() for _ in range(places.stage_of[-1] + 1)]
        # The first stage that holds a parameter sends it on.
        self._made = {Skip(name): min(stages) for name, stages in places.parameter_stages.items() if stages}
        self._events = list(_events(trace, site_of))

    def found(self) -> Skips:
        """Follow one stage after the other; return to the stage that makes a value whenever it has to be sent."""
        stages: list[_Stage] = []
        while len(stages) < len(self.skips):
            stage = self._follow(len(stages))
            at, lacking = stage.stage, stage.lacking
            if not lacking and stages:
                # The stage before must have each value that this stage receives. One value at a time: with it, the
                # stages may lack no other value.
                at, lacking = at - 1, next(filter(None, map(stages[-1].lacks, stage.entry)), frozenset())
            for skip in () if stage.lacking else stage.ran:
                self._made.setdefault(skip, stage.stage)
            stages.append(stage)
            if lacking:
                first = self._send_along(at, lacking)
                if first is None:
                    break
                del stages[first:]
        return tuple(tuple(sorted(skips)) for skips in self.skips)

    def _follow(self, number: int) -> _Stage:
        stage = _Stage(number, self.skips[number], self.places)
        for event in self._events:
            if isinstance(event, Operation):
                stage.operate(event)
            elif stage.call(event):
                return stage
            if stage.lacking:
                return stage
        stage.end(self.trace.output)
        return stage

    def _send_along(self, stage: int, lacking: frozenset[Skip]) -> int | None:
        """Send values that `stage` lacks through all stages from their origin; return the first of these stages."""
        # Messages go forward only: a value of this stage or of a later one cannot be sent along.
        if any(self._made.get(skip, stage) >= stage for skip in lacking):
            return None
        added = [
            (later, skip)
            for skip in lacking
            for later in range(self._made[skip] + 1, stage + 1)
            if skip not in self.skips[later]
        ]
        for later, skip in added:
            self.skips[later].add(skip)
        return min((later for later, _ in added), default=None)


def _events(trace: StepTrace, site_of: Mapping[nn.Module, CallSite]) -> Iterator[Operation | _SiteCall]:
    """Yield the calls of `site_of` and the operations between them, in order; what these calls do is left out."""
    numbers: Counter[str] = Counter()
    modules, last = {*site_of}, -1
    operations = [each for each in trace.operations if not trace.is_inside(each.call, modules)]
    for call in trace.calls:
        while operations and operations[0].after <= call.number:
            yield operations.pop(0)
        site = site_of.get(call.module)
        if site is None:
            continue
        numbers[site.name] += 1
        if site.places:
            last = site.place_after(last)
        if not trace.is_inside(call.parent, modules):
            yield _SiteCall(call, site.name, last if site.places else None, numbers[site.name] - 1)
    yield from operations


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

    @property
    def has_any(self) -> bool:
        """Whether a tensor comes in or goes out."""
        return bool(self._places)

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

    def keep_parameters(self, parameters: Mapping[str, Tensor], full: Callable[[str, Tensor], Tensor]) -> None:
        """Keep the parameters of this stage that the next stage gets, each as `full` returns it."""
        # Sorted, since `full` may gather, and the order of a set differs between processes.
        for skip in sorted(self.outgoing):
            # A received parameter is passed on as it came, even if another stage of this rank holds it.
            if skip.is_parameter and skip.name in parameters and skip not in self.kept:
                self._pass(skip, full(skip.name, parameters[skip.name]))

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
