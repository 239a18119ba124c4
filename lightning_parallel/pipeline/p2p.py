"""Point-to-point messages between stages: activations forward, gradients back.

Each (sender, receiver, direction) is a channel with its own tag. Messages are used in the order in which they are
made, which the schedule says, so both ends know what comes next:

    header      stage, microbatch, bytes of a new layout (0: the last one)          always
    tensors     in the last layout; in the header's message if they are small       receives posted ahead
    layout, tensors         only after a header that announces them

If the layout has changed, the tensors that the receiver already waits for are sent without meaning. Gradients need no
header: their shapes are those of the activations that they belong to.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.pipeline.message_layout import Message, MessageLayout, MessageLayouts
from lightning_parallel.pipeline.schedule import Action, Kind, Schedule

__all__ = ["MessageGroups", "StageMessages"]

_TAGS = {Kind.F: 1, Kind.I: 2}
_HEADER_BYTES = 24  # three int64
_Key = tuple[int, int]
MessageGroups = Mapping[tuple[Kind, bool], Group]
"""A group of the same ranks for each kind of message (F or I) and direction (to a higher rank?).

For NCCL, which has no tags: between two ranks, it carries the messages of one group one after the other, both ways.
"""


class _Sends(NamedTuple):
    """The result of an action, being sent to another rank."""

    action: Action
    receiver: int
    pending: list[Pending]


class StageMessages:
    """All messages of this rank in one step.

    Args:
        group: The pipeline group.
        schedule: What will run; `group`'s position r runs row r.
        device: Where the tensors are.
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
        self._sent: dict[_Key, tuple[MessageLayout, _Sends]] = {}
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
        return self.message_groups.get((kind, receiver > sender), self.group)

    def send_activations(self, stage: int, microbatch: int, message: Message) -> None:
        """Send the output of `stage` to the next stage."""
        receiver = self.stage_ranks[stage + 1]
        # Stages of one rank exchange their tensors by reference.
        if receiver == self.group.rank:
            self._local[Kind.F, stage, microbatch] = message
            return
        layout = message.layout
        last = self.layouts.sent.get(stage)
        # The receiver has posted receives for the last layout: they are filled in any case, or the order of messages on
        # the channel would differ between the two ends.
        description = b"" if layout == last else pickle.dumps(layout)
        wire = [_header(stage, microbatch, len(description), self.device)]
        if last is not None:
            tensors = message.tensors if layout == last else [spec.empty(self.device) for spec in last.tensors]
            if last.packed_bytes:
                wire = [torch.cat([*wire, *map(_as_bytes, tensors)])]
            else:
                wire += tensors
        if layout != last:
            self.layouts.sent[stage] = layout
            # A `bytearray`, since torch warns of buffers that cannot be written to.
            wire.append(torch.frombuffer(bytearray(description), dtype=torch.uint8).to(self.device))
            wire += message.tensors
        sends = self._send(Action(Kind.F, stage, microbatch), wire, receiver)
        self._sent[stage, microbatch] = (layout, sends)
        # Now the shapes of the gradients that will come back are known.
        for gradients in self._gradients.values():
            gradients.post()

    def receive_activations(self, action: Action) -> Message:
        """Receive the input of `action`'s stage."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage - 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.F, stage - 1, microbatch))
        message = self._activations[sender].take(action)
        # The sender used these gradients before it made what has just come: waiting takes no time, and frees them.
        for _ in range(next(self._used[sender])):
            self._finish_sends(self._returned[sender].popleft())
        return message

    def send_gradients(self, stage: int, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the input of `stage` to the stage before."""
        receiver = self.stage_ranks[stage - 1]
        if receiver == self.group.rank:
            self._local[Kind.I, stage, microbatch] = list(gradients)
            return
        self._returned[receiver].append(self._send(Action(Kind.I, stage, microbatch), gradients, receiver))

    def receive_gradients(self, action: Action) -> list[Tensor]:
        """Receive the gradients of the output of `action`'s stage, of those tensors that need one."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage + 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.I, stage + 1, microbatch))
        gradients = self._gradients[sender].take(action)
        # The next stage has used what it was sent: waiting takes no time, and frees the activation.
        self._finish_sends(self._sent.pop((stage, microbatch))[1])
        return gradients

    def _send(self, action: Action, tensors: Sequence[Tensor], receiver: int) -> _Sends:
        """Begin to send the result of `action`."""
        channel = self.channel(action.kind, self.group.rank, receiver)
        tag = _TAGS[action.kind]
        try:
            # Empty tensors are not sent: both ends know from the layout which these are.
            pending = [comm.isend(_in_memory(tensor), channel, receiver, tag) for tensor in tensors if tensor.numel()]
        except RuntimeError as error:
            raise self._not_sent(action, receiver, error) from error
        return _Sends(action, receiver, pending)

    def _finish_sends(self, sends: _Sends) -> None:
        try:
            for pending in sends.pending:
                pending.wait()
        except RuntimeError as error:
            raise self._not_sent(sends.action, sends.receiver, error) from error

    def _not_sent(self, action: Action, receiver: int, error: RuntimeError) -> RuntimeError:
        ranks = self.group.ranks
        return RuntimeError(
            f"rank {ranks[self.group.rank]}, pipeline stage {action.stage}, could not send {action} "
            f"to rank {ranks[receiver]}: {error}"
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
            RuntimeError: If it does not come; says who waits for whom.
        """
        try:
            pending.wait()
        except RuntimeError as error:
            needed = action._replace(stage=action.stage + (-1 if action.kind is Kind.F else 1))
            ranks = self.group.ranks
            raise RuntimeError(
                f"rank {ranks[self.group.rank]}, pipeline stage {action.stage}, waited at {action} for {needed} "
                f"of rank {ranks[sender]}, which did not come: {error}"
            ) from error


def _used_before(schedule: Schedule, sender: int, receiver: int) -> Iterator[int]:
    """Count, for each activation that `sender` makes for `receiver`, the gradients of `receiver` that it used before.

    Counted since the activation before, in the order of the sender's row.
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


# The same few headers are sent in every step, and nobody writes into them; making one copies to the device.
@lru_cache(maxsize=4096)
def _header(stage: int, microbatch: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.tensor([stage, microbatch, num_bytes], device=device).view(torch.uint8)


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
    def begin(cls, tensor: Tensor, group: Group, source: int, tag: int) -> _Posted:
        return cls(tensor, comm.irecv(tensor, group, source, tag) if tensor.numel() else None)


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
            # Layouts go by the stage that receives, `coming` by the one that sends.
            known = self.messages.layouts.received.get(self.coming[0][0] + 1)
            packed_bytes = 0 if known is None else known.packed_bytes
            self.header = self._begin(self._bytes(_HEADER_BYTES + packed_bytes))
            self.expected = [] if known is None or packed_bytes else self._begin_all(known)

    def take(self, action: Action) -> Message:
        """Wait for the next message, and begin to receive the one after it."""
        self.post()
        assert self.header is not None
        packet = self._finish(self.header, action)
        stage, microbatch, num_bytes = packet[:_HEADER_BYTES].view(torch.int64).tolist()
        if (stage, microbatch) != (action.stage - 1, action.microbatch):
            ranks = self.messages.group.ranks
            raise RuntimeError(
                f"rank {ranks[self.messages.group.rank]} runs {action} and expected the output of "
                f"{Action(Kind.F, action.stage - 1, action.microbatch)} from rank {ranks[self.sender]}, got that of "
                f"{Action(Kind.F, stage, microbatch)}: the ranks run different schedules"
            )
        received = self.messages.layouts.received
        if num_bytes:
            # These were in the old layout; their receives have to end before others are posted on the channel.
            for posted in self.expected:
                self._finish(posted, action)
            description = self._finish(self._begin(self._bytes(num_bytes)), action)
            # From a rank of the same run, never from a file: what it runs is code that this rank trusts already.
            received[action.stage] = pickle.loads(description.cpu().numpy().tobytes())
            self.expected = self._begin_all(received[action.stage])
        tensors = [self._finish(posted, action) for posted in self.expected]
        if not self.expected:
            tensors = self._unpacked(packet, received[action.stage])
        self.coming.popleft()
        self.header = None
        # Before the stage computes with this message, so that the next one arrives meanwhile.
        self.post()
        return Message(received[action.stage], tuple(tensors))

    def _unpacked(self, packet: Tensor, layout: MessageLayout) -> list[Tensor]:
        tensors = []
        start = _HEADER_BYTES
        # Copies, since views into the packet would keep all of it alive, and may not be aligned for their dtype.
        for spec in layout.tensors:
            tensor = spec.empty(self.messages.device)
            _as_bytes(tensor).copy_(packet[start : start + spec.num_bytes])
            tensors.append(tensor)
            start += spec.num_bytes
        return tensors

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.messages.device)

    def _begin(self, tensor: Tensor) -> _Posted:
        return _Posted.begin(tensor, self.group, self.sender, _TAGS[Kind.F])

    def _begin_all(self, layout: MessageLayout) -> list[_Posted]:
        return [self._begin(spec.empty(self.messages.device)) for spec in layout.tensors]

    def _finish(self, posted: _Posted, action: Action) -> Tensor:
        if posted.pending is not None:
            self.messages.wait(posted.pending, action, self.sender)
        return posted.tensor


class _Gradients:
    """Receives the gradients of one rank, in order."""

    def __init__(self, messages: StageMessages, sender: int, made: Sequence[Action]) -> None:
        self.messages = messages
        self.sender = sender
        self.group = messages.channel(Kind.I, sender, messages.group.rank)
        self.coming = deque((action.stage - 1, action.microbatch) for action in made)
        self.expected: list[_Posted] | None = None

    def post(self) -> None:
        """Begin to receive the next gradients, once the activations that they belong to have been sent."""
        if self.expected is None and self.coming:
            layout = self.messages.layout_sent(*self.coming[0])
            if layout is not None:
                specs = [spec for spec in layout.tensors if spec.requires_grad]
                self.expected = [
                    _Posted.begin(spec.empty(self.messages.device), self.group, self.sender, _TAGS[Kind.I])
                    for spec in specs
                ]

    def take(self, action: Action) -> list[Tensor]:
        """Wait for the next gradients, and begin to receive those after them."""
        assert self.coming[0] == (action.stage, action.microbatch)
        self.post()
        assert self.expected is not None
        for posted in self.expected:
            if posted.pending is not None:
                self.messages.wait(posted.pending, action, self.sender)
        gradients = [posted.tensor for posted in self.expected]
        self.coming.popleft()
        self.expected = None
        self.post()
        return gradients
