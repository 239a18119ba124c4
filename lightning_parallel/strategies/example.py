"""The first batch of a run, looked at before the run begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_leaves

__all__ = ["STEPS", "first_batch"]

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
"""The step that a run is made of."""


def first_batch(trainer: Trainer) -> Any | None:
    """The first batch of the run that `trainer` is about to begin, on the device; it will come again.

    None if there is none, or if the data can be read only once.
    """
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    loop = loops[trainer.state.fn]
    with isolate_rng(), _rewound(tree_leaves(loop._data_source.instance)):
        loop.setup_data()
        loader, loop._combined_loader = loop._combined_loader, None  # so that the run sets up its data by itself
        if loader is None or any(hasattr(data, "__next__") for data in loader.flattened):
            return None
        entry = next(iter(loader), None)
    if entry is None or entry[0] is None:
        return None
    batch = trainer.precision_plugin.convert_input(entry[0])
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


@contextmanager
def _rewound(loaders: list[Any]) -> Iterator[None]:
    """Give random generators that belong to loaders and samplers the state back that they had."""
    owners = [owner for loader in loaders for owner in (loader, getattr(loader, "sampler", None))]
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
