"""TensorParallelStrategy against one process, through the Trainer."""

import pytest
import torch

from tests.harness import distributed
from tests.strategies.models import Net, fit_parallel, fit_single


def _oracle(**kwargs):
    """What one process gets; run on every rank, outside of the process group."""
    module = Net(**kwargs.pop("net", {})).double()
    trainer = fit_single(module, **kwargs)
    return module, trainer


def _assert_same(trainer, module, expected, expected_trainer):
    full = trainer.strategy.lightning_module_state_dict()
    if trainer.global_rank == 0:
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-10, atol=1e-12, msg=f"{name} differs")
    for key, value in expected_trainer.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[key].double(), value.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tensor", "clip"),
    [(1, ("norm", 0.3)), (2, None), (2, ("norm", 0.3)), (2, ("value", 0.01)), (4, ("norm", 0.3))],
)
@distributed(world_size=4)
def test_training_equals_one_process(tensor, clip):
    options = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    expected, expected_trainer = _oracle(**options)
    module = Net().double()
    trainer = fit_parallel(module, 4, tensor, **options)
    _assert_same(trainer, module, expected, expected_trainer)
    if tensor > 1:
        assert module.net[0].weight.shape[0] < 18


@distributed(world_size=4)
def test_accumulation_communicates_once():
    expected, expected_trainer = _oracle(accumulate_grad_batches=2)
    module = Net().double()
    trainer = fit_parallel(module, 4, 2, accumulate_grad_batches=2)
    _assert_same(trainer, module, expected, expected_trainer)
