"""A number that is not finite on one rank: all ranks skip, stop or raise before the weights change."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, NonFiniteGuard, comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from tests.callbacks.test_auto_resume import DeepDropping
from tests.harness import distributed
from tests.strategies.models import Samples, trainer_for

BAD_STEP = 3


class Failing(DeepDropping):
    """Has a loss (or a gradient alone) that is not finite on the last replica in one step."""

    def __init__(self, where="loss"):
        super().__init__(dropout=0.0)
        self.where = where
        self.states = []

    def training_step(self, batch, index):
        x, y = batch
        output = self.net(x)
        if index == BAD_STEP and self.trainer.strategy.distributed_sampler_kwargs["rank"] == 1:
            # The derivative of a root at zero is infinite, its value is not.
            output = output * float("nan") if self.where == "loss" else output + (output * 0).sqrt()
        loss = F.cross_entropy(output, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        self.states.append([parameter.detach().clone() for parameter in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


STRATEGIES = {
    "tensor": lambda: HybridParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: HybridParallelStrategy(pipeline_parallel_size=2, balance="uniform"),
    "ddp": DDPStrategy,
}


def _fit(strategy, module, action, **options):
    guard = NonFiniteGuard(action)
    trainer = trainer_for(
        STRATEGIES[strategy](), 4 if strategy != "ddp" else 2, callbacks=[guard], max_epochs=1, **options
    )
    trainer.fit(module, DataLoader(Samples(length=32), 2))
    return trainer, guard


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
@distributed(world_size=4)
def test_a_step_is_skipped_on_a_mesh(strategy, where):
    # The first rank warns, for all.
    with pytest.warns(UserWarning, match=f"step {BAD_STEP}, .*net") if Group.of().rank == 0 else nullcontext():
        module = Failing(where)
        trainer, guard = _fit(strategy, module, "skip", gradient_clip_val=0.5)
    before, after = module.states[BAD_STEP - 1 : BAD_STEP + 1]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert guard.skipped_steps == 1
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert trainer.global_step == len(module.states)


@distributed(world_size=2)
def test_all_ranks_raise_and_name_the_one(group):
    module = Failing()
    with pytest.raises(RuntimeError, match=f"step {BAD_STEP}, the loss of rank 1 is not finite; the gradient of `net"):
        _fit("ddp", module, "raise")
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert len(module.states) == BAD_STEP


@distributed(world_size=2)
def test_training_stops_on_all_ranks(group):
    module = Failing()
    trainer, _ = _fit("ddp", module, "stop")
    assert len(module.states) == BAD_STEP + 1
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@distributed(world_size=2)
def test_without_it_the_weights_are_lost_and_nothing_is_sent(group):
    module = Failing()
    with patched(comm, "on_any_rank", None):
        _fit("ddp", module, "ignore")
    assert not all(parameter.isfinite().all() for parameter in module.parameters())


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="must be one of 'ignore', 'skip', 'stop', 'raise'; got 'log'"):
        NonFiniteGuard("log")
