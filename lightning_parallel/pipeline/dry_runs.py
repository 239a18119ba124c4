"""Runs of stages without data: they check a split before anything is communicated, and find the arguments of stages.

`dry_run_stages` runs each stage alone, with the values that the record of the step says it receives (`find_skips`). A
stage that lacks a value is refused, with the value. `NextStageDryRun` is the dry run of one stage in training: it finds
the arguments for a microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.microbatch import MissingLossError
from lightning_parallel.pipeline.pipeline_plan import TensorLayout
from lightning_parallel.pipeline.skips import Places, Skip, Skips, StageSkips
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

__all__ = ["Boundaries", "NextStageDryRun", "StageInputs", "dry_run_stages"]

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


def dry_run_stages(
    sites: InterceptedModel,
    places: Places,
    skips: Skips,
    step: Callable[[Any], Any],
    microbatch: Any,
    device: torch.device,
) -> Boundaries:
    """Run each stage alone on placeholders, and return the layouts of the values that are sent to it.

    Args:
        sites: The model.
        places: How it is split.
        skips: The values that each stage receives besides the arguments of its first layer.
        step: The user's step.
        microbatch: A part of a batch.
        device: Where the stages will compute.

    Raises:
        ValueError: If a stage cannot reach its layers, or needs a value that cannot be sent; with the reason.
    """
    runs: list[_StageDryRun] = []
    stubs = StubOutputs(device, repeats=True)
    with dry_run(), named_placeholders(sites.module, device) as registered, _held_again(sites):
        placeholders = [*registered, *_freed_parameters(sites.module)]
        for stage in range(len(skips)):
            run = _StageDryRun(stage, places, stubs, placeholders, {*skips[stage]})
            _dry_run(sites, places, run, step, microbatch)
            # The stage before must have each value that this stage receives; a run of one stage cannot see that.
            for position in run.entry if runs else ():
                if position in runs[-1].not_held:
                    what = runs[-1].not_held[position].provenance
                    raise ValueError(
                        f"Stage {stage} needs {what}, which is on an earlier stage and does not pass through stage"
                        f" {stage - 1}: this connection skips the split point. Pass it through the layers as an"
                        " argument, or choose other split points (`balance`, fewer stages)"
                    )
            runs.append(run)
    return tuple(run.received for run in runs[1:])


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


def _dry_run(
    sites: InterceptedModel, places: Places, run: _StageDryRun, step: Callable[[Any], Any], microbatch: Any
) -> None:
    """Run one stage.

    Raises:
        ValueError: If it cannot run on its own.
    """
    # Modules of other stages become stubs, as in training.
    for site in sites.outer:
        site.present = run.stage in places.module_stages[site.name]
    sent = {skip.name for skip in run.sent if skip.is_parameter}
    for placeholder in run.placeholders:
        placeholder.available = placeholder.parameter in sent
    try:
        run.run(step, microbatch, sites)
    finally:
        # All stages run on the same placeholders, and the next stage holds different ones.
        for placeholder in run.placeholders:
            placeholder.available = False
    if run.failure is not None:
        raise ValueError(run.failure.reason) from run.failure.cause


@dataclass(frozen=True)
class _Failure:
    """Why a stage cannot run.

    Attributes:
        reason: The message for the user.
        cause: The exception, if there was one.
    """

    reason: str
    cause: Exception | None = None


class _StageDryRun(StageForward):
    """A stage's forward on placeholders; from its entry on, placeholders for data that it would have are available.

    Args:
        stage: The stage.
        places: How the model is split.
        stubs: Outputs of modules of other stages.
        placeholders: For all parameters.
        sent: Values that it is sent besides the arguments of its first layer.

    Attributes:
        entry: Positions of its first layer's arguments that it has to receive.
        received: The layouts of the tensors that it receives.
        held: Placeholders of its parameters.
        not_held: Placeholders for missing arguments of the next stage's first layer, by position.
        failure: Why it cannot run.
    """

    # Each call is noted.
    quick = None  # type: ignore[assignment]

    def __init__(
        self, stage: int, places: Places, stubs: StubOutputs, placeholders: list[PlaceholderTensor], sent: set[Skip]
    ) -> None:
        super().__init__(stage, places.stage_of, stubs, self._pretend_to_receive)
        self.placeholders = placeholders
        self.held = [each for each in placeholders if stage in places.parameter_stages[str(each.parameter)]]
        self.sent = sent
        self.entry: list[int] = []
        self.not_held: dict[int, PlaceholderTensor] = {}
        self.failure: _Failure | None = None
        self._arguments: tuple[TensorLayout, ...] = ()
        self._skipped: dict[Skip, TensorLayout] = {}
        self._calls: Counter[str] = Counter()
        # Outputs that require a gradient, by `id`, each with the placeholder that the stub returned.
        self._originals: dict[int, tuple[PlaceholderTensor, PlaceholderTensor]] = {}

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
                self.failure = _Failure(reason, error)
        else:
            if not self.entered or self.stage < self.stage_of[-1]:
                self.failure = _Failure("The step ends without running all layers of the pipeline")
                return
            unknown = next(filter(missing, pytree.tree_leaves(result)), None)
            if unknown is not None:
                reason = (
                    f"The step returns a value made of {unknown.provenance}, which is on an earlier pipeline stage;"
                    " compute the loss from the outputs of the layers"
                )
                self.failure = _Failure(reason)

    def _pretend_to_receive(self, index: int, leaves: list[Any], positions: list[int]) -> list[Tensor]:
        wanted = [leaves[position] for position in positions]
        # Inside a reentrant checkpoint there is no graph, so no gradient would reach the received tensors.
        if not torch.is_grad_enabled() and any(placeholder.requires_grad for placeholder in wanted):
            raise CutError(REENTRANT)
        self.entry = positions
        self._arguments = tuple(_layout_of(placeholder) for placeholder in wanted)
        self._mark_held()
        for placeholder in wanted:
            # In a real run a hook that has collected the output of a stub has the object that receives the data.
            _, original = self._originals.get(id(placeholder), (placeholder, placeholder))
            original.available = True
        return [PlaceholderTensor(value.meta, value.device, value.provenance, available=True) for value in wanted]

    def _mark_held(self) -> None:
        for placeholder in self.held:
            placeholder.available = True

    def _infer(self, call: Call) -> Any:
        number = self._next_number(call)
        # Values that it computes inside, and a hook collects, cannot be sent: only its outputs can.
        with inside_module(call.site.name):
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
                if torch.is_grad_enabled():
                    leaves[position] = _differentiable(leaf)
                    self._originals[id(leaves[position])] = leaves[position], leaf
        return pytree.tree_unflatten(leaves, tree)

    def _run(self, call: Call) -> Any:
        self._next_number(call)
        # In a real run the stage's own modules have outputs, so values made of these are not missing.
        return self.stubs.run_stub(call, available=True)

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
