"""The self-check: compares the user's own step on one process with the parallel step, before the first batch of a run.

    one process   the first rank runs the step on two samples, with the original module
    parallel      all ranks run it on the same samples as the run will: in shards and stages, in two microbatches
    compared      loss, gradients by name, logged values, outputs, attributes and buffers that changed

Dropout is off, because ranks draw other masks in sharded layers than one process does. With dropout, the ranks of
sharded layers are compared with each other. The single-process run records the random numbers that the step itself
draws. Each microbatch replays the numbers of its samples.

The self-check examines a difference before it reports the difference. It leaves out values that differ between two
single-process runs, such as times. Then it finds the cause: microbatches, code that uses shards, or the first module
that differs.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, RollCall
from lightning_parallel.compat import ParallelState, is_power_of_two
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import BatchNormalization
from lightning_parallel.pipeline.microbatch import (
    LOGGED,
    RETURNED,
    chosen_samples,
    few_samples,
    in_words,
    num_samples,
    other_kinds,
    split_batch,
    split_by,
)
from lightning_parallel.step_trace.record import StepTrace, sequence_length, shortened
from lightning_parallel.strategies.checks import check_same_batch
from lightning_parallel.strategies.hooks.watch import raised_in_shards
from lightning_parallel.strategies.self_check.observed import (
    ObservedStep,
    StepDifference,
    comparable_attributes,
    compare,
    compare_counters,
    compare_gradients,
    first_difference,
    largest_of,
    relative_difference,
    tolerance_of,
)
from lightning_parallel.strategies.self_check.runs import DividedRun, StepCall, StepRuns, Way, WholeRun
from lightning_parallel.strategies.steps.pipeline import ProveValues
from lightning_parallel.strategies.steps.weights import FEW_COPIES, copies_of_two
from lightning_parallel.strategies.whole.pinned import SEED, ReferenceRunError
from lightning_parallel.strategies.whole.reference import Blame
from lightning_parallel.tensor.verify import SMALL

__all__ = ["FirstBatches", "SelfCheckError", "StepProof", "Verify"]

Verify = Literal["auto", "always", "off"]
"""Whether to compare the first steps with one process."""

_Result = TypeVar("_Result")

_ALIKE_S = 15.0
"""How long a rank that fails in the sharded run waits for the same failure on the other ranks."""

_SHOWN = 6

_MICROBATCHES = (
    "Without microbatches the results match, so splitting the batch causes the difference. If the loss is not a mean"
    " over samples, a pipeline minimizes another loss: count tokens with `microbatch_weight` for a mean over tokens;"
    " divide a sum by the number of samples. Logged, returned or kept values must have the samples in their first"
    " dimension. If the samples of a batch depend on each other, set `num_microbatches=1`."
)
_KEPT_BY_HAND = (
    "A pipeline runs the step once per microbatch, so `self.{0}` differs from a single-process run. Append values of"
    " the current batch alone to a list, update `self.{0}` in `on_train_batch_end`, or set `num_microbatches=1`."
)
_OUR_FAILURE = (
    "The self-check of `{}` must run the step on the full model; that run failed, although the step runs {} ({})."
    " This is a limit of the self-check. To train without it, set `verify='off'`. Then nothing compares the run with"
    " a single-process run. [LP027]"
)
_NORM = (
    "With microbatches the results differ: batch normalization computes the statistics of each microbatch"
    " separately, which also changes the gradients."
)
_FIXED_NORM = "With its running statistics, microbatches match a single-process run."
_WHOLE_BATCHES = (
    "`{}` runs on full batches, because its results with microbatches differ from a single-process run ({}). The"
    " results now match, but stages wait for each other. To run it in microbatches, return and keep values with one"
    " row per sample, in the order of the samples."
)
_DRAWS = (
    "The run with microbatches was not compared: the number or source of the step's random draws{} depends on the"
    " number of samples. If all samples must be drawn together, set `num_microbatches=1`."
)
_PLACES = ("first", "last")
"""The kinds that take the value of one microbatch."""
_MOST_KINDS = 16
"""Runs in which the self-check looks for the way to merge microbatches."""
_ANOTHER_WAY = "of a step whose loss used other operations than the earlier steps"
_FROM_BEFORE = "of the first batch again, with the attributes that it set"
_OF_VALUES = "of a batch whose microbatches differ in {}"
_OF_COPIES = "with copies of two samples of the first batch"
_LONG, _FEW_POSITIONS, _LEAST_POSITIONS = 512, 128, 256
"""Of sequences with more positions per rank of the context axis, the self-check takes fewer, and this many at least."""
_MIXED = 8
"""Samples on which the self-check tests whether a step that draws numbers mixes samples."""
_USERS_FAILURE = (
    "Self-check of `{}` skipped: {}. The run continues without it{}. For a self-check, leave this out of the first"
    " step, or compare with a single-process run yourself. [LP027]"
)
_PARTLY = (
    "Self-check of `{}` incomplete: {} differ between two single-process runs, so they cannot be compared. Does the"
    " step read a clock, a file, or state outside the module?"
)
_UNSTEADY = (
    "Two single-process runs of the step differ as well. The step reads state outside the module, such as an"
    " iterator or a counter. The self-check cannot restore this state and has advanced it on the first rank. Keep"
    " that state in the module or in the batch, or set `verify='off'`."
)
_ORDER = ("loss", "logged value", "output", "attribute", "gradient", "parameter", "buffer")


class SelfCheckError(RuntimeError):
    """Reports a parallel step whose result differs from the result of the same step on one process.

    The strategy raises the error before the first batch of training. `verify="off"` turns the self-check off.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import SelfCheckError, TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        try:
            trainer.fit(MyModule(), MyData())
        except SelfCheckError as error:
            print(error)  # names the first module that differs
            raise
        ```
    """


class FirstBatches:
    """Checks the first batches of a run: equal batches on all ranks of a replica, and one self-check of each step.

    Args:
        groups: The mesh's groups.
        verify: The strategy's argument.
        make_runs: Makes the two runs of a step.
    """

    def __init__(self, groups: MeshGroups, verify: Verify, make_runs: Callable[[], StepRuns]) -> None:
        self._groups = groups
        self._verify = verify
        self._make_runs = make_runs
        self._epoch = -1
        self._loaders: set[tuple[str, int]] = set()
        self._seen: set[str] = set()
        self._compared: set[str] = set()
        self._steps = 0
        self._again: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def see_training(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        epoch: int,
        unproven: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> bool:
        """Check a batch of training; once an epoch, check that all ranks of the replica have the same batch.

        Args:
            args, kwargs: The arguments of the step.
            epoch: The current epoch.
            unproven: The arguments of an earlier step of this replica whose kind of loss was not compared yet.

        Returns:
            Whether the earlier step was compared.
        """
        # Also over the ranks of one sequence: each computes other positions, and may find another kind of loss.
        alike = self._groups.gradients
        # They exchange this in a few steps only, since it costs a message.
        is_due = alike.size == 1 or self._epoch != epoch or self._steps == 0 or is_power_of_two(self._steps)
        self._steps += 1
        if self._epoch != epoch:
            check_same_batch((args, kwargs), self._groups.replica)
            self._epoch = epoch
        again, self._again = self._again, None
        if again is not None:
            self._seen.discard("training_step")
        self._prove("training_step", *(again or (args, kwargs)), why="" if again is None else _FROM_BEFORE)
        if not is_due or self._verify == "off":
            return False
        is_wanted = unproven is not None
        if any(comm.all_gather_object(is_wanted, alike)) if alike.size > 1 else is_wanted:
            self._seen.discard("training_step")
            self._prove("training_step", *(unproven or (args, kwargs)), why=_ANOTHER_WAY)
        return True

    def begin_evaluation(self) -> None:
        """Check the first batch of each loader again."""
        self._loaders.clear()

    def see_evaluation(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], loader: int) -> None:
        """Check a batch of evaluation; once for each loader, check that all ranks have the same batch."""
        if (name, loader) not in self._loaders:
            check_same_batch((args, kwargs), self._groups.replica)
            self._loaders.add((name, loader))
        self._prove(name, args, kwargs)

    def prover(self, name: str) -> ProveValues | None:
        """Return a function that compares later values of a step; None if its first batch could not be compared."""
        return self._prove_values if name in self._compared else None

    def _prove_values(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]) -> None:
        runs = self._make_runs()
        # The reduction of this step may be under way, and a pause would forget it.
        runs.reducer = None
        found = _listed(sorted(map(in_words, names)))
        # Other replicas do not take part: their microbatches may differ in other values.
        StepProof(runs, self._groups.replica).prove(name, args, kwargs, _OF_VALUES.format(found))

    def _prove(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> None:
        if name not in self._seen and self._verify != "off" and self._groups.replica.size > 1:
            self._seen.add(name)
            runs = self._make_runs()
            # A step that does not run in stages runs on the full model on every rank, as on one process.
            if runs.steps is None or runs.steps.goes_in_stages(name, args, kwargs):
                if StepProof(runs).prove(name, args, kwargs, why):
                    self._compared.add(name)
                if runs.steps is not None and name == "training_step" and not why:
                    # In the first batch attributes are empty, so a running minimum in a list may be right by chance.
                    # A second run of the batch shows the difference: its loss lies between the losses of its parts.
                    rules = ParallelState.of(runs.module).merging.get(name, {})
                    is_left = any(not key.startswith(RETURNED) for key in rules)
                    if any(comm.all_gather_object(is_left, self._groups.world)):
                        self._again = (args, kwargs)


class StepProof:
    """Compares steps of a divided module with the same steps on the full module.

    All ranks of all replicas construct it, and call `prove`, at the same points.

    Args:
        runs: Runs a step both ways.
        everyone: The ranks that compare the step together; by default the ranks of all replicas.
    """

    def __init__(self, runs: StepRuns, everyone: Group | None = None) -> None:
        self.runs = runs
        self.everyone = everyone or runs.groups.world
        self.module = runs.module
        self.replica = runs.groups.replica
        # A rank that fails in the middle of the sharded run tells the other ranks, which may wait for its messages.
        self.calls = RollCall(self.replica, "self-check", comm.shared_key(self.replica))

    def prove(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> bool:
        """Compare the step `name` on the first samples of its first batch; print the compared values.

        Args:
            name: `training_step`, `validation_step`, `test_step` or `predict_step`.
            args, kwargs: The arguments of the step.
            why: The reason for a comparison after the first one.

        Returns:
            Whether the step could be compared.

        Raises:
            SelfCheckError: On every rank, if the step differs from a single-process run.
        """
        begun_s = time.perf_counter()
        batch, *rest = args
        # In a later comparison any sample of the batch may make the difference.
        self.runs.cuts_fully = bool(why)
        samples = batch if why else self._first_samples(name, batch)
        call = StepCall(name, samples, tuple(rest), kwargs)
        positions = self._few_positions(batch)
        state = ParallelState.of(self.module)
        if not why:
            state.merging[name] = {}
            state.proven[name] = {}
        state.whole_batches.discard(name)
        with self.runs.nothing_left():
            verdict = self._compared(call, batch, positions)
            if verdict.failure and positions and verdict.may_go_on:
                # Some steps require one length.
                positions = 0
                verdict = self._compared(call, batch, positions)
            batch = _shorter(batch, positions)
            blames = comm.all_gather_object(verdict.blame, self.everyone)
            if verdict.may_go_on and any(blame in ("unknown", "user") for blame in blames):
                # Judge on all replicas together: their steps may communicate with each other.
                verdict = _judge(self.runs, verdict, batch, self.calls)
            of_copies = self._on_copies(verdict, batch, why, positions)
        if name == "training_step":
            state.doubt = state.copies_in_doubt = None
        if of_copies is not None:
            verdict, why = of_copies, _OF_COPIES
        return self._report(verdict, time.perf_counter() - begun_s, why)

    def _compared(self, call: StepCall, batch: Any, positions: int) -> Verdict:
        """Compare a step on some samples of a batch, and on the batch if the step fails or differs on them."""
        is_all, short = call.batch is batch, _shorter(batch, positions)
        if short is not batch:
            full_length = sequence_length(batch)
            samples = short if is_all else _shorter(call.batch, positions)
            call, batch = replace(call, batch=samples, full_length=full_length), short
        verdict = compare_step(self.runs, call, batch, self.calls)
        # `fits_in_double` is equal on all ranks, so either all of them reach the collective or none.
        differs = not self.runs.fits_in_double and _on_any(verdict.differences, self.replica)
        if (verdict.failure or differs) and not is_all and verdict.may_go_on:
            # Some steps require one batch size, or take another path for a single sample.
            verdict = compare_step(self.runs, replace(call, batch=batch), batch, self.calls)
        return verdict

    def _few_positions(self, batch: Any) -> int:
        """Return how many positions to compare of sequences that may be too long for one rank; 0 to compare all."""
        ranks = self.runs.groups.context_parallel.size
        is_long = ranks > 1 and sequence_length(batch) > _LONG * ranks
        return max(_FEW_POSITIONS * ranks, _LEAST_POSITIONS) if is_long else 0

    def _on_copies(self, first: Verdict, full: Any, why: str, positions: int) -> Verdict | None:
        """Return the verdict on copies of two samples; None if the step does not differ on them.

        A loss over some samples only may be right in the first comparison by chance: see `copies_of_two`.
        """
        call, steps, state = first.call, self.runs.steps, ParallelState.of(self.module)
        is_cut = steps is not None and steps.options.split_batch is split_batch and self.runs.microbatches > 1
        varies = bool({"loss", "gradient"} & {kind for kind, _ in first.ignored})
        is_told = first.failure or first.error or first.differences or varies
        is_due = call.name == "training_step" and is_cut and why in ("", _ANOTHER_WAY)
        if not is_due or _on_any(is_told, self.replica):
            return None
        assert steps is not None
        batches = None if why else state.copies_in_doubt
        if batches is None:  # the sketch could not run
            try:
                half = num_samples(call.batch) // 2
                half = max(half, FEW_COPIES) if self.runs.fits_in_double else half
                batches = copies_of_two(full, half, steps.engine.microbatch_weight) if half > 1 else []
            except ValueError:
                return None
        rules = state.merging.get(call.name, {})
        proven = state.proven.get(call.name, {})
        for batch in batches:
            short = _shorter(batch, positions)
            found = compare_step(self.runs, replace(call, batch=short), short, self.calls)
            wrong = [entry for entry in found.differences if entry.kind in ("loss", "gradient")]
            if _on_any(wrong, self.replica) or not found.may_go_on:
                return found
            # Restore the rules: copies of samples tell little about the merging of other samples.
            state.merging[call.name] = dict(rules)
            state.proven[call.name] = dict(proven)
        return None

    def _first_samples(self, name: str, batch: Any) -> Any:
        """Return two samples; in a pipeline two microbatches, with two samples each if the run has several.

        A large model gets one sample per microbatch. If the step fails or differs on one sample, the self-check
        compares it on the whole batch.
        """
        steps, state = self.runs.steps, ParallelState.of(self.module)
        try:
            if steps is None:
                return few_samples(batch, 2)
            if name == "training_step" and state.doubt is not None and self.runs.microbatches == 2:
                return state.doubt[0]
            parts = steps.engine.schedule.num_microbatches
            if self.runs.microbatches > 2:
                return batch
            if steps.options.split_batch is split_batch:
                most = 2 if self.runs.fits_in_double else 1
                return few_samples(batch, 2 * min(most, max(1, num_samples(batch) // parts)))
            # The user's function splits the batch; the first part becomes two microbatches.
            return split_by(steps.options.split_batch, batch, max(1, parts // 2))[0]
        except ValueError:
            return batch

    def _report(self, verdict: Verdict, seconds: float, why: str) -> bool:
        """Raise or warn on all ranks together; print the compared values; tell whether both could run."""
        # Raise an error of the sharded run unchanged, as the step itself would raise it.
        comm.raise_together(verdict.error, self.everyone)
        mine = (verdict.failure, verdict.blame, verdict.differences, verdict.hint, verdict.varying, verdict.checked)
        # Gather over all replicas: each compares other samples, and all must raise or go on together.
        everyone = comm.all_gather_object(mine, self.everyone)
        found = [difference for _, _, differences, _, _, _ in everyone for difference in differences]
        failure, blame = next(((text, blame) for text, blame, *_ in everyone if text), ("", ""))
        hint = next((text for _, _, _, text, _, _ in everyone if text), "")
        varying = sorted({text for _, _, _, _, texts, _ in everyone for text in texts})
        name = verdict.call.name
        if found:
            raise SelfCheckError(_message(verdict.call, found, hint, why))
        if failure and blame == "check":
            raise SelfCheckError(
                _OUR_FAILURE.format(name, "in shards" if self.runs.engine is None else "in stages", failure)
            )
        if failure:
            rank_zero_warn(_USERS_FAILURE.format(name, failure, verdict.checked))
            return False
        if any(text == "loss" or text.startswith("gradient") for text in varying):
            rank_zero_warn(_PARTLY.format(name, _listed(varying)))
            return False
        if not verdict.summary:
            return True
        of = "" if name == "training_step" else f" of `{name}`"
        manner = " without microbatches" if verdict.limits else ""
        alike = ", with the same random numbers" if verdict.way.draws is not None and not verdict.limits else ""
        left_out = f"; not compared: {_listed(varying)}, because two single-process runs differ" if varying else ""
        summary = verdict.summary.replace(":", f" {why}:", 1) if why else verdict.summary
        text = f"Self-check{of} passed{manner} on {summary}{alike}{left_out} ({seconds:.1f} s)."
        tell(" ".join([text, *verdict.limits]))
        return True


def _key_of(kind: str, name: str) -> str:
    """Return the key of a compared value among the rules of `Merging`."""
    return {"output": RETURNED, "logged value": LOGGED}.get(kind, "") + name


def _is_in(name: str, key: str) -> bool:
    """Tell whether a name is a key, or an entry of the value under the key."""
    return name.startswith(key) and name[len(key) :][:1] in ("", "[", ".")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _message(call: StepCall, found: Sequence[StepDifference], hint: str, why: str) -> str:
    # Several replicas find the same differences.
    unique = list({(difference.kind, difference.name): difference for difference in found}.values())
    unique.sort(key=lambda difference: _ORDER.index(difference.kind))
    lines = [f"  {difference}" for difference in unique[:_SHOWN]]
    if len(unique) > _SHOWN:
        lines.append(f"  and {len(unique) - _SHOWN} more")
    return (
        f"`{call.name}` must match a single-process run; got other results. Both ran on {_described(call)}"
        f" {why or 'before the first batch'} and differ in\n"
        + "\n".join(lines)
        + (f"\n{hint}" if hint else "")
        + " [LP026]"
    )


# --------------------------------------------------------------------------------------------------- one comparison


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison of a step with one process, on this rank.

    Attributes:
        call: The step.
        way: How both runs computed.
        failure: Why the two runs could not be compared.
        blame: Whose fault the failure is: see `reference.Blame`.
        error: The error of the sharded run on this rank or on another rank. If one rank has an error, all have one.
        checked: The part of a sentence about the values that were compared instead.
        differences: The values that differ on this rank.
        hint: The cause of the differences, and a remedy.
        summary: A text about the compared values.
        varying: The values that were left out because two single-process runs differ in them.
        limits: Why the step was compared as one microbatch.
        ignored: Kinds and names of the values that were left out.
    """

    call: StepCall
    way: Way
    failure: str
    blame: Blame
    error: Exception | None
    checked: str
    differences: tuple[StepDifference, ...]
    hint: str
    summary: str
    varying: tuple[str, ...]
    limits: tuple[str, ...]
    ignored: frozenset[tuple[str, str]]

    @property
    def may_go_on(self) -> bool:
        """Whether further runs are possible. After an error, messages of failed stages may still be under way."""
        return self.error is None


def compare_step(runs: StepRuns, call: StepCall, full: Any, calls: RollCall) -> Verdict:
    """Run a step both ways and compare; all ranks of the replica call this.

    Args:
        runs: Runs the step both ways.
        call: The step, on a few samples.
        full: The full batch.
        calls: Lets a rank that fails in the sharded run tell the other ranks.
    """
    comparison = _Comparison(runs, call, full, calls)
    try:
        comparison.run()
    except _ShardedError as failed:
        comparison.end(failed)
    return comparison.verdict()


def _judge(runs: StepRuns, verdict: Verdict, full: Any, calls: RollCall) -> Verdict:
    """Return the verdict with the fault of a failed run on the full model; all ranks of the replica call this."""
    comparison = _Comparison(runs, verdict.call, full, calls)
    comparison.way = verdict.way
    comparison.failure = verdict.failure
    comparison.blame = verdict.blame
    comparison.judge()
    return comparison.verdict()


def _on_any(found: Any, replica: Group) -> bool:
    """Tell on all ranks of the replica whether any rank has found anything."""
    return any(comm.all_gather_object(bool(found), replica))


class _Comparison:
    """Holds the state of a comparison during its runs; `verdict` is its result, see `Verdict`."""

    def __init__(self, runs: StepRuns, call: StepCall, full: Any, calls: RollCall) -> None:
        self.runs = runs
        self.call = call
        self.full = full
        self.calls = calls
        self.replica = runs.groups.replica
        self.failure = ""
        self.blame: Blame = ""
        self.error: Exception | None = None
        self.checked = ""
        self.differences: list[StepDifference] = []
        self.hint = ""
        self.summary = ""
        self.varying: list[str] = []
        self.way = Way()
        self.limits: list[str] = []
        self.ignored: set[tuple[str, str]] = set()

    def verdict(self) -> Verdict:
        """Return the result so far."""
        return Verdict(
            call=self.call,
            way=self.way,
            failure=self.failure,
            blame=self.blame,
            error=self.error,
            checked=self.checked,
            differences=tuple(self.differences),
            hint=self.hint,
            summary=self.summary,
            varying=tuple(self.varying),
            limits=tuple(self.limits),
            ignored=frozenset(self.ignored),
        )

    def end(self, failed: _ShardedError) -> None:
        """Find the fault of a sharded run that failed although the full model ran the step."""
        self.differences = []
        if self.runs.engine is None and failed.is_users:
            again = self.runs.whole(self.call, self.way)
            if again.failure:
                self.failure = f"a second run of the step failed ({again.failure})"
                self.blame = "user"
                return
            text = raised_in_shards(self.call.name, failed.error)
            if text:  # the step computes with shards of weights
                failed.error = SelfCheckError(text)
        self.error = failed.error

    def judge(self) -> None:
        """Find the fault of a failed run on the full model; compare the tensor-parallel ranks instead."""
        stages = self.runs.engine is not None
        if stages and self.blame == "user":
            return
        try:
            divided = self._sharded(self.way)
        except _ShardedError as failed:
            self.failure = self.failure and f"{self.failure}, as did the sharded run of the self-check ({failed.error})"
            self.blame = self.blame and "user"
            # Failed stages leave messages under way, and a failure on some ranks leaves other ranks waiting.
            self.error = None if failed.is_users and not stages else failed.error
            return
        if self.blame == "unknown":
            self.blame = "check"
        self._compare_ranks(divided)
        if not self.differences and self.runs.groups.tensor_parallel.size > 1:
            self.checked = "; the tensor-parallel ranks agree in the loss and in replicated gradients"

    def _sharded(self, way: Way, call: StepCall | None = None) -> DividedRun:
        """Run the step in shards; a failure on one rank raises on all ranks of the replica."""
        failure: Exception | None = None
        divided: DividedRun | None = None
        try:
            divided = self.runs.divided(call or self.call, way)
        except Exception as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        # Other ranks either fail with the same error within moments, or wait in the step for this rank.
        patience_s = default_pg_timeout.total_seconds() if failure is None else _ALIKE_S
        try:
            notes = self.calls.meet("self-check", patience_s, json.dumps(text))
        except RuntimeError as error:
            # Other ranks wait in the step for messages of this rank, or are gone.
            raise _ShardedError(failure or error, is_users=False) from error
        texts = [json.loads(note) for note in notes]
        if not any(texts):
            assert divided is not None
            return divided
        others = {rank: other for rank, other in zip(self.replica.ranks, texts) if other}
        if failure is None:
            rank, other = next(iter(others.items()))
            failure = RuntimeError(f"{other.partition(': ')[2]}\n(found on rank {rank})")
        raise _ShardedError(failure, is_users=all(texts) and not any(text.startswith(_OURS) for text in texts))

    def run(self) -> None:
        """Run the step both ways in the best precision that works, and compare.

        Raises:
            _ShardedError: If the sharded run fails.
        """
        for way in self.runs.precisions():
            whole = self.runs.whole(self.call, way)
            if not whole.failure:
                break
        else:
            self.failure = whole.failure
            self.blame = whole.blame
            self.way = way
            if whole.blame == "unknown":
                self.failure = f"the single-process reference run failed ({whole.failure})"
            return
        splits = self.runs.microbatches > 1
        has_norm = splits and self._has_batch_norm()
        self.way = replace(way, splits=splits and not has_norm, draws=whole.recorded if whole.draws else None)
        self._compare(whole)
        self.summary = self._counted(whole)
        if has_norm:
            self.limits.append(_NORM)
            # With fixed statistics, the step must be right in microbatches, too.
            self.way = replace(self.way, splits=True, fixed_norm=True)
            fixed = None if self.anywhere(self.differences) else self.runs.whole(self.call, self.way)
            if fixed is not None and not fixed.failure:
                self.way = replace(self.way, draws=fixed.recorded if fixed.draws else None)
                self.limits.append(_FIXED_NORM)
                self._compare(fixed)
        for name in (*whole.effects.attributes, *whole.effects.counters):
            self._rules.setdefault(name, "")

    @property
    def _rules(self) -> dict[str, str]:
        """How values of microbatches are merged, by name."""
        return ParallelState.of(self.runs.module).merging.setdefault(self.call.name, {})

    @property
    def _proven(self) -> dict[str, str]:
        """The names whose rule has fitted different values of microbatches."""
        return ParallelState.of(self.runs.module).proven.setdefault(self.call.name, {})

    def _compare(self, whole: WholeRun) -> None:
        divided = self._divided(whole)
        self.differences = self._found(whole, divided)
        self._leave_out_caches(whole, divided)
        if self.anywhere(self.differences):
            self._explain(self.way, whole, divided)
        else:
            self._keep_kinds(divided)
            self._compare_orders(whole, divided)
            if whole.dropout and not self.way.fixed_norm and self.runs.groups.tensor_parallel.size > 1:
                self._compare_dropout()
        if self.way.splits and self.way.draws is not None and not self.anywhere(self.differences):
            alike = self._draws_alike(divided)
            self.differences = self._mixing(alike)
            if self.differences:
                self.hint = _MICROBATCHES
            elif not alike:
                self.limits.append(_DRAWS.format(_in_places(self.runs.record(self.call).draws)))

    def _divided(self, whole: WholeRun) -> DividedRun:
        """Run the sharded step with the draws of the full step; try both orders of several rows per sample."""
        divided = self._sharded(self.way)
        has_views = divided.replayed is not None and divided.replayed.has_views
        if self.anywhere([has_views]) and self.anywhere(self._found(whole, divided)):
            self.way = replace(self.way, by_views=True)
            divided = self._sharded(self.way)
        return divided

    def _draws_alike(self, divided: DividedRun) -> bool:
        """Tell whether the microbatches used the draws of the full step for their samples."""
        replayed = divided.replayed
        found = None if replayed is None else (replayed.missed, replayed.counts())
        everyone = comm.all_gather_object(found, self.replica)
        if self.way.draws is None or any(each is None or each[0] for each in everyone):
            return self.way.draws is None
        counts: dict[tuple[str, int], int] = {}
        for _, theirs in filter(None, everyone):
            for key, count in theirs.items():
                counts[key] = max(count, counts.get(key, 0))
        microbatches = {microbatch for _, microbatch in counts} or {0}
        expected = self.way.draws.counts()
        return counts == {(stream, each): expected[stream] for stream in expected for each in microbatches}

    def _mixing(self, alike: bool) -> list[StepDifference]:
        """Return a difference if the loss of a sample depends on the other samples; the same on all ranks.

        A mean over samples has L(a, b) + L(b, a) = L(a, a) + L(b, b) for two halves of the samples, by their weights.
        The test needs no draws of microbatches, since all four runs draw the same numbers.

        Args:
            alike: Whether microbatches with the draws of the full step are equal to the full step. Then the step can
                only shuffle samples, and has left them in their microbatches by chance. Fewer tries are enough.
        """
        if self.call.name != "training_step" or self.runs.engine is None:
            return []
        try:
            samples = few_samples(self.full, _MIXED) if self.runs.fits_in_double else self.call.batch
            half = num_samples(samples) // 2
            halves = list(range(half)), list(range(half, 2 * half))
            orders = [halves[0] + halves[1], halves[1] + halves[0], halves[0] * 2, halves[1] * 2]
            calls = [replace(self.call, batch=chosen_samples(samples, order)) for order in orders if half]
            weights = [float(self.runs.engine.microbatch_weight(chosen_samples(samples, each))) for each in halves]
        except ValueError:
            return []
        if not calls or not all(0 < weight < math.inf for weight in weights):
            return []
        # Shuffled samples may stay in their halves by chance, so try several seeds.
        tries = 2 if half >= 4 else 4 if half > 1 else 6
        for number in range(tries // 2 if alike else tries):
            way = replace(self.way, seed=SEED + number, splits=False, hooks=False)
            runs = [self.runs.whole(call, way) for call in calls]
            if any(run.failure for run in runs) or len({str(run.recorded.shapes()) for run in runs}) > 1:
                return []  # a draw of another kind for other samples
            if self.anywhere(self._alike(partial(_second_differences, runs, weights))):
                return [
                    StepDifference("loss", "loss", math.inf, "of a sample depends on the other samples of its batch")
                ]
        return []

    def _has_batch_norm(self) -> bool:
        return any(isinstance(child, BatchNormalization) and child.training for child in self.runs.module.modules())

    def anywhere(self, differences: Sequence[Any]) -> bool:
        """Tell on all ranks of the replica whether one of them has found differences."""
        return _on_any(differences, self.replica)

    # ------------------------------------------------------------------------------------------------- differences

    def _found(self, whole: WholeRun, divided: DividedRun) -> list[StepDifference]:
        tolerance = tolerance_of(whole.precisions)
        differences = self._alike(lambda: self._effect_differences(whole, divided, tolerance))
        if self.call.name == "training_step":
            differences += self._gradient_differences(whole, divided, tolerance)
        differences += self._value_differences(whole, divided, tolerance)
        return [entry for entry in differences if (entry.kind, entry.name) not in self.ignored]

    def _alike(self, compute: Callable[[], _Result]) -> _Result:
        """Return the result of `compute` on this rank; raise on all ranks of the replica if it fails on one rank."""
        with comm.failing_together(self.replica):
            return compute()

    def _leave_out_caches(self, whole: WholeRun, divided: DividedRun) -> None:
        """Leave out buffers of another shape if no other value differs, such as caches for a batch or a shard."""
        others = [entry for entry in self.differences if entry.kind != "buffer" or not math.isinf(entry.relative)]
        if self.anywhere(others):
            return
        mine = {name: value.shape for name, value in divided.values.items()}
        theirs = {name: value.shape for name, value in whole.values.items()}
        caches = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
        caches = {name for names in comm.all_gather_object(caches, self.replica) for name in names}
        self.differences = [entry for entry in self.differences if entry.name not in caches]
        self.ignored |= {("buffer", name) for name in caches}

    def _effect_differences(
        self, whole: WholeRun, other: WholeRun | DividedRun, tolerance: float
    ) -> list[StepDifference]:
        expected, found = whole.effects, other.effects
        differences = compare("loss", _loss(found), _loss(expected), tolerance)
        differences += compare("logged value", found.logged, expected.logged, tolerance)
        differences += compare("attribute", found.attributes, comparable_attributes(found, expected), tolerance)
        if self.runs.groups.model.rank == 0:
            differences += compare("output", found.output, expected.output, tolerance)
        return differences

    def _gradient_differences(self, whole: WholeRun, divided: DividedRun, tolerance: float) -> list[StepDifference]:
        mine = self._alike(lambda: max(filter(math.isfinite, map(largest_of, whole.gradients.values())), default=0.0))
        # The largest gradient of all ranks counts: the parameters of one rank may have rounding errors only.
        floor = SMALL * max(comm.all_gather_object(mine, self.replica))
        return self._alike(lambda: compare_gradients(divided.gradients, whole.gradients, floor, tolerance))

    def _value_differences(self, whole: WholeRun, divided: DividedRun, tolerance: float) -> list[StepDifference]:
        """Compare buffers, parameters and numbers; if several stages hold a value, one stage must have it right."""
        parameters = dict(self.runs.module.named_parameters())
        held: dict[str, Tensor] = {**dict(self.runs.module.named_buffers()), **parameters}

        def compared() -> dict[str, float]:
            found: dict[str, float] = {}
            known = {*self.runs.skeleton.buffer_names, *parameters}
            written = {*whole.values, *divided.values} & known
            for name in [name for name in held if name in written]:
                # A run that did not write a tensor left its present value.
                expected = whole.values.get(name, held[name]).to(held[name].device)
                found[name] = relative_difference(divided.values.get(name, held[name]), expected, 1e-2)
            found.update(compare_counters(divided.effects, whole.effects, self.runs.module))
            return found

        found = self._alike(compared)
        # Modules of other stages may change their numbers, too: they run to find the shapes of their outputs.
        elsewhere = self.runs.elsewhere()
        here = {path for path, child in self.runs.module.named_modules() if id(child) not in elsewhere}
        found = {name: relative for name, relative in found.items() if name.rpartition(".")[0] in here}
        best: dict[str, float] = {}
        for theirs in comm.all_gather_object(found, self.runs.groups.model):
            for name, relative in theirs.items():
                best[name] = min(relative, best.get(name, math.inf))
        kinds = {name: "parameter" for names in comm.all_gather_object([*parameters], self.replica) for name in names}
        wrong = {name: relative for name, relative in best.items() if relative > tolerance}
        return [StepDifference(kinds.get(name, "buffer"), name, relative) for name, relative in wrong.items()]

    def _counted(self, whole: WholeRun) -> str:
        names = comm.all_gather_object((list(whole.gradients), list(whole.values)), self.replica)
        gradients = len({name for found, _ in names for name in found})
        written = {name for _, found in names for name in found} - {name for _, name in self.ignored}
        held = {name for theirs in comm.all_gather_object(self._parameter_names(), self.replica) for name in theirs}
        buffers, parameters = len(written - held), len(written & held)
        effects = whole.effects
        parts = [] if effects.loss is None else ["loss"]
        parts += [_count(gradients, "gradient")] if gradients else []
        logged = effects.logged.keys() - {name for _, name in self.ignored}
        parts += [_count(len(logged), "logged metric")] if logged else []
        parts += ["the output"] if effects.output else []
        parts += [_count(len(effects.attributes), "attribute")] if effects.attributes else []
        parts += [_count(parameters, "parameter")] if parameters else []
        parts += [_count(buffers, "buffer")] if buffers else []
        if not parts:
            return ""
        text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        is_one = len(parts) < 2 and not text.endswith("s")
        return f"{_described(self.call)}: {text} {'matches' if is_one else 'match'} a single-process run"

    def _parameter_names(self) -> list[str]:
        return [name for name, _ in self.runs.module.named_parameters()]

    # ------------------------------------------------------------------------------------------------- dropout

    def _compare_dropout(self) -> None:
        """Compare the tensor-parallel ranks again with dropout: replicated layers must draw the same numbers."""
        self._compare_ranks(self._sharded(replace(self.way, dropout=True, splits=False)))
        self.hint = (
            "With dropout, replicated layers must draw the same random numbers on all ranks. Use the same seed on"
            " all ranks, and draw on all ranks or none."
        )

    def _compare_ranks(self, divided: DividedRun) -> None:
        """Compare the loss and the gradients of replicated parameters between tensor-parallel ranks."""
        tensor_group = self.runs.groups.tensor_parallel
        mine = {
            # Sums are small messages, and full gradients are not.
            name: float(gradient.double().abs().sum())
            for name, gradient in divided.gradients.items()
            if gradient is not None and name not in self.runs.rules
        }
        for loss, sums in comm.all_gather_object((divided.effects.loss, mine), tensor_group):
            pairs = [("loss", "loss", loss, divided.effects.loss)]
            pairs += [("gradient", name, total, mine.get(name)) for name, total in sums.items()]
            for kind, name, theirs, own in pairs:
                if theirs is not None and not math.isclose(theirs, own or 0.0, rel_tol=1e-3, abs_tol=1e-12):
                    detail = "differs between tensor-parallel ranks"
                    self.differences.append(StepDifference(kind, name, math.inf, detail))

    # ------------------------------------------------------------------------------------------------- explanations

    def _explain(self, way: Way, whole: WholeRun, divided: DividedRun) -> None:
        """Leave out values that differ between runs on one process, and find the cause of the other differences."""
        varying = self.ignored = self._varying(whole, self.runs.whole(self.call, self.way))
        self.differences = [entry for entry in self.differences if (entry.kind, entry.name) not in varying]
        # A time differs between microbatches as well, and no later comparison can tell more about it.
        self._proven.update((_key_of(kind, name), "differs") for kind, name in varying)
        self.varying = sorted(name if kind == "loss" else f"{kind} `{name}`" for kind, name in varying)
        self._warn_of_pieces()
        if any(kind in ("loss", "gradient") for kind, _ in varying):
            # Only the first rank ran the full model, which may have advanced state outside the module.
            self._compare_ranks(self._sharded(way))
            if self.anywhere(self.differences):
                self.hint = _UNSTEADY
                return
        if not self.anywhere(self.differences):
            self._keep_kinds(divided)
            self._compare_orders(whole, divided)
            return
        if any(comm.all_gather_object(divided.draws_apart, self.replica)):
            self.differences = []
            self.failure = (
                "sharded layers draw random numbers other than dropout masks"
                f"{_in_places(self.runs.record(self.call).draws)}; each rank draws for its own shard, so the numbers"
                " depend on the layout"
            )
            return
        one = replace(way, splits=False)
        can_split = self.runs.engine is not None and way.splits
        if can_split and not self.anywhere(self._found(whole, self._sharded(one))):
            if self._draws_alike(divided):
                divided = self._learn_kinds(way, whole, divided)
                if self.anywhere(self.differences):
                    self._end_split()
                else:
                    self._compare_orders(whole, divided)
            elif self.call.name == "training_step":
                self.differences = []
            elif self.anywhere(self.differences):
                self._use_whole_batches()
            return
        parts = comm.all_gather_object(divided.effects.part_in_loss, self.replica)
        self.hint = next(filter(None, parts), "") or self._first_module(replace(one, traces=True))

    def _warn_of_pieces(self) -> None:
        """Leave out attributes in which hooks keep outputs of sharded layers, with a warning."""
        if self.runs.sharding is None:
            return
        pieces = {entry.name for entry in self.differences if entry.kind == "attribute" and math.isinf(entry.relative)}
        self.differences = [entry for entry in self.differences if entry.name not in pieces]
        self.ignored = self.ignored | {("attribute", name) for name in pieces}
        if pieces:
            rank_zero_warn(
                f"The attribute `{min(pieces)}` holds only this rank's shard of its single-process value. The"
                " self-check does not compare it."
            )

    def _end_split(self) -> None:
        """Say how to mend values that differ because of microbatches; evaluation runs on whole batches instead."""
        self.hint = self._kept_by_hand() or _MICROBATCHES
        if self.call.name != "training_step":
            self._use_whole_batches()

    def _compare_orders(self, whole: WholeRun, divided: DividedRun) -> None:
        """Compare the values of the first or last microbatch again, on the samples in other orders.

        The maximum of two microbatches is always the value of one microbatch. In the opposite order, it is the value of
        the other one. A count of samples, or the first sample, is right in every order.
        """
        if not self.way.splits:
            return
        in_orders = [divided.unproven]
        by_one = {key for key, why in divided.unproven.items() if why in ("first", "once")}
        kinds = {key: divided.merged.get(key, "").partition(" ")[0] for key in divided.unproven}
        placed = [key for key, kind in kinds.items() if kind in _PLACES or key in by_one]
        if self.anywhere(placed):
            for found, unproven in self._in_other_orders(whole):
                in_orders.append(unproven)
                wrong = [each for each in found if any(_is_in(_key_of(each.kind, each.name), key) for key in placed)]
                if self.anywhere(wrong):
                    self.differences = wrong
                    self._end_split()
                    return
        self._proven.update(
            (key, why) for key, why in divided.unproven.items() if key not in by_one and why != "either"
        )
        if len(in_orders) > 1:
            # If the first microbatch changes an attribute in all orders, each microbatch would set the same value.
            by_first = {key for key in by_one if all(each.get(key) == "first" for each in in_orders)}
            self._proven.update(dict.fromkeys(by_first, "first"))

    def _in_other_orders(self, whole: WholeRun) -> Iterator[tuple[list[StepDifference], Mapping[str, str]]]:
        """Yield the differences, and the values without a proven rule, of the same samples in other orders."""
        try:
            count = num_samples(self.call.batch)
            orders = [list(reversed(range(count)))]
            if self.runs.microbatches > 2:
                orders.append([*range(count // 2, count), *range(count // 2)])
            calls = [replace(self.call, batch=chosen_samples(self.call.batch, order)) for order in orders]
        except ValueError:
            calls = []
        for call in calls:
            other = self.runs.whole(call, replace(self.way, draws=None))
            if other.failure:  # such as packed sequences, which are sorted by length
                break
            divided = self._sharded(replace(self.way, draws=other.recorded if other.draws else None), call)
            # With other random numbers, the values tell nothing about the order.
            yield (self._found(other, divided), divided.unproven) if self._draws_alike(divided) else ([], {})
        else:
            if calls:
                return
        if self.way.draws is None:
            divided = self._sharded(replace(self.way, reverses=True))
            yield self._found(whole, divided), divided.unproven

    def _learn_kinds(self, way: Way, whole: WholeRun, divided: DividedRun) -> DividedRun:
        """Learn how outputs and lists of microbatches are merged into the values of one step: see `Merging`."""
        rules, left = self._rules, dict[str, list[str]]()
        for _ in range(_MOST_KINDS):
            changed: dict[str, str] = {}
            for name in sorted(self._named_differences()):
                # Begin with inner values: another way to merge a list may change the entries inside.
                for key in sorted((key for key in divided.merged if _is_in(name, key)), key=len, reverse=True):
                    kind = divided.merged[key]
                    # Another rule would contradict an earlier batch.
                    ways = left.setdefault(key, [] if key in self._proven else [*other_kinds(kind), kind])
                    if ways and key not in changed:
                        changed[key] = ways.pop(0)
                    if key in changed and changed[key] != kind:
                        break
            if not changed:
                break
            rules.update(changed)
            divided = self._sharded(way)
            # An attribute whose rows do not fit together keeps its last value.
            rules.update((key, divided.merged[key]) for key in changed if key in divided.merged)
            self.differences = self._found(whole, divided)
        self._keep_kinds(divided)
        return divided

    def _named_differences(self) -> set[str]:
        """Return the names of attributes and outputs that differ on any rank of the replica."""
        kinds = ("attribute", "buffer", "output")
        mine = {_key_of(entry.kind, entry.name) for entry in self.differences if entry.kind in kinds}
        return {name for theirs in comm.all_gather_object(mine, self.replica) for name in theirs}

    def _keep_kinds(self, divided: DividedRun) -> None:
        """Keep the rules by which microbatches were merged: later sizes could suggest another rule by chance."""
        if self.way.splits:
            for key, kind in divided.merged.items():
                self._rules.setdefault(key, kind)

    def _use_whole_batches(self) -> None:
        """Run a step of evaluation as one microbatch, which is exact: without gradients, memory has room for it."""
        name = self.call.name
        kinds = sorted(
            {str(each) for theirs in comm.all_gather_object(self.differences, self.replica) for each in theirs}
        )
        ParallelState.of(self.runs.module).whole_batches.add(name)
        rank_zero_warn(_WHOLE_BATCHES.format(name, "; ".join(kinds[:_SHOWN]) or "random numbers"))
        self.differences = []
        self.hint = ""
        self.way = replace(self.way, splits=False)

    def _kept_by_hand(self) -> str:
        """Return advice for the values that a step keeps, if only attributes and buffers differ in microbatches."""
        mine = [(entry.kind, entry.name) for entry in self.differences]
        found = sorted({each for theirs in comm.all_gather_object(mine, self.replica) for each in theirs})
        if not found or any(kind not in ("attribute", "buffer") for kind, _ in found):
            return ""
        return _KEPT_BY_HAND.format(found[0][1].partition("[")[0])

    def _varying(self, one: WholeRun, two: WholeRun) -> set[tuple[str, str]]:
        """Return the values that differ between two runs on one process, as kinds and names."""
        if two.failure:
            return set()
        tolerance = tolerance_of(one.precisions)
        found = {(entry.kind, entry.name) for entry in self._effect_differences(one, two, tolerance)}
        for name in one.gradients.keys() & two.gradients.keys():
            if relative_difference(two.gradients[name], one.gradients[name], 0.0) > tolerance:
                found.add(("gradient", name))
        return {entry for theirs in comm.all_gather_object(found, self.replica) for entry in theirs}

    def _first_module(self, way: Way) -> str:
        whole = self.runs.whole(self.call, way)
        divided = self._sharded(way)
        traces = [trace for trace in comm.all_gather_object(divided.trace, self.replica) if trace is not None]
        if whole.trace is None:
            return ""
        (path, number), text = first_difference(whole.trace, traces, tolerance_of(whole.precisions))
        around = _around(self.runs.record(self.call), path, number) if path else ""
        if not path:
            # Outputs and their gradients agree, so a gradient is lost between an output and a parameter.
            names = [entry.name for entry in self.differences if entry.kind == "gradient"]
            names = [name for theirs in comm.all_gather_object(names, self.replica) for name in theirs]
            first = next((name for name, _ in self.runs.module.named_parameters() if name in names), "")
            path = first.rpartition(".")[0]
            text = f"`{path}`, by the gradient of its parameters"
        if not path:
            return (
                "The outputs of all modules match. The difference arises outside modules, where the step computes"
                f" with outputs or parameters{_in_places(self.runs.record(self.call).places_outside())}."
            )
        block = re.sub(r"\b\d+\b", "*", path.rpartition(".")[0] or path)
        remedy = "choose other split points (`balance`, fewer stages)"
        if self.runs.sharding is not None:
            remedy = f"keep the module around it replicated: tensor_plan={{..., '{block}*': 'replicate'}}"
        return f"The first module that differs is {text}.{around} To fix it, {remedy}."


def _in_places(places: Sequence[str]) -> str:
    """Return the places of the record of a step as a part of a sentence; empty without a place."""
    return f" in {_listed(places)}" if places else ""


def _around(record: StepTrace, path: str, number: int) -> str:
    """Return sentences about the user's lines around a call of the module at `path`."""
    calls = record.calls_of(path)
    if number >= len(calls):  # the record ends before the call
        return ""
    makers, users = record.places_around(calls[number])
    text = f" Its inputs are made{_in_places(makers)}." if makers else ""
    return text + (f" Its output is used{_in_places(users)}." if users else "")


def _second_differences(runs: Sequence[WholeRun], weights: Sequence[float]) -> list[str]:
    """Return the names of values that are no mean over samples in runs on (a, b), (b, a), (a, a) and (b, b)."""
    tolerance = max(10 * tolerance_of(runs[0].precisions), 1e-8)
    losses = [{"loss": torch.tensor(run.effects.loss or 0.0, dtype=torch.float64)} for run in runs]
    of_a, of_b = (2 * weight / sum(weights) for weight in weights)
    found = []
    for values in (losses, [run.gradients for run in runs]):
        largest = max((largest_of(value) for each in values for value in each.values()), default=0.0)
        for name in set.intersection(*(set(each) for each in values)):
            ab, ba, aa, bb = (each[name].double() for each in values)
            difference = largest_of(ab + ba - of_a * aa - of_b * bb)
            if difference > tolerance * max(largest, SMALL):  # false for NaN
                found.append(name)
    return found


class _ShardedError(Exception):
    """Reports a failure of the sharded run, on all ranks of the replica or on some.

    Attributes:
        error: The error to raise on this rank.
        is_users: Whether the user's code failed on all ranks, so that no rank waits for another.
    """

    def __init__(self, error: Exception, is_users: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_users = is_users


_OURS = f"{ReferenceRunError.__name__}:"


def _loss(effects: ObservedStep) -> dict[str, float]:
    return {} if effects.loss is None else {"loss": effects.loss}


def _shorter(batch: Any, positions: int) -> Any:
    return shortened(batch, positions) if positions else batch


def _described(call: StepCall) -> str:
    try:
        text = _count(num_samples(call.batch), "sample")
    except ValueError:
        text = "the first batch"
    if call.full_length:
        text += f", of which it took {sequence_length(call.batch):,} of {call.full_length:,} positions"
    return text


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
