"""Tensor parallelism: each layer is sharded over several ranks.

A plan says which module is divided how (`auto_plan`, `plan`), and `apply_plan` divides the module in place. The
functions exported here are the building blocks, for other code that works on divided tensors: collectives with a
forward and a backward, and the cross-entropy of logits whose classes are divided.
"""

from lightning_parallel.tensor.autograd import (
    all_gather_to_group,
    all_to_all_in_group,
    broadcast_to_group,
    copy_to_group,
    gather_from_group,
    receive_from,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
    send_to,
    whole_from_group,
)
from lightning_parallel.tensor.loss import cross_entropy
from lightning_parallel.tensor.sharding import Shard, ShardPart

__all__ = [
    "Shard",
    "ShardPart",
    "all_gather_to_group",
    "all_to_all_in_group",
    "broadcast_to_group",
    "copy_to_group",
    "cross_entropy",
    "gather_from_group",
    "receive_from",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "send_to",
    "whole_from_group",
]
