"""Gradient compression: `reduce_` replaces gradients by their approximate mean.

    compressor = TopK(0.01) | Quantize(8)
    applied = compressor.reduce_({name: parameter.grad, ...}, group)

From the outside in:

* `Reducer` (`reducer.py`) belongs to a strategy or a training loop: `reduce_`, `begin`, `wire_bytes`, `state_dict`.
  A *step* is a transaction over any number of buckets, and ends in `commit`. `commit` keeps the new state if every
  gradient on every rank was finite, and drops it otherwise.
* `Compressor` (`compressor.py`) is a reducer with one method for all tensors; `Policy` chooses one by name.
  Error feedback (`feedback.py`) surrounds the method: the method gets a work tensor, and leaves the unsent part in it.
* A method is a generator of requests (`wire.py`). It yields a tensor to sum, gather or exchange, and receives the
  answer. All methods of a bucket run in lockstep and share their collectives.
* The gradients come through a `comm.GradientSession`: from `DistributedDataParallel` (`ddp_hook.py`: `HookState`
  with `compression_hook`), DeepSpeed (`deepspeed_session.py`), FSDP1 and FSDP2 (`fsdp.py`: `compress_fsdp`,
  `compress_fully_shard`), or the hooks of `data_parallel`. A `HierarchicalReducer` (`hierarchical.py`) between session
  and reducer sums the gradients inside a node, and gives each rank a part of the gradients to compress.
* A `Memory` (`compressor_state.py`) holds the state by parameter name. Two buffers make a rollback free; some slots
  have one. A `ReductionPlan` (`reducer.py`) says how to reduce gradients of one kind.
* `thin_products.py` and `rowwise.py` hold the arithmetic of `PowerSGD` and `Quantize`.

A step that is dropped leaves non-finite gradients on every rank and makes `reduce_` return False.
"""

from lightning_parallel.compression.compressor import Compressor, Dense, StepValue
from lightning_parallel.compression.ddp_hook import (
    HookState,
    compression_hook,
)
from lightning_parallel.compression.deepspeed_session import DeepSpeedSession, compress_deepspeed
from lightning_parallel.compression.fsdp import (
    ShardedSession,
    compress_fsdp,
    compress_fully_shard,
    shard_ranks,
)
from lightning_parallel.compression.hierarchical import HierarchicalReducer
from lightning_parallel.compression.policy import Policy, bind_to_module, warn_of_unmatched
from lightning_parallel.compression.powersgd import PowerSGD
from lightning_parallel.compression.quantizers import Cast, Quantize, Sign
from lightning_parallel.compression.reducer import Reducer, ReductionStep, check_reducer
from lightning_parallel.compression.sparsifiers import BlockTopK, RandomK, TopK

__all__ = [
    "BlockTopK",
    "Cast",
    "Compressor",
    "DeepSpeedSession",
    "Dense",
    "HierarchicalReducer",
    "HookState",
    "Policy",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Reducer",
    "StepValue",
    "ShardedSession",
    "Sign",
    "ReductionStep",
    "TopK",
    "check_reducer",
    "compress_deepspeed",
    "compress_fsdp",
    "compress_fully_shard",
    "compression_hook",
    "bind_to_module",
    "shard_ranks",
    "warn_of_unmatched",
]
