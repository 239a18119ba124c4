"""Optimizers whose groups name, measure or add parameters: as on one process, and in its checkpoints."""

import copy
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn

from lightning_parallel import LAMB, HybridParallelStrategy, comm
from lightning_parallel.comm import Group
from lightning_parallel.strategies.optimizers import checks as optimization
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, assert_same, fit


class Measured(Deep):
    """Learning rates by the width of a matrix, as in muP; the head by name, before the embedding."""

    def configure_optimizers(self):
        groups = [{"params": [self.head.weight], "lr": 0.3}]
        for name, parameter in self.named_parameters():
            if name != "head.weight":
                width = parameter.shape[1] + parameter.size(1) if parameter.ndim > 1 else parameter.numel()
                groups.append({"params": [parameter], "lr": 0.5 / width + len(parameter) / 1000})
        return torch.optim.SGD(groups, momentum=0.9)


@distributed(world_size=4)
def test_groups_by_name_and_shape(group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "measured.ckpt"
    expected, module = Measured(), Measured()
    expected_trainer = fit(expected, "auto", 1)
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2)
    trainer = fit(module, strategy, 4)
    assert_same(trainer, module, expected_trainer, expected)
    kinds = {type(parameter) for parameter in module.parameters()}
    assert kinds == {nn.Parameter}
    trainer.save_checkpoint(path)
    comm.barrier(group)
    (found,) = torch.load(path, weights_only=False)["optimizer_states"]
    one = expected_trainer.optimizers[0].state_dict()
    assert found["param_groups"] == one["param_groups"]
    for index, entry in one["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])


class Finetuned(Deep):
    @property
    def backbone(self):
        return nn.ModuleList([self.embed, *self.blocks[:2]])

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


def _thaw():
    return [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, should_align=False)]


@distributed(world_size=2)
def test_groups_that_finetuning_adds(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 2, "balance": "uniform"}

    def stages():
        return HybridParallelStrategy(**sizes)

    one = fit(Finetuned(), "auto", 1, max_epochs=2, callbacks=_thaw())
    cut = fit(Finetuned(), stages(), 2, max_epochs=2, callbacks=_thaw())
    cut.save_checkpoint(folder / "cut.ckpt")
    if group.rank == 0:
        one.save_checkpoint(folder / "one.ckpt")
    comm.barrier(group)
    (found,) = torch.load(folder / "cut.ckpt", weights_only=False)["optimizer_states"]
    expected = one.optimizers[0].state_dict()
    assert len(expected["param_groups"]) == 2
    assert found["param_groups"] == expected["param_groups"]
    for index, entry in expected["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])
    # Not a run without a break: stock Lightning freezes the backbone again where it resumes.
    expected = {}
    for name in ("one", "cut"):
        module = Finetuned()
        fit(module, "auto", 1, max_epochs=4, callbacks=_thaw(), ckpt_path=folder / f"{name}.ckpt")
        for key, value in module.state_dict().items():
            torch.testing.assert_close(value, expected.setdefault(key, value), rtol=1e-9, atol=1e-11)
    for name in ("one", "cut"):
        resumed = fit(Finetuned(), stages(), 2, max_epochs=4, callbacks=_thaw(), ckpt_path=folder / f"{name}.ckpt")
        full = resumed.strategy.lightning_module_state_dict()
        if group.rank == 0:
            for key, value in expected.items():
                torch.testing.assert_close(full[key], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {key}")


class Thaws(BaseFinetuning):
    """Lightning compares each parameter with those of the optimizer, by their numbers."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.05)


@distributed(world_size=2)
def test_groups_that_a_callback_of_the_users_adds(group):
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 2, "balance": "uniform"}
    one = Finetuned()
    fit(one, "auto", 1, max_epochs=2, callbacks=[Thaws()])
    for strategy in (HybridParallelStrategy(tensor_parallel_size=2), HybridParallelStrategy(**sizes)):
        cut = Finetuned()
        trainer = fit(cut, strategy, 2, max_epochs=2, callbacks=[Thaws()])
        assert len(trainer.optimizers[0].param_groups) == 2
        for key, value in cut.state_dict().items():
            torch.testing.assert_close(value, one.state_dict()[key], rtol=1e-10, atol=1e-12, msg=key)


class Odd(torch.optim.SGD):
    """Treats each element by itself, and keeps a flat copy of each parameter."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["flat"] = parameter.detach().reshape(-1).clone()
        return loss


class OddBesideTheState(Odd):
    """Keeps a flat copy beside its state, too, so that no owner can have all."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = [state["flat"] for state in self.state.values()]
        return loss


@distributed(world_size=2)
def test_state_that_cannot_be_merged_is_refused_before_training():
    class Project(Deep):
        def configure_optimizers(self):
            return OddBesideTheState(self.parameters(), lr=0.1)

        def training_step(self, batch, index):
            raise AssertionError("it trains")

    with pytest.raises(ValueError, match=r"`OddBesideTheState` keeps `flat`.*cannot be merged"):
        fit(Project(), HybridParallelStrategy(tensor_parallel_size=2), 2, num_sanity_val_steps=0)


class Keeping(torch.optim.SGD):
    """Keeps copies of its parameters in many ways, and pulls them back there."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        every = [p for group in self.param_groups for p in group["params"]]
        self.params, self.start = every, [p.detach().clone() for p in every]
        self.by_group = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.by_parameter = {p: p.detach().clone() for p in every}
        self.by_id = {id(p): p.detach() * 0.5 for p in every}
        self.by_number = dict(enumerate(p.detach().clone() for p in every))
        self.pairs = [(p, copy.deepcopy(p.detach())) for p in every]
        self.records = [{"p": p, "start": p.detach().clone()} for p in every]
        self.sums = [torch.zeros_like(p) for p in every if p.dim() > 1]
        for group in self.param_groups:
            group["start"] = [torch.empty_like(p).copy_(p) for p in group["params"]]
            for p in group["params"]:
                self.state[p]["start"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        pairs = [*zip(self.params, self.start), *self.by_parameter.items(), *self.pairs]
        pairs += [tuple(record.values()) for record in self.records]
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            pairs += [(p, self.by_id[id(p)]), (p, self.by_number[number]), (p, self.state[p]["start"])]
        for group, kept in zip(self.param_groups, self.by_group):
            pairs += [*zip(group["params"], kept), *zip(group["params"], group["start"])]
        for p, total in zip([p for p in self.params if p.dim() > 1], self.sums):
            pairs.append((p, total.add_(p)))
        for p, start in pairs:
            p.add_(start - p, alpha=0.003)
        return loss


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, without what torch sets up for optimizers."""

    def __init__(self, inner, alpha=0.5):
        self.inner, self.alpha, self.param_groups, self.defaults = inner, alpha, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        for group, kept in zip(self.param_groups, self.slow):
            for p, slow in zip(group["params"], kept):
                p.copy_(slow.lerp_(p, self.alpha))
        return loss

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Copying(Deep):
    """Makes its optimizer, and copies of its own beside it."""

    def __init__(self, make, use=None):
        super().__init__()
        self.make, self.use, self.kept = make, use, None

    def configure_optimizers(self):
        if self.use is not None:
            self.kept = self.use(self)
        vectors = [p for p in self.parameters() if p.dim() == 1]
        return self.make([{"params": [p for p in self.parameters() if p.dim() > 1]}, {"params": vectors, "lr": 0.05}])

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        for mine, p in zip(*(self.kept or ([], []))):
            p.add_(mine.lerp_(p, 0.3) - p, alpha=0.1)


def shadow(module):
    mine = copy.deepcopy(module.blocks)  # in a closure, and a module
    return [p.detach().clone() for p in module.parameters()], Lazily(module, lambda: mine.parameters())


class Lazily:
    def __init__(self, module, copies):
        self.module, self.copies = module, copies

    def __iter__(self):
        for mine, p in zip(self.copies(), self.module.blocks.parameters()):
            p.lerp_(mine, 0.01)
        return iter(list(self.module.parameters()))


def vector(module):
    return nn.utils.parameters_to_vector(module.parameters())[:0], []


def hidden(module):
    return [], iter([[module.blocks[number].up.bias.detach().clone() for number in (0, -1)]])


def rates(module):
    return [], [p.norm().item() for p in module.parameters()]


@distributed(world_size=2)
def test_copies_of_parameters_that_optimizers_make(group):
    def strategy():
        return HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2)

    def around(groups):
        return Lookahead(torch.optim.SGD(groups, lr=0.1, momentum=0.9))

    short = {"max_epochs": 1, "limit_val_batches": 0}
    for make, use in ((Keeping, shadow), (around, None), (Keeping, vector), (Keeping, hidden), (Keeping, rates)):
        expected, module = Copying(make, use), Copying(make, use)
        assert_same(fit(module, strategy(), 2, **short), module, fit(expected, "auto", 1, **short), expected)


class Slow(torch.optim.SGD):
    """Keeps slow weights in an attribute, and saves them under a key of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.slow_state, self.scale, self.calls = {}, torch.full((3,), 0.5, dtype=torch.float64), 0

    def keep(self, number, p):
        return self.slow_state.setdefault(number, p.detach().clone())

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.calls += 1
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p.copy_(self.keep(number, p).lerp_(p, self.scale[0]))
        return loss

    def state_dict(self):
        return {**super().state_dict(), "slow_state": dict(self.slow_state)}

    def load_state_dict(self, state):
        self.slow_state = dict(state["slow_state"])
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Renaming(Slow):
    def state_dict(self):
        return {"inner": torch.optim.SGD.state_dict(self), "slow": self.slow_state}

    def load_state_dict(self, state):
        self.slow_state = state["slow"]
        torch.optim.SGD.load_state_dict(self, state["inner"])


class Steady(Slow):
    """Keeps slow weights in its state, and under keys of its own what is the same on all ranks."""

    def keep(self, number, p):
        return self.state[p].setdefault("slow", p.detach().clone())

    def state_dict(self):
        state = torch.optim.SGD.state_dict(self)
        return {**state, "calls": self.calls, "scales": [self.scale, torch.tensor(float(self.calls))]}

    def load_state_dict(self, state):
        self.calls, self.scale = state["calls"], state["scales"][0]
        assert type(self.scale) is torch.Tensor
        assert state["scales"][1] == self.calls
        super(Slow, self).load_state_dict({key: state[key] for key in ("state", "param_groups")})


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_keys_of_an_optimizers_own(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))

    def train(kind, devices=1, replicas=1, epochs=1, path=None, **sizes):
        module = Copying(kind)
        saves = sizes.pop("saves", False)
        strategy = "auto" if devices == 1 else HybridParallelStrategy(**sizes)
        short = {"max_epochs": epochs, "limit_train_batches": 1, "limit_val_batches": 0}
        found = fit(module, strategy, devices, replicas, path, enable_checkpointing=saves, **short)
        return found, module

    tensor, stages = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}
    replicas = {"data_parallel_size": 2, "replicas": 2}
    refused = [(Slow, sizes, "has a key `slow_state`") for sizes in (tensor, stages)]
    refused.append((Renaming, tensor, "has no `param_groups`, but `inner`"))
    for kind, sizes, key in refused:
        trainer, _ = train(kind, 2, **sizes)  # nothing is saved
        with pytest.raises(RuntimeError, match=rf"`{kind.__name__}.state_dict\(\)` {key}.*`self.state"):
            trainer.save_checkpoint(folder / "no.ckpt")
    with pytest.raises(RuntimeError, match=key):
        train(kind, 2, **sizes, saves=True)
    one, _ = train(Slow)
    if group.rank == 0:
        one.save_checkpoint(folder / "one.ckpt")
    comm.barrier(group)
    with pytest.raises(RuntimeError, match="`slow_state` in the checkpoint"):
        train(Slow, 2, path=folder / "one.ckpt", epochs=2, **tensor)
    for kind, sizes in ((Renaming, replicas), (Steady, stages), (Steady, {**tensor, "checkpoint_format": "sharded"})):
        path = folder / f"{kind.__name__}_{'checkpoint_format' in sizes}.ckpt"
        trainer, _ = train(kind, 2, **sizes)
        trainer.save_checkpoint(path)
        comm.barrier(group)
        _, expected = train(kind, epochs=2)
        _, module = train(kind, 2, path=path, epochs=2, **sizes)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=f"{sizes} {name}")


class Sam(torch.optim.Optimizer):
    """A SAM whose user calls both steps; `step` is that of the inner optimizer."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        found = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for _, grad in found]).norm()
        for parameter, grad in found:
            self.state[parameter]["aside"] = self.param_groups[0]["rho"] / norm * grad
            parameter += self.state[parameter]["aside"]

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= self.state[parameter].pop("aside", 0)
        self.step()

    def step(self, closure=None):
        return self.base.step(closure)


class GivenSam(Sam):
    """Is given the inner optimizer as a function that is no class."""

    def __init__(self, params, make, untold):
        super().__init__(params, make)


class Given(torch.optim.SGD):
    """Steps as torch does, whatever its constructor wants."""

    def __init__(self, params, model, lr=0.1):
        super().__init__(params, lr=lr)


class AdamOfOwn(torch.optim.AdamW):
    pass


def test_optimizers_that_cannot_be_tried_are_refused():
    parameters = list(nn.Linear(4, 4).parameters())
    names = {id(parameter): f"layer.{index}" for index, parameter in enumerate(parameters)}

    def checks(optimizer):
        optimization.check_optimizers([optimizer], names, dict.fromkeys(names.values()), True, Group.alone("world"))

    with pytest.raises(ValueError, match="`GivenSam` could not be tried .*takes `\\(params, lr=..., ...\\)`"):
        checks(GivenSam(parameters, lambda params: torch.optim.SGD(params, lr=0.1), object()))
    with pytest.raises(ValueError, match="`Sam` computes with all parameters at once"):
        checks(Sam(parameters, torch.optim.SGD, lr=0.1))
    for optimizer in (
        Given(parameters, None),
        AdamOfOwn(parameters),
        torch.optim.SparseAdam(parameters),
        Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    ):
        checks(optimizer)


class Averaging(torch.optim.SGD):
    """Counts its steps in the parameter group, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class Normalized(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


def test_optimizers_that_step_on_some_parameters_after_others():
    parameters = list(nn.Linear(4, 4).parameters())
    for kind in (torch.optim.AdamW, AdamOfOwn, torch.optim.Adafactor):
        assert optimization.steps_in_turns(kind(parameters)), kind
    for kind in (Averaging, Normalized, torch.optim.LBFGS):
        assert not optimization.steps_in_turns(kind(parameters, lr=0.1)), kind


def test_optimizers_over_vectors_of_all_parameters():
    parameters = list(nn.Linear(4, 4).parameters())
    optimization.check_flattened([torch.optim.AdamW(parameters), AdamOfOwn(parameters)], "FSDP1")
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, LAMB):
        with pytest.raises(ValueError, match=f"`{kind.__name__}` computes with full tensors, but FSDP1 flattens"):
            optimization.check_flattened([kind(parameters)], "FSDP1")
    with pytest.warns(UserWarning, match="`Given` could not be tried .* single elements"):
        optimization.check_flattened([Given(parameters, None)], "FSDP1")
    of_deepspeed = type("FusedAdam", (Given,), {"__module__": "deepspeed.ops.adam"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimization.check_flattened([of_deepspeed(parameters, None)], "DeepSpeed's ZeRO")


SPLITS = (optimization._row_halves, optimization._column_halves, optimization._slices)
KINDS = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop"]
KINDS += ["Rprop", "SGD", "SparseAdam", *(["Muon"] if hasattr(torch.optim, "Muon") else [])]
OPTIONS = {
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1}, {"fused": True}, {"capturable": False, "foreach": True}],
    "AdamW": [{"amsgrad": True}, {"fused": True}, {"maximize": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"fused": True}, {"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{"decoupled_weight_decay": True}],
    "Adagrad": [{"fused": True}, {"lr_decay": 0.1}],
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", KINDS)
def test_the_lists_of_torchs_optimizers_say_what_a_trial_says(name):
    kind = getattr(torch.optim, name)
    # Each step of LBFGS has 20 iterations by default, and a trial takes many steps.
    for options in [{"max_iter": 2}] if name == "LBFGS" else [{}, *OPTIONS.get(name, [])]:
        optimizer = kind(list(nn.Linear(4, 4, bias=False).parameters()), lr=0.05, **options)
        (group,) = optimizer.param_groups
        by_elements, odd, needs_whole, takes_turns = optimization._tried(optimizer, group, SPLITS)
        by_tensors = optimization._tried(optimizer, group, (optimization._single_tensors,)).is_same
        if name == "SparseAdam":  # refuses the gradients of a trial
            assert (by_elements, by_tensors) == (None, None)
            continue
        assert by_elements == (name in optimization.ELEMENTWISE_OPTIMIZERS), options
        assert by_tensors == (name != "LBFGS"), options
        assert odd is None or not by_elements
        assert needs_whole == takes_turns == (name in optimization.TENSORWISE_OPTIMIZERS)
