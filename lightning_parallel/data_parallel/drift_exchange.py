"""Local SGD: replicas step independently, and average their drift at intervals.

    a     anchor: the parameters that were last equal on all replicas
    x     a replica's parameters, after local steps
    d     mean of a - x over the replicas, by a reducer, which may compress a - x with error feedback
    a'    a - d, or a step of the outer optimizer from a with d as gradient

Afterwards x = a'. An exchange that overlaps with further steps keeps their changes: x = a' + (x now - x then).

    steps      1   2   3   4   5   6   7   8          every_n_steps = 4, two fragments, overlap_steps = 1
    fragment 0             [---]           [---]      [ drift is sent    ] mean is taken
    fragment 1     [---]           [---]

Sources: local SGD, arXiv 1805.09767; an outer optimizer, DiLoCo, arXiv 2311.08105; fragments and overlap, Streaming
DiLoCo, arXiv 2501.18512; compressed drifts with error feedback, SparseLoCo, arXiv 2508.15706.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import GradientSession, Group, InlineExecutor, MeanReducer, ThreadExecutor

__all__ = ["DriftExchange"]


class _Fragment:
    """Parameters whose drifts are exchanged together.

    Attributes:
        has_moved: Whether there was a local step since the last send of the drift.
        age: Local steps since the send, while the exchange is open; None otherwise.
        start: The parameters at the time of the send.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.has_moved = False
        self.age: int | None = None
        self.start: dict[str, Tensor] = {}
        self.means: Callable[[], Mapping[str, Tensor]] | None = None


class DriftExchange:
    """Averages the drift of replicas from their anchor every `every_n_steps` local steps.

    Replicas must begin equal, and call `count_step` and `flush` after the same steps.

    Args:
        parameters: The parameters by name, including frozen ones that may be trained later.
        group: The replicas.
        reducer: Computes the mean of the drifts.
        outer: Creates the optimizer of the outer step from the parameters; None for the plain mean.
        every_n_steps: Local steps between two exchanges of a parameter.
        fragments: Number of parts in which the parameters are exchanged, one after the other.
        average_first: Number of first exchanges that are plain means.
        overlap_steps: Local steps between the send of a drift and the use of its mean; 0 waits for the mean.
        side_group: An extra group of the same replicas, only for this exchange, so that it overlaps with steps.
        replica_group: Ranks that hold the rest of the model.
        first: Names of the first fragment: the parameters that several ranks of a replica hold.
        complete: Called with the means of a fragment, on every rank, to make the means equal on ranks with the same
            parameters.
        on_return: Called when this replica has returned to the anchor, because its drift was not finite. Its optimizer
            state may not be finite either.

    Attributes:
        outer: The optimizer of the outer step, if there is one.
        exchanged: Exchanges of all parameters so far. A resumed run sets it and `counted`.
        failed: Exchanges whose mean was not finite, so that they changed nothing.
        returned: Number of returns of this replica to the anchor.
        counted: Local steps so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        reducer: MeanReducer,
        outer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        *,
        every_n_steps: int,
        average_first: int = 0,
        fragments: int = 1,
        overlap_steps: int = 0,
        side_group: Group | None = None,
        replica_group: Group | None = None,
        first: Collection[str] = (),
        complete: Callable[[Mapping[str, Tensor]], None] = lambda means: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.overlap_steps = overlap_steps
        self._parameters = dict(parameters)
        self._average_first = average_first
        self._num_fragments = fragments
        self._replica_group = replica_group
        self._first = frozenset(first)
        self._complete = complete
        self._on_return = on_return
        self.outer = None if outer is None else outer(list(self._parameters.values()))
        self.exchanged = self.failed = self.returned = self.counted = 0
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        side_group = side_group if overlap_steps > 0 else None
        # Without a verdict group: the executor's thread would use it at the same time as the training thread. Instead,
        # `_end` checks the means, together with the ranks of the replica.
        self._session = GradientSession(
            reducer,
            group if side_group is None else side_group,
            InlineExecutor() if side_group is None else ThreadExecutor(device),
            device=device,
        )
        self._anchor: dict[str, Tensor] = {}
        self._fragments: list[_Fragment] = []
        self._position = 0  # local steps since the cycle of exchanges began

    # ------------------------------------------------------------------------------------------------------- steps

    @property
    def is_begun(self) -> bool:
        """Whether there is an anchor."""
        return bool(self._fragments)

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters without an anchor: optimizers do not train them, but the module may still change them."""
        return [value for name, value in self._parameters.items() if name not in self._anchor]

    @property
    def agrees(self) -> bool:
        """Whether the parameters of all replicas are equal now."""
        return all(not fragment.has_moved and fragment.age is None for fragment in self._fragments)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the parameters, equal on all replicas now, as the anchor; called before the first local step.

        Another call adds the parameters that were unfrozen since. Frozen parameters do not drift.
        """
        added = [name for name, value in self._parameters.items() if value.requires_grad and name not in self._anchor]
        if not added:
            return
        # Flushed first: anchored parameters may have drifted, and the fragments change below.
        self.flush()
        for name in added:
            self._anchor[name] = self._parameters[name].detach().clone(memory_format=torch.preserve_format)
        sizes = {name: self._anchor[name].numel() for name in self._parameters if name in self._anchor}
        self._fragments = [_Fragment(names) for names in _divided(sizes, self._num_fragments, self._first)]
        self._position = 0

    @property
    def is_at_anchor(self) -> bool:
        """Whether no anchored parameter of this rank differs from its anchor."""
        return all(torch.equal(self._parameters[name], value) for name, value in self._anchor.items())

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Take the parameters, equal on all replicas, as the anchor, after code other than a step has set them."""
        for name, value in self._anchor.items():
            value.copy_(self._parameters[name])

    def move(self) -> None:
        """Note a step of another optimizer, possibly after an exchange; the step does not count."""
        for fragment in self._fragments:
            fragment.has_moved = True

    @torch.no_grad()
    def count_step(self) -> bool:
        """Count a local step, begin and end exchanges at their steps, and return whether an exchange began or ended."""
        self.counted += 1
        self._position += 1
        changed = False
        self.move()
        for fragment in self._fragments:
            if fragment.age is not None:
                fragment.age += 1
                if fragment.age >= self.overlap_steps:
                    self._end(fragment)
                    changed = True
        count = len(self._fragments)
        due = [
            fragment
            for index, fragment in enumerate(self._fragments)
            if (self._position - index * self.every_n_steps // count) % self.every_n_steps == 0
        ]
        for fragment in due:
            self._begin(fragment)
            if self.overlap_steps == 0:
                self._end(fragment)
        if self._position % self.every_n_steps == 0:
            self.exchanged += 1
            if self.overlap_steps == 0:
                self._session.finish()  # a step of the reducer is one exchange of all parameters
        return changed or bool(due)

    @torch.no_grad()
    def flush(self) -> bool:
        """Exchange all drifts now, so that all replicas are equal; return whether there was any drift."""
        for fragment in self._fragments:
            if fragment.age is not None:
                self._end(fragment)
        drifted = [fragment for fragment in self._fragments if fragment.has_moved]
        if drifted:
            # A session takes each parameter once per step of its reducer, and the open step may hold these parameters.
            self._session.finish()
            for fragment in drifted:
                self._begin(fragment)
            for fragment in drifted:
                self._end(fragment)
            self.exchanged += 1
        if self._fragments:
            self._session.finish()
        self._position = 0
        return bool(drifted)

    def close(self) -> None:
        """End the thread, and free the anchor; counts and the outer optimizer are kept."""
        self._session.close()
        self._anchor = {}
        self._fragments = []

    # ---------------------------------------------------------------------------------------------------- exchanges

    def _begin(self, fragment: _Fragment) -> None:
        """Send the drift of a fragment."""
        drift = {name: self._anchor[name] - self._parameters[name].detach() for name in fragment.names}
        if self._is_any_nonfinite(drift.values()):
            self._return_to_anchor()
            # The replica still sends its message: the other replicas wait for it.
            for value in drift.values():
                value.zero_()
        if self.overlap_steps > 0:
            # A copy, because the next steps change the parameters while the drift is in flight.
            fragment.start = {name: self._parameters[name].detach().clone() for name in fragment.names}
        fragment.has_moved, fragment.age = False, 0
        # A stage without a parameter in the fragment still takes part in the agreement of the replica.
        fragment.means = self._session.add(drift) if drift else dict

    def _end(self, fragment: _Fragment) -> None:
        """Take the mean of the drifts of a fragment, and continue from the new anchor."""
        assert fragment.means is not None
        means = fragment.means()
        self._complete(means)
        # Read before `_step`, in which an outer optimizer overwrites the parameters.
        moved = {name: self._parameters[name].detach() - start for name, start in fragment.start.items()}
        # The answer is equal on all replicas, as the means are. A codec may have overflowed, as fp16 does at 65504.
        if self._is_any_nonfinite(means.values()):
            self.failed += 1
        else:
            self._step(means)
        for name in fragment.names:
            self._parameters[name].copy_(self._anchor[name])
            if name in moved:
                self._parameters[name].add_(moved[name])
        fragment.age, fragment.means, fragment.start = None, None, {}

    def _step(self, means: Mapping[str, Tensor]) -> None:
        """Move the anchor by the mean drifts."""
        if self.outer is None or self.exchanged < self._average_first:
            for name, mean in means.items():
                self._anchor[name].sub_(mean)
            return
        # The outer optimizer holds the parameters themselves, not the anchor, so checkpoints save its state by their
        # names. The parameters therefore take the values of the anchor during the step.
        with self._only_gradients(means):
            for name in means:
                self._parameters[name].copy_(self._anchor[name])
            self.outer.step()
            for name in means:
                self._anchor[name].copy_(self._parameters[name])

    @contextmanager
    def _only_gradients(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the gradients of all parameters by `gradients` in the block; None for a missing name."""
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.grad = gradients.get(name)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = before[name]

    def _is_any_nonfinite(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether a tensor holds a value that is not finite, on any rank of this replica."""
        # The largest absolute value, because the 2-norm of finite values may overflow.
        largest = [torch.linalg.vector_norm(tensor, float("inf")) for tensor in tensors if tensor.numel()]
        is_finite = not largest or bool(torch.stack([value.float() for value in largest]).isfinite().all())
        group = self._replica_group
        return not is_finite if group is None or group.size == 1 else comm.on_any_rank([not is_finite], group)[0]

    def _return_to_anchor(self) -> None:
        self.returned += 1
        for name, value in self._anchor.items():
            self._parameters[name].copy_(value)
        for fragment in self._fragments:
            # The drift in flight was finite when it was sent. Only the later moves are dropped.
            fragment.start = {name: self._anchor[name].clone() for name in fragment.start}
        self._on_return()


def _divided(sizes: Mapping[str, int], count: int, first: Collection[str]) -> list[list[str]]:
    """Divide names, in order, into `count` runs of about equal size; `first` goes into the first run."""
    runs: list[list[str]] = [[name for name in sizes if name in first], *([] for _ in range(count - 1))]
    others = {name: size for name, size in sizes.items() if name not in first}
    total, filled = sum(others.values()), 0
    for name, size in others.items():
        # By the middle of the tensor, so that a large tensor at a border goes into the run with its larger part.
        runs[min(count - 1, int(count * (filled + size / 2) / max(1, total)))].append(name)
        filled += size
    return runs
