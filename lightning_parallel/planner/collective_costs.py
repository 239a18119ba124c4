"""The time of a collective by the alpha-beta model: `latency + bytes / bandwidth` for each message between two ranks.

| collective     | ring                             | tree                          |
|----------------|----------------------------------|-------------------------------|
| all_reduce     | 2 (n-1) a + 2 (n-1)/n S b        | 2 log2(n) a + 2 S b           |
| all_gather     | (n-1) a + (n-1)/n S b            |                               |
| reduce_scatter | (n-1) a + (n-1)/n S b            |                               |
| broadcast      | (n-1) a + S b, in pieces         | log2(n) a + S b, in pieces    |
| all_to_all     | (n-1) a + (n-1)/n S b            |                               |
| send           | a + S b                          |                               |

n ranks, S bytes (the full tensor), a seconds of latency, b seconds per byte. The faster of two algorithms counts. A
group on several nodes reduces inside each node, then across nodes, and then gathers the result inside each node.

Source: Thakur, Rabenseifner and Gropp, https://doi.org/10.1177/1094342005051521
"""

from __future__ import annotations

from math import ceil, log2

from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.planner.hardware import Cluster

__all__ = ["collective_s", "flat_collective_s", "gradients_s"]


def flat_collective_s(op: str, num_bytes: float, size: int, link: Link, is_ring: bool = False) -> float:
    """Return the seconds of a collective between `size` ranks with the same link between any two ranks.

    Args:
        op: The operation, in torch's terms; an unknown operation counts as a message.
        num_bytes: Bytes, counted like in `comm`. For all_reduce and broadcast, the full tensor. For all_gather and
            reduce_scatter, the total. For all_to_all and messages, the bytes that one rank sends.
        size: Number of ranks.
        link: Link between any two ranks.
        is_ring: Whether to exclude a tree.
    """
    if size == 1:
        return 0.0
    a, all_s = link.latency_s, num_bytes / link.bytes_per_s
    steps, rounds = size - 1, ceil(log2(size))
    share_s = all_s * steps / size
    if op == "all_reduce":
        ring_s = 2 * (steps * a + share_s)
        return ring_s if is_ring else min(ring_s, 2 * (rounds * a + all_s))
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return steps * a + share_s
    if op in ("broadcast", "reduce"):
        return rounds * a + all_s
    return a + all_s


def collective_s(op: str, num_bytes: float, stride: int, size: int, cluster: Cluster) -> float:
    """Return the seconds of a collective in groups of `size` ranks with this stride, such as 0, stride, 2 stride, ...

    A group with several ranks on each of several nodes communicates inside the nodes first.
    """
    if size == 1:
        return 0.0
    inside = max(1, cluster.ranks_per_node // stride)  # ranks of the group on a node
    # In other groups, nodes have different numbers of ranks, and no ring across the nodes joins equal places.
    is_even = size % inside == 0 and cluster.ranks_per_node % stride == 0
    if cluster.num_nodes == 1 or cluster.is_inside_node(stride, size):
        measured = cluster.group_links.get(size)
        if measured is not None:
            # Its latency and bandwidth were fitted to a ring (`planner.links`), so no tree may undercut it.
            return flat_collective_s(op, num_bytes, size, measured, is_ring=True)
        return flat_collective_s(op, num_bytes, size, cluster.node_link)
    flat_s = flat_collective_s(op, num_bytes, size, cluster.link)
    if op != "all_reduce" or inside == 1 or not is_even:
        return flat_s
    # reduce-scatter in the node, all-reduce of each share across nodes, all-gather in the node
    ends_s = 2 * flat_collective_s("all_gather", num_bytes, inside, cluster.node_link)
    return min(flat_s, ends_s + flat_collective_s(op, num_bytes / inside, size // inside, cluster.link))


def gradients_s(op: str, num_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds of a collective of the ranks that hold the same parameters: data x context.

    Args:
        op: `all_reduce`, `all_gather` or `reduce_scatter`.
        num_bytes: Bytes of the full tensor.
        mesh: The axes.
        cluster: The devices and links.
    """
    data, pipeline, context, tensor = mesh.shape
    if 1 in (pipeline, data, context):
        # Equal distances: of the context axis alone, of both axes without stages between them, or of replicas.
        stride = pipeline * tensor if context == 1 else tensor
        return collective_s(op, num_bytes, stride, data * context, cluster)
    # Stages lie between the replicas, so the context axis comes first, and replicas exchange its shares.
    among = 2 if op == "all_reduce" else 1
    inside_s = among * collective_s("all_gather", num_bytes, tensor, context, cluster)
    return inside_s + collective_s(op, num_bytes / context, pipeline * context * tensor, data, cluster)
