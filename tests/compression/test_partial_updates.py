"""Several models, or parts of one, that take turns with one compressor; gradients of unusual kinds."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import CompressedDDPStrategy, PowerSGD, TensorParallelStrategy, TopK, comm
from lightning_parallel.compression import Dense, HookState, Quantize, compression_hook
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for

SMALL = {"min_numel": 1}


class Two(Net):
    """Two parts with an optimizer each, updated in turn; the sum of their gradients is kept."""

    automatic_optimization = False

    def __init__(self, toggle=False):
        super().__init__(momentum=0)
        self.toggle = toggle
        self.other = nn.Linear(12, 5)
        self.total = {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=1.0), torch.optim.SGD(self.other.parameters(), lr=1.0)

    def training_step(self, batch, index):
        x, y = batch
        for optimizer, part in zip(self.optimizers(), (self.net, self.other)):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = 0.01 * F.cross_entropy(part(x), y)
            optimizer.zero_grad()
            named = {name: p for name, p in self.named_parameters() if any(p is q for q in part.parameters())}
            for (name, _), gradient in zip(
                named.items(), torch.autograd.grad(loss, list(named.values()), retain_graph=True)
            ):
                self.total[name] = self.total.get(name, 0) + gradient
            for probed in () if self.toggle else (self.net, self.other):  # brings no gradient to anybody's `.grad`
                torch.autograd.grad(F.cross_entropy(probed(x), y), list(probed.parameters()))
            self.manual_backward(loss)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)


STRATEGIES = {
    "ddp": lambda compression: CompressedDDPStrategy(compression, find_unused_parameters=True),
    "mesh": lambda compression: TensorParallelStrategy(tensor_parallel_size=1, compression=compression),
}


@pytest.mark.parametrize(("kind", "compressor"), [("ddp", TopK), ("mesh", PowerSGD)])
@distributed(world_size=2)
def test_gradients_that_another_update_has_left_are_no_new_ones(kind, compressor, group):
    module = Two().double()
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    strategy = STRATEGIES[kind](compressor(0.1 if compressor is TopK else 1, **SMALL))
    trainer = trainer_for(strategy, group.size, max_epochs=2)
    trainer.fit(module, loader(group.size, group.rank))
    residual = strategy.compression.state_dict()["residual"]
    assert residual
    for name, parameter in module.named_parameters():
        update = start[name] - parameter.detach()
        left = comm.all_reduce_(residual[name].clone(), group) / 2 if name in residual else 0
        true = comm.all_reduce_(module.total[name].clone(), group) / 2
        torch.testing.assert_close(update + left, true, rtol=1e-9, atol=1e-12)


@distributed(world_size=2)
def test_optimizers_that_are_toggled(group):
    expected, module = Two(toggle=True).double(), Two(toggle=True).double()
    for strategy, one in (
        (DDPStrategy(find_unused_parameters=True), expected),
        (CompressedDDPStrategy(Dense(), find_unused_parameters=True), module),
    ):
        trainer_for(strategy, group.size, max_epochs=1).fit(one, loader(group.size, group.rank))
    for parameter, other in zip(module.parameters(), expected.parameters()):
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-14)


@distributed(world_size=2)
def test_alternating_factors_take_turns_parameter_by_parameter(group):
    generator = torch.Generator().manual_seed(3)
    targets = {name: torch.randn(24, 16, generator=generator, dtype=torch.float64) for name in ("one", "two")}
    values = {name: torch.zeros_like(target) for name, target in targets.items()}
    compressor = PowerSGD(4, alternate=True, **SMALL)
    for step in range(400):
        name = ("one", "two")[step % 2]
        gradient = (values[name] - targets[name]) * (1.5 if group.rank else 0.5)
        compressor.reduce_({name: gradient}, group)
        values[name] -= 0.1 * gradient
    for name, target in targets.items():
        assert (values[name] - target).norm() < 0.05 * target.norm(), name


@distributed(world_size=2)
def test_ranks_that_suddenly_bring_other_gradients_are_told(group):
    compressor = PowerSGD(2, **SMALL)
    for names in ("ab", "a", "ab"):
        compressor.reduce_({name: torch.ones(8, 8) for name in names}, group)
    with pytest.raises(ValueError, match=r"(?s)must be the same on all ranks.*rank 1: .'b': None"):
        compressor.reduce_({name: torch.ones(8, 8) for name in ("ab", "a")[group.rank]}, group)


class Mixed(nn.Module):
    """Parameters of three dtypes, and a sparse gradient."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, 8, sparse=sparse)
        self.wide = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(8, 8).bfloat16())
        self.idle = nn.Parameter(torch.ones(40, 40))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.table(x) @ self.wide.float() @ self.short.float()).square().mean()


@pytest.mark.parametrize(
    ("sparse", "options", "compressor"),
    [
        (False, {"static_graph": True}, PowerSGD),
        (False, {"find_unused_parameters": True, "bucket_cap_mb": 0.001}, Dense),
        (True, {"find_unused_parameters": True, "bucket_cap_mb": 0.001}, PowerSGD),
        (True, {"static_graph": True}, Dense),
    ],
)
@distributed(world_size=2)
def test_dtypes_sparse_gradients_and_portions_without_any(sparse, options, compressor, group):
    models = [DistributedDataParallel(Mixed(sparse), **options) for _ in range(2)]
    state = HookState(compressor(), models[1])
    models[1].register_comm_hook(state, compression_hook)
    for step in range(3):
        x = torch.arange(6) + 3 * group.rank + step
        for model in models:
            model.zero_grad()
            model(x).backward()
        assert state.finish()
        for (name, p), q in zip(models[1].named_parameters(), models[0].parameters()):
            if p.grad is not None and (compressor is Dense or name == "module.table.weight" and sparse):
                torch.testing.assert_close(
                    p.grad.to_dense(), q.grad.to_dense(), rtol=1e-2 if "short" in name else 1e-5, atol=1e-6
                )
    assert state.compressor.step == 3
    state.close()


@distributed(world_size=2)
def test_gradients_are_those_of_the_parameters_whatever_their_layout(group):
    def train(memory_format):
        torch.manual_seed(4)
        module = (
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 5))
            .double()
            .to(memory_format=memory_format)
        )
        state = HookState(PowerSGD(1, **SMALL), module)
        model = DistributedDataParallel(module)
        model.register_comm_hook(state, compression_hook)
        for step in range(2):
            x = torch.randn(
                2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + group.rank)
            )
            model(x).square().sum().backward()
            state.finish()
        state.close()
        return {name: parameter.grad for name, parameter in module.named_parameters()}, state.compressor.state_dict()[
            "residual"
        ]

    torch.testing.assert_close(train(torch.channels_last), train(torch.contiguous_format), rtol=1e-9, atol=1e-12)


@distributed(world_size=2)
def test_an_error_in_the_lane_ends_backward(group):
    class Broken(Quantize):
        def compress(self, work, block, step):
            raise ZeroDivisionError("no such method")
            yield

    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), bucket_cap_mb=0.001)
    state = HookState(Broken(8, **SMALL), model)
    model.register_comm_hook(state, compression_hook)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: no such method"):
        model(torch.ones(2, 40)).sum().backward()
    state.close()
