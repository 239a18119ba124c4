"""The costs of attention whose positions are split over the ranks of the context axis: messages and memory.

| method    | forward, per call                             | backward                                      |
|-----------|-----------------------------------------------|-----------------------------------------------|
| `gather`  | all-gather of keys and values                 | reduce-scatter of their gradients             |
| `ulysses` | all-to-all of queries, keys, values; results  | the same, in the other direction              |
| `ring`    | keys and values make R-1 turns                | R-1 turns, with the gradients beside them     |

R ranks. Turns of a ring travel while attention computes, so only the longer part of a turn counts, and the merge of
its results. `gather` keeps the keys and values of all positions until backward. `ulysses` repeats key and value heads
if there are fewer than ranks. All other work and memory of a rank is proportional to its
number of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from lightning_parallel.pipeline.search import Costs
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.planner.collective_costs import collective_s
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.tensor.context_methods import Method, ulysses_reason

__all__ = ["PHASES", "AttentionCosts", "AttentionWork", "ContextAxis", "context_obstacle", "methods_for", "total_s"]


MERGE_PASSES, MERGE_OPERATIONS = 3, 10
"""Reads and writes of all results, and operations, with which a turn of a ring merges its results into earlier ones."""


class AttentionWork(NamedTuple):
    """Calls of attention over full sequences, added up.

    Attributes:
        calls: Number of calls.
        query_bytes: Bytes of queries and results.
        key_bytes: Bytes of keys and values.
        wide_bytes: The same with at least 4 bytes for each element, in which a ring adds their gradients.
        seconds: Seconds of the calls on one rank.
    """

    calls: float = 0.0
    query_bytes: float = 0.0
    key_bytes: float = 0.0
    wide_bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, *amounts: float) -> AttentionWork:
        """Return the sums with another call."""
        return AttentionWork(*(mine + theirs for mine, theirs in zip(self, amounts)))

    def of_samples(self, share: float) -> AttentionWork:
        """Return the work for a share of the samples: the same calls with smaller tensors."""
        return AttentionWork(self.calls, *(share * amount for amount in self[1:]))


class AttentionSizes(NamedTuple):
    """Sizes of calls of attention.

    Attributes:
        heads: Fewest query heads of a call.
        kv_heads: Fewest heads of keys and values.
        positions: Fewest positions of queries.
        has_mask: Whether a call has a mask, or its own products and softmax. Then a ring has no fused kernel.
    """

    heads: int = 0
    kv_heads: int = 0
    positions: int = 0
    has_mask: bool = False

    def least(self, other: AttentionSizes) -> AttentionSizes:
        """Return the sizes of all calls so far, with another call."""
        if not self.heads:
            return other
        heads, kv_heads, positions = map(min, self[:3], other[:3])
        return AttentionSizes(heads, kv_heads, positions, self.has_mask or other.has_mask)


class AttentionCosts(NamedTuple):
    """The attention of a model on one of t tensor-parallel ranks.

    Attributes:
        costs: For each field of `AttentionWork`, forward and then backward, the sums in each part of the model.
        seen: The sizes of the calls.
    """

    costs: tuple[Costs, ...] = ()
    seen: AttentionSizes = AttentionSizes()

    @property
    def is_there(self) -> bool:
        return any(cost.forward_s for costs in self.costs[:1] for cost in costs.parts)

    def in_part(self, index: int, phase: str, share: float) -> tuple[AttentionWork, AttentionWork]:
        """Return the forward and the backward calls in a phase of a part of the model, for a share of the samples."""
        amounts = [getattr(costs.parts[index], phase) for costs in self.costs]
        middle = len(amounts) // 2
        return (
            AttentionWork(*amounts[:middle]).of_samples(share),
            AttentionWork(*amounts[middle:]).of_samples(share),
        )


PHASES = ("forward_s", "input_gradient_s", "weight_gradient_s", "again_s")
"""The phases of `Cost` that take time; `again_s` is a part of `input_gradient_s`."""


def context_obstacle(attention: AttentionCosts, ranks: int) -> str:
    """Return why positions cannot be split over the ranks; empty if they can."""
    if ranks > 1 and not attention.is_there:
        return "the layers have no attention, so there are no positions to split"
    if ranks > 1 and attention.seen.positions < 2 * ranks:
        return f"{attention.seen.positions} positions are too few for {ranks} ranks"
    return ""


def methods_for(attention: AttentionCosts, ranks: int) -> list[Method]:
    """Return the methods that can compute the attention of a model."""
    if ranks == 1:
        return []
    seen = attention.seen
    left_out = {"ulysses": ulysses_reason(seen.heads, seen.kv_heads, ranks) is not None, "ring": seen.has_mask}
    return [method for method in get_args(Method) if not left_out.get(method, False)]


class ContextAxis(NamedTuple):
    """The ranks that share the positions, and how they compute attention.

    Attributes:
        method: See `tensor.context_methods`.
        ranks: Their number.
        stride: Distance between neighbours, in ranks.
        cluster: The devices and links.
    """

    method: Method
    ranks: int
    stride: int
    cluster: Cluster

    def messages(self, attention: AttentionCosts, share: float) -> Costs:
        """Return the seconds of the messages in each part, for a share of the samples."""
        count = len(attention.costs[0].parts)
        first, *layers, last = (self._message_cost(attention, index, share) for index in range(count))
        return Costs(tuple(layers), first, last)

    def _message_cost(self, attention: AttentionCosts, index: int, share: float) -> Cost:
        seconds = {}
        for phase in PHASES:
            forward, backward = attention.in_part(index, phase, share)
            seconds[phase] = self._seconds(forward, attention, False) + self._seconds(backward, attention, True)
        return Cost(**seconds)

    def _seconds(self, work: AttentionWork, attention: AttentionCosts, is_backward: bool) -> float:
        """Return the seconds of the messages of calls."""
        if not work.calls:
            return 0.0
        queries, keys = work.query_bytes / work.calls, work.key_bytes / work.calls
        if self.method == "gather":
            # A reduce-scatter takes as long.
            each_s = self._sent_s("all_gather", keys)
        elif self.method == "ulysses":
            there = queries / 2 + self._repeats(attention) * keys
            each_s = sum(self._sent_s("all_to_all", size / self.ranks) for size in (there, queries / 2))
        else:
            gradients = work.wide_bytes / work.calls if is_backward else 0.0
            turn_s = self._sent_s("send", (keys + gradients) / self.ranks)
            computed_s = work.seconds / work.calls / self.ranks**2
            device = self.cluster.device
            # Each turn adds to the results of the turns before.
            merged_s = MERGE_PASSES * queries / 2 / self.ranks / device.bytes_per_s + MERGE_OPERATIONS * device.launch_s
            each_s = (self.ranks - 1) * (max(0.0, turn_s - computed_s) + merged_s)
        return work.calls * each_s

    def _sent_s(self, op: str, num_bytes: float) -> float:
        return collective_s(op, num_bytes, self.stride, self.ranks, self.cluster)

    def _repeats(self, attention: AttentionCosts) -> float:
        """Return on how many ranks `ulysses` has each head of keys and values."""
        return max(1.0, self.ranks / attention.seen.kv_heads)

    def held(self, costs: Costs, attention: AttentionCosts, share: float) -> Costs:
        """Add the bytes that a method keeps until backward, beside the rank's share of all tensors."""
        extra = {"gather": 1 - 1 / self.ranks, "ulysses": (self._repeats(attention) - 1) / self.ranks, "ring": 0.0}
        parts = []
        for index, cost in enumerate(costs.parts):
            forward, _ = attention.in_part(index, "forward_s", share)
            again, _ = attention.in_part(index, "again_s", share)
            added = extra[self.method] * forward.key_bytes
            # Where backward computes attention again, it collects keys and values again.
            names = ("again_bytes", "largest_again_bytes") if again.calls else ("activation_bytes",)
            parts.append(replace(cost, **{name: getattr(cost, name) + added for name in names}))
        first, *layers, last = parts
        return Costs(tuple(layers), first, last)


def total_s(costs: Costs) -> float:
    """Return the seconds of all parts together."""
    parts: Sequence[Cost] = costs.parts
    return sum(cost.total_s for cost in parts)
