"""Tensors that are parts: layers sharded over ranks, sequences split along positions, and tiles.

A plan names a style for each module (`auto_plan`, `plan`), and `apply_plan` shards the modules in place. The functions
exported here are the building blocks for other code on sharded tensors. They are collectives with a forward and a
backward, and the cross-entropy of logits that are sharded by class.
"""

from lightning_parallel.tensor import context_rules, piece_rules  # noqa: F401  (they give pieces their rules)
from lightning_parallel.tensor.autograd import (
    all_gather_to_group,
    all_to_all_in_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
    whole_from_group,
)
from lightning_parallel.tensor.loss import cross_entropy
from lightning_parallel.tensor.sharding import Shard, ShardPart

__all__ = [
    "Shard",
    "ShardPart",
    "all_gather_to_group",
    "all_to_all_in_group",
    "copy_to_group",
    "cross_entropy",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "whole_from_group",
]
