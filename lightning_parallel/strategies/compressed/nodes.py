"""The argument `hierarchical` of strategies: compression between nodes, and the ranks of each node."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Optional, Union

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel import comm
from lightning_parallel.comm import Group, NodeGroups
from lightning_parallel.compression import HierarchicalReducer, Reducer
from lightning_parallel.compression.compressor import check_integer

__all__ = ["Hierarchical", "between_nodes", "check_hierarchical", "hosts_of", "size_of_node"]

Hierarchical = Union[bool, int]
"""True compresses between nodes only. A number sets the consecutive replicas of a node."""


def check_hierarchical(value: Hierarchical, compression: Optional[Reducer]) -> None:
    """Check the argument `hierarchical`.

    Raises:
        TypeError: If it is neither True, False, nor an integer.
        ValueError: If a node would have one replica, or there is no compression.
    """
    if not isinstance(value, bool):
        check_integer("hierarchical", value, least=2)
    if value and compression is None:
        raise ValueError(
            "`hierarchical` needs `compression`, which it distributes over the replicas of a node; give `compression`"
        )


def hosts_of(world: Group, node_rank: int) -> dict[int, str]:
    """Return a name for the node of each global rank; every rank must call it."""
    # Both: containers on one machine may have different names, and machines may share a name.
    mine = f"{socket.gethostname()} (node {node_rank})"
    return dict(zip(world.ranks, comm.all_gather_object(mine, world)))


def size_of_node(hierarchical: Hierarchical) -> int | None:
    """Return the number of replicas per node; None to group the replicas by host."""
    return None if isinstance(hierarchical, bool) else int(hierarchical)


def between_nodes(
    reducer: Reducer, nodes: NodeGroups, sizes: Optional[Mapping[str, int]] = None
) -> HierarchicalReducer:
    """Return a reducer that compresses with `reducer` between `nodes`; warn if compression between nodes has no effect.

    Args:
        sizes: Elements by parameter name; see `HierarchicalReducer`.
    """
    if nodes.across.size == 1:
        rank_zero_warn(
            f"`hierarchical` has no effect: all {nodes.whole.size} replicas are on one node. Inside a node,"
            " gradients are averaged without compression."
        )
    elif nodes.inside.size == 1:
        rank_zero_warn("`hierarchical` has no effect: each node has one replica.")
    return HierarchicalReducer(reducer, nodes, sizes)
