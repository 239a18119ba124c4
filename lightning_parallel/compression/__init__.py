"""Gradient compression: one contract, `reduce_`, that puts the (approximate) mean of the gradients in their place.

    compressor = TopK(0.01) | Quantize(8)
    finite = compressor.reduce_({name: parameter.grad, ...}, group)

How it is built, from the outside in:

* `Reducer` (`reducer.py`) is what strategies and people's own loops hold: `reduce_`, `begin`, `wire_bytes`,
  `state_dict`. A *step* is a transaction over any number of buckets: it ends in `commit`, which keeps the new state if
  every gradient on every rank was finite and drops it otherwise.
* `Compressor` (`compressor.py`) is a reducer with one method for all tensors; `Policy` chooses one by name. Error
  feedback (`feedback.py`) surrounds the method: it offers a work tensor, the method leaves in it what was not sent.
* A method is a generator of requests (`exchange.py`): it yields what is to be summed, gathered or swapped and is sent
  the answer. All methods of a bucket run in lockstep and their requests of one kind travel in one collective.
* `HookState` and `compression_hook` (`hooks.py`) bring the gradients of `DistributedDataParallel` to a reducer;
  `compress_fsdp`, `compress_fully_shard` and `compress_deepspeed` those of FSDP1, FSDP2 and DeepSpeed.
* State lives in a `Memory` (`memory.py`), by parameter name, current beside next, so that rolling back is free.

A skipped step leaves non-finite gradients on every rank alike and makes `reduce_` return False.
"""

from lightning_parallel.compression.arguments import StepValue
from lightning_parallel.compression.compressor import Compressor, Dense
from lightning_parallel.compression.ddp import HookState, compression_hook
from lightning_parallel.compression.deepspeed_engine import DeepSpeedSession, compress_deepspeed
from lightning_parallel.compression.fsdp import (
    ShardedSession,
    compress_fsdp,
    compress_fully_shard,
    shard_ranks,
)
from lightning_parallel.compression.policy import Auto, Policy, bind_to_module, warn_of_unmatched
from lightning_parallel.compression.powersgd import PowerSGD
from lightning_parallel.compression.quantizers import Cast, Quantize, Sign
from lightning_parallel.compression.reducer import Reducer, ReductionStep, check_reducer
from lightning_parallel.compression.sparsifiers import BlockTopK, RandomK, TopK

__all__ = [
    "Auto",
    "BlockTopK",
    "Cast",
    "Compressor",
    "DeepSpeedSession",
    "Dense",
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
