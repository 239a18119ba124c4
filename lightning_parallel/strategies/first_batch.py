"""Look at the first batch of a run before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_parallel.compat.lightning import loaders_of, prepared_batch, take_first_entry
from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.runtime import loss_of

__all__ = ["STEPS", "first_batch", "warn_unless_mean"]

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
"""The step that a run is made of."""


def warn_unless_mean(
    module: nn.Module,
    run: Callable[[Any], Any],
    batch: Any,
    microbatches: Sequence[Any],
    weights: Sequence[float],
) -> None:
    """Warn if the loss of `batch` is not the mean of those of its microbatches, so that a pipeline computes another.

    Compares without dropout, and not where the loss is random even so. The loss of a truncated model does: whether it
    is a mean over samples does not depend on the layers.

    Args:
        module: The user's module.
        run: Runs a step of the truncated model.
        batch: The first batch, or as much of it as may be run at once.
        microbatches: Its parts.
        weights: Share of each.
    """
    if len(microbatches) < 2:
        return
    modes = {child: child.training for child in module.modules()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.eval()
    try:
        with torch.no_grad():
            whole, again = (_loss(run, batch, seed) for seed in (0, 1))
            losses = torch.stack([_loss(run, part, 0).to(whole) for part in microbatches])
            mean = torch.tensor(weights).to(whole) @ losses / sum(weights)
    except Exception:  # the trial of the cut will say what is wrong with the step
        return
    finally:
        for child, mode in modes.items():
            child.training = mode
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    tolerance = 1e-6 if whole.dtype == torch.float64 else 5e-3  # layers may compute in half precision
    if torch.allclose(whole, again, rtol=tolerance) and not torch.allclose(whole, mean, rtol=tolerance):
        rank_zero_warn(
            f"The loss of the first batch is {whole:.6g}, but the mean over its {len(microbatches)} microbatches is"
            f" {mean:.6g}: it is not a mean over samples, so a pipeline trains on another loss than one process. Where"
            " it is a mean over tokens, count them by `microbatch_weight`; divide a sum by the number of samples; where"
            " the samples of a batch depend on each other, set `num_microbatches=1`."
        )


def _loss(run: Callable[[Any], Any], batch: Any, seed: int) -> Tensor:
    with isolate_rng():
        torch.manual_seed(seed)
        return loss_of(run(batch)).detach()


def first_batch(trainer: Trainer) -> Any | None:
    """Return the first batch of the run that `trainer` is about to begin, on the device; it will come again.

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
    with isolate_rng(), _rewound(pytree.tree_leaves(loaders_of(loop))):
        entry = take_first_entry(loop)
    if entry is None or entry[0] is None:
        return None
    return prepared_batch(trainer, entry[0])


@contextmanager
def _rewound(loaders: list[Any]) -> Iterator[None]:
    """Restore the random generators that belong to loaders and samplers after the block."""
    owners = [owner for loader in loaders for owner in (loader, getattr(loader, "sampler", None))]
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
