"""Imported once, by the server that the workers of `harness` are forked from: what takes long to import."""

import functools
import gc

import lightning.pytorch  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch.distributed.checkpoint
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from lightning.fabric.utilities import registry

import lightning_parallel.cli  # noqa: F401
import tests.strict_order  # noqa: F401 - NCCL's order in all forks, if the environment says so

torch.compile(torch.nn.Identity(), backend="eager")(torch.ones(1))  # imports what only a compilation needs
# Each Trainer would search all installed packages for callbacks, which takes longer than a tiny fit on one process.
registry.entry_points = functools.cache(registry.entry_points)
gc.collect()
gc.freeze()  # the garbage collector would touch, and so copy, every page in every fork
