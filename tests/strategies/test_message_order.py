"""Calls of a divided model outside of steps: on all ranks together, or refused at once."""

import random
import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from lightning_parallel import (
    ContextParallelStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    comm,
)
from lightning_parallel.comm import RollCall
from lightning_parallel.compat import ParallelState, patched, users_place
from tests.harness import distributed, free_port, start_script
from tests.strategies.models import Net, Samples, loader, trainer_for
from tests.strategies.test_context_parallel import Sequences, place
from tests.strategies.test_pipeline import Deep

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


@pytest.mark.sweep
@pytest.mark.parametrize("hook", HOOKS)
@distributed(world_size=2)
def test_all_ranks_may_call_the_model(hook, group):
    callback, _ = fit(hook, [0, 1])
    assert callback.outputs
    for output in callback.outputs:
        assert output.shape == (2, 5)


class SamplingNet(Net):
    """Calls its layers on rank zero only, in one place."""

    def __init__(self, where, samples, first):
        super().__init__()
        self.where, self.samples, self.first = where, samples, first

    def sample(self, here):
        if here == self.where and self.global_rank == 0 and self.global_step >= self.first:
            with torch.no_grad():
                self.net(torch.ones(self.samples, 12, dtype=torch.float64))

    def training_step(self, batch, index):
        self.sample("before")
        loss = super().training_step(batch, index)
        self.sample("after")
        return loss

    def validation_step(self, batch, index):
        self.sample("validation")
        return super().validation_step(batch, index)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("where", "samples", "first", "verify", "step"),
    [
        ("before", 8, 2, "off", "training_step"),
        ("before", 2, 2, "off", "training_step"),
        ("after", 2, 0, "always", "training_step"),
        ("validation", 2, 4, "off", "validation_step"),
    ],
)
@distributed(world_size=2)
def test_a_call_on_one_rank_in_a_step_is_refused_on_all(where, samples, first, verify, step, group):
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2, verify=verify), 2)
    module = SamplingNet(where, samples, first).double()
    with pytest.raises(RuntimeError, match=rf"got (a call )?in `{step}` \(.*, line \d+\) on rank 0, (in|but not)"):
        trainer.fit(module, loader(), loader())
    assert trainer.global_step == first


class SamplingSequences(Sequences):
    """Calls its first block in one step, on the first rank of the context axis or on rank zero only."""

    def __init__(self, is_one):
        super().__init__()
        self.is_one = is_one

    def training_step(self, batch, index):
        rank = self.global_rank if self.is_one else place(self)
        if self.global_step == 2 and rank == 0:
            with torch.no_grad():
                self.blocks[0](self.embed(batch[0].unsqueeze(-1)))
        return super().training_step(batch, index)


@pytest.mark.sweep
@pytest.mark.parametrize(("is_one", "method"), [(True, "auto"), (False, "ring")])
@distributed(world_size=4)
def test_a_call_on_one_rank_of_a_sequence_is_refused_on_all(is_one, method, group):
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2, "context_parallel_method": method}
    trainer = trainer_for(HybridParallelStrategy(**sizes), 4)
    with pytest.raises(RuntimeError, match=r"got (a call )?in `training_step` \(.*, line \d+\) on rank"):
        trainer.fit(SamplingSequences(is_one), loader())
    assert trainer.global_step == 2


class SamplingDeep(Deep):
    """Calls the model on rank zero only, without gradients: what that call gives is of the shape of a microbatch's."""

    def training_step(self, batch, index):
        if self.global_rank == 0 and self.global_step == 2:
            with torch.no_grad():
                self(2 * batch[0])
        return super().training_step(batch, index)


SCRIPT = """
import sys
from lightning_parallel import PipelineParallelStrategy, TensorParallelStrategy
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_message_order import LookingNet, Sampling, SamplingDeep, SamplingNet

where = sys.argv[1]
callbacks = [Sampling(where, [0])] if where.startswith("on_") else []
if where == "stage":
    trainer_for(PipelineParallelStrategy(pipeline_parallel_size=2), 2).fit(SamplingDeep(), loader())
else:
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, callbacks=callbacks)
    trainer.fit((LookingNet([0]) if where == "look" else SamplingNet(where, 2, 2)).double(), loader(), loader())
print("the run ended")
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("on_train_batch_end", "in `Sampling.on_train_batch_end` on rank 0, "),
        ("after", r"got a call in `training_step` \(test_message_order.py, line \d+\) on rank 0, but not on rank 1"),
        (
            "look",
            r"got a call in `training_step` \(test_message_order.py, line \d+\) on rank 0, "
            r"but not on rank 1.*gather_log",
        ),
        ("stage", r"in `training_step` \(.*line \d+\)\. The step must do\s+the same on every stage"),
    ],
)
def test_a_call_on_one_rank_ends_the_run(where, message, tmp_path):
    script = tmp_path / "sampling.py"
    script.write_text(SCRIPT)
    # Started one by one: a launcher would start an interpreter that imports everything anew.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    waits = [start_script(script, where, deadline_s=60, LOCAL_RANK=str(rank), **address) for rank in range(2)]
    ended = [wait() for wait in waits]
    assert all(rank.returncode != 0 for rank in ended)
    assert not any("the run ended" in rank.stdout for rank in ended)
    for rank in ended:
        assert re.search(message, rank.stderr), rank.stderr


class Lonely(Callback):
    """Calls the model on rank zero only, in hooks that are not looked at any more."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 3 and not self.is_decorated and module.global_rank == 0:
            self.sample(trainer, module)
        elif trainer.global_step == 3 and self.is_decorated:
            rank_zero_only(self.sample)(trainer, module)

    def sample(self, trainer, module):
        with torch.no_grad():
            if hasattr(module, "blocks"):
                module.blocks[0](torch.ones(2, 12, 8).double()).sum().item()
            elif hasattr(module, "head"):
                module.head(torch.ones(2, 8).double())
            else:
                module.net(torch.ones(2, 12).double())


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_later_call_on_one_rank_is_told_alike_on_all(group):
    """In processes that live on, as those of a notebook do."""
    condition = r"`if .*module.global_rank == 0.*` \(line \d+\)"
    cases = [
        (TensorParallelStrategy(tensor_parallel_size=2), Net().double(), "`rank_zero_only`"),
        (PipelineParallelStrategy(pipeline_parallel_size=2), Deep(), condition),
        (ContextParallelStrategy(context_parallel_size=2), Sequences(), condition),
    ]
    for kind, module, condition in cases:
        callback = Lonely()
        callback.is_decorated = "only" in condition
        with pytest.raises(RuntimeError) as caught:
            trainer_for(kind, 2, callbacks=[callback]).fit(module, loader())
        text = str(caught.value).partition("\n(found on rank ")[0]
        comm.agree("the text", text, group)
        assert "got a call in `Lonely.on_train_batch_end` on rank 0, but not on rank 1." in text
        assert re.search(rf"Rank 0 runs `on_train_batch_end` \(.*, line \d+\), under {condition}\.", text), text


def test_a_conditional_expression_is_told_whole():
    rank = 0
    place = users_place(sys._getframe()) if rank == 0 else ""
    assert re.search(r"under `users_place\(sys._getframe\(\)\) if rank == 0 else ''` \(line \d+\)$", place), place


class ChangingNet(Net):
    """Calls its layers once more in some steps, on all ranks."""

    def training_step(self, batch, index):
        if self.global_step % 3 == 1:
            with torch.no_grad():
                self.net(batch[0][:1])
        return super().training_step(batch, index)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_steps_may_differ_on_all_ranks_together(group):
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, max_epochs=2)
    module = ChangingNet().double()
    trainer.fit(module, loader(), loader())
    order = ParallelState.of(module).order
    known = len(order._known)
    trainer.validate(module, loader(), verbose=False)
    assert len(order._known) == known, "what the ranks have agreed on is not agreed on again"
    assert order._calls._count == 1, "the ranks have met before the other batches"


class LookingNet(Net):
    """Looks at the outputs of its last layer, which is divided, in some steps and on some ranks."""

    def __init__(self, ranks, first=2, returns=False):
        super().__init__()
        self.ranks, self.first, self.returns, self.seen = ranks, first, returns, []

    def training_step(self, batch, index):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if self.global_rank in self.ranks and self.global_step >= self.first:
            self.seen.append(float(logits.std()))
        return {"loss": loss, "logits": logits.detach()} if self.returns else loss


class LookingAtOutputs(Callback):
    """Looks at what a step returned, on rank zero only."""

    def on_train_batch_end(self, trainer, module, outputs, *_):
        if trainer.is_global_zero:
            assert type(outputs["logits"]) is torch.Tensor
            module.seen.append(float(outputs["logits"].std()))


@pytest.mark.parametrize("returns", [False, True])
@distributed(world_size=2)
def test_all_ranks_may_look_at_logits(returns, group):
    seen = []
    for devices in (1, 2):
        strategy = TensorParallelStrategy(tensor_parallel_size=2) if devices == 2 else "auto"
        module = LookingNet([] if returns else [0, 1], returns=returns).double()
        callbacks = [LookingAtOutputs()] if returns else []
        trainer_for(strategy, devices, callbacks=callbacks).fit(module, loader())
        seen.append(module.seen)
    assert seen[0]
    if not returns or group.rank == 0:
        assert seen[1] == pytest.approx(seen[0], rel=1e-10)


@distributed(world_size=2)
def test_one_rank_may_look_at_logits_that_are_gathered(group):
    module = LookingNet([0]).double()
    trainer_for(TensorParallelStrategy(tensor_parallel_size=2, gather_logits=True), 2).fit(module, loader())
    assert bool(module.seen) == (group.rank == 0)


class Drawing(Callback):
    """Draws from a generator in one hook, where the run has one process, or on rank zero."""

    def __init__(self, hook, draw):
        self.draw = draw
        setattr(self, hook, self.on_rank_zero)

    def on_rank_zero(self, trainer, *_):
        if trainer.is_global_zero:
            self.draw()


class Masked(Net):
    """Drops what all ranks hold, by each of the generators."""

    def __init__(self, in_step=False):
        super().__init__()
        self.in_step = in_step

    def training_step(self, batch, index):
        if self.in_step and self.global_rank == 0:
            torch.rand(3)
        x = F.dropout(batch[0], 0.3) * (1 + random.random()) * float(np.random.rand())
        return super().training_step((x, batch[1]), index)


def weights_of(callbacks, strategy="auto", devices=1, **kwargs):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module = Masked(**kwargs).double()
    train = DataLoader(Samples(), batch_size=8, shuffle=True)
    trainer_for(strategy, devices, callbacks=callbacks, limit_train_batches=3).fit(module, train)
    return dict(module.named_parameters())


@distributed(world_size=2)
def test_generators_that_part_are_put_back_to_those_of_the_first_rank(group):
    cases = [("on_train_epoch_end", torch.rand, (3,)), ("on_train_batch_end", np.random.rand, ())]
    cases += [("on_fit_start", torch.rand, (3,)), ("on_before_optimizer_step", random.random, ())]
    for many in (False, True):
        with patched(RollCall, "MOST_RANKS", 1 if many else 64):
            for hook, draw, args in cases:
                expected = weights_of([Drawing(hook, lambda draw=draw, args=args: draw(*args))])
                callbacks = [Drawing(hook, lambda draw=draw, args=args: draw(*args))]
                warned = pytest.warns(match=f"`Drawing.{hook}` draws random numbers on some of the ranks 0, 1 only")
                with warned if group.rank == 0 else nullcontext():
                    found = weights_of(callbacks, TensorParallelStrategy(tensor_parallel_size=2), 2)
                for name, value in expected.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=f"{hook} {name}")


@distributed(world_size=2)
def test_a_step_that_begins_or_ends_with_other_generators_is_refused(group):
    strategy = TensorParallelStrategy(tensor_parallel_size=2)
    with pytest.raises(RuntimeError, match=r"`Drawing.on_train_batch_start` draws random numbers before this step"):
        weights_of([Drawing("on_train_batch_start", lambda: torch.rand(1))], strategy, 2)
    with pytest.raises(RuntimeError, match="Only some of the ranks .* have drawn random numbers in the last step"):
        weights_of([], TensorParallelStrategy(tensor_parallel_size=2), 2, in_step=True)
