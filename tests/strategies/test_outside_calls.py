"""Calls of a divided model outside of steps: on all ranks together, or refused at once."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_parallel import TensorParallelStrategy
from tests.harness import distributed, run_script
from tests.strategies.models import Net, loader, trainer_for

HOOKS = ["on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_end"]


class Sampling(Callback):
    """Calls the model in one hook, on some ranks."""

    def __init__(self, hook, ranks):
        self.outputs = []

        self.hook, self.ranks = hook, ranks

    def sample(self, hook, trainer, module):
        if hook == self.hook and trainer.global_rank in self.ranks:
            with torch.no_grad():
                self.outputs.append(module.net(torch.ones(2, 12, dtype=torch.float64)))

    def on_fit_start(self, trainer, module):
        self.sample("on_fit_start", trainer, module)

    def on_train_batch_start(self, trainer, module, *_):
        self.sample("on_train_batch_start", trainer, module)

    def on_train_batch_end(self, trainer, module, *_):
        self.sample("on_train_batch_end", trainer, module)

    def on_train_epoch_end(self, trainer, module):
        self.sample("on_train_epoch_end", trainer, module)

    def on_validation_end(self, trainer, module):
        self.sample("on_validation_end", trainer, module)


def fit(hook, ranks):
    callback = Sampling(hook, ranks)
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, max_epochs=1, callbacks=[callback])
    module = Net().double()
    trainer.fit(module, loader(), loader())
    return callback, module


@pytest.mark.parametrize("hook", HOOKS)
@distributed(world_size=2)
def test_all_ranks_may_call_the_model(hook, group):
    callback, _ = fit(hook, [0, 1])
    assert callback.outputs
    for output in callback.outputs:
        assert output.shape == (2, 5)


SCRIPT = """
import sys
import torch
from lightning_parallel import TensorParallelStrategy
from lightning_parallel.strategies import outside_calls
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_outside_calls import Sampling

outside_calls.WAIT_S = 2.0
strategy = TensorParallelStrategy(tensor_parallel_size=2)
trainer = trainer_for(strategy, 2, max_epochs=1, callbacks=[Sampling(sys.argv[1], [0])])
trainer.fit(Net().double(), loader(), loader())

"""


@pytest.mark.parametrize("hook", ["on_train_batch_end"])
def test_a_call_on_one_rank_is_refused_and_named(hook, tmp_path):
    script = tmp_path / "sampling.py"
    script.write_text(SCRIPT)
    ended = run_script(script, hook, deadline_s=60)
    assert ended.returncode != 0
    assert f"the model is called in `Sampling.{hook}` on rank 0, but not on rank 1" in ended.stderr
