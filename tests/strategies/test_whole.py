"""Between runs the module is whole: what follows `fit` in a script for one process works."""

import copy
import functools
import io
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelSummary
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, comm
from lightning_parallel.compat import patched
from lightning_parallel.strategies.ranks import order as message_order
from lightning_parallel.strategies.whole import reference
from tests.harness import distributed
from tests.strategies.models import SHORT, Net, Samples, loader, trainer_for

LAYOUTS = {
    "tensor": (lambda **kw: TensorParallelStrategy(tensor_parallel_size=2, **kw), 2),
    "pipeline": (lambda **kw: PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, **kw), 2),
    "hybrid": (
        lambda **kw: HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2, **kw),
        4,
    ),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(Net):
    """A tied matrix, a recurrent layer with its list of weights, buffers, and a counter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 12), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(12, 12))
        self.rnn, self.tied = nn.LSTM(12, 5, batch_first=True), nn.Linear(12, 12, bias=False)
        self.tied.weight = self.net[0].weight
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        return self.rnn(self.tied(self.net(x))[:, None])[0][:, 0]

    def on_train_batch_end(self, *args):
        self.batches += 1


def _script(strategy, devices):
    """What a script for one process does: fit, save, call, change, validate, fit; returns what it has seen."""
    torch.manual_seed(0)
    module = Model().double()
    seen = []

    def look():
        seen.append({name: value.clone() for name, value in module.state_dict().items()})
        with torch.no_grad():
            seen.append(module(torch.ones(3, 12, dtype=torch.float64)))

    trainer = trainer_for(strategy(), devices, max_epochs=1, **SHORT)
    trainer.fit(module, loader(), loader())
    assert module.net[0].weight.shape == (12, 12)
    assert len(list(module.parameters())) == 32
    look()
    pickled = io.BytesIO()
    torch.save(copy.deepcopy(module), pickled)
    with torch.no_grad():
        module.net[1][3].down.weight.mul_(0.5)
        module.load_state_dict({**module.state_dict(), "rnn.bias_hh_l0": torch.ones(20)})
    trainer.validate(module, loader(), verbose=False)
    seen.append(trainer.callback_metrics["val_loss"])
    for parameter in module.net[1][0].parameters():
        parameter.requires_grad_(False)
    trainer = trainer_for(strategy(), devices, max_epochs=1, **SHORT)
    trainer.fit(module, loader(), loader())
    look()
    module.net[1].append(Block().double())
    return seen, module


def _expect_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_what_follows_a_fit_in_a_script():
    strategy, devices = LAYOUTS["hybrid"]
    expected, _ = _script(lambda: "auto", 1)
    found, module = _script(strategy, devices)
    _expect_equal(found, expected)
    # Other modules: divided anew, here over another mesh.
    torch.manual_seed(1)
    trainer = trainer_for(LAYOUTS["tensor"][0](data_parallel_size=2), 4)
    trainer.validate(module, loader(), verbose=False)
    found = trainer.callback_metrics["val_loss"]
    expected = trainer_for()
    expected.validate(copy.deepcopy(module), loader(), verbose=False)
    torch.testing.assert_close(found, expected.callback_metrics["val_loss"], rtol=1e-9, atol=1e-11)


@distributed(world_size=2)
def test_a_run_that_failed_leaves_the_module_divided(group):
    class Failing(Model):
        def on_train_batch_end(self, *args):
            raise RuntimeError("on every rank")

    module = Failing().double()
    trainer = trainer_for(LAYOUTS["tensor"][0](), 2)
    with pytest.raises(RuntimeError, match="on every rank"):
        trainer.fit(module, loader())
    assert module.net[1][0].up.weight.shape == (8, 12)


# ------------------------------------------------------------------------------------------------- during a run


class Averaging(Callback):
    """An average of the weights and a copy of a layer, by state dicts."""

    def on_fit_start(self, trainer, pl_module):
        self.average = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.1)
        pl_module.net[1][3].load_state_dict(pl_module.net[1][0].state_dict())

    def on_train_end(self, trainer, pl_module):
        self.inner = {name: value.clone() for name, value in pl_module.net[1][2].state_dict(prefix="inner.").items()}
        pl_module.load_state_dict(self.average)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_state_dicts_during_a_run_are_those_of_one_process(layout):
    results = []
    for strategy, devices in ((lambda: "auto", 1), LAYOUTS[layout]):
        torch.manual_seed(0)
        module, averaging = Model().double(), Averaging()
        short = {"max_epochs": 1, "limit_train_batches": 2}
        trainer_for(strategy(), devices, callbacks=[averaging], **short).fit(module, loader())
        results.append([averaging.average, averaging.inner, module.state_dict()])
        assert list(averaging.average) == list(module.state_dict())
    _expect_equal(*reversed(results))


class OnZero(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.is_global_zero:
            pl_module.state_dict()


class InStep(Model):
    def training_step(self, batch, index):
        self.net[1][3].load_state_dict(self.net[1][0].state_dict())
        return super().training_step(batch, index)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_a_state_dict_on_one_rank_is_refused(layout):
    trainer = trainer_for(LAYOUTS[layout][0](), 2, max_epochs=1, callbacks=[OnZero()])
    message = r"in `OnZero.on_train_batch_end` on rank 0, .*rank 1"
    with patched(message_order, "WAIT_S", 2.0), pytest.raises(RuntimeError, match=message):
        trainer.fit(Model().double(), loader())


@distributed(world_size=2)
def test_a_state_dict_in_a_step():
    results = []
    for strategy, devices in (("auto", 1), (LAYOUTS["tensor"][0](), 2)):
        torch.manual_seed(0)
        module = InStep().double()
        with patched(reference, "_CACHE_BYTES", 1):  # parameters of the reference are let go after each use
            trainer_for(strategy, devices, max_epochs=1, verifies=True).fit(module, loader())
        results.append([module.state_dict()])
    _expect_equal(*reversed(results))
    # Stages come to it one after the other.
    trainer = trainer_for(LAYOUTS["pipeline"][0](), 2, max_epochs=1, verifies=True)
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)not available inside a step.*on_train_batch_end"):
        trainer.fit(InStep().double(), loader())


class Looking(Callback):
    """What projects do with the model in hooks: samples, a submodule alone, gradients of a probe, draws in between."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
        with torch.no_grad():
            self.seen += [pl_module(batch[0]), pl_module.net[1][3](batch[0]), torch.rand(()), pl_module.last]
            pl_module.average(pl_module.last)  # its running statistics

    def on_train_epoch_end(self, trainer, pl_module):
        probe = torch.ones(2, 12, dtype=torch.float64, requires_grad=True)
        self.seen += torch.autograd.grad(pl_module(probe).square().sum(), probe)


class Sampled(Model):
    """Calls itself in its own hook, and has a parameter that its `forward` reads directly."""

    def __init__(self):
        super().__init__()
        self.shift, self.average = nn.Parameter(torch.ones(5)), nn.BatchNorm1d(5)
        self.example_input_array = torch.ones(2, 12, dtype=torch.float64)

    def forward(self, x):
        found = super().forward(x)
        self.last = found.detach()
        return found + self.shift

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_validation_epoch_end(self):
        sample = torch.rand(1, 12, dtype=torch.float64)
        for _ in range(2):
            sample = torch.cat([self(sample), torch.rand(1, 7, dtype=torch.float64)], 1)
        self.losses.append(sample.detach())


@distributed(world_size=2)
def test_calls_outside_of_steps():
    _calls_outside_of_steps("tensor")


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_calls_outside_of_steps_on_four_ranks():
    _calls_outside_of_steps("hybrid")


def _calls_outside_of_steps(layout):
    results = []
    for strategy, devices in ((lambda: "auto", 1), LAYOUTS[layout]):
        torch.manual_seed(0)
        module, looking, summary = Sampled().double(), Looking(), Summary(max_depth=3)
        short = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
        trainer = trainer_for(strategy(), devices, callbacks=[looking, summary], **short)
        trainer.fit(module, loader(), loader())
        results.append([*looking.seen, *module.losses, *module.state_dict().values()])
        results[-1].append(torch.tensor(summary.total))
    _expect_equal(*reversed(results))


class Summary(ModelSummary):
    """Keeps what it would print, which it gathers on every rank."""

    def _summary(self, trainer, pl_module):
        summary = super()._summary(trainer, pl_module)
        self.total = summary.total_parameters, summary.model_size
        return summary


class CalledOnZero(Callback):
    def on_train_batch_end(this, trainer, pl_module, *args):
        if trainer.is_global_zero:
            pl_module(torch.ones(1, 12, dtype=torch.float64))


@distributed(world_size=2)
def test_a_call_on_one_rank_is_refused():
    trainer = trainer_for(LAYOUTS["pipeline"][0](), 2, max_epochs=1, callbacks=[CalledOnZero()])
    message = r"in `CalledOnZero.on_train_batch_end` on rank 0, .*rank 1"
    with patched(message_order, "WAIT_S", 2.0), pytest.raises(RuntimeError, match=message):
        trainer.fit(Sampled().double(), loader())


class Layers(nn.Module):
    """The layers of `Model`, as a network by itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 12), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(12, 12))
        self.rnn, self.tied = nn.LSTM(12, 5, batch_first=True), nn.Linear(12, 12, bias=False)
        self.tied.weight = self.net[0].weight

    forward = Model.forward

    def as_loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels)


class Template(Net):
    """As the templates of projects have it: made of parts that somebody else has made, all of them hyperparameters."""

    def __init__(self, network, optimizer, loss, parts):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.loss = network, loss

    def training_step(self, batch, index):
        return self.loss(self.net(batch[0]), batch[1])

    validation_step = None

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


@distributed(world_size=2)
def test_modules_among_hyperparameters_are_saved_whole(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    strategies = {**{name: LAYOUTS[name][0] for name in ("tensor", "pipeline")}, "zero": _zero}
    for layout, make in strategies.items():
        network = _network()
        parts = {"first": [network.net[0]], "unused": nn.Linear(2, 2)}
        module = Template(network, functools.partial(torch.optim.SGD, lr=0.1), network.as_loss, parts)
        short = {"max_epochs": 1, "limit_train_batches": 1}
        trainer = trainer_for(make(), 2, enable_checkpointing=True, default_root_dir=folder / layout, **short)
        trainer.fit(module, loader(2, group.rank) if layout == "zero" else loader())
        if group.rank > 0:
            continue
        path = trainer.checkpoint_callback.best_model_path
        saved, trained = torch.load(path, weights_only=False)["hyper_parameters"], module.net.state_dict()
        kinds = {type(child) for value in (saved["network"], *saved["parts"]["first"]) for child in value.modules()}
        assert kinds == {type(child) for child in _network().modules()}, layout
        torch.testing.assert_close(dict(saved["network"].state_dict()), dict(trained), rtol=0, atol=0)
        assert saved["loss"].__self__ is saved["network"]
        assert saved["parts"]["first"][0] is saved["network"].net[0]
        assert saved["network"].tied.weight is saved["network"].net[0].weight
        x = torch.ones(3, 12, dtype=torch.float64)
        again = Template.load_from_checkpoint(path, weights_only=False)
        torch.testing.assert_close(again.net(x), module.net(x), rtol=0, atol=0)


def _network():
    torch.manual_seed(0)
    return Layers().double()


def _zero():
    return HybridParallelStrategy(zero_stage=2)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_one_strategy_for_one_trainer_after_another(layout):
    """As packages do that keep the arguments of a Trainer."""
    strategy, module, expected = LAYOUTS[layout][0](), Model().double(), Model().double()
    for kind, one in ((strategy, module), ("auto", expected)):
        devices = 1 if kind == "auto" else 2
        short = {"max_epochs": 1, "limit_train_batches": 2}
        trainer_for(kind, devices, **short).fit(one, loader())
        one.predicted = trainer_for(kind, devices, limit_predict_batches=1).predict(
            one, DataLoader(Samples().x, batch_size=8)
        )
        trainer_for(kind, devices, **short).fit(one, loader())
    torch.testing.assert_close(module.predicted, expected.predicted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-9, atol=1e-11)


class Sums(Model):
    """Computes with what is saved, in hooks of its own and of a callback."""

    def configure_callbacks(self):
        class Norms(Callback):
            def on_save_checkpoint(self, trainer, module, checkpoint):
                states = checkpoint["optimizer_states"][0]["state"].values()
                module.found["norms"] = [state["momentum_buffer"].norm().item() for state in states]

        return [Norms()]

    def on_save_checkpoint(self, checkpoint):
        self.found["sums"] = {name: value.sum().item() for name, value in checkpoint["state_dict"].items()}
        checkpoint["half"] = {name: value.half() for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_hooks_compute_with_what_is_saved_on_every_rank(group, layout):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    found = []
    for devices in (1, 2):
        module = Sums().double()
        module.found = {}
        options = {"enable_checkpointing": True, "default_root_dir": folder / f"{devices} {group.rank % devices}"}
        options |= {"max_epochs": 1, "limit_train_batches": 1}
        trainer_for("auto" if devices == 1 else LAYOUTS[layout][0](), devices, **options).fit(module, loader())
        found.append(module.found)
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)
