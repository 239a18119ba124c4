"""Point-to-point messages between stages: activations forward, gradients back.

Each (sender, receiver, direction) is a channel. Messages are used in the order in which they are made. The schedule
defines that order, so both ends know which message comes next:

    header      stage, microbatch, bytes of a new layout (0: the last one)      between hosts, received one ahead
    layout      if the header announces it                                      between hosts
    tensors     as one operation                                                between devices, received on demand

Gradients consist of tensors only: their shapes equal the shapes of their activations.

No tensor is received ahead. NCCL carries the messages of a group one after the other, so that a receive whose message
comes late would hold up a send behind it. Also, only the header tells the shapes of the tensors.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.compat import users_line
from lightning_parallel.compat.torch import computes_on_parts
from lightning_parallel.pipeline.schedule import Action, Channel, Kind, Schedule
from lightning_parallel.pipeline.skips import Skip

__all__ = [
    "LostMessageError",
    "Message",
    "MessageGroups",
    "MessageLayout",
    "MessageLayouts",
    "StageMessages",
    "TensorSpec",
    "line_of_step",
]


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor on the wire, and whether it needs a gradient.

    Attributes:
        full_shape: The shape of the tensor for the step; that on the wire is smaller if each rank sends its part.
        piece: How the next stage makes a piece of the part; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    full_shape: tuple[int, ...]
    piece: Callable[[Tensor, Any], Tensor] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, tensor.requires_grad, shape)

    @classmethod
    def with_part(cls, tensor: Tensor) -> tuple[TensorSpec, Tensor]:
        """Return the description of a tensor, and the tensor to send."""
        if not computes_on_parts(type(tensor)):
            return cls.of(tensor), tensor
        part, piece = tensor.for_next_stage()  # type: ignore[attr-defined]
        return cls.of(part)._replace(full_shape=tuple(tensor.shape), piece=piece), part

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a buffer that can be used in training, even inside Lightning's inference mode."""
        # Receives are posted ahead: the buffer of a training step may be made while inference mode is still on.
        with torch.inference_mode(False):
            return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class MessageLayout:
    """The tensors that pass from one stage to the next, which are arguments of a layer.

    Attributes:
        index: The layer.
        positions: Which leaves of its arguments.
        tensors: Their shapes and dtypes.
        line: The line of the step that calls it; see `line_of_step`.
        skips: The skip connections whose tensors follow the arguments.
        is_failure: Whether it stands for tensors that a stage cannot make, because a step has failed before. It has
            no tensors.
    """

    index: int
    positions: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    line: str = ""
    skips: tuple[Skip, ...] = ()
    is_failure: bool = False


def line_of_step() -> str:
    """Name the line that runs of the user's step: see `users_line`."""
    is_inside = False

    def is_end(frame: FrameType) -> bool:
        nonlocal is_inside
        # The runtime calls the step, which calls the layers that the runtime runs. The caller may be that runtime.
        name = frame.f_globals.get("__name__")
        was_inside, is_inside = is_inside, is_inside or name not in (_RUNTIME, __name__)
        return name == _RUNTIME and was_inside

    return users_line(is_end)


_RUNTIME = "lightning_parallel.pipeline.runtime"


class Message(NamedTuple):
    """Tensors that pass from stage to stage, and their layout."""

    layout: MessageLayout
    tensors: tuple[Tensor, ...]


@dataclass
class MessageLayouts:
    """The last layout sent by and received by each stage; kept from step to step."""

    sent: dict[int, MessageLayout] = field(default_factory=dict)
    received: dict[int, MessageLayout] = field(default_factory=dict)


_TAGS = {Kind.F: 1, Kind.I: 2}
_HOST_TAG = 3
_HEADER_BYTES = 24  # three int64
MessageGroups = Mapping[Channel, Group]
"""A group of two for each channel that this rank takes part in.

For NCCL, which has no tags, and runs the operations of a group one after the other. With fewer groups, messages of
interleaved schedules would wait for each other, some of them in a circle.
"""


class LostMessageError(RuntimeError):
    """A message did not come, or could not be sent: no more can be exchanged with that rank."""


class _Sends(NamedTuple):
    """The result of an action, being sent to another rank."""

    action: Action
    receiver: int
    pending: list[Pending]


class StageMessages:
    """All messages of this rank in one step.

    Args:
        group: The pipeline group.
        schedule: The schedule of the step; `group`'s position r runs row r.
        device: The device of the tensors.
        layouts: Kept from step to step.
        message_groups: See `MessageGroups`; by default all messages pass through `group`.
    """

    def __init__(
        self,
        group: Group,
        schedule: Schedule,
        device: torch.device,
        layouts: MessageLayouts,
        message_groups: MessageGroups | None = None,
    ) -> None:
        self.group = group
        self.device = device
        self.layouts = layouts
        self.message_groups = message_groups or {}
        self.stage_ranks = schedule.stage_ranks
        self._local: dict[tuple[Kind, int, int], Any] = {}
        # Kept until the gradients return: the sent memory must stay valid, and the layout gives their shapes.
        self._sent: dict[tuple[int, int], tuple[MessageLayout, _Sends]] = {}
        # One queue per rank: a rank uses gradients in the order in which they were sent.
        self._returned: dict[int, deque[_Sends]] = {rank: deque() for rank in range(group.size)}
        self._used = {rank: _used_before(schedule, rank, group.rank) for rank in range(group.size)}
        # By sender: the number of headers that this rank has not begun to receive, and the header under way.
        self._to_come = {
            sender: len(made)
            for (sender, receiver, kind), made in schedule.channels.items()
            if receiver == group.rank and kind is Kind.F
        }
        self._headers: dict[int, Pending] = {}

    def channel(self, kind: Kind, sender: int, receiver: int) -> Group:
        """Return the group for messages of a kind from one rank to another."""
        return self.message_groups.get((sender, receiver, kind), self.group)

    def peer(self, rank: int, channel: Group) -> int:
        """Return the position in `channel` of the rank at a position of the pipeline group."""
        return channel.ranks.index(self.group.ranks[rank])

    def send_activations(self, stage: int, microbatch: int, message: Message) -> None:
        """Send the output of `stage` to the next stage."""
        receiver = self.stage_ranks[stage + 1]
        # Stages of one rank exchange their tensors by reference.
        if receiver == self.group.rank:
            self._local[Kind.F, stage, microbatch] = message
            return
        layout = message.layout
        description = b"" if layout == self.layouts.sent.get(stage) else pickle.dumps(layout)
        self.layouts.sent[stage] = layout
        device = self.channel(Kind.F, self.group.rank, receiver).host_device
        parts = [_header(stage, microbatch, len(description), device)]
        if description:
            # A `bytearray`, because torch warns about buffers that cannot be written to.
            parts.append(torch.frombuffer(bytearray(description), dtype=torch.uint8).to(device))
        sends = self._send(Action(Kind.F, stage, microbatch), message.tensors, receiver, parts)
        self._sent[stage, microbatch] = (layout, sends)

    def receive_activations(self, action: Action) -> Message:
        """Receive the input of `action`'s stage."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage - 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.F, stage - 1, microbatch))
        layout = self._receive_layout(action, sender)
        tensors = self._receive(action, layout.tensors, sender)
        # Before the stage computes with this message, so that the next header arrives meanwhile.
        self._post_header(sender)
        # The sender used these gradients before it made this message: waiting takes no time, and frees them.
        for _ in range(next(self._used[sender])):
            self._finish_sends(self._returned[sender].popleft())
        return Message(layout, tuple(tensors))

    def send_gradients(self, stage: int, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the input of `stage` to the stage before."""
        receiver = self.stage_ranks[stage - 1]
        if receiver == self.group.rank:
            self._local[Kind.I, stage, microbatch] = list(gradients)
            return
        self._returned[receiver].append(self._send(Action(Kind.I, stage, microbatch), gradients, receiver))

    def receive_gradients(self, action: Action) -> list[Tensor]:
        """Receive the gradients of the output of `action`'s stage, for the tensors that need one."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage + 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.I, stage + 1, microbatch))
        layout, sends = self._sent[stage, microbatch]
        # Gradients have no header: only the schedule tells which gradients come.
        gradients = self._receive(action, [spec for spec in layout.tensors if spec.requires_grad], sender)
        # The next stage has used the activation: waiting takes no time, and frees it.
        self._finish_sends(sends)
        del self._sent[stage, microbatch]
        return gradients

    def _send(
        self, action: Action, tensors: Sequence[Tensor], receiver: int, host_parts: Sequence[Tensor] = ()
    ) -> _Sends:
        """Begin to send the result of `action`; `host_parts` precede it, between the hosts."""
        channel = self.channel(action.kind, self.group.rank, receiver)
        peer = self.peer(receiver, channel)
        # Empty tensors are not sent: both ends know from the layout which tensors are empty.
        held = [(_in_memory(tensor), peer) for tensor in tensors if tensor.numel()]
        try:
            # Each `Pending` refers to its tensors, so the memory lives until the wait.
            pending = [comm.isend(part, channel, peer, _HOST_TAG, between_hosts=True) for part in host_parts]
            if held:
                pending.append(comm.exchange(held, [], channel, _TAGS[action.kind]))
        except RuntimeError as error:
            raise self._not_sent(action, receiver, error) from error
        return _Sends(action, receiver, pending)

    def _receive(self, action: Action, layout: Sequence[TensorSpec], sender: int) -> list[Tensor]:
        """Receive tensors that `action` needs."""
        kind = Kind.F if action.kind is Kind.F else Kind.I
        channel = self.channel(kind, sender, self.group.rank)
        peer = self.peer(sender, channel)
        buffers = [spec.empty(self.device) for spec in layout]
        wanted = [(buffer, peer) for buffer in buffers if buffer.numel()]
        if wanted:
            with self._expected(action, sender):
                comm.exchange([], wanted, channel, _TAGS[kind]).wait()
        return buffers

    def post(self) -> None:
        """Begin to receive the first header from each rank that sends activations."""
        for sender in self._to_come:
            self._post_header(sender)

    def _post_header(self, sender: int) -> None:
        if sender not in self._headers and self._to_come[sender]:
            self._to_come[sender] -= 1
            self._headers[sender] = self._begin_bytes(_HEADER_BYTES, sender)

    def _begin_bytes(self, count: int, sender: int) -> Pending:
        channel = self.channel(Kind.F, sender, self.group.rank)
        buffer = torch.empty(count, dtype=torch.uint8, device=channel.host_device)
        return comm.irecv(buffer, channel, self.peer(sender, channel), _HOST_TAG, between_hosts=True)

    def _receive_layout(self, action: Action, sender: int) -> MessageLayout:
        """Receive the header of `action`'s input, and the layout that it announces."""
        with self._expected(action, sender):
            self._post_header(sender)
            header = self._headers.pop(sender).wait()
        stage, microbatch, num_bytes = header.view(torch.int64).tolist()
        if (stage, microbatch) != (action.stage - 1, action.microbatch):
            ranks = self.group.ranks
            raise LostMessageError(
                f"Rank {ranks[self.group.rank]} runs {action} and must receive the output of"
                f" {Action(Kind.F, action.stage - 1, action.microbatch)} from rank {ranks[sender]}; got the"
                f" output of {Action(Kind.F, stage, microbatch)}. The ranks run different schedules"
            )
        if num_bytes:
            with self._expected(action, sender):
                description = self._begin_bytes(num_bytes, sender).wait()
            # Unpickling runs code, but the sender is a rank of the same run, and this rank trusts that code already.
            self.layouts.received[action.stage] = pickle.loads(description.cpu().numpy().tobytes())
        return self.layouts.received[action.stage]

    def _finish_sends(self, sends: _Sends) -> None:
        try:
            for pending in sends.pending:
                pending.wait()
        except RuntimeError as error:
            raise self._not_sent(sends.action, sends.receiver, error) from error

    def _not_sent(self, action: Action, receiver: int, error: RuntimeError) -> LostMessageError:
        ranks = self.group.ranks
        return LostMessageError(
            f"Rank {ranks[self.group.rank]}, pipeline stage {action.stage}, could not send {action} to rank"
            f" {ranks[receiver]}: {error}"
        )

    def finish(self) -> None:
        """Wait until everything has been sent."""
        # A tensor must neither be freed nor written to before its send is complete.
        for _, sends in self._sent.values():
            self._finish_sends(sends)
        for returned in self._returned.values():
            while returned:
                self._finish_sends(returned.popleft())
        self._sent.clear()

    @contextmanager
    def _expected(self, action: Action, sender: int) -> Iterator[None]:
        """Receive a message that `action` needs inside the block.

        Raises:
            LostMessageError: If it does not come; names the waiting rank and the missing message.
        """
        try:
            yield
        except RuntimeError as error:
            needed = action._replace(stage=action.stage + (-1 if action.kind is Kind.F else 1))
            ranks = self.group.ranks
            raise LostMessageError(
                f"Rank {ranks[self.group.rank]}, pipeline stage {action.stage}, waited in vain at {action} for"
                f" {needed} of rank {ranks[sender]}: {error}"
            ) from error


def _used_before(schedule: Schedule, sender: int, receiver: int) -> Iterator[int]:
    """Count, for each activation that `sender` makes for `receiver`, the gradients of `receiver` that it used before.

    The count starts at the previous activation, in the order of the sender's row.
    """
    used = 0
    for kind, stage, _ in schedule.rows[sender]:
        if kind is Kind.W or stage + 1 == schedule.num_stages or schedule.stage_ranks[stage + 1] != receiver:
            continue
        if kind is Kind.F:
            yield used
            used = 0
        else:
            used += 1


# The same few headers are sent in every step and never written to; making one costs a copy to the device.
@lru_cache(maxsize=4096)
def _header(stage: int, microbatch: int, num_bytes: int, device: str) -> Tensor:
    return torch.tensor([stage, microbatch, num_bytes], device=device).view(torch.uint8)


def _in_memory(tensor: Tensor) -> Tensor:
    # Messages are bytes: a conjugate or a negative is only a flag on other bytes.
    return tensor.resolve_conj().resolve_neg().contiguous()
