"""The session that the callbacks of a Trainer share: one recorder, one clock, and one exchange between ranks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_parallel import comm, tracing
from lightning_parallel.callbacks.recording.clocks import ClockOffset, CudaClock, clock_id, compare_clocks
from lightning_parallel.callbacks.recording.collective_tracer import (
    CollectiveTracer,
    blind_spots,
    trace_collectives,
    tracer_for,
)
from lightning_parallel.comm import PROFILING, Group, ThreadExecutor
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.twins import is_a, kinds_of
from lightning_parallel.mesh import DATA, TENSOR, Mesh
from lightning_parallel.tracing import OTHER, CallCounter, OpenSpan, Recorder, Window

__all__ = [
    "PHASES",
    "Accumulator",
    "Session",
    "mesh_of",
    "phase_of",
]


PHASES = (
    "data_wait",
    "forward",
    "backward",
    "communication_exposed",
    "pipeline_wait",
    "optimizer",
    "checkpoint",
    "validation",
    OTHER,
)
"""Every nanosecond of a step belongs to one of these."""

ABSORBING = ("checkpoint", "validation")
"""Phases that keep the time of phases inside them: the forward of a validation step is validation."""

# Lightning prefixes names with their owner, such as `[Strategy]DDPStrategy.training_step`. Any strategy counts.
_ACTIONS = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "data_wait",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "save_checkpoint": "checkpoint",
}
# Lightning announces callbacks, too. Their methods may have the same names, but belong to the surrounding phase.
_OWNERS = ("[Strategy]", "[LightningModule]", "[_TrainingEpochLoop]")


class Accumulator(ABC):
    """Adds up the measurements of one callback on one rank. Holds plain numbers only, and does not communicate."""

    def add(self, window: Window) -> None:  # noqa: B027 callbacks that do not measure time need no spans
        """Add a step; does nothing by default."""

    def end(self, window: Window) -> None:  # noqa: B027 few accumulators use it
        """Add the time after the last step, such as its validation and its checkpoint; does nothing by default."""

    @abstractmethod
    def share(self) -> Any:
        """Return the data that the other ranks need so far: picklable and small."""

    @abstractmethod
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        """Return the keys of the report from the shared data of the ranks, without signals that no rank has."""

    def scalars(self) -> dict[str, float]:
        """Return values of this rank to log, over the steps since the last call."""
        return {}


class Session:
    """Recording of one `fit`, and exchange of results between the ranks.

    The first member that joins leads the session: it reports the end of each step. Ranks exchange the data of their
    members in a separate group and on a separate thread, so training never waits. A rank that does not answer within
    the deadline ends the exchange, not the training. `failure` then says why reports are incomplete.

    Args:
        trainer: In `fit`, with the strategy set up.

    Attributes:
        mesh: The mesh of all ranks.
        rank: Global rank of this process.
        group: All ranks, for the callbacks' exchange only; always gloo, even under NCCL.
        recorder: Records this rank's spans; None before training begins.
        calls: Collectives issued in each group, see `Recorder.calls`.
        cores: Number of processors of this rank; its share if several ranks use the same processors.
        clocks: By rank, the offset of its clock to the clock of the first rank, as of the last exchange; None if all
            ranks read the same clock.
        clock: The offset of the clock of this rank, as of the last exchange.
        missing: The communication of the strategy that is not recorded, in sentences.
        steps: Steps counted, without the warm-up.
        latest: The last shared data: by rank, then by member. Empty before the first exchange and after a failed
            one. On all ranks but the first, empty until the end of training.
        failure: Reason for an early end of the exchange between the ranks; None without one.
        bar: Figures that the members add to the progress bar; None where there is no bar.
    """

    DEADLINE = timedelta(seconds=60)
    MOST_WINDOWS = 32
    MOST_SPANS = 4096

    def __init__(self, trainer: Trainer) -> None:
        self.mesh = mesh_of(trainer)
        self.rank = trainer.global_rank
        self.members: list[Accumulator] = []
        self.every_n_batches = 0
        self.warmup_batches = 0
        self.recorder: Recorder | None = None
        self.steps = 0
        self.latest: list[list[Any]] = []
        self.failure: str | None = None
        self.bar: dict[str, str] | None = None
        self.device: torch.device = trainer.strategy.root_device
        self.group = self._create_group(trainer)
        self.calls: dict[tuple[Any, ...], CallCounter] = {}
        # The clock tells hosts apart. The processor numbers tell apart the ranks of a host that share no processors.
        place = clock_id(), processors()
        places = comm.all_gather_object(place, self.group)
        is_one_clock = len({clock for clock, _ in places}) == 1
        self.clocks: dict[int, ClockOffset] | None = None if is_one_clock else {}
        self.clock = ClockOffset.none() if is_one_clock else compare_clocks(self.group, clock_id())
        self.cores = min(len(place[1]), quota_of_container()) / places.count(place)
        self.missing: list[str] = []
        self._windows: list[Window] = []
        self._num_spans = 0
        self._worker: ThreadExecutor | None = None
        self._pending: Callable[[], Any] | None = None
        self._is_idle = True
        self._tracer: CollectiveTracer | None = None
        self._context = ExitStack()

    def _create_group(self, trainer: Trainer) -> Group:
        if trainer.world_size == 1:
            return Group.alone(PROFILING)
        # With NCCL, an exchange would run on the device, after all queued training. It must not share a group with
        # training either: another thread issues it, so ranks would issue their calls in different orders.
        process_group = dist.new_group(timeout=self.DEADLINE, backend="gloo")
        return Group.of(process_group, PROFILING)

    # ------------------------------------------------------------------------------------------------------- members

    @classmethod
    def of(cls, trainer: Trainer) -> Session:
        """Return the session of the running `fit`, which the first caller begins; every rank must call it."""
        if trainer not in _sessions:
            _sessions[trainer] = cls(trainer)
        return _sessions[trainer]

    def join(self, member: Accumulator, every_n_batches: int, warmup_batches: int) -> None:
        """Add a member, which gets every step after the first `warmup_batches`.

        The smallest `every_n_batches` (steps between two exchanges) and the largest `warmup_batches` of all members
        count.
        """
        self.members.append(member)
        self.every_n_batches = min(every_n_batches, self.every_n_batches or every_n_batches)
        self.warmup_batches = max(warmup_batches, self.warmup_batches)

    def is_led_by(self, member: Accumulator | None) -> bool:
        """Return whether `member` reports the end of each step; None leads while the session has no member."""
        return next(iter(self.members), None) is member

    # --------------------------------------------------------------------------------------------------------- steps

    @property
    def active_recorder(self) -> Recorder:
        """The recorder, once training has begun.

        Raises:
            RuntimeError: If training has not begun.
        """
        if self.recorder is None:
            raise RuntimeError("Nothing is recorded before training begins")
        return self.recorder

    def begin(self, trainer: Trainer) -> None:
        """Begin to record; `close` undoes every change of the trainer, of its parts and of torch."""
        # Before the recorder starts: a CUDA clock waits for the device, and the wait is no part of the first step.
        clock = CudaClock(self.device) if self.device.type == "cuda" else None
        self.recorder = Recorder(clock=clock, absorbing=ABSORBING, calls=self.calls)
        self._context.enter_context(tracing.activate(self.recorder))
        self._context.enter_context(lightning_phases(trainer))
        bar = trainer.progress_bar_callback
        if bar is not None and self.rank == 0:
            self.bar, metrics = {}, bar.get_metrics
            # Not through `log` of the module: its values would become metrics that other callbacks monitor.
            self._context.enter_context(patched(bar, "get_metrics", lambda *args: {**metrics(*args), **self.bar}))
        if trainer.world_size > 1:
            self._tracer = tracer_for(trainer, self.mesh)
            self._context.enter_context(trace_collectives(self._tracer, self.recorder))
            self.missing += blind_spots()

    def after_backward(self) -> None:
        """Charge the waits at the end of a backward pass, when the gradients are complete."""
        if self.recorder is not None and self._tracer is not None:
            self._tracer.finish_pending(self.recorder)

    def end_step(self) -> None:
        """End a step, and exchange the data of the members every n steps; see `hand_out` for their steps."""
        recorder = self.active_recorder
        if self._tracer is not None:
            self._tracer.end_step(recorder)
        # With a device these are earlier steps: the device is behind the host.
        for window in recorder.close_step():
            self._keep(window)
        if len(self._windows) >= self.MOST_WINDOWS or self._num_spans >= self.MOST_SPANS:
            self.hand_out()
        # All ranks count the same steps, so they exchange after the same steps without any agreement.
        if self.group.size > 1 and recorder.step % self.every_n_batches == 0:
            self._exchange()

    def _keep(self, window: Window) -> None:
        if window.step >= self.warmup_batches:
            self.steps += 1
            self._windows.append(window)
            self._num_spans += len(window.spans)

    def hand_out(self) -> None:
        """Hand the ended steps to the members; must run before anything reads a member.

        Hands out many steps at once. After a training step, no data of a member is left in the processor's caches, so
        adding a single step takes five times as long.
        """
        windows, self._windows, self._num_spans = self._windows, [], 0
        for member in self.members if windows else ():
            for window in windows:
                member.add(window)

    def end(self) -> None:
        """End the recording, and exchange for the last time. Waits for the other ranks, up to the deadline."""
        # The last window holds the time after the last step.
        *steps, tail = self.active_recorder.close_step(wait=True)
        # Stop recording here: the members and the exchange are not part of training.
        self._context.close()
        for window in steps:
            self._keep(window)
        self.hand_out()
        # The tail is distributed over the counted steps, so there must be one.
        if self.steps:
            for member in self.members:
                member.end(tail)
        self._exchange(with_all=True)
        self._wait()

    def close(self) -> None:
        """Stop recording and destroy the group; a second call does nothing."""
        self._context.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        # The group must stay while a collective is in flight; a lost rank may keep it in flight.
        if self._is_idle and self.group.process_group is not None:
            dist.destroy_process_group(self.group.process_group)
            self.group = Group.alone(PROFILING)
        # The next `fit` of the Trainer gets a new session.
        for trainer, session in list(_sessions.items()):
            if session is self:
                del _sessions[trainer]

    @property
    def updates_bar(self) -> bool:
        """Tell whether the members have new figures of all ranks for the progress bar."""
        is_due = self.recorder is not None and self.recorder.step % self.every_n_batches == 0
        return self.bar is not None and is_due and (self.group.size == 1 or bool(self.latest))

    # ------------------------------------------------------------------------------------------------------ exchange

    def gather(self, value: Any) -> list[Any] | None:
        """Return the `value` of every rank, by rank; None if not all answer. Every rank must call it, and waits."""
        self._submit(value, lambda values: None)
        return self._wait()

    def _exchange(self, with_all: bool = False) -> None:
        """Send the shared data of all members to the first rank, or to all ranks."""
        self.hand_out()
        self._submit([member.share() for member in self.members], self._keep_latest, to_first=not with_all)

    def _keep_latest(self, values: list[list[Any]]) -> None:
        self.latest = values

    def _submit(self, value: Any, keep: Callable[[list[Any]], None], to_first: bool = False) -> None:
        if self.failure is not None:
            return
        if self._worker is None:
            self._worker = ThreadExecutor(torch.device("cpu"))

        def call() -> list[Any] | None:
            # After a failure, ranks no longer issue the same calls. Calls submitted since then must not run.
            if self.failure is not None:
                return None
            try:
                values = self._gather_clocks_and(value, to_first)
            except RuntimeError as error:  # the deadline has passed, or a rank is gone: training need not end for it
                self.failure = str(error)
                self.latest = []
                return None
            if values is not None:
                keep(values)
            return values

        self._pending = self._worker.submit(call)
        self._is_idle = False

    def _gather_clocks_and(self, value: Any, to_first: bool) -> list[Any] | None:
        # Clocks of several hosts drift, so compare them again for the times of this exchange.
        if self.clocks is not None:
            self.clock = compare_clocks(self.group, clock_id())
        gather = comm.gather_object if to_first else comm.all_gather_object
        found = gather((self.clock, value), self.group)
        if found is None:
            return None
        if self.clocks is not None:
            self.clocks.update({rank: offset for rank, (offset, _) in enumerate(found)})
        return [shared for _, shared in found]

    def _wait(self) -> list[Any] | None:
        """Wait for the latest submission; each of its collectives has a deadline."""
        # The worker runs its calls in order, so the latest call ends last.
        pending = self._pending
        self._pending = None
        self._is_idle = True
        return None if pending is None else pending()


# The callbacks have only the Trainer in common. Weak keys: a Trainer may disappear without a teardown.
_sessions: WeakKeyDictionary[Trainer, Session] = WeakKeyDictionary()


def mesh_of(trainer: Trainer) -> Mesh:
    """Return the mesh of the trainer's strategy; a strategy without a mesh has only replicas."""
    mesh = getattr(trainer.strategy, "mesh", None)
    if isinstance(mesh, Mesh):
        return mesh
    if is_a(trainer.strategy, ModelParallelStrategy):
        sizes = trainer.strategy.device_mesh
        return Mesh(data_parallel=sizes[DATA].size(), tensor_parallel=sizes[TENSOR].size())
    return Mesh(data_parallel=trainer.world_size)


def processors() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota_of_container() -> float:
    """Return the number of processors that the container may use at once; infinity without a limit."""
    with suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        # Without a limit the file holds "max", which is no number.
        return int(most) / int(period)
    return float("inf")


# ------------------------------------------------------------------------------------------------------------- phases


@cache
def phase_of(action: str) -> str | None:
    """Return the phase of an action as Lightning names it: `[Strategy]DDPStrategy.training_step` is `forward`."""
    if action.startswith(_OWNERS):
        return _ACTIONS.get(action.rpartition(".")[2])
    return _ACTIONS.get(action)


@contextmanager
def lightning_phases(trainer: Trainer) -> Iterator[None]:
    """Record Lightning's actions as phases inside the block.

    Under any strategy, Lightning tells its profiler of every start and stop. The exception is the backward under manual
    optimization, so this patches the backward of the strategy.
    """
    patches = Patches()
    try:
        _record_actions(trainer.profiler, patches)  # type: ignore[attr-defined]
        backward = trainer.strategy.backward
        patches.replace(trainer.strategy, "backward", _in_phase(backward, "backward"))
        yield
    finally:
        patches.undo()


def _record_actions(profiler: Profiler, patches: Patches) -> None:
    """Let `profiler` record phases in addition to its own work."""
    # `start` and `stop` are separate calls, so the spans in between are kept here.
    opened: list[tuple[str, OpenSpan]] = []
    start = profiler.start
    stop = profiler.stop
    nothing = OpenSpan()

    def start_phase(action_name: str) -> None:
        start(action_name)
        phase = phase_of(action_name)
        if phase is not None:
            span = tracing.span(phase, phase)
            span.__enter__()
            opened.append((action_name, span))

    def stop_phase(action_name: str) -> None:
        # Most actions have no phase and opened no span. A mismatched name is such an action inside a phase.
        if opened and opened[-1][0] == action_name:
            opened.pop()[1].__exit__(None, None, None)
        stop(action_name)

    def profile(action_name: str) -> OpenSpan:
        phase = phase_of(action_name)
        return nothing if phase is None else tracing.span(phase, phase)

    patches.replace(profiler, "start", start_phase)
    patches.replace(profiler, "stop", stop_phase)
    # A step has about a hundred actions, so skip the call into Lightning's profiler that does nothing.
    if type(profiler) in kinds_of(PassThroughProfiler):
        patches.replace(profiler, "profile", profile)


def _in_phase(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with tracing.span(phase, phase):
            return function(*args, **kwargs)

    return recorded
