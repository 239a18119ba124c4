"""Many ranks in one process: each is a thread, and one of them runs at a time.

    results = in_lockstep(function, 64)         # calls function(group) on each rank, in turns

A rank runs until it waits for another rank. Then the next rank that can go on runs. The results are those of gloo,
without its processes and sockets: 64 ranks take one core and no port. The group also checks more than gloo: the
members of a collective must give the same operation, dtype and sizes, and ranks that wait for each other are an error.

`LocalTensorMode` of torch runs the code once, on tensors that hold the values of all ranks. It does not serve here: the
library reads its rank as an integer, so all ranks would get the shard of the first rank, and all shards one size.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm import Group

__all__ = ["Collective", "EmulatedGroup", "Finished", "Ranks", "Results", "in_lockstep", "sizes_of", "write"]

Everyone = list[list[Tensor]]
"""The tensors of a collective, by member."""
Results = Callable[[Everyone], Callable[[int], list[Tensor]]]

_REDUCE = {
    dist.ReduceOp.SUM: lambda parts: torch.stack(parts).sum(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.PRODUCT: lambda parts: torch.stack(parts).prod(0),
}


class Collective(NamedTuple):
    """A collective that a rank has begun, with the tensors that it gives together."""

    op: str
    members: tuple[int, ...]
    dtype: torch.dtype
    elements: int


class _StoppedError(BaseException):
    """Ends a rank after the failure of another rank."""


class Ranks:
    """The ranks of a run.

    Attributes:
        size: Their number.
        begun: The collectives of each rank so far.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun: list[list[Collective]] = [[] for _ in range(size)]
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[tuple[Callable[[], bool], str] | None] = [None] * size
        self._is_over = [False] * size
        # Each rank draws its own random numbers, as a process does.
        self._chance = [torch.get_rng_state()] * size
        self._results: list[Any] = [None] * size
        self._failure: BaseException | None = None
        self._groups: dict[tuple[str, tuple[int, ...]], list[Group]] = {}
        self._all_over = threading.Semaphore(0)

    def group(self, rank: int, members: Sequence[int] | None = None, axis: str = "world") -> Group:
        """Return the group of the global ranks `members` on `rank`; all ranks if None."""
        members = tuple(range(self.size)) if members is None else tuple(members)
        if len(members) == 1:
            return Group.alone(axis, rank)
        if (axis, members) not in self._groups:
            meeting = _Meeting(self, members)
            ends = [_Lockstep(meeting, place) for place in range(len(members))]
            for end in ends:
                _register(end, members, f"{axis}/{members}/{end.place}")
            self._groups[axis, members] = [Group(axis, members, end.place, end) for end in ends]
        return self._groups[axis, members][members.index(rank)]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call `function(rank)` on all ranks; returns the results by rank."""
        before = torch.get_rng_state()
        threads = [threading.Thread(target=self._live, args=(function, rank), daemon=True) for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            self._turns[0].release()
            self._all_over.acquire()
        finally:
            torch.set_rng_state(before)
            for groups in self._groups.values():
                for group in groups:
                    _unregister(group.process_group)
        if self._failure is not None:
            raise self._failure
        return self._results

    def _live(self, function: Callable[[int], Any], rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if self._failure is None:
                torch.set_rng_state(self._chance[rank])
                self._results[rank] = function(rank)
        except _StoppedError:
            pass
        except BaseException as error:
            self._fail(error)
        self._is_over[rank] = True
        if all(self._is_over):
            self._all_over.release()
        elif self._failure is None:
            self._wake_next(rank)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            for turn in self._turns:
                turn.release()

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `is_ready`."""
        while not is_ready():
            self._waits[rank] = (is_ready, what)
            self._chance[rank] = torch.get_rng_state()
            self._wake_next(rank)
            self._turns[rank].acquire()
            if self._failure is not None:
                raise _StoppedError
            torch.set_rng_state(self._chance[rank])
        self._waits[rank] = None

    def _wake_next(self, rank: int) -> None:
        for step in range(1, self.size):
            other = (rank + step) % self.size
            waits = self._waits[other]
            if not self._is_over[other] and (waits is None or waits[0]()):
                self._turns[other].release()
                return
        waiting = [f"rank {place}: {found[1]}" for place, found in enumerate(self._waits) if found is not None]
        self._fail(AssertionError("The ranks wait for each other:\n" + "\n".join(waiting)))


class EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives are computed here from the tensors of all members; the methods are torch's.

    Subclasses exchange the tensors.
    """

    def __init__(self, place: int, members: Sequence[int]) -> None:
        super().__init__(place, len(members))
        self.place, self.members = place, tuple(members)

    def exchanged(self, op: str, like: Any, given: list[Tensor], into: list[Tensor], results: Results) -> dist.Work:
        """Give this member's tensors of a collective; once all have given theirs, fill `into`.

        Args:
            op: The operation.
            like: Equal on all members.
            given: This member's tensors.
            into: The tensors that take the results for this member.
            results: From the tensors of all members, the results by member.
        """
        raise NotImplementedError

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.place

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op

        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            total = _REDUCE[op]([one for (one,) in everyone])
            return lambda place: [total]

        return self.exchanged("all_reduce", [*sizes_of(*tensors), op], tensors, tensors, results)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            total = torch.stack([one for (one,) in everyone]).sum(0)
            return lambda place: [total] if place == opts.rootRank else []

        return self.exchanged("reduce", [*sizes_of(*tensors), opts.rootRank], tensors, tensors, results)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            return lambda place: everyone[opts.rootRank]

        return self.exchanged("broadcast", [*sizes_of(*tensors), opts.rootRank], tensors, tensors, results)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            return lambda place: [part for (part,) in everyone]

        return self.exchanged("all_gather", sizes_of(*inputs), inputs, outputs[0], results)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            return lambda place: [part for (part,) in everyone] if place == opts.rootRank else []

        into = outputs[0] if outputs else []
        return self.exchanged("gather", [*sizes_of(*inputs), opts.rootRank], inputs, into, results)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            return lambda place: [torch.stack([rows[place] for rows in everyone]).sum(0)]

        return self.exchanged("reduce_scatter", sizes_of(*inputs[0]), inputs[0], outputs, results)

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, receive: list[int] | None, send: list[int] | None, opts: Any = None
    ) -> dist.Work:
        into, given = (
            list(tensor.split(sizes or [len(tensor) // self.size()] * self.size()))
            for tensor, sizes in ((received, receive), (sent, send))
        )

        def results(everyone: Everyone) -> Callable[[int], list[Tensor]]:
            return lambda place: [parts[place] for parts in everyone]

        return self.exchanged("all_to_all", sent.dtype, given, into, results)

    alltoall_base = all_to_all_single  # its name in older versions of torch

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.exchanged("barrier", None, [], [], lambda everyone: lambda place: [])


def sizes_of(*tensors: Tensor) -> list[Any]:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def write(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write results into tensors; without the knowledge of autograd, as the backends of torch do."""
    for tensor, value in zip(into, values):
        assert tensor.numel() == value.numel(), f"{tuple(tensor.shape)} expected; got {tuple(value.shape)}"
        tensor.detach().copy_(value.reshape(tensor.shape))


class Finished(dist._Work):
    """A call that `wait` completes."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return True


class _Meeting:
    """Collectives and messages of a group of ranks that are under way."""

    def __init__(self, ranks: Ranks, members: tuple[int, ...]) -> None:
        self.ranks, self.members = ranks, members
        self.under_way: dict[int, dict[int, tuple[Any, list[Tensor], list[Tensor]]]] = defaultdict(dict)
        self.counts = [0] * len(members)
        self.letters: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)

    def join(self, place: int, what: Any, given: list[Tensor], into: list[Tensor], results: Results) -> dist.Work:
        """Give a member's part of its next collective; the last member does the work of all."""
        number = self.counts[place]
        self.counts[place] += 1
        calls = self.under_way[number]
        calls[place] = (what, given, into)
        expected = next(iter(calls.values()))[0]
        assert what == expected, f"collective {number}: {what} on member {place}, {expected} on other members"
        if len(calls) == len(self.members):
            with torch.no_grad():
                of_place = results([calls[member][1] for member in range(len(self.members))])
                for member, (_, _, tensors) in calls.items():
                    write(tensors, of_place(member))
            del self.under_way[number]
        return Finished(self.waiting(place, lambda: number not in self.under_way, str(what)))

    def waiting(self, place: int, is_ready: Callable[[], bool], what: str) -> Callable[[], None]:
        return lambda: self.ranks.wait(self.members[place], is_ready, what)


class _Lockstep(EmulatedGroup):
    """A member's end of a group of ranks in lockstep."""

    def __init__(self, meeting: _Meeting, place: int) -> None:
        super().__init__(place, meeting.members)
        self.meeting = meeting

    def getBackendName(self) -> str:
        return "lockstep"

    @property
    def group_name(self) -> str:
        return f"lockstep {self.members}"

    def exchanged(self, op: str, like: Any, given: list[Tensor], into: list[Tensor], results: Results) -> dist.Work:
        dtype = given[0].dtype if given else torch.uint8
        call = Collective(op, self.members, dtype, sum(tensor.numel() for tensor in given))
        self.meeting.ranks.begun[self.members[self.place]].append(call)
        return self.meeting.join(self.place, (op, like), given, into, results)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        self.meeting.letters[self.place, to, tag].append(tensors[0].detach().clone())
        return Finished()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        letters = self.meeting.letters[source, self.place, tag]
        wait = self.meeting.waiting(self.place, lambda: bool(letters), f"recv from {source} with tag {tag}")

        def finish() -> None:
            wait()
            letter = letters.pop(0)
            assert sizes_of(letter) == sizes_of(*tensors), f"{sizes_of(*tensors)} expected; got {sizes_of(letter)}"
            write(tensors, [letter])

        return Finished(finish)


def _register(group: dist.ProcessGroup, members: tuple[int, ...], name: str) -> None:
    """Let torch's functions know the group."""
    world = dist.distributed_c10d._world
    world.pg_map[group] = ("lockstep", None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    world.pg_backend_config[group] = "cpu:lockstep"


def _unregister(group: dist.ProcessGroup | None) -> None:
    world = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)


def in_lockstep(function: Callable[..., Any], size: int, **kwargs: Any) -> list[Any]:
    """Call `function(group, **kwargs)` on `size` ranks of this process; returns the results by rank."""
    ranks = Ranks(size)
    return ranks.run(lambda rank: function(ranks.group(rank), **kwargs))
