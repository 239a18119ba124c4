"""What the callbacks of one Trainer share: one recorder, one clock of steps and ranks, one exchange between ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_parallel import comm, tracing
from lightning_parallel.callbacks.collective_tracer import (
    CollectiveTracer,
    blind_spots,
    trace_collectives,
    trace_ddp_buckets,
    tracer_for,
)
from lightning_parallel.comm import PROFILING, Group, ThreadExecutor
from lightning_parallel.compat import Patches
from lightning_parallel.compat.twins import is_a, kinds_of
from lightning_parallel.mesh import DATA, TENSOR, Mesh
from lightning_parallel.tracing import OTHER, CallCounter, OpenSpan, Recorder, Window

__all__ = [
    "ClockOffset",
    "CudaClock",
    "PHASES",
    "Session",
    "clock_id",
    "compare_clocks",
    "mesh_of",
    "phase_of",
]


PINGS = 16
ANCHOR_MS = 1000.0
"""CUDA gives the time between two events in single precision: over a second, to less than a tenth of a microsecond."""


class CudaClock:
    """Reads the time of a CUDA device from events in its streams, after the fact.

    Host and device time are compared once, when the clock is made. From then on times are differences between events,
    to an event at most a second earlier. The two oscillators drift apart by some microseconds a second at most.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = perf_counter_ns()  # the host wakes up some microseconds late, once and for all

    def mark(self) -> torch.cuda.Event:
        """Put a mark into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_on_main_stream(self) -> bool:
        """Return whether the current stream is the one in which the clock was made: the one that computes."""
        return torch.cuda.current_stream(self._device) == self._main

    def completion(self, work: Any) -> torch.cuda.Event:
        """Make a mark that is passed when `work` is complete, without delaying the stream that computes."""
        event = torch.cuda.Event(enable_timing=True)
        # `work.wait()` makes the current stream wait, so it must not be the one that computes.
        with torch.cuda.stream(self._side):
            work.wait()
            event.record(self._side)
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has passed `mark`."""
        return mark.query()

    def read(self, mark: torch.cuda.Event) -> int:
        """Return when the device passed `mark`, in `perf_counter_ns`."""
        elapsed_ms = self._anchor.elapsed_time(mark)
        time_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        # Distances stay short, so that single precision does: marks are read in the order of their time.
        if elapsed_ms > ANCHOR_MS:
            self._anchor = mark
            self._anchor_ns = time_ns
        return time_ns

    def synchronize(self) -> None:
        """Wait for the device to pass all marks."""
        torch.cuda.synchronize(self._device)


class ClockOffset(NamedTuple):
    """Difference between the clock of one rank and that of rank 0, in nanoseconds.

    Attributes:
        offset_ns: What to add to `perf_counter_ns()` here to get that of rank 0.
        uncertainty_ns: How far that may be off.
        unix_ns: What to add to `perf_counter_ns()` here to get `time_ns()` here.
    """

    offset_ns: int
    uncertainty_ns: int
    unix_ns: int


def compare_clocks(group: Group, clock_id: str, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare the clocks of all ranks of `group` with that of its first; every rank must call it.

    Ranks with the same `clock_id` read the same clock. For every other clock, one rank exchanges 16 messages with the
    first rank. The fastest round trip bounds the offset best: the answer was given at some moment within it.

    Args:
        group: All ranks; on CPU.
        clock_id: Identifies the clock that this rank reads.
        now: Reads it.
    """
    ids = comm.all_gather_object(clock_id, group)
    # One rank for each clock: the others on its host read the same one.
    representatives = [ids.index(each) for each in dict.fromkeys(ids) if each != ids[0]]
    mine = (0, 0)
    for representative in representatives:
        if group.rank == 0:
            _answer(group, representative, now)
        elif group.rank == representative:
            mine = _ask(group, now)
    offsets = comm.all_gather_object(mine, group)
    offset, uncertainty = offsets[ids.index(clock_id)]
    return ClockOffset(offset, uncertainty, time_ns() - perf_counter_ns())


def _ask(group: Group, now: Callable[[], int]) -> tuple[int, int]:
    """Ask the first rank for its time; returns what to add to this rank's, and how far off that may be."""
    answer = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(PINGS):
        begin = now()
        comm.isend(answer, group, 0).wait()
        comm.irecv(answer, group, 0).wait()
        end = now()
        trips.append((end - begin, int(answer.item()) - (begin + end) // 2))
    # The answer was given between `begin` and `end`: half the trip is the largest possible error.
    length, offset = min(trips)
    return offset, (length + 1) // 2


def _answer(group: Group, asker: int, now: Callable[[], int]) -> None:
    """Tell `asker` the time, as often as it asks."""
    question = torch.zeros(1, dtype=torch.int64)
    for _ in range(PINGS):
        comm.irecv(question, group, asker).wait()
        comm.isend(torch.tensor([now()]), group, asker).wait()


def clock_id() -> str:
    """Identify the clock that `perf_counter_ns` reads: that of one boot of one host, in one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    # Containers on one host share its clock unless they have a time namespace; elsewhere than on Linux the name serves.
    if not (boot.exists() and namespace.is_symlink()):
        return platform.node()
    return f"{boot.read_text()} {namespace.readlink()}"


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
"""Phases that keep the time of what runs in them: the forward of a validation step is validation."""

# The names come with their owner, such as `[Strategy]DDPStrategy.training_step`: which strategy it is does not matter.
_ACTIONS = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "data_wait",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "save_checkpoint": "checkpoint",
}
# Callbacks are announced, too, and may have methods of the same names: their time is that of the phase around them.
_OWNERS = ("[Strategy]", "[LightningModule]", "[_TrainingEpochLoop]")


class Member(Protocol):
    """A participant of a session: the accumulator of a callback."""

    def add(self, window: Window) -> None:
        """Add a step."""

    def end(self, window: Window) -> None:
        """Add the time after the last step."""

    def share(self) -> Any:
        """Return what the other ranks need to know so far: picklable, and small."""


class Session:
    """Recording of one `fit`, and exchange of results between the ranks.

    The first member that joins leads: it says when a step ends. Ranks exchange what their members share in a group and
    on a thread used for nothing else, so that training never waits. A rank that does not answer within the deadline
    ends the exchange, not the training; `failure` then says why reports are incomplete.

    Args:
        trainer: In `fit`, with the strategy set up.

    Attributes:
        mesh: The mesh of all ranks.
        rank: Global rank of this process.
        group: All ranks, for the callbacks' exchange only; always gloo, even under NCCL.
        recorder: Records this rank's spans; None before training begins.
        calls: Collectives issued in each group, see `Recorder.calls`.
        one_clock: Whether `perf_counter_ns` is the same clock on all ranks: they run on one host.
        missing: The communication of the strategy that is not recorded, in sentences.
        steps: Steps counted, without those that warm up.
        latest: What the ranks shared last: by rank, then by member; empty before the first exchange, or if it fails.
        failure: Why the exchange between the ranks ended early, if it did.
    """

    DEADLINE = timedelta(seconds=60)

    def __init__(self, trainer: Trainer) -> None:
        self.mesh = mesh_of(trainer)
        self.rank = trainer.global_rank
        self.members: list[Member] = []
        self.every_n_steps = 0
        self.warmup_steps = 0
        self.recorder: Recorder | None = None
        self.steps = 0
        self.latest: list[list[Any]] = []
        self.failure: str | None = None
        self.device: torch.device = trainer.strategy.root_device
        self.group = self._create_group(trainer)
        self.calls: dict[tuple[Any, ...], CallCounter] = {}
        self.one_clock = len(set(comm.all_gather_object(clock_id(), self.group))) == 1
        self.missing: list[str] = []
        self._worker: ThreadExecutor | None = None
        self._pending: Callable[[], Any] | None = None
        self._is_idle = True
        self._tracer: CollectiveTracer | None = None
        self._context = ExitStack()

    def _create_group(self, trainer: Trainer) -> Group:
        if trainer.world_size == 1:
            return Group.alone(PROFILING)
        # On NCCL an exchange would run on the device, after all the training that is queued there. Nor may it share a
        # group with training: it is issued from another thread, so that ranks would issue calls in different orders.
        process_group = dist.new_group(timeout=self.DEADLINE, backend="gloo")
        return Group.of(process_group, PROFILING)

    # ------------------------------------------------------------------------------------------------------- members

    @classmethod
    def of(cls, trainer: Trainer) -> Session:
        """Return the session of the running `fit`, which the first caller begins; every rank must call it."""
        if trainer not in _sessions:
            _sessions[trainer] = cls(trainer)
        return _sessions[trainer]

    def join(self, member: Member, every_n_steps: int, warmup_steps: int) -> None:
        """Add a member, which gets every step after the first `warmup_steps`.

        The smallest `every_n_steps` of all members, steps between two exchanges, and the largest `warmup_steps` count.
        """
        self.members.append(member)
        self.every_n_steps = min(every_n_steps, self.every_n_steps or every_n_steps)
        self.warmup_steps = max(warmup_steps, self.warmup_steps)

    def is_led_by(self, member: Member | None) -> bool:
        """Return whether `member` says when a step ends; None leads as long as there is no member."""
        return next(iter(self.members), None) is member

    # --------------------------------------------------------------------------------------------------------- steps

    @property
    def active_recorder(self) -> Recorder:
        """The recorder, once training has begun.

        Raises:
            RuntimeError: Before.
        """
        if self.recorder is None:
            raise RuntimeError("nothing is recorded before training begins")
        return self.recorder

    def begin(self, trainer: Trainer) -> None:
        """Begin to record; `close` undoes every change of the trainer, of its parts and of torch."""
        # Before the recorder starts: a CUDA clock waits for the device, which must not count as part of the first step.
        clock = CudaClock(self.device) if self.device.type == "cuda" else None
        self.recorder = Recorder(clock=clock, absorbing=ABSORBING, calls=self.calls)
        self._context.enter_context(tracing.activate(self.recorder))
        self._context.enter_context(lightning_phases(trainer))
        if trainer.world_size > 1:
            self._tracer = tracer_for(trainer, self.mesh)
            self._context.enter_context(trace_collectives(self._tracer))
            self._context.enter_context(trace_ddp_buckets(self._tracer, trainer.strategy))
            self.missing += blind_spots(trainer)

    def after_backward(self) -> None:
        """End the collectives that others issued in backward: the gradients are there."""
        if self.recorder is not None and self._tracer is not None:
            self._tracer.finish_pending(self.recorder)

    def end_step(self) -> None:
        """End a step: hand it to the members, and every n steps exchange what they share."""
        recorder = self.active_recorder
        # Where a device computes these are earlier steps: it is behind the host.
        for window in recorder.close_step():
            self._hand_out(window)
        # All ranks count the same steps, so that they exchange at the same ones without agreeing on it.
        if self.group.size > 1 and recorder.step % self.every_n_steps == 0:
            self._exchange()

    def _hand_out(self, window: Window) -> None:
        if window.step >= self.warmup_steps:
            self.steps += 1
            for member in self.members:
                member.add(window)

    def end(self) -> None:
        """End the recording, and exchange for the last time. Waits for the other ranks, up to the deadline."""
        *steps, tail = self.active_recorder.close_step(wait=True)
        # Nothing is recorded from here on: members and the exchange are not part of training.
        self._context.close()
        for window in steps:
            self._hand_out(window)
        # Without a step that counts there is none to which the time after the last one could be added.
        if self.steps:
            for member in self.members:
                member.end(tail)
        self._exchange()
        self._wait()

    def close(self) -> None:
        """Stop recording and destroy the group; a second call does nothing."""
        self._context.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        # While a collective is in flight, which a lost rank may keep so, the group must stay.
        if self._is_idle and self.group.process_group is not None:
            dist.destroy_process_group(self.group.process_group)
            self.group = Group.alone(PROFILING)
        # The next `fit` of the Trainer gets a new session.
        for trainer, session in list(_sessions.items()):
            if session is self:
                del _sessions[trainer]

    # ------------------------------------------------------------------------------------------------------ exchange

    def gather(self, value: Any) -> list[Any] | None:
        """Return the `value` of every rank, by rank; None if not all answer. Every rank must call it, and waits."""
        self._submit(value, lambda values: None)
        return self._wait()

    def _exchange(self) -> None:
        def keep(values: list[list[Any]]) -> None:
            self.latest = values

        self._submit([member.share() for member in self.members], keep)

    def _submit(self, value: Any, keep: Callable[[list[Any]], None]) -> None:
        if self.failure is not None:
            return
        if self._worker is None:
            self._worker = ThreadExecutor(torch.device("cpu"))

        def call() -> list[Any] | None:
            # After a failure ranks no longer issue the same calls, so that what was submitted since must not run.
            if self.failure is not None:
                return None
            try:
                values = comm.all_gather_object(value, self.group)
            except RuntimeError as error:  # the deadline has passed, or a rank is gone: training need not end for it
                self.failure = str(error)
                self.latest = []
                return None
            keep(values)
            return values

        self._pending = self._worker.submit(call)
        self._is_idle = False

    def _wait(self) -> list[Any] | None:
        """Wait for the latest submission; each of its collectives has a deadline."""
        pending = self._pending
        self._pending = None
        self._is_idle = True
        return None if pending is None else pending()


# Weak, as a Trainer may go without a teardown. Callbacks know only the Trainer in common.
_sessions: WeakKeyDictionary[Trainer, Session] = WeakKeyDictionary()


def mesh_of(trainer: Trainer) -> Mesh:
    """Return the mesh of the trainer's strategy; strategies that know only replicas have one axis."""
    mesh = getattr(trainer.strategy, "mesh", None)
    if isinstance(mesh, Mesh):
        return mesh
    if is_a(trainer.strategy, ModelParallelStrategy):
        sizes = trainer.strategy.device_mesh
        return Mesh(data_parallel=sizes[DATA].size(), tensor_parallel=sizes[TENSOR].size())
    return Mesh(data_parallel=trainer.world_size)


# ------------------------------------------------------------------------------------------------------------- phases


@cache
def phase_of(action: str) -> str | None:
    """Return the phase of an action as Lightning names it: `[Strategy]DDPStrategy.training_step` is `forward`."""
    if action.startswith(_OWNERS):
        return _ACTIONS.get(action.rpartition(".")[2])
    return _ACTIONS.get(action)


@contextmanager
def lightning_phases(trainer: Trainer) -> Iterator[None]:
    """Inside the block, record Lightning's actions as phases.

    Whatever the strategy, Lightning's profiler is told of every start and stop; only of the backward it is not told
    under manual optimization, so that one is taken from the strategy itself.
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
        # Most actions have no phase, and opened nothing.
        if opened and opened[-1][0] == action_name:
            opened.pop()[1].__exit__(None, None, None)
        stop(action_name)

    def profile(action_name: str) -> OpenSpan:
        phase = phase_of(action_name)
        return nothing if phase is None else tracing.span(phase, phase)

    patches.replace(profiler, "start", start_phase)
    patches.replace(profiler, "stop", stop_phase)
    # About a hundred actions a step: the profiler that does nothing need not even be asked to.
    if type(profiler) in kinds_of(PassThroughProfiler):
        patches.replace(profiler, "profile", profile)


def _in_phase(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with tracing.span(phase, phase):
            return function(*args, **kwargs)

    return recorded
