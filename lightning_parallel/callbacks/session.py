"""What the measuring callbacks of one Trainer share: one recorder, one clock of steps, one exchange between ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_parallel import comm, recorder
from lightning_parallel.callbacks.clock import clock_id
from lightning_parallel.callbacks.phases import ABSORBING, lightning_phases
from lightning_parallel.callbacks.stock import foreign_of, show_buckets, unseen
from lightning_parallel.comm import PROFILING, Group, ThreadExecutor
from lightning_parallel.comm.foreign import Foreign, watching
from lightning_parallel.mesh import DATA, TENSOR, Mesh
from lightning_parallel.recorder import Calls, Recorder, Window
from lightning_parallel.recorder.cuda import CudaClock

__all__ = ["Member", "Session", "mesh_of"]


class Member(Protocol):
    """A callback that takes part in a session."""

    def add(self, window: Window) -> None:
        """Take notice of a step."""

    def end(self, window: Window) -> None:
        """Take notice of what came after the last step."""

    def share(self) -> Any:
        """What the other ranks need to know so far: picklable, and small."""


class Session:
    """One `fit`: what is recorded in it, and what the ranks have told each other.

    The first callback that joins leads: it says when a step ends. Ranks exchange what their callbacks share on a group
    of its own and a thread of its own, so that training never waits. A rank that does not answer within the deadline
    ends the exchange, not the training; `failure` then says why reports are incomplete.

    Args:
        trainer: In `fit`, with the strategy set up.

    Attributes:
        mesh: The mesh of all ranks.
        rank: Global rank of this process.
        group: All ranks, for the callbacks' exchange alone. A process of its own on `gloo`, also beside NCCL.
        recorder: What is recorded; None before training begins.
        calls: What was issued in each group, see `Recorder.calls`.
        one_clock: Whether `perf_counter_ns` is the same clock on all ranks: they run on one host.
        missing: What of the strategy's own communication is not seen, in sentences.
        steps: Steps counted, without those that warm up.
        latest: What the ranks shared last: by rank, then by member; empty before the first exchange, or if it fails.
        failure: Why the exchange between the ranks has ended early, if it has.
    """

    DEADLINE = timedelta(seconds=60)

    def __init__(self, trainer: Trainer) -> None:
        self.mesh = mesh_of(trainer)
        self.rank = trainer.global_rank
        self.members: list[Member] = []
        self.exchange_every = self.warmup_steps = 0
        self.recorder: Recorder | None = None
        self.steps = 0
        self.latest: list[list[Any]] = []
        self.failure: str | None = None
        self.device: torch.device = trainer.strategy.root_device
        self.group = self._create_group(trainer)
        self.calls: dict[tuple[Any, ...], Calls] = {}
        self.one_clock = len(set(comm.all_gather_object(clock_id(), self.group))) == 1
        self._worker: ThreadExecutor | None = None
        self._pending: Callable[[], Any] | None = None
        self._settled = True
        self._foreign: Foreign | None = None
        self.missing: list[str] = []
        self._context = ExitStack()

    def _create_group(self, trainer: Trainer) -> Group:
        if trainer.world_size == 1:
            return Group.alone(PROFILING)
        process_group = dist.new_group(timeout=self.DEADLINE, backend="gloo")
        return Group.of(process_group, PROFILING)

    # ------------------------------------------------------------------------------------------------------- members

    @classmethod
    def of(cls, trainer: Trainer) -> Session:
        """The session of the running `fit`, which the first caller begins; every rank must call it."""
        if trainer not in _sessions:
            _sessions[trainer] = cls(trainer)
        return _sessions[trainer]

    def join(self, member: Member, exchange_every: int, warmup_steps: int) -> None:
        """Take part: `member` gets every step after the first `warmup_steps`."""
        self.members.append(member)
        self.exchange_every = min(exchange_every, self.exchange_every or exchange_every)
        self.warmup_steps = max(warmup_steps, self.warmup_steps)

    def is_led_by(self, member: Member | None) -> bool:
        """Whether `member` says when a step ends; None leads as long as there is no member."""
        return next(iter(self.members), None) is member

    # --------------------------------------------------------------------------------------------------------- steps

    def begin(self, trainer: Trainer) -> None:
        """Begin to record."""
        clock = CudaClock(self.device) if self.device.type == "cuda" else None
        self.recorder = Recorder(clock=clock, absorbing=ABSORBING, calls=self.calls)
        self._context.enter_context(recorder.activate(self.recorder))
        self._context.enter_context(lightning_phases(trainer))
        if trainer.world_size > 1:
            self._foreign = foreign_of(trainer, self.mesh)
            self._context.enter_context(watching(self._foreign))
            show_buckets(trainer)
            self.missing += unseen(trainer)

    def after_backward(self) -> None:
        """Take notice that gradients are there, and what others communicated for them is over."""
        if self.recorder is not None and self._foreign is not None:
            self._foreign.settle(self.recorder)

    def end_step(self) -> None:
        """End a step: hand it to the members, and from time to time exchange what they share."""
        assert self.recorder is not None
        for window in self.recorder.close_step():
            self._hand_out(window)
        if self.group.size > 1 and self.recorder.step % self.exchange_every == 0:
            self._exchange()

    def _hand_out(self, window: Window) -> None:
        if window.step >= self.warmup_steps:
            self.steps += 1
            for member in self.members:
                member.add(window)

    def end(self) -> None:
        """End the recording, and exchange for the last time. Waits for the other ranks, up to the deadline."""
        assert self.recorder is not None
        *steps, tail = self.recorder.close_step(wait=True)
        self._context.close()
        for window in steps:
            self._hand_out(window)
        if self.steps:
            for member in self.members:
                member.end(tail)
        self._exchange()
        self._settle()

    def close(self) -> None:
        """Stop recording and let go of the group; does nothing the second time."""
        self._context.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._settled and self.group.process_group is not None:
            dist.destroy_process_group(self.group.process_group)
            self.group = Group.alone(PROFILING)
        for trainer, session in list(_sessions.items()):
            if session is self:
                del _sessions[trainer]

    # ------------------------------------------------------------------------------------------------------ exchange

    def gather(self, value: Any) -> list[Any] | None:
        """The `value` of every rank, by rank; None if not all answer. Every rank must call it, and waits."""
        self._submit(value, lambda values: None)
        return self._settle()

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
            if self.failure is not None:
                return None
            try:
                values = comm.all_gather_object(value, self.group)
            except RuntimeError as error:
                self.failure, self.latest = str(error), []
                return None
            keep(values)
            return values

        self._pending, self._settled = self._worker.submit(call), False

    def _settle(self) -> list[Any] | None:
        """Wait for what was submitted last; each of its collectives has a deadline."""
        pending, self._pending = self._pending, None
        self._settled = True
        return None if pending is None else pending()


_sessions: WeakKeyDictionary[Trainer, Session] = WeakKeyDictionary()


def mesh_of(trainer: Trainer) -> Mesh:
    """The mesh of the trainer's strategy; strategies that know only replicas have one axis."""
    mesh = getattr(trainer.strategy, "mesh", None)
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(trainer.strategy, ModelParallelStrategy):
        sizes = trainer.strategy.device_mesh
        return Mesh(data_parallel=sizes[DATA].size(), tensor_parallel=sizes[TENSOR].size())
    return Mesh(data_parallel=trainer.world_size)
