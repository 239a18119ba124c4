"""Plans: how a reducer reduces gradients of certain names and shapes, found once and used in each step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lightning_parallel.compression.compressor_state import Memory
from lightning_parallel.compression.feedback import GradientBlock, Method
from lightning_parallel.compression.wire import goes_alone

__all__ = ["ReductionPlan", "Signature", "kind_of"]

Signature = tuple[tuple[str, tuple[int, ...], torch.dtype, torch.layout], ...]


class PlannedBlock(NamedTuple):
    """Gradients that one method may compute together, by their positions in the mapping that brings them."""

    method: Method
    names: tuple[str, ...]
    positions: tuple[int, ...]
    shard: Optional[int]


class ReductionPlan(NamedTuple):
    """How to reduce gradients of one kind.

    Attributes:
        signature: Names, shapes, dtypes and layouts of the gradients, sorted by name.
        digest: 63 bits of the signature, which fit into a signed integer.
        blocks: The blocks, in an order that is equal on all ranks.
    """

    signature: Signature
    digest: int
    blocks: list[PlannedBlock]

    @classmethod
    def of(
        cls,
        named_gradients: Mapping[str, Tensor],
        shards: Mapping[str, int],
        choose: Callable[[str, Sequence[int]], Method],
    ) -> ReductionPlan:
        """Return the plan for gradients of this kind.

        Args:
            named_gradients: Gradients by parameter name.
            shards: See `ReductionStep.reduce_`.
            choose: Returns the method for a name and shape.
        """
        found: dict[Hashable, tuple[Method, Optional[int], list[str]]] = {}
        seen: set[Tensor] = set()  # tensors hash by identity: a tied gradient under two names is reduced once
        # Sorted: dictionaries may be filled in another order on another rank, but requests must pair up.
        for name in sorted(named_gradients):
            gradient = named_gradients[name]
            if gradient.numel() == 0 or gradient in seen:
                continue
            seen.add(gradient)
            method = choose(name, gradient.shape)
            shard = shards.get(name) if method.scatters else None
            # A large gradient alone is summed in its own memory; in a block it would be copied twice.
            large = not method.batched and goes_alone(gradient)
            separate_name = name if large or method.separate else None
            key = (id(method), gradient.shape, gradient.dtype, gradient.device, shard, separate_name)
            found.setdefault(key, (method, shard, []))[2].append(name)
        position = {name: index for index, name in enumerate(named_gradients)}
        blocks = [
            PlannedBlock(method, tuple(names), tuple(position[name] for name in names), shard)
            for method, shard, names in found.values()
        ]
        signature = tuple((name, tuple(g.shape), g.dtype, g.layout) for name, g in sorted(named_gradients.items()))
        digest = blake2b(repr(signature).encode(), digest_size=8).digest()
        return cls(signature, int.from_bytes(digest, "little") >> 1, blocks)

    def blocks_of(self, gradients: Sequence[Tensor], number: int, memory: Memory) -> list[tuple[Method, GradientBlock]]:
        """Return the blocks of step `number`; a block whose parameters have different step numbers is divided."""
        blocks: list[tuple[Method, GradientBlock]] = []
        for method, names, positions, shard in self.blocks:
            mine = [gradients[position] for position in positions]
            numbers = method.effective_steps(names, number, memory)
            if isinstance(numbers, int):
                blocks.append((method, GradientBlock(names, mine, effective_step=numbers, shard=shard)))
                continue
            for own in sorted(set(numbers)):
                some = [index for index, other in enumerate(numbers) if other == own]
                few = tuple(names[index] for index in some), [mine[index] for index in some]
                blocks.append((method, GradientBlock(*few, effective_step=own, shard=shard)))
        return blocks


def kind_of(named_gradients: Mapping[str, Tensor], shards: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a key that gradients with the same plan share: everything that `ReductionPlan.of` reads."""
    gradients = named_gradients.values()
    identities = [id(gradient) for gradient in gradients]
    # Which names share a tensor, if any do.
    tied = tuple(map(identities.index, identities)) if len(set(identities)) < len(identities) else None
    kinds = tuple([(gradient.shape, gradient.dtype, gradient.device, gradient.layout) for gradient in gradients])
    return tuple(named_gradients), kinds, tied, tuple(shards.items())
