"""Compression of modules that `fully_shard` has divided, in a plain loop."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from lightning_parallel import comm
from lightning_parallel.compression import (
    Cast,
    Dense,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    compress_fully_shard,
)
from tests.harness import distributed, needs_fully_shard

SMALL = {"min_numel": 16}
LOSSLESS = {
    "dense": (Dense, 1e-10),
    "fp32": (lambda: Cast("fp32", **SMALL), 1e-5),
    "everything": (lambda: RandomK(1.0, **SMALL), 1e-10),
}
LOSSY = {
    "powersgd": lambda: PowerSGD(2, **SMALL),
    "topk_int8": lambda: TopK(0.1, **SMALL) | Quantize(8),
    "sign": lambda: Sign(**SMALL),
    "policy": lambda: Policy({"0*": None, "2*": PowerSGD(1, **SMALL), "*": Quantize(8, **SMALL)}),
}


@pytest.fixture(autouse=True)
def fully_shard_of_torch():
    needs_fully_shard(compressed=True)


def network():
    """Odd sizes: no dimension is a multiple of the ranks."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(9, 17), nn.GELU(), nn.Linear(17, 13), nn.LayerNorm(13), nn.Linear(13, 5))


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 9, generator=generator, dtype=dtype)


def train(model, group, steps=None, num_steps=4, dtype=torch.float64):
    """SGD; the full weights after the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(batch(step, group.rank, dtype)).square().sum(1).mean().backward()
        if steps is not None:
            assert steps.finish()
        optimizer.step()
    return [full(parameter) for parameter in model.parameters()]


def full(parameter):
    return parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach().clone()


def single(size, num_steps=4):
    """What one process computes with the batches of all ranks."""
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(size)])).square().sum(1).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def meshes(layout):
    """The mesh that is sharded over, and that of the replicas."""
    if layout == "sharded":
        return init_device_mesh("cpu", (4,)), None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh["replicate"]


LAYOUTS = pytest.mark.parametrize("layout", ["sharded", "hybrid"])


def assert_equal(found, expected):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@LAYOUTS
@distributed(world_size=4)
def test_what_loses_nothing_equals_one_process(layout, group):
    mesh, replicas = meshes(layout)
    expected = single(4)
    for make, tolerance in LOSSLESS.values():
        model = shard(network().double(), mesh)
        steps = compress_fully_shard(model, make(), replicas)
        for mine, theirs in zip(train(model, group, steps), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert steps.compressor.step == 4


@pytest.mark.parametrize("name", ["powersgd", "topk_int8"])
@distributed(world_size=4)
def test_the_mean_is_that_of_the_same_compressor_in_an_own_loop(name, group):
    """Where the method needs the whole mean; the others leave out their second phase."""
    model = shard(network().double(), meshes("sharded")[0])
    compress_fully_shard(model, LOSSY[name]())
    found = train(model, group)
    plain, compressor = network().double(), LOSSY[name]()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        plain(batch(step, group.rank)).square().sum(1).mean().backward()
        named = {key: parameter.grad for key, parameter in plain.named_parameters()}
        compressor.reduce_(named)
        optimizer.step()
    for mine, theirs in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["topk_int8", "policy"])
@distributed(world_size=4)
def test_replicas_stay_bitwise_equal(name, group):
    mesh, replicas = meshes("hybrid")
    model = network().double()
    if group.rank >= 2:
        model[0].weight.data.add_(1)  # replicas that start apart
    model = shard(model, mesh)
    steps = compress_fully_shard(model, LOSSY[name](), replicas)
    for weight in train(model, group, steps):
        assert_equal(comm.all_gather(weight[None], group), [weight] * 4)
    assert max(comm.all_gather_object(steps.compressor.residual_norm, group)) > 0


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "name"), [("sharded", "sign"), ("hybrid", "policy")])
@distributed(world_size=4)
def test_resumes_bit_for_bit(layout, name, group):
    mesh, replicas = meshes(layout)
    model = shard(network().double(), mesh)
    steps = compress_fully_shard(model, LOSSY[name](), replicas)
    train(model, group, steps, num_steps=3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert steps.finish()
    state = steps.compressor.state_dict()
    expected = train(model, group, steps)

    model = shard(network().double(), mesh)
    model.load_state_dict(weights)
    steps = compress_fully_shard(model, LOSSY[name](), replicas)
    steps.compressor.load_state_dict(state, steps.group)
    assert_equal(train(model, group, steps), expected)
    assert steps.compressor.step == 7


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "name"), [("hybrid", "powersgd"), ("sharded", "policy")])
@distributed(world_size=4)
def test_overflow_on_one_rank_leaves_no_trace(layout, name, group):
    """In hybrid layouts also the ranks that hold finite shards forget the step."""
    mesh, replicas = meshes(layout)
    runs = []
    for bad in (False, True):
        model = shard(network().double(), mesh)
        steps = compress_fully_shard(model, LOSSY[name](), replicas)
        steps.compressor.expects_rollback = True
        train(model, group, steps, num_steps=2)
        if bad:
            x = torch.full((1, 17), 1e200 if group.rank == 1 else 1.0, dtype=torch.float64)
            (model[2](x)[:, 0] * 1e200).sum().backward()  # only the first row's gradient is infinite
            assert not steps.finish()
        runs.append(train(model, group, steps))
    assert_equal(*runs)


@LAYOUTS
@distributed(world_size=4)
def test_accumulates_without_communication(layout, group):
    mesh, replicas = meshes(layout)
    model = shard(network().double(), mesh)
    steps = compress_fully_shard(model, TopK(0.1, **SMALL), replicas)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(step, group.rank)).square().sum(1).mean().backward()
    assert steps.finish()
    assert steps.compressor.step == 2


@LAYOUTS
@distributed(world_size=4)
def test_every_backward_pass_is_a_step(layout, group):
    """Nothing is lost in the second one, and an overflow in the first one is not forgotten."""
    mesh, replicas = meshes(layout)
    model = shard(network().double(), mesh)
    steps = compress_fully_shard(model, PowerSGD(1, **SMALL), replicas)
    plain, compressor = network().double(), PowerSGD(1, **SMALL)
    loss, expected = model(batch(0, group.rank)).square().mean(), plain(batch(0, group.rank)).square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert steps.finish()
    assert steps.compressor.step == 3
    if layout == "sharded":
        sums = [0.0] * 8
        for _ in range(3):
            plain.zero_grad()
            expected.backward(retain_graph=True)
            compressor.reduce_({name: parameter.grad for name, parameter in plain.named_parameters()})
            sums = [total + parameter.grad for total, parameter in zip(sums, plain.parameters(), strict=True)]
        for parameter, total in zip(model.parameters(), sums):
            torch.testing.assert_close(parameter.grad.full_tensor(), total)
    (loss * (torch.inf if group.rank == 0 else 1.0)).backward(retain_graph=True)
    loss.backward()
    assert not steps.finish()
    assert steps.compressor.step == 4


@distributed(world_size=2)
def test_activations_computed_once_more_end_no_step(group):
    """The modules that are computed again in backward are the outermost sharded ones."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(checkpoint_wrapper(fully_shard(nn.Linear(9, 9), mesh=mesh)) for _ in range(3)))
    steps = compress_fully_shard(model, TopK(0.1, **SMALL))
    for count in range(3):
        model(batch(0, group.rank, torch.float32)).sum().backward()
        assert steps.compressor.step == count, "ended by the next forward pass"
    assert steps.finish()
    assert steps.compressor.state_dict()["residual"].keys() == {"0.weight", "1.weight", "2.weight"}


@LAYOUTS
@distributed(world_size=4)
def test_mixed_precision(layout, group):
    mesh, replicas = meshes(layout)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    expected = train(shard(network(), meshes("sharded")[0], mp_policy=policy), group, dtype=torch.float32)
    model = shard(network(), mesh, mp_policy=policy)
    steps = compress_fully_shard(model, Quantize(8, **SMALL), replicas)
    for mine, theirs in zip(train(model, group, steps, dtype=torch.float32), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2)


@distributed(world_size=4)
def test_other_dimensions_and_frozen_parameters(group):
    """Columns shared out instead of rows."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4)).double()
    plain[0].bias.requires_grad_(False)
    options = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.requires_grad else Shard(0)}
    model = shard(plain, mesh, **options)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4)).double()
    other[0].bias.requires_grad_(False)
    steps = compress_fully_shard(model, PowerSGD(2, **SMALL))
    compressor = PowerSGD(2, **SMALL)
    for step in range(3):
        x = batch(step, group.rank)[:, :8]
        model(x).square().sum().backward()
        assert steps.finish()
        other.zero_grad()
        other(x).square().sum().backward()
        compressor.reduce_({name: p.grad for name, p in other.named_parameters() if p.requires_grad})
        for mine, theirs in zip(model.parameters(), other.parameters()):
            if theirs.requires_grad:
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        model.zero_grad()


@distributed(world_size=4)
def test_two_models_on_two_pairs_of_ranks(group):
    """They train at their own pace."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    model = shard(network().double(), mesh)
    steps = compress_fully_shard(model, TopK(0.1, **SMALL))
    train(model, group, steps, num_steps=2 + group.rank // 2)
    assert steps.compressor.step == 2 + group.rank // 2


@distributed(world_size=2)
def test_unused_parameters(group):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    for zeros in (False, True):
        model = fully_shard(Halves().double(), mesh=init_device_mesh("cpu", (2,)))
        steps = compress_fully_shard(model, TopK(0.1, **SMALL))
        loss = model(torch.randn(3, 8, dtype=torch.float64)).sum()
        if not zeros:
            with pytest.raises(RuntimeError, match="a parameter was not used"):
                loss.backward()
        elif hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
            loss.backward()
            assert steps.finish()
            assert not model.idle.weight.grad.full_tensor().any()


@distributed(world_size=4)
def test_what_cannot_work_is_refused(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="got none"):
        compress_fully_shard(network(), Dense())
    with pytest.raises(ValueError, match="sum over the replicas before"):
        compress_fully_shard(shard(network(), mesh), Dense())
    model = shard(network(), mesh["shard"])
    steps = compress_fully_shard(model, Dense(), mesh["replicate"])
    with pytest.raises(ValueError, match="must have no communication hook"):
        compress_fully_shard(model, Dense())
    steps.close()
    compress_fully_shard(model, Dense()).close()
    with torch.device("meta"):
        empty = shard(network(), mesh["shard"])
    with pytest.raises(ValueError, match="meta device"):
        compress_fully_shard(empty, Dense(), mesh["replicate"])
    mixed = network()
    fully_shard(mixed[0], mesh=mesh["replicate"])
    fully_shard(mixed, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="same ranks"):
        compress_fully_shard(mixed, Dense())


@distributed(world_size=2)
def test_a_divide_factor_of_the_users(group):
    model = shard(network().double(), init_device_mesh("cpu", (2,)))
    plain = shard(network().double(), init_device_mesh("cpu", (2,)))
    compress_fully_shard(model, Dense())
    for one in (model, plain):
        for module in one.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(6.0)
        one(batch(0, group.rank)).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor())
