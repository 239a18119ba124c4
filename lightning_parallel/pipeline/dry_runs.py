"""Runs of stages without data, to find missing values: the arguments of a stage's first layer, and skip connections.

`dry_run_stages` tries all stages before anything is communicated. If a stage needs a value of an earlier stage, the
value is added to the messages, until every stage gets through. A stage that still fails is refused, with the missing
value. `NextStageDryRun` is the dry run of one stage in training: it finds the arguments for a microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.microbatch import MissingLossError
from lightning_parallel.pipeline.pipeline_plan import TensorLayout
from lightning_parallel.pipeline.skips import Skip, Skips, StageSkips
from lightning_parallel.pipeline.stage import (
    REENTRANT,
    CutError,
    InterceptedModel,
    StageEnd,
    StageExit,
    StageForward,
    are_tensors,
    positions_to_receive,
)
from lightning_parallel.step_trace.interception import Call
from lightning_parallel.step_trace.placeholder import PlaceholderTensor, dry_run, inside_module, missing
from lightning_parallel.step_trace.stubs import StubOutputs, named_placeholders

__all__ = ["Boundaries", "NextStageDryRun", "Places", "StageInputs", "dry_run_stages"]

Boundaries = tuple[tuple[TensorLayout, ...], ...]
"""The layouts of the tensors that pass from each stage to the next."""


@dataclass(frozen=True)
class StageInputs:
    """The tensors that a stage must receive when it is entered.

    Attributes:
        index: The layer at which it is entered.
        tree: Structure of the layer's arguments.
        kinds: For each leaf of the arguments, whether it is a tensor.
        positions: The leaves to be received.
    """

    index: int
    tree: pytree.TreeSpec
    kinds: tuple[bool, ...]
    positions: tuple[int, ...]

    @classmethod
    def at(cls, end: StageEnd) -> StageInputs:
        """Make it from the end of a dry run of the stage."""
        return cls(end.index, end.tree, are_tensors(end.leaves), tuple(positions_to_receive(end.leaves)))

    def fits(self, index: int, leaves: list[Any], tree: pytree.TreeSpec) -> bool:
        """Return whether this was found for a call with arguments of this structure."""
        return self.index == index and self.kinds == are_tensors(leaves) and self.tree == tree


class NextStageDryRun(StageForward):
    """The next stage's forward up to its entry, run here without data to find the tensors that stage must receive."""

    def __init__(
        self,
        stage: int,
        stage_of: tuple[int, ...],
        stubs: StubOutputs,
        after_outer_call: Callable[[int], None],
        skips: StageSkips,
    ) -> None:
        super().__init__(stage, stage_of, stubs, self._receive_nothing, after_outer_call=after_outer_call, skips=skips)

    def _enter(self, index: int, call: Call) -> tuple[Any, Any]:
        leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
        raise StageExit(StageEnd(index, leaves, tree))

    def _receive_nothing(self, index: int, leaves: list[Any], positions: list[int]) -> list[Tensor]:
        raise AssertionError("A dry run receives nothing")


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


def dry_run_stages(
    sites: InterceptedModel, places: Places, step: Callable[[Any], Any], microbatch: Any, device: torch.device
) -> tuple[Boundaries, Skips]:
    """Run each stage alone on placeholders, and find the values to send to it.

    Args:
        sites: The model.
        places: How it is split.
        step: The user's step.
        microbatch: A part of a batch.
        device: Where the stages will compute.

    Raises:
        ValueError: If a stage cannot reach its layers, or needs a value that cannot be sent; with the reason.
    """
    freed = _freed_parameters(sites.module)
    with dry_run(), named_placeholders(sites.module, device) as registered, _held_again(sites):
        trial = _Trial(sites, places, step, microbatch, StubOutputs(device, repeats=True), [*registered, *freed])
        trial.run()
    # These placeholders stay in the model, so they must not keep the sources of this trial.
    for placeholder in freed:
        placeholder.sources = frozenset()
    return tuple(run.received for run in trial.runs[1:]), tuple(tuple(sorted(skips)) for skips in trial.skips)


def _freed_parameters(module: nn.Module) -> list[PlaceholderTensor]:
    """Return the placeholders for parameters of other stages, in a model that is split already."""
    values = [value for child in module.modules() for value in vars(child).values()]
    return [value for value in values if type(value) is PlaceholderTensor and value.parameter is not None]


@contextmanager
def _held_again(sites: InterceptedModel) -> Iterator[None]:
    """Restore the sites' records of the modules on this rank after the block."""
    before = [site.present for site in sites.outer]
    try:
        yield
    finally:
        for site, present in zip(sites.outer, before):
            site.present = present


class _Trial:
    """The dry runs of all stages; see `dry_run_stages`.

    Attributes:
        runs: The last run of each stage.
        skips: The values that each stage is sent besides the arguments of its first layer.
    """

    def __init__(
        self,
        sites: InterceptedModel,
        places: Places,
        step: Callable[[Any], Any],
        microbatch: Any,
        stubs: StubOutputs,
        placeholders: list[PlaceholderTensor],
    ) -> None:
        self.sites = sites
        self.places = places
        self.step = step
        self.microbatch = microbatch
        self.stubs = stubs
        self.placeholders = placeholders
        self.runs: list[_StageDryRun] = []
        self.skips: list[set[Skip]] = [set() for _ in range(places.stage_of[-1] + 1)]
        self._made: dict[Skip, int] = {}
        for placeholder in placeholders:
            skip = Skip(str(placeholder.parameter))
            placeholder.sources = frozenset([skip])
            # The first stage that holds a parameter sends it on.
            self._made[skip] = min(places.parameter_stages[skip.name])

    def run(self) -> None:
        """Run the stages one after the other; go back to the stage that makes a value whenever it has to be sent."""
        while len(self.runs) < len(self.skips):
            stage = len(self.runs)
            run = self._run(stage)
            if run.failure is not None:
                self._send_along(stage, run.failure)
                continue
            for skip in run.made:
                self._made.setdefault(skip, stage)
            # The stage before must have each value that this stage receives; a run of one stage cannot see that.
            not_held = self.runs[-1].not_held if stage else {}
            self.runs.append(run)
            for placeholder in [not_held[position] for position in run.entry if position in not_held]:
                reason = (
                    f"Stage {stage} needs {placeholder.provenance}, which is on an earlier stage and does not pass"
                    f" through stage {stage - 1}: this connection skips the split point. Pass it through the layers"
                    " as an argument, or choose other split points (`balance`, fewer stages)"
                )
                self._send_along(stage - 1, _Failure(reason, placeholder.sources))
                # One value at a time: the stages run again with it, and may then lack no other value.
                break

    def _run(self, stage: int) -> _StageDryRun:
        places = self.places
        # Modules of other stages become stubs, as in training.
        for site in self.sites.outer:
            site.present = stage in places.module_stages[site.name]
        here = {name for name, stages in places.parameter_stages.items() if stage in stages}
        sent = {skip.name for skip in self.skips[stage] if skip.is_parameter}
        for placeholder in self.placeholders:
            placeholder.available = placeholder.parameter in sent
        held = [placeholder for placeholder in self.placeholders if placeholder.parameter in here]
        run = _StageDryRun(stage, places.stage_of, self.stubs, held, self.skips[stage])
        try:
            run.run(self.step, self.microbatch, self.sites)
        finally:
            # All stages run on the same placeholders, and the next stage holds different ones.
            for placeholder in self.placeholders:
                placeholder.available = False
        return run

    def _send_along(self, stage: int, failure: _Failure) -> None:
        """Send values that `stage` lacks through all stages from their origin, and go back to the first of these.

        Raises:
            ValueError: If that does not help.
        """
        before = sum(map(len, self.skips))
        # Messages go forward only: a value of this stage or of a later one cannot be sent along.
        if all(self._made.get(skip, stage) < stage for skip in failure.sources):
            for skip in failure.sources:
                for later in range(self._made[skip] + 1, stage + 1):
                    self.skips[later].add(skip)
                    # These stages receive more than in their last run, so they run again.
                    del self.runs[later:]
        # With nothing new to send, the next run would fail in the same way, without end.
        if sum(map(len, self.skips)) == before:
            raise ValueError(failure.reason) from failure.cause


@dataclass(frozen=True)
class _Failure:
    """Why a stage cannot run.

    Attributes:
        reason: The message for the user.
        sources: The missing values.
        cause: The exception, if there was one.
    """

    reason: str
    sources: frozenset[Skip]
    cause: Exception | None = None


class _StageDryRun(StageForward):
    """A stage's forward on placeholders; from its entry on, placeholders for data that it would have are available.

    Args:
        held: Placeholders of its parameters.
        sent: Values that it is sent besides the arguments of its first layer.

    Attributes:
        entry: Positions of its first layer's arguments that it has to receive.
        received: The layouts of the tensors that it receives.
        made: Values that it could send.
        not_held: Placeholders for missing arguments of the next stage's first layer, by position.
        failure: Why it cannot run.
    """

    def __init__(
        self,
        stage: int,
        stage_of: tuple[int, ...],
        stubs: StubOutputs,
        held: list[PlaceholderTensor],
        sent: set[Skip],
    ) -> None:
        super().__init__(stage, stage_of, stubs, self._pretend_to_receive)
        self.held = held
        self.sent = sent
        self.entry: list[int] = []
        self.made: set[Skip] = set()
        self.not_held: dict[int, PlaceholderTensor] = {}
        self.failure: _Failure | None = None
        self._arguments: tuple[TensorLayout, ...] = ()
        self._skipped: dict[Skip, TensorLayout] = {}
        self._calls: Counter[str] = Counter()

    @property
    def received(self) -> tuple[TensorLayout, ...]:
        return (*self._arguments, *(self._skipped[skip] for skip in sorted(self._skipped)))

    def run(self, step: Callable[[Any], Any], microbatch: Any, sites: InterceptedModel) -> None:
        """Run the stage.

        Raises:
            MissingLossError: If the step returns no loss.
        """
        # The first stage receives nothing, so it has its parameters from the start.
        if self.entered:
            self._mark_held()
        try:
            with sites.handled_by(self):
                result = step(microbatch)
        except StageExit as exit_:
            self.not_held = {position: leaf for position, leaf in enumerate(exit_.end.leaves) if missing(leaf)}
        # Not a matter of the split: in one process this step would fail as well.
        except MissingLossError:
            raise
        except Exception as error:
            # Once it has data, the step may branch on them, which a dry run cannot follow.
            if not self.entered or isinstance(error, CutError) or getattr(error, "is_missing", False):
                reason = f"Stage {self.stage} of the pipeline cannot run on its own: {error}"
                self.failure = _Failure(reason, getattr(error, "sources", frozenset()), error)
        else:
            if not self.entered or self.stage < self.stage_of[-1]:
                self.failure = _Failure("The step ends without running all layers of the pipeline", frozenset())
                return
            unknown = next(filter(missing, pytree.tree_leaves(result)), None)
            if unknown is not None:
                reason = (
                    f"The step returns a value made of {unknown.provenance}, which is on an earlier pipeline stage;"
                    " compute the loss from the outputs of the layers"
                )
                self.failure = _Failure(reason, unknown.sources)

    def _pretend_to_receive(self, index: int, leaves: list[Any], positions: list[int]) -> list[Tensor]:
        wanted = [leaves[position] for position in positions]
        # Inside a reentrant checkpoint there is no graph, so no gradient would reach the received tensors.
        if not torch.is_grad_enabled() and any(placeholder.requires_grad for placeholder in wanted):
            raise CutError(REENTRANT)
        self.entry = positions
        self._arguments = tuple(_layout_of(placeholder) for placeholder in wanted)
        self._mark_held()
        return [PlaceholderTensor(value.meta, value.device, value.provenance, available=True) for value in wanted]

    def _mark_held(self) -> None:
        for placeholder in self.held:
            placeholder.available = True

    def _infer(self, call: Call) -> Any:
        number = self._next_number(call)
        # Values that it computes inside, and a hook collects, are unknown here: only its outputs can be sent.
        with inside_module(Skip.inside(call.site.name, number)):
            output = super()._infer(call)
        leaves, tree = pytree.tree_flatten(output)
        given = {id(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs))}
        for position, leaf in enumerate(leaves):
            if type(leaf) is PlaceholderTensor:
                skip = Skip(call.site.name, number, position)
                if skip in self.sent:
                    self._skipped[skip] = _layout_of(leaf)
                    if id(leaf) in given:
                        # A new object, so that only this output becomes available, and not the argument.
                        leaf = PlaceholderTensor(leaf.meta, leaf.device, leaf.provenance)
                    leaf.available = True
                # An argument that is handed on keeps its own source.
                elif id(leaf) not in given:
                    leaf.sources = frozenset([skip])
                leaves[position] = _differentiable(leaf) if torch.is_grad_enabled() else leaf
        return pytree.tree_unflatten(leaves, tree)

    def _run(self, call: Call) -> Any:
        number = self._next_number(call)
        # In a real run the stage's own modules have outputs, so values made of these are not missing.
        output = self.stubs.run_stub(call, available=True)
        leaves = enumerate(pytree.tree_leaves(output))
        self.made |= {Skip(call.site.name, number, position) for position, leaf in leaves if isinstance(leaf, Tensor)}
        return output

    def _next_number(self, call: Call) -> int:
        self._calls[call.site.name] += 1
        return self._calls[call.site.name] - 1


def _layout_of(placeholder: PlaceholderTensor) -> TensorLayout:
    shape, dtype = placeholder.signature
    return TensorLayout(tuple(shape), str(dtype).removeprefix("torch."))


def _differentiable(placeholder: PlaceholderTensor) -> Tensor:
    """Return a placeholder that requires a gradient and is no leaf, like the output of a layer with parameters."""
    # In a real run these outputs have a graph on their own stage, so received tensors may require a gradient.
    return placeholder.requires_grad_() * 1 if placeholder.signature[1].is_floating_point else placeholder
