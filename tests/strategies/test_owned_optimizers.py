"""Optimizers that need whole tensors: each rank steps on the tensors that it owns, and all equals one process."""

import copy
import functools
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_parallel import HybridParallelStrategy, LocalSGDStrategy, PowerSGD, comm
from lightning_parallel.compat import patched
from lightning_parallel.data_parallel.host_steps import HostSteps
from lightning_parallel.planner.rank_memory import optimizer_copies
from lightning_parallel.strategies.optimizers import owners
from lightning_parallel.tensor.sharding import Shard
from tests.harness import distributed
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_optimizer_groups import Odd
from tests.strategies.test_pipeline import Deep, fit
from tests.strategies.test_pipeline_lifecycle import HalfPrecision


class Tensorwise(Optimizer):
    """Computes the update of each tensor from the tensor, its gradient and its state."""

    def __init__(self, params, lr=0.05, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, self.state[parameter]) + group["weight_decay"] * parameter
                    parameter.sub_(update, alpha=group["lr"])
        return loss


class UsersLamb(Tensorwise):
    """Scales the step of Adam by norms of the tensor."""

    def update(self, parameter, state):
        state["step"] = state.get("step", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        square = state.setdefault("square", torch.zeros_like(parameter)).lerp_(parameter.grad.square(), 0.01)
        update = mean / (1 - 0.9 ** state["step"]) / ((square / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
        return update * parameter.norm() / update.norm()


class Shampoo(Tensorwise):
    """Multiplies a gradient by roots of the sums of its products, which it keeps in the shapes of these products."""

    def update(self, parameter, state):
        update = parameter.grad
        for dim, size in enumerate(parameter.shape):
            if f"products{dim}" not in state:
                state[f"products{dim}"] = 0.1 * torch.eye(size, dtype=parameter.dtype)
            rows = parameter.grad.movedim(dim, 0).reshape(size, -1)
            values, vectors = torch.linalg.eigh(state[f"products{dim}"].addmm_(rows, rows.T))
            root = vectors * values.pow(-0.5 / parameter.dim()) @ vectors.T
            update = torch.tensordot(root, update.movedim(dim, 0), 1).movedim(0, dim)
        return update


class Factored(Tensorwise):
    """Keeps a mean of the squares of each row, and an elementwise momentum, from its constructor on."""

    def __init__(self, params, lr=0.05, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["rows"] = torch.zeros(parameter.shape[0], dtype=parameter.dtype)
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    def update(self, parameter, state):
        squares = parameter.grad.square().flatten(1).mean(1) if parameter.dim() > 1 else parameter.grad.square()
        state["rows"].lerp_(squares, 0.1)
        state["momentum"].lerp_(parameter.grad, 0.5)
        return state["momentum"] / (state["rows"].sqrt().view(-1, *[1] * (parameter.dim() - 1)) + 1e-3)


class Mixed(Tensorwise):
    """Has the rule of another optimizer in each group, so that one run says as much as three."""

    RULES = {"lamb": UsersLamb, "shampoo": Shampoo, "factored": Factored}

    def __init__(self, params, lr=0.05, weight_decay=0.0, rule="lamb"):
        super().__init__(params, lr, weight_decay)
        for group in self.param_groups:
            group.setdefault("rule", rule)
            for parameter in group["params"] if group["rule"] == "factored" else ():
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[0], dtype=parameter.dtype)
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    def update(self, parameter, state):
        rule = next(group["rule"] for group in self.param_groups if any(each is parameter for each in group["params"]))
        return self.RULES[rule].update(self, parameter, state)


MAKERS = {
    "mixed": Mixed,
    "lamb": UsersLamb,
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
    "odd": functools.partial(Odd, lr=0.05),
}
if hasattr(torch.optim, "Muon"):
    MAKERS["muon"] = functools.partial(torch.optim.Muon, lr=0.05)


class Varied(Deep):
    """Has a parameter that no step uses, one without dimensions, a frozen one, odd sizes and two groups."""

    def __init__(self, case, **kwargs):
        super().__init__(**kwargs)
        self.case = case
        self.odd = nn.Linear(8, 7).double()
        self.back = nn.Linear(7, 8, bias=False).double()
        self.unused = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.odd.bias.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.back(self.odd(x)) * self.scale)

    def configure_optimizers(self):
        every = [each for each in self.parameters() if each.dim() == 2 or (self.case != "muon" and each.numel() > 1)]
        groups = [{"params": every[::2], "weight_decay": 0.1}, {"params": every[1::2], "weight_decay": 0.0}]
        if self.case == "mixed":
            groups = [{"params": every[at::3], "weight_decay": 0.1, "rule": it} for at, it in enumerate(Mixed.RULES)]
        elif self.case != "muon":
            groups.append({"params": [self.scale]})
        optimizer = MAKERS[self.case](groups)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


# Sizes, devices, replicas.
LAYOUTS = {
    "stock": (None, 1, 1),
    "tensor 2": ({"tensor_parallel_size": 2}, 2, 1),
    "tensor 4": ({"tensor_parallel_size": 4}, 4, 1),
    "stage 1": ({"zero_stage": 1}, 2, 2),
    "stage 2": ({"zero_stage": 2}, 4, 4),
    "stage 3": ({"zero_stage": 3}, 2, 2),
    "tensor 2, stage 3": ({"tensor_parallel_size": 2, "zero_stage": 3}, 4, 2),
    "tensor 2, stage 1": ({"tensor_parallel_size": 2, "zero_stage": 1}, 4, 2),
    "tensor 2, stage 2": ({"tensor_parallel_size": 2, "zero_stage": 2}, 4, 2),
    "tensor 2, pipeline 2": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}, 4, 1),
    "pipeline 2, stage 1": ({"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1}, 4, 2),
}


def run(layout, module, more=None, **options):
    sizes, devices, replicas = LAYOUTS[layout]
    strategy = (
        "auto" if sizes is None else HybridParallelStrategy(**{"gather_after_fit": "all", **sizes, **(more or {})})
    )
    # Small turns, so that each rank takes several in a step.
    with patched(owners, "TURN_BYTES", 256):
        return fit(module, strategy, devices, replicas, **{"limit_val_batches": 0, "gradient_clip_val": 0.3, **options})


def expect_same(module, expected, what):
    found = module.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{what}: {name}")


@functools.cache
def on_one_process(case, epochs=2):
    module = Varied(case)
    run("stock", module, max_epochs=epochs)
    return module.state_dict()


# Each layout trains with every rule of `Mixed`; torch's own kinds need only meet each kind of layout.
ALSO = {
    "tensor 2": "adafactor",
    "tensor 2, stage 3": "adafactor",
    "stage 3": "muon",
    "tensor 2, pipeline 2": "muon",
    "tensor 4": "odd",
    "pipeline 2, stage 1": "odd",
}


def expect_the_weights_of_one_process(layout):
    for case in sorted(MAKERS.keys() & {"mixed", ALSO.get(layout)}):  # in one order on all ranks
        module = Varied(case)
        trainer = run(layout, module, {"verify": "always"})
        expect_same(module, on_one_process(case), case)
        expect_shares_of_the_state(trainer, module)


def expect_shares_of_the_state(trainer, module):
    """Expect that each tensor has a state on one rank only, and that no rank has more than its share."""
    sizes, mesh = trainer.strategy.zero_stage, trainer.strategy.mesh
    ranks = mesh.tensor_parallel * (mesh.data_parallel if sizes else 1)
    names = trainer.strategy.run.parameter_names
    shared = [*trainer.strategy.run.owners.of.values()][0]
    held = {names[id(each)]: each.numel() for each in trainer.optimizers[0].state if each in shared}
    everyone = comm.all_gather_object(held, comm.Group.of())
    every = {names[id(each)]: each.numel() for each in shared if names[id(each)] in set().union(*everyone)}
    if mesh.pipeline_parallel == 1:
        assert sum(sum(each.values()) for each in everyone) >= sum(every.values())
    assert sum(held.values()) <= sum(every.values()) / ranks + max(every.values(), default=0)


def test_the_planner_measures_state_in_the_shapes_of_the_model():
    parameters = [nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(64))]
    assert optimizer_copies([torch.optim.Adafactor(parameters)]) == 2 + (64 + 32) / (64 * 32)
    assert optimizer_copies([UsersLamb(parameters)]) == 4
    assert optimizer_copies([Shampoo(parameters)]) == 2 + (64**2 + 32**2) / (64 * 32)
    parameters[0] = nn.Parameter(torch.ones(32, 32))
    parameters[0].shard_rule = Shard.even(0, 64, 2)
    assert optimizer_copies([Shampoo(parameters)]) == 2 + (64**2 + 32**2) / (64 * 32)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if LAYOUTS[each][1] == 2])
@distributed(world_size=2)
def test_it_trains_like_one_process_on_two_ranks(layout):
    expect_the_weights_of_one_process(layout)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if LAYOUTS[each][1] == 4])
@distributed(world_size=4)
def test_it_trains_like_one_process_on_four_ranks(layout):
    expect_the_weights_of_one_process(layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor 2", "stage 1", "stage 3"])
@distributed(world_size=2)
def test_owners_step_in_host_memory(group, layout):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "host.ckpt"
    more = {"verify": "always", "cpu_offload": ("optimizer",)}
    stepped = []
    real = HostSteps.turns

    def noted(self, optimizer, parameters):
        stepped.append(len(parameters))
        return real(self, optimizer, parameters)

    with patched(HostSteps, "turns", noted):
        run(layout, Varied("adafactor"), more, max_epochs=1).save_checkpoint(path)
        module = Varied("adafactor")
        run(layout, module, more, ckpt_path=path)
    expect_same(module, on_one_process("adafactor"), layout)
    # Several turns in each step.
    assert sum(map(bool, stepped)) > 16


@distributed(world_size=2)
def test_messages_travel_beside_the_steps_of_other_turns(group):
    calls = []

    def noted(begin, name):
        def note(*args):
            calls.append(f"{name}+")
            end = begin(*args)
            return lambda: (calls.append(f"{name}-"), end())[1]

        return note

    class Noting(Varied):
        def configure_optimizers(self):
            found = super().configure_optimizers()
            step = found[0][0].step
            found[0][0].step = lambda *args: (calls.append("step"), step(*args))[1]
            return found

    with (
        patched(owners, "_collecting", noted(owners._collecting, "collect")),
        patched(owners, "_delivering", noted(owners._delivering, "deliver")),
    ):
        run("tensor 2", Noting("adafactor"), max_epochs=1, limit_train_batches=1)
    # Two turns of messages are under way during a step, in one order on all ranks.
    comm.agree("the order", calls, group)
    found = " ".join(calls)
    turn = r"collect- step deliver\+ "
    expected = rf"collect\+ collect\+ {turn}(collect\+ {turn}deliver- ){{3,}}{turn}deliver- deliver-"
    assert re.fullmatch(expected, found), found


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("case", ["mixed", "adafactor"])
@distributed(world_size=4)
def test_every_layout_resumes_every_other(group, case):
    folder, path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)), None
    ring = ["stock", "tensor 2, stage 2", "tensor 4", "tensor 2, pipeline 2", "tensor 2, stage 3", "stock"]
    for epoch, layout in enumerate(ring):
        module = Varied(case)
        is_sharded = layout != "stock" and epoch % 2
        more = {"checkpoint_format": "sharded"} if is_sharded else {}
        trainer = run(layout, module, more, max_epochs=epoch + 1, ckpt_path=path)
        expect_same(module, on_one_process(case, epoch + 1), f"{case}, {ring[:epoch]} -> {layout}")
        path = folder / f"{epoch}.ckpt"
        if layout != "stock" or group.rank == 0:
            trainer.save_checkpoint(path)
        comm.barrier(group)


class Watching(Varied):
    """Reads the state of its optimizer in hooks, scales and resets it there, and takes a copy of the optimizer."""

    def on_train_batch_end(self, outputs, batch, index):
        optimizer = self.trainer.optimizers[0]
        self.norms = {}
        for name, parameter in self.named_parameters():
            if index == 0 and "blocks.0" in name and "mean" in optimizer.state[parameter]:
                optimizer.state[parameter]["mean"].mul_(0.5)
            if index == 0 and "blocks.3" in name:
                optimizer.state[parameter]["square"] = optimizer.state[parameter]["square"] * 0.9
            # With slices, a stage sees no scalar of another stage.
            for key, value in optimizer.state.get(parameter, {}).items() if name != "scale" else ():
                self.norms[name, key] = torch.as_tensor(value).double().norm().item()
        count = sum(len(group["params"]) for group in optimizer.param_groups[:2])
        state = copy.deepcopy(optimizer).state_dict()["state"]
        self.copied = {index: entry for index, entry in state.items() if index < count}
        if index == 1 and self.current_epoch == 0:
            del optimizer.state[self.head.weight]


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["tensor 2, stage 3", "tensor 2, pipeline 2", "pipeline 2, stage 1"])
@distributed(world_size=4)
def test_hooks_see_the_state_of_one_process(layout):
    expected, module = Watching("lamb"), Watching("lamb")
    run("stock", expected)
    run(layout, module)
    expect_same(module, expected.state_dict(), layout)
    assert module.norms == pytest.approx(expected.norms, rel=1e-9)
    torch.testing.assert_close(module.copied, expected.copied, rtol=1e-9, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"data_parallel_size": 4}, {"tensor_parallel_size": 2, "data_parallel_size": 2}])
@distributed(world_size=4)
def test_it_goes_with_compression(sizes):
    found = []
    for stage in (0, 1):
        module = Varied("adafactor")
        strategy = HybridParallelStrategy(zero_stage=stage, compression=PowerSGD(1, min_numel=16), **sizes)
        fit(module, strategy, 4, sizes["data_parallel_size"], limit_val_batches=0)
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12, msg=name)


class Manual(Varied):
    """Calls two optimizers by itself, one with a closure; hooks of their steps see full parameters."""

    def __init__(self):
        super().__init__("lamb")
        self.automatic_optimization = False
        self.shapes = []

    def training_step(self, batch, index):
        first, second = self.optimizers()

        def closure():
            first.zero_grad()
            loss = super(Manual, self).training_step(batch, index)["loss"]
            self.manual_backward(loss)
            return loss

        first.step(closure)
        outputs = super().training_step(batch, index)
        self.manual_backward(outputs["loss"])
        second.optimizer.step()
        second.zero_grad()
        return outputs

    def configure_optimizers(self):
        optimizers = [UsersLamb(self.blocks.parameters()), torch.optim.Adafactor(self.head.parameters(), lr=0.1)]
        for each in optimizers:
            each.register_step_pre_hook(self.see)
            each.register_step_post_hook(self.see)
        return optimizers

    def see(self, optimizer, args, kwargs):
        self.shapes.append([each.shape for group in optimizer.param_groups for each in group["params"]])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor 2", "stage 1"])
@distributed(world_size=2)
def test_steps_under_manual_optimization(layout):
    expected, module = Manual(), Manual()
    run("stock", expected, gradient_clip_val=None)
    run(layout, module, gradient_clip_val=None)
    expect_same(module, expected.state_dict(), layout)
    assert module.shapes == expected.shapes


class Thawed(Varied):
    """Trains a part of its layers from the second epoch on, in further groups."""

    def __init__(self):
        super().__init__("adafactor")
        self.blocks[:2].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.blocks[:2].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.blocks[:2].parameters()), "lr": 0.1})

    def configure_optimizers(self):
        every = [each for each in self.parameters() if each.requires_grad and each.numel() > 1]
        return torch.optim.Adafactor(every, lr=0.05)


@pytest.mark.parametrize("layout", ["tensor 2", "stage 1"])
@distributed(world_size=2)
def test_parameters_that_come_later_get_owners(layout):
    expected, module = Thawed(), Thawed()
    run("stock", expected, max_epochs=3)
    run(layout, module, max_epochs=3)
    expect_same(module, expected.state_dict(), layout)


class Overflowing(HalfPrecision):
    def configure_optimizers(self):
        return UsersLamb(self.parameters())


@distributed(world_size=2)
def test_owners_skip_a_step_together(group):
    found = []
    for devices in (1, 2):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
        module = Overflowing(0)
        strategy = HybridParallelStrategy(tensor_parallel_size=2) if devices == 2 else "auto"
        if devices == 2:
            strategy.precision_plugin = plugin
        os.environ.update(LOCAL_RANK=str(group.rank * (devices > 1)), NODE_RANK="0", WORLD_SIZE=str(devices))
        options = {"plugins": [plugin]} if devices == 1 else {}
        trainer = trainer_for(strategy, devices, max_epochs=1, limit_val_batches=0, **options)
        trainer.fit(module, loader(dtype=torch.float32))
        found.append((module.state_dict(), plugin.scaler.get_scale()))
    assert found[0][1] == found[1][1] == 2.0**9
    torch.testing.assert_close(dict(found[1][0]), dict(found[0][0]), rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_replicas_with_local_steps_have_owners_each(group):
    def train(sizes, replicas, path=None, **options):
        module = Varied("adafactor")
        strategy = LocalSGDStrategy(every_n_steps=2, average_first=0, gather_after_fit="all", verify="off", **sizes)
        return module, fit(module, strategy, 4, replicas, path, limit_val_batches=0, **options)

    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "local.ckpt"
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    expected, _ = train(sizes, 2, max_epochs=2)
    _, trainer = train(sizes, 2, max_epochs=1)
    trainer.save_checkpoint(path)
    comm.barrier(group)
    module, _ = train(sizes, 2, path, max_epochs=2)
    expect_same(module, expected.state_dict(), "resumed")
