"""Point-to-point messages between stages: activations forward, gradients back.

Each (sender, receiver, direction) is a channel. Messages are used in the order in which they are made. The schedule
defines that order, so both ends know which message comes next:

    header      stage, microbatch, bytes of a new layout (0: the last one)          always
    tensors     in the last layout; in the header's message if they are small       receives posted ahead
    layout, tensors         only after a header that announces them

If the layout has changed, the tensors that the receiver already waits for are sent without meaning. Gradients need no
header: their shapes equal the shapes of their activations.

A group that carries its messages one after the other (NCCL's) would hold up a send behind a receive that was posted
ahead. With such a group no tensor is posted ahead. The tensors of a message are one operation, issued where the
schedule needs them. Headers and layouts pass between the hosts, and no device waits for them.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.compat import users_line
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


_SMALL_BYTES = 1 << 16  # up to this size a separate message takes longer than a copy


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor on the wire, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize

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

    @property
    def packed_bytes(self) -> int:
        """Bytes of the tensors if they travel in the header's message, 0 if they travel separately."""
        num_bytes = sum(spec.num_bytes for spec in self.tensors)
        return num_bytes if num_bytes <= _SMALL_BYTES else 0


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
_Key = tuple[int, int]
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
        self.is_ordered = group.is_ordered
        self.layouts = layouts
        self.message_groups = message_groups or {}
        self.stage_ranks = schedule.stage_ranks
        self._local: dict[tuple[Kind, int, int], Any] = {}
        # Kept until the gradients return: the sent memory must stay valid, and the layout gives their shapes.
        self._sent: dict[_Key, tuple[MessageLayout, _Sends]] = {}
        # One queue per rank: a rank uses gradients in the order in which they were sent.
        self._returned: dict[int, deque[_Sends]] = {rank: deque() for rank in range(group.size)}
        self._used = {rank: _used_before(schedule, rank, group.rank) for rank in range(group.size)}
        self._activations: dict[int, _Activations] = {}
        self._gradients: dict[int, _Gradients] = {}
        for (sender, receiver, kind), made in schedule.channels.items():
            if receiver == group.rank:
                if kind is Kind.F:
                    self._activations[sender] = _Activations(self, sender, made)
                else:
                    self._gradients[sender] = _Gradients(self, sender, made)

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
        last = self.layouts.sent.get(stage)
        self.layouts.sent[stage] = layout
        description = b"" if layout == last else pickle.dumps(layout)
        action = Action(Kind.F, stage, microbatch)
        if self.is_ordered:
            sends = self._send(action, message.tensors, receiver, description)
        else:
            sends = self._send_at_once(action, self._wire(message, last, action, description), receiver)
        self._sent[stage, microbatch] = (layout, sends)
        # The shapes of the gradients that will come back are known from here on.
        for gradients in self._gradients.values():
            gradients.post()

    def _wire(self, message: Message, last: MessageLayout | None, action: Action, description: bytes) -> list[Tensor]:
        """Return the tensors to send to a receiver that has posted receives for the last layout."""
        # Fill these receives in any case: otherwise the channel's order of messages would differ between the two ends.
        wire = [_header(action.stage, action.microbatch, len(description), self.device)]
        if last is not None:
            tensors = [spec.empty(self.device) for spec in last.tensors] if description else message.tensors
            if last.packed_bytes:
                wire = [torch.cat([*wire, *map(_as_bytes, tensors)])]
            else:
                wire += tensors
        if description:
            wire += [_tensor_of(description, self.device), *message.tensors]
        return wire

    def receive_activations(self, action: Action) -> Message:
        """Receive the input of `action`'s stage."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage - 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.F, stage - 1, microbatch))
        message = self._activations[sender].take(action)
        # The sender used these gradients before it made this message: waiting takes no time, and frees them.
        for _ in range(next(self._used[sender])):
            self._finish_sends(self._returned[sender].popleft())
        return message

    def send_gradients(self, stage: int, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the input of `stage` to the stage before."""
        receiver = self.stage_ranks[stage - 1]
        if receiver == self.group.rank:
            self._local[Kind.I, stage, microbatch] = list(gradients)
            return
        send = self._send if self.is_ordered else self._send_at_once
        self._returned[receiver].append(send(Action(Kind.I, stage, microbatch), gradients, receiver))

    def receive_gradients(self, action: Action) -> list[Tensor]:
        """Receive the gradients of the output of `action`'s stage, for the tensors that need one."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage + 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.I, stage + 1, microbatch))
        gradients = self._gradients[sender].take(action)
        # The next stage has used the activation: waiting takes no time, and frees it.
        self._finish_sends(self._sent.pop((stage, microbatch))[1])
        return gradients

    def _send_at_once(self, action: Action, tensors: Sequence[Tensor], receiver: int) -> _Sends:
        """Begin to send the result of `action`, tensor by tensor."""
        channel = self.channel(action.kind, self.group.rank, receiver)
        tag = _TAGS[action.kind]
        try:
            # Empty tensors are not sent: both ends know from the layout which tensors are empty.
            held = [_in_memory(tensor) for tensor in tensors if tensor.numel()]
            # Each `Pending` refers to its tensor, so the memory lives until the wait.
            pending = [comm.isend(tensor, channel, self.peer(receiver, channel), tag) for tensor in held]
        except RuntimeError as error:
            raise self._not_sent(action, receiver, error) from error
        return _Sends(action, receiver, pending)

    def _send(self, action: Action, tensors: Sequence[Tensor], receiver: int, description: bytes = b"") -> _Sends:
        """Begin to send the result of `action` as one operation; header and layout pass between the hosts."""
        channel = self.channel(action.kind, self.group.rank, receiver)
        peer = self.peer(receiver, channel)
        pending = []
        try:
            if action.kind is Kind.F:
                parts = [_header(action.stage, action.microbatch, len(description), torch.device(channel.host_device))]
                if description:
                    parts.append(_tensor_of(description, torch.device(channel.host_device)))
                pending = [comm.isend(part, channel, peer, _HOST_TAG, between_hosts=True) for part in parts]
            held = [(_in_memory(tensor), peer) for tensor in tensors if tensor.numel()]
            if held:
                # One operation for all tensors, like the receive on the other end.
                pending.append(comm.exchange(held, [], channel, _TAGS[action.kind]))
        except RuntimeError as error:
            raise self._not_sent(action, receiver, error) from error
        return _Sends(action, receiver, pending)

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

    def post(self) -> None:
        """Post the first receive of each channel."""
        for activations in self._activations.values():
            activations.post()
        for gradients in self._gradients.values():
            gradients.post()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        # A tensor must neither be freed nor written to before its send is complete.
        for _, sends in self._sent.values():
            self._finish_sends(sends)
        for returned in self._returned.values():
            while returned:
                self._finish_sends(returned.popleft())
        self._sent.clear()

    def layout_sent(self, stage: int, microbatch: int) -> MessageLayout | None:
        """Return the layout of the output of `stage`, None if it has not been sent yet."""
        sent = self._sent.get((stage, microbatch))
        return None if sent is None else sent[0]

    def wait(self, pending: Pending, action: Action, sender: int) -> None:
        """Wait for a message that `action` needs.

        Raises:
            RuntimeError: If it does not come; names the waiting rank and the missing message.
        """
        try:
            pending.wait()
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
def _header(stage: int, microbatch: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.tensor([stage, microbatch, num_bytes], device=device).view(torch.uint8)


def _tensor_of(data: bytes, device: torch.device) -> Tensor:
    # A `bytearray`, because torch warns about buffers that cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _in_memory(tensor: Tensor) -> Tensor:
    # Messages are bytes: a conjugate or a negative is only a flag on other bytes.
    return tensor.resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    return _in_memory(tensor).view(-1).view(torch.uint8)


@dataclass
class _Posted:
    """A buffer and the receive that fills it; None for an empty buffer, which is never sent."""

    tensor: Tensor
    pending: Pending | None

    @classmethod
    def begin_all(cls, layout: Sequence[TensorSpec], messages: StageMessages, kind: Kind, sender: int) -> list[_Posted]:
        """Begin to receive tensors; in an ordered group, as one operation."""
        channel, tag = messages.channel(kind, sender, messages.group.rank), _TAGS[kind]
        peer = messages.peer(sender, channel)
        buffers = [spec.empty(messages.device) for spec in layout]
        wanted = [(buffer, peer) for buffer in buffers if buffer.numel()]
        if not messages.is_ordered:
            return [cls(one, comm.irecv(one, channel, peer, tag) if one.numel() else None) for one in buffers]
        pending = comm.exchange([], wanted, channel, tag) if wanted else None
        # One operation fills all buffers; the first wait ends it, and later waits return at once.
        return [cls(one, pending if one.numel() else None) for one in buffers]

    def finish(self, messages: StageMessages, action: Action, sender: int) -> Tensor:
        """Wait until it is filled."""
        if self.pending is not None:
            messages.wait(self.pending, action, sender)
        return self.tensor


class _Activations:
    """Receives the activations of one rank, in order."""

    def __init__(self, messages: StageMessages, sender: int, made: Sequence[Action]) -> None:
        self.messages = messages
        self.sender = sender
        self.group = messages.channel(Kind.F, sender, messages.group.rank)
        self.coming = deque((action.stage, action.microbatch) for action in made)
        self.header: _Posted | None = None
        self.expected: list[_Posted] = []

    def post(self) -> None:
        """Begin to receive the next message, if none is under way: header first, then tensors of the last layout."""
        if self.header is None and self.coming:
            # Layouts are keyed by the receiving stage, `coming` by the sending stage.
            known = self.messages.layouts.received.get(self.coming[0][0] + 1)
            # An ordered group posts only the header ahead, which passes between the hosts.
            if self.messages.is_ordered:
                known = None
            # Small tensors of a known layout come in the header's message.
            packed_bytes = 0 if known is None else known.packed_bytes
            self.header = self._begin_bytes(_HEADER_BYTES + packed_bytes)
            self.expected = [] if known is None or packed_bytes else self._begin_all(known)

    def take(self, action: Action) -> Message:
        """Wait for the next message, and begin to receive its successor."""
        self.post()
        assert self.header is not None
        packet = self.header.finish(self.messages, action, self.sender)
        stage, microbatch, num_bytes = packet[:_HEADER_BYTES].view(torch.int64).tolist()
        if (stage, microbatch) != (action.stage - 1, action.microbatch):
            ranks = self.messages.group.ranks
            raise LostMessageError(
                f"Rank {ranks[self.messages.group.rank]} runs {action} and must receive the output of"
                f" {Action(Kind.F, action.stage - 1, action.microbatch)} from rank {ranks[self.sender]}; got the"
                f" output of {Action(Kind.F, stage, microbatch)}. The ranks run different schedules"
            )
        received = self.messages.layouts.received
        # These are in the old layout; their receives have to end before others are posted on the channel.
        tensors = self._finish_all(action)
        if num_bytes:
            description = self._begin_bytes(num_bytes).finish(self.messages, action, self.sender)
            # Unpickling runs code, but the sender is a rank of the same run, and this rank trusts that code already.
            received[action.stage] = pickle.loads(description.cpu().numpy().tobytes())
        layout = received[action.stage]
        if num_bytes or self.messages.is_ordered:
            self.expected = self._begin_all(layout)
            tensors = self._finish_all(action)
        elif not self.expected:
            tensors = self._unpacked(packet, layout)
        self.coming.popleft()
        self.header = None
        # Before the stage computes with this message, so that the next one arrives meanwhile.
        self.post()
        return Message(layout, tuple(tensors))

    def _unpacked(self, packet: Tensor, layout: MessageLayout) -> list[Tensor]:
        tensors = []
        start = _HEADER_BYTES
        # Copies, because views into the packet would keep all of it alive, and may not be aligned for their dtype.
        for spec in layout.tensors:
            tensor = spec.empty(self.messages.device)
            _as_bytes(tensor).copy_(packet[start : start + spec.num_bytes])
            tensors.append(tensor)
            start += spec.num_bytes
        return tensors

    def _begin_bytes(self, count: int) -> _Posted:
        messages = self.messages
        device = self.group.host_device if messages.is_ordered else messages.device
        buffer = torch.empty(count, dtype=torch.uint8, device=device)
        tag = _HOST_TAG if messages.is_ordered else _TAGS[Kind.F]
        peer = messages.peer(self.sender, self.group)
        return _Posted(buffer, comm.irecv(buffer, self.group, peer, tag, between_hosts=messages.is_ordered))

    def _begin_all(self, layout: MessageLayout) -> list[_Posted]:
        return _Posted.begin_all(layout.tensors, self.messages, Kind.F, self.sender)

    def _finish_all(self, action: Action) -> list[Tensor]:
        return [posted.finish(self.messages, action, self.sender) for posted in self.expected]


class _Gradients:
    """Receives the gradients of one rank, in order."""

    def __init__(self, messages: StageMessages, sender: int, made: Sequence[Action]) -> None:
        self.messages = messages
        self.sender = sender
        self.coming = deque((action.stage - 1, action.microbatch) for action in made)
        self.expected: list[_Posted] | None = None

    def post(self) -> None:
        """Begin to receive the next gradients, once their activations have been sent."""
        if not self.messages.is_ordered:
            self._begin()

    def _begin(self) -> None:
        if self.expected is None and self.coming:
            layout = self.messages.layout_sent(*self.coming[0])
            if layout is not None:
                specs = [spec for spec in layout.tensors if spec.requires_grad]
                self.expected = _Posted.begin_all(specs, self.messages, Kind.I, self.sender)

    def take(self, action: Action) -> list[Tensor]:
        """Wait for the next gradients, and begin to receive their successors."""
        # Gradients have no header: only the schedule tells which gradients come.
        assert self.coming[0] == (action.stage, action.microbatch)
        self._begin()
        assert self.expected is not None
        gradients = [posted.finish(self.messages, action, self.sender) for posted in self.expected]
        self.coming.popleft()
        self.expected = None
        self.post()
        return gradients
