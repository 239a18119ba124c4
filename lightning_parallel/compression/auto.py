"""A reducer that tries compressors in the first steps of a run, and keeps what makes whole steps faster.

    step     1  2 | 3 4 5 |  6 | 7 8 9 |   10     | ...  |    | . . .
             warm | timed | warm| timed | compared | ...  |warm| timed
             plain means  |  first candidate      | ...  | plain means

In the steps of a candidate its means are used: only so does it overlap with backward, and share the processor with it,
as it will later. In its last step the mean of what it still owes (residuals) and of the gradient is taken as it is,
so that nothing of what it did not send is lost; its own mean of that gradient is compared with the true one.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Optional

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor import Compressor, Dense, check_fraction, check_integer
from lightning_parallel.compression.compressor_state import CHUNKED, Memory
from lightning_parallel.compression.feedback import CompressionError, Method
from lightning_parallel.compression.quantizers import Cast, Quantize
from lightning_parallel.compression.reducer import LATE, GroupLike, Reducer, ReductionStep, as_group
from lightning_parallel.tracing.spans import bytes_text, percent, show

__all__ = ["Auto"]


class _TriedStep(NamedTuple):
    """What one of the first steps is for.

    Attributes:
        candidate: The position of the compressor; None for plain means.
        is_timed: Whether its time counts.
        is_last: Whether the candidate is compared, and what it owes is paid, by plain means.
    """

    candidate: Optional[int] = None
    is_timed: bool = False
    is_last: bool = False


class Auto(Reducer):
    """Tries full gradients and several compressors in the first steps, then keeps the fastest.

    `Auto` times whole steps, from the end of one to the end of the next. A compressor only saves the time in which
    training waits for communication; it saves nothing if the reduction overlaps with the backward pass. `Auto` compares
    the medians of the slowest rank, so all ranks choose the same. Candidates run as they do after their warm-up
    (`start_step`, schedules). The warm-up of the chosen compressor counts from the first step of the run.

    Rank 0 prints the times, and the relative error |mean - true mean| / |true mean| of each candidate in one step.
    `verdict` holds the result in words.

    The steps of a candidate use its compressed gradients. The gradients that it has not sent after its last step are
    added to the full gradients that follow.

    If full gradients win, the all-reduce of `DistributedDataParallel` takes over.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import Auto, CompressedDDPStrategy, PowerSGD, Quantize

        compression = Auto([Quantize(8), PowerSGD(rank=8)])
        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(compression))
        trainer.fit(MyModule(), MyData())
        print(compression.verdict)
        ```

    Args:
        candidates: Compressors to try. By default `Cast("bf16")` and `Quantize(8)`, which are nearly lossless.
        min_gain: Share of a step that the fastest candidate must save. Otherwise `Auto` keeps full gradients.
        steps: Steps to time with each candidate, and with full gradients before and after.

    Raises:
        TypeError: If a candidate is not a compressor.
        ValueError: If a number is out of range.
    """

    def __init__(
        self, candidates: Optional[list[Compressor]] = None, *, min_gain: float = 0.05, steps: int = 3
    ) -> None:
        super().__init__()
        check_integer("steps", steps, least=1)
        check_fraction("min_gain", min_gain)
        self.candidates = [Cast("bf16"), Quantize(8)] if candidates is None else list(candidates)
        if not self.candidates or not all(isinstance(candidate, Compressor) for candidate in self.candidates):
            raise TypeError(f"`candidates` must be compressors such as [Quantize(8), PowerSGD(4)]; got {candidates!r}")
        self.min_gain = min_gain
        self.steps = steps
        self._dense = Dense()
        self._measure_anew()

    def _measure_anew(self) -> None:
        """Begin to measure."""
        plain = [_TriedStep(is_timed=True)] * self.steps
        # The first one takes what an earlier run has left in memory, and tells the size of plain means. Neither it nor
        # the second is timed: they allocate, and DDP fills its buckets anew.
        self._trials = [_TriedStep(is_last=True), _TriedStep(), *plain]
        for index in range(len(self.candidates)):
            timed = [_TriedStep(index, is_timed=True)] * self.steps
            self._trials += [_TriedStep(index), *timed, _TriedStep(index, is_last=True)]
        # Before and after: the first steps of a run are often slower than those that follow.
        self._trials += [_TriedStep(), *plain] if self.candidates else []
        self.choice: Optional[Reducer] = None
        self.verdict = "still measuring"
        self._taken = 0
        self._ended_at: Optional[float] = None
        self._seconds: list[list[float]] = [[] for _ in range(1 + len(self.candidates))]  # of plain means first
        self._sums = [[0.0, 0.0] for _ in self.candidates]  # of the squares of the error, and of the true mean
        self._bytes = [[0, 0] for _ in self.candidates]  # sent by the candidate, and by plain means

    @property
    def linear(self) -> bool:
        """True if the choice is linear; before it is made, if all candidates are."""
        return all(one.linear for one in self._possible)

    @property
    def unbiased(self) -> bool:
        """True if the choice is unbiased; before it is made, if all candidates are."""
        return all(one.unbiased for one in self._possible)

    @property
    def collective(self) -> str:
        """The collective of the choice; before it is made, of all candidates, or `mixed`."""
        found = {one.collective for one in self._possible}
        return found.pop() if len(found) == 1 else "mixed"

    @property
    def _possible(self) -> Sequence[Reducer]:
        return [self._dense, *self.candidates] if self.choice is None else [self.choice]

    @property
    def is_plain(self) -> bool:
        """True while full gradients are measured, and after they have won."""
        if self.choice is not None:
            return self.choice is self._dense
        return self._trial in (_TriedStep(), _TriedStep(is_timed=True))

    def count_plain_step(self) -> None:
        """Count a step with full gradients that the strategy reduced itself, and its time."""
        super().count_plain_step()
        # Who takes plain means may have been told to before the last step ended.
        if self.choice is None and self.is_plain:
            self._end_trial()

    @property
    def _trial(self) -> _TriedStep | None:
        """What the next step is for; None when everything is measured."""
        is_over = self.choice is not None or self._taken == len(self._trials)
        return None if is_over else self._trials[self._taken]

    @property
    def _present(self) -> Reducer:
        """What takes the means now."""
        if self.choice is not None:
            return self.choice
        trial = self._trial
        return self._dense if trial is None or trial.candidate is None else self.candidates[trial.candidate]

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that any candidate uses."""
        return frozenset().union(*(candidate.slots for candidate in self.candidates))

    def reset(self) -> None:
        """Return to the state before the first step, and measure again."""
        super().reset()
        self._measure_anew()

    def phase(self, step: int) -> Optional[Hashable]:
        """Return the compressor of this step, and its phase."""
        phase = self._present.phase(step)
        return None if phase is None else (id(self._present), phase)

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return the method of the compressor of this step."""
        return self._present.method(name, shape, step)

    def prepare(self, group: Group) -> None:
        """Choose a compressor, after all measurements."""
        if self.choice is None and self._trial is None:
            self._decide(group)

    def begin(self, group: GroupLike = None) -> ReductionStep:
        """Start a step, which measures until the choice is made."""
        group = as_group(group)
        self.prepare(group)
        return super().begin(group) if self.choice is not None else _MeasuringStep(self, group)

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state, with the choice."""
        return {**super().state_dict(), **self._verdict_state()}

    def gather_state(self, group: GroupLike = None, exact: bool = True) -> dict[str, Any]:
        """Return the state of all ranks on the first, with the choice."""
        state = super().gather_state(group, exact)
        return {**state, **self._verdict_state()} if state else state

    def load_state_dict(self, state: Mapping[str, Any], group: GroupLike = None) -> None:
        """Continue with the saved choice; measure again if the choice is no longer among the candidates."""
        super().load_state_dict(state, group)
        known = {repr(one): one for one in (self._dense, *self.candidates)}
        saved = state.get("choice", "").replace("Schedule(", "StepValue(")  # its name in older checkpoints
        self._measure_anew()
        self.choice = known.get(saved)
        if self.choice is not None:
            self.verdict = state.get("verdict", self.verdict)

    def _verdict_state(self) -> dict[str, Any]:
        return {"choice": "" if self.choice is None else repr(self.choice), "verdict": self.verdict}

    # -------------------------------------------------------------------------------------------- measurements

    def _end_trial(self, applied: bool = True) -> None:
        """Take the time of the step that has just ended; one that was not applied is taken again."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the step is over when the device is done, not when the host is
        now, trial = time.perf_counter(), self._trial
        assert trial is not None
        if applied:
            if trial.is_timed and self._ended_at is not None:
                index = 0 if trial.candidate is None else 1 + trial.candidate
                self._seconds[index].append(now - self._ended_at)
            self._taken += 1
        self._ended_at = now

    def _compare(self, candidate: int, error: CompressionError, sent: int, dense: int) -> None:
        """Keep how far from the true means those of a candidate are, and what it has sent."""
        self._sums[candidate] = list(error.sums()[:2])
        self._bytes[candidate] = [sent, dense]

    def _decide(self, group: Group) -> None:
        # All ranks choose by the same numbers: a step takes as long as on the slowest rank.
        everyone = comm.all_gather_object((self._seconds, self._sums, self._bytes), group)
        dense, *others = (
            median(max(of_ranks) for of_ranks in zip(*times)) for times in zip(*(seconds for seconds, _, _ in everyone))
        )
        errors, sent = [], []
        for index in range(len(self.candidates)):
            # Where ranks own different parameters, their squares add up; where they hold the same, nothing changes.
            error, true = (sum(sums[index][part] for _, sums, _ in everyone) for part in (0, 1))
            errors.append((error / true) ** 0.5 if true else 0.0)
            sent.append(
                [sum(num_bytes[index][part] for _, _, num_bytes in everyone) / len(everyone) for part in (0, 1)]
            )
        best = min(range(len(others)), key=others.__getitem__, default=None)
        is_worth_it = best is not None and 1 - others[best] / dense >= self.min_gain
        self.choice = self.candidates[best] if best is not None and is_worth_it else self._dense
        found = "; ".join(
            f"{candidate!r} takes {seconds * 1e3:.2f} ms ({1 - seconds / dense:+.0%}, relative error {error:.2%})"
            for candidate, seconds, error in zip(self.candidates, others, errors)
        )
        chosen = "uncompressed gradients" if self.choice is self._dense else repr(self.choice)
        self.verdict = (
            f"A step with uncompressed gradients takes {dense * 1e3:.2f} ms; {found}. With"
            f" `min_gain={self.min_gain:g}`, `Auto` uses {chosen}."
        )
        if group.rank == 0:
            show(self._table(dense, others, errors, sent))

    def _table(
        self, dense: float, others: Sequence[float], errors: Sequence[float], sent: Sequence[Sequence[float]]
    ) -> Table:
        table = Table(title="Gradient compression", title_justify="left", box=box.SIMPLE_HEAD)
        for header in ("compressor", "ms per step", "gain", "error", "sent", ""):
            is_text = header in ("compressor", "")
            table.add_column(header, justify="left" if is_text else "right", overflow="fold")
        plain_bytes = bytes_text(sent[0][1]) if sent else ""
        is_plain = self.choice is self._dense
        table.add_row("uncompressed", f"{dense * 1e3:.2f}", "", "", plain_bytes, "chosen" if is_plain else "")
        for candidate, seconds, error, (num_bytes, _) in zip(self.candidates, others, errors, sent):
            chosen = "chosen" if candidate is self.choice else ""
            gain = f"{1 - seconds / dense:+.0%}"
            table.add_row(repr(candidate), f"{seconds * 1e3:.2f}", gain, percent(error), bytes_text(num_bytes), chosen)
        table.caption = (
            f"Compression is chosen where it saves {self.min_gain:.0%} of a whole step. Error: of the means, relative,"
            " in one step; sent: by one rank per step."
        )
        return table

    def __repr__(self) -> str:
        gain = "" if self.min_gain == 0.05 else f", min_gain={self.min_gain}"
        steps = "" if self.steps == 3 else f", steps={self.steps}"
        return f"Auto({self.candidates}{gain}{steps})" if self.choice is None else repr(self.choice)


class _MeasuringStep(ReductionStep):
    """A step in which something is tried."""

    reducer: Auto

    def __init__(self, reducer: Auto, group: Group) -> None:
        super().__init__(reducer, group)
        trial = reducer._trial
        assert trial is not None
        self._trial = trial
        # Takes the means of a candidate's last step.
        self._plain = ReductionStep(reducer._dense, group)
        if trial.candidate is not None:
            self.number += LATE  # its warm-up is over
            # Nobody else may ask for a comparison in a step that is timed.
            self._error = CompressionError() if trial.is_last else None

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Take the means by what is tried, in its last step by plain means."""
        if not self._trial.is_last:
            super().reduce_(named_gradients, shards)
            return
        # On what is tried, which plain means do not tell.
        self.agree(named_gradients)
        # Before the candidate changes what it holds.
        owed = {name: self._owed(name, gradient) for name, gradient in named_gradients.items()}
        if self._trial.candidate is not None:
            super().reduce_({name: gradient.detach().clone() for name, gradient in named_gradients.items()})
        for name, tensor in owed.items():
            if tensor is not None:
                named_gradients[name].detach().add_(tensor.to(named_gradients[name].dtype), alpha=self.scale)
        self._plain.reduce_(named_gradients, shards)

    def overlaps(self, named_gradients: Mapping[str, Tensor]) -> bool:
        """Return False: what a step takes is measured as a whole, and its last one reduces twice."""
        return False

    def _owed(self, name: str, gradient: Tensor) -> Optional[Tensor]:
        """Return what this rank has not sent of earlier gradients; its mean over the ranks is what the means lack."""
        residual = self.memory.read("residual", name, gradient.device, gradient.shape)
        owed = None if residual is None else residual.clone()
        for slot in CHUNKED:
            chunk = self.memory.read(slot, name, gradient.device, (None,))
            if chunk is not None:
                owed = torch.zeros(gradient.shape, dtype=chunk.dtype, device=chunk.device) if owed is None else owed
                part = owed.view(-1)[self.group.rank * len(chunk) :][: len(chunk)]
                # Of the mean, and no other rank has it.
                part.add_(chunk[: len(part)], alpha=self.group.size)
        return owed

    @property
    def verdict(self) -> Tensor:
        """Whether every gradient so far was finite on every rank, on their device: the host does not wait for it."""
        found = super().verdict
        if not self._trial.is_last:
            return found
        plain = self._plain.verdict
        return found.to(plain.device) & plain

    def commit(self, finite: Optional[bool] = None) -> bool:
        """End the step; False, and no trace of it, if a gradient was not finite on any rank."""
        candidate, is_last = self._trial.candidate, self._trial.is_last
        finite = bool(self.verdict) if finite is None else finite
        if is_last and candidate is None:
            self._blocks = self._plain._blocks
        applied = super().commit(finite)
        self._plain.rollback()
        if applied and is_last:
            self.reducer.blocks = self._plain._blocks  # of the plain steps that follow
            if candidate is not None and self._error is not None:
                sent = sum(block.sent_bytes for block in self._blocks)
                dense = sum(block.dense_bytes for block in self._blocks)
                self.reducer._compare(candidate, self._error, sent, dense)
            self.reducer.memory = Memory()  # nothing is owed any more
        self.reducer._end_trial(applied)
        return applied
