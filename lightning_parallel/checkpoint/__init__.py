"""Checkpoints that any layout can load: one file with full tensors, or a folder to which each rank writes its part."""

from lightning_parallel.checkpoint.distributed import DistributedCheckpoint, is_distributed_checkpoint
from lightning_parallel.checkpoint.dummies import fill_in, remove_dummy_parameters
from lightning_parallel.checkpoint.folder import Folder, is_sharded_checkpoint, newest_in
from lightning_parallel.checkpoint.full import Checkpoints, ModelNames, StateOwner, rules_by_name
from lightning_parallel.checkpoint.inventory import HeldTensor, Inventory
from lightning_parallel.checkpoint.reader import SavedCheckpoint, StoredTensor, TensorSource, take_part
from lightning_parallel.checkpoint.weights import load_weights
from lightning_parallel.checkpoint.writer import PartialTensor, ShardedWriter, TensorPart, as_parts

__all__ = [
    "Checkpoints",
    "DistributedCheckpoint",
    "Folder",
    "HeldTensor",
    "Inventory",
    "ModelNames",
    "PartialTensor",
    "SavedCheckpoint",
    "ShardedWriter",
    "StateOwner",
    "StoredTensor",
    "TensorPart",
    "TensorSource",
    "as_parts",
    "is_distributed_checkpoint",
    "is_sharded_checkpoint",
    "load_weights",
    "newest_in",
    "remove_dummy_parameters",
    "rules_by_name",
    "take_part",
    "fill_in",
]
