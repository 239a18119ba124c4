"""Point-to-point messages between stages: activations forward, gradients back.

Each (sender, receiver, direction) is a channel. Messages are used in the order in which they are made. The schedule
defines that order, so both ends know which message comes next. One message is received ahead on each channel, so that
its transfer begins as soon as it is made:

    tensors and a word      as one operation, in the layout that both ends expect
    layout                  between hosts, if the word announces a new one
    tensors                 as one operation, if the layout is another than the expected one

The word names the stage, the microbatch and the layout. Both ends expect the last layout of a stage once two messages
in a row have had it, and no tensors before. A message of another layout still fills the tensors that are expected, with
bytes without meaning: a receive that is posted needs a message of its size. So does the message of a stage that has
failed. Layouts have numbers, and each is described once.

Gradients consist of tensors only: their shapes equal the shapes of their activations.

NCCL carries the messages of a group one after the other. A receive whose message comes late would hold up a send behind
it, so each channel has a group, which carries messages one way. Nothing is received beyond the end of a step.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict, deque
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
    "FAILURE",
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

    @property
    def has_elements(self) -> bool:
        return 0 not in self.shape

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
class _KnownLayouts:
    """The layouts of a stage's messages, by number; both ends of the channel have the same.

    Attributes:
        known: The layouts.
        last: The number of the last one.
        is_repeated: Whether the last two messages had one layout.
    """

    known: list[MessageLayout] = field(default_factory=list)
    last: int = -1
    is_repeated: bool = False

    @property
    def expected(self) -> int:
        """The number of the layout in which both ends expect the next message, -1 for none."""
        # Lengths that differ in each message would fill one message in two.
        return self.last if self.is_repeated else -1

    def number_of(self, layout: MessageLayout) -> int:
        """Return the number of a layout; a new one gets the next number, or 0 if the list is full."""
        if self.last >= 0 and self.known[self.last] == layout:
            return self.last
        if layout in self.known:
            return self.known.index(layout)
        return len(self.known) % _MOST_LAYOUTS

    def note(self, number: int, new: MessageLayout | None = None) -> None:
        """Note the layout of a message, on both ends."""
        if new is not None:
            del self.known[number:]
            self.known.append(new)
        self.is_repeated = new is None and number == self.last
        self.last = number

    def tensors(self, number: int) -> list[TensorSpec]:
        """Return the tensors of a layout that have elements: both ends know the empty tensors."""
        return [] if number < 0 else [spec for spec in self.known[number].tensors if spec.has_elements]


@dataclass
class MessageLayouts:
    """The layouts sent by and received by each stage, in training and in evaluation; kept from step to step."""

    sent: defaultdict[tuple[int, bool], _KnownLayouts] = field(default_factory=lambda: defaultdict(_KnownLayouts))
    received: defaultdict[tuple[int, bool], _KnownLayouts] = field(default_factory=lambda: defaultdict(_KnownLayouts))


_MOST_LAYOUTS = 256
_FAILED = -1
"""In place of the number of a layout: the stage has failed, and sends no tensors."""
FAILURE = MessageLayout(-1, (), (), is_failure=True)

_TAGS = {Kind.F: 1, Kind.I: 2}
_HOST_TAG = 3
_WORDS = 4  # int64
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


class _Posted(NamedTuple):
    """A receive under way.

    Attributes:
        pending: The receive.
        buffers: The memory of its tensors.
        word: The memory of the word; None for gradients.
        number: The layout that is expected.
    """

    pending: Pending | None
    buffers: list[Tensor]
    word: Tensor | None = None
    number: int = -1


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
        self._is_training = schedule.is_training
        self._local: dict[tuple[Kind, int, int], Any] = {}
        # Kept until the gradients return: the sent memory must stay valid, and the layout gives their shapes.
        self._sent: dict[tuple[int, int], tuple[MessageLayout, _Sends]] = {}
        # One queue per rank: a rank uses gradients in the order in which they were sent.
        self._returned: dict[int, deque[_Sends]] = {rank: deque() for rank in range(group.size)}
        self._used = {rank: _used_before(schedule, rank, group.rank) for rank in range(group.size)}
        # By kind and sender: the actions whose results this rank has not begun to receive, and the receive under way.
        self._to_come = {
            (kind, sender): deque(made)
            for (sender, receiver, kind), made in schedule.channels.items()
            if receiver == group.rank
        }
        self._posted: dict[tuple[Kind, int], _Posted] = {}

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
        layout, tensors = message
        layouts = self.layouts.sent[stage, self._is_training]
        expected = layouts.expected
        number = _FAILED if layout.is_failure else layouts.number_of(layout)
        is_new = number >= 0 and (number >= len(layouts.known) or layouts.known[number] != layout)
        description = pickle.dumps(layout) if is_new else b""
        channel = self.channel(Kind.F, self.group.rank, receiver)
        word = _word(stage, microbatch, number, len(description), self._word_device(channel))
        action = Action(Kind.F, stage, microbatch)
        if number == expected and not is_new:
            pending = self._send(action, [*tensors, word], receiver)
        else:
            fillers = [spec.empty(self.device) for spec in layouts.tensors(expected)]
            pending = self._send(action, [*fillers, word], receiver)
            if description:
                # A `bytearray`, because torch warns about buffers that cannot be written to.
                part = torch.frombuffer(bytearray(description), dtype=torch.uint8).to(channel.host_device)
                pending += self._send(action, [part], receiver, between_hosts=True)
            if number >= 0:
                pending += self._send(action, tensors, receiver)
        if number >= 0:
            layouts.note(number, layout if is_new else None)
        self._sent[stage, microbatch] = (layout, _Sends(action, receiver, pending))
        self._post(Kind.I, receiver)

    def receive_activations(self, action: Action) -> Message:
        """Receive the input of `action`'s stage."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage - 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.F, stage - 1, microbatch))
        message = self._receive_message(action, sender)
        # Before the stage computes with this message, so that the next one arrives meanwhile.
        self._post(Kind.F, sender)
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
        action = Action(Kind.I, stage, microbatch)
        self._returned[receiver].append(_Sends(action, receiver, self._send(action, gradients, receiver)))

    def receive_gradients(self, action: Action) -> list[Tensor]:
        """Receive the gradients of the output of `action`'s stage, for the tensors that need one."""
        _, stage, microbatch = action
        sender = self.stage_ranks[stage + 1]
        if sender == self.group.rank:
            return self._local.pop((Kind.I, stage + 1, microbatch))
        # Gradients have no word: only the schedule tells which gradients come.
        self._post(Kind.I, sender, on_demand=True)
        posted = self._posted.pop((Kind.I, sender))
        with self._expected(action, sender):
            if posted.pending is not None:
                posted.pending.wait()
        # The next stage has used the activation: waiting takes no time, and frees it.
        self._finish_sends(self._sent.pop((stage, microbatch))[1])
        self._post(Kind.I, sender)
        return posted.buffers

    def _send(
        self, action: Action, tensors: Sequence[Tensor], receiver: int, between_hosts: bool = False
    ) -> list[Pending]:
        """Begin to send a part of the result of `action`, as one operation."""
        channel = self.channel(action.kind, self.group.rank, receiver)
        peer = self.peer(receiver, channel)
        # Empty tensors are not sent: both ends know from the layout which tensors are empty.
        held = [(_in_memory(tensor), peer) for tensor in tensors if tensor.numel()]
        if not held:
            return []
        try:
            # Each `Pending` refers to its tensors, so the memory lives until the wait.
            if between_hosts:
                return [comm.isend(held[0][0], channel, peer, _HOST_TAG, between_hosts=True)]
            return [comm.exchange(held, [], channel, _TAGS[action.kind])]
        except RuntimeError as error:
            raise self._not_sent(action, receiver, error) from error

    def _begin(self, kind: Kind, sender: int, specs: Sequence[TensorSpec], word: Tensor | None = None) -> _Posted:
        """Begin to receive tensors, and the word if it is given."""
        channel = self.channel(kind, sender, self.group.rank)
        peer = self.peer(sender, channel)
        buffers = [spec.empty(self.device) for spec in specs]
        wanted = [(buffer, peer) for buffer in buffers if buffer.numel()]
        wanted += [] if word is None else [(word, peer)]
        return _Posted(comm.exchange([], wanted, channel, _TAGS[kind]) if wanted else None, buffers, word)

    def post(self) -> None:
        """Begin to receive the first message from each rank that sends activations."""
        for kind, sender in self._to_come:
            self._post(kind, sender)

    def _post(self, kind: Kind, sender: int, on_demand: bool = False) -> None:
        """Begin to receive the next message of a channel, if there is one and its size is known."""
        to_come = self._to_come.get((kind, sender))
        if not to_come or (kind, sender) in self._posted:
            return
        channel = self.channel(kind, sender, self.group.rank)
        # A receive that waits would hold up the sends of a shared group.
        if not on_demand and channel.is_ordered and (channel is self.group or _waits_block_hosts()):
            return
        _, stage, microbatch = to_come[0]
        number, word, specs = -1, None, list[TensorSpec]()
        if kind is Kind.F:
            layouts = self.layouts.received[stage, self._is_training]
            number = layouts.expected
            specs = layouts.tensors(number)
            word = torch.empty(_WORDS, dtype=torch.int64, device=self._word_device(channel))
        elif (stage - 1, microbatch) in self._sent:
            layout, _ = self._sent[stage - 1, microbatch]
            specs = [spec for spec in layout.tensors if spec.requires_grad]
        else:
            return  # this rank has not made the activation, so nobody knows the shapes
        to_come.popleft()
        user = Action(Kind.F, stage + 1, microbatch) if kind is Kind.F else Action(Kind.B, stage - 1, microbatch)
        with self._expected(user, sender):
            self._posted[kind, sender] = self._begin(kind, sender, specs, word)._replace(number=number)

    def _receive_message(self, action: Action, sender: int) -> Message:
        """Receive the word of `action`'s input, and its tensors."""
        self._post(Kind.F, sender, on_demand=True)
        posted = self._posted.pop((Kind.F, sender))
        with self._expected(action, sender):
            stage, microbatch, number, num_bytes = _read(posted)
        if (stage, microbatch) != (action.stage - 1, action.microbatch):
            ranks = self.group.ranks
            raise LostMessageError(
                f"Rank {ranks[self.group.rank]} runs {action} and must receive the output of"
                f" {Action(Kind.F, action.stage - 1, action.microbatch)} from rank {ranks[sender]}; got the"
                f" output of {Action(Kind.F, stage, microbatch)}. The ranks run different schedules"
            )
        if number == _FAILED:
            return Message(FAILURE, ())
        layouts = self.layouts.received[stage, self._is_training]
        layouts.note(number, self._receive_layout(action, sender, num_bytes) if num_bytes else None)
        layout = layouts.known[number]
        if number == posted.number and not num_bytes:
            found = iter(posted.buffers)
            return Message(
                layout,
                tuple([next(found) if spec.has_elements else spec.empty(self.device) for spec in layout.tensors]),
            )
        with self._expected(action, sender):
            now = self._begin(Kind.F, sender, layout.tensors)
            if now.pending is not None:
                now.pending.wait()
        return Message(layout, tuple(now.buffers))

    def _receive_layout(self, action: Action, sender: int, num_bytes: int) -> MessageLayout:
        """Receive the layout that a word announces."""
        channel = self.channel(Kind.F, sender, self.group.rank)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=channel.host_device)
        with self._expected(action, sender):
            description = comm.irecv(buffer, channel, self.peer(sender, channel), _HOST_TAG, between_hosts=True).wait()
        # Unpickling runs code, but the sender is a rank of the same run, and this rank trusts that code already.
        layout: MessageLayout = pickle.loads(description.cpu().numpy().tobytes())
        return layout

    def _word_device(self, channel: Group) -> torch.device:
        """Return where the word of a message lies: with its tensors, as it travels with them."""
        return self.device if "nccl" in channel.backend else torch.device("cpu")

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


# The same few words are sent in every step and never written to; making one costs a copy to the device.
@lru_cache(maxsize=4096)
def _word(stage: int, microbatch: int, number: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.tensor([stage, microbatch, number, num_bytes], device=device)


@lru_cache
def _waits_block_hosts() -> bool:
    """Tell whether a receive that is posted ahead would block the host, or the kernels of other streams."""
    values = {name: os.environ.get(name, "") for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT")}
    return any(value not in ("", "0") for value in values.values()) or os.environ.get(_CONNECTIONS) == "1"


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _read(posted: _Posted) -> list[int]:
    """Wait for a message; return its word."""
    assert posted.pending is not None
    assert posted.word is not None
    if not posted.word.is_cuda:
        posted.pending.wait()
        return posted.word.tolist()
    # On a stream of its own: the host waits for this message, not for the kernels that are queued before.
    reading = _reading_stream(posted.word.device)
    with torch.cuda.stream(reading):
        posted.pending.wait()
        words: list[int] = posted.word.tolist()
    # The stream that computes is the one that frees the memory.
    torch.cuda.current_stream(posted.word.device).wait_stream(reading)
    return words


@lru_cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _in_memory(tensor: Tensor) -> Tensor:
    # Messages are bytes: a conjugate or a negative is only a flag on other bytes.
    return tensor.resolve_conj().resolve_neg().contiguous()
