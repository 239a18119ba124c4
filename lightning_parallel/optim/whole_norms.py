"""Norms of whole tensors, of which a rank may hold a part: one message for all tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import each

__all__ = ["WholeNorms", "local_part"]


def local_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is divided as `like`; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert isinstance(like, DTensor)
    # A gradient may still be a sum over ranks.
    if tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.to_local()


class WholeNorms:
    """Takes 2-norms of whole parameters, and of tensors divided like them.

    Knows whole parameters and `DTensor`s (FSDP2 and torch's tensor parallelism). A strategy that divides
    parameters by itself gives optimizers a subclass, which tells by `groups` over which ranks a parameter is divided
    and by `part` which elements of its shard a rank counts, so that the ranks together count each once.
    """

    def groups(self, parameter: Tensor) -> tuple[Group, ...]:
        """Return the groups over which a parameter is divided, the same on all their ranks; none if it is whole."""
        if not isinstance(parameter, DTensor):
            return ()
        mesh = parameter.device_mesh
        return tuple(
            Group.of(mesh.get_group(dim), f"dimension {dim} of a DTensor")
            for dim, placement in enumerate(parameter.placements)
            # And not `is_shard`: of FSDP2 over torch's tensor parallelism, shards are strided, which it denies.
            if not placement.is_replicate() and mesh.size(dim) > 1
        )

    def part(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Return the elements that this rank counts of its `shard` of a tensor that is divided like `parameter`."""
        return shard

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], *kinds: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of each whole tensor; every rank that holds a part of one must call it, with all parameters.

        Args:
            parameters: The parameters.
            kinds: For each parameter this rank's shard of some tensor of its shape, such as its gradient; None counts
                as zero.

        Returns:
            Norms in double precision, `[kinds, parameters]`.
        """
        if not parameters:
            return torch.zeros(len(kinds), 0, dtype=torch.float64)
        device = parameters[0].device
        parts = [
            None if shard is None else self.part(parameter, shard)
            for shards in kinds
            for parameter, shard in zip(parameters, shards)
        ]
        found = [part for part in parts if part is not None]
        # 16 bits would leave three digits of a norm.
        wide = torch.float64 if any(part.dtype == torch.float64 for part in found) else torch.float32
        norms = iter(each("norm", found, 2.0, dtype=wide) if found else [])
        zero = torch.zeros((), dtype=wide, device=device)
        squares = torch.stack([zero if part is None else next(norms).to(device) for part in parts]).double().square()
        squares = squares.view(len(kinds), len(parameters))
        self._sum(squares, parameters)
        return squares.sqrt()

    def _sum(self, squares: Tensor, parameters: Sequence[Tensor]) -> None:
        """Sum the squares of divided parameters, in place: one message for each group."""
        columns: dict[object, tuple[Group, list[int]]] = {}
        for column, parameter in enumerate(parameters):
            for group in self.groups(parameter):
                if group.size > 1:
                    key = group.name or id(group)
                    columns.setdefault(key, (group, []))[1].append(column)
        for group, chosen in columns.values():
            index = torch.tensor(chosen, device=squares.device)
            squares[:, index] = comm.all_reduce_(squares[:, index], group)
