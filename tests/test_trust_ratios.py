"""LARS and LAMB: the published formulas, alone, and over parameters that are divided, as on one process."""

import pickle

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_parallel import LAMB, LARS, HybridParallelStrategy, comm
from lightning_parallel.comm import Group
from lightning_parallel.strategies.optimizers.norms import ShardNorms
from lightning_parallel.tensor.sharding import Shard, ShardPart
from tests.harness import distributed
from tests.strategies.models import trainer_for

OPTIMIZERS = {
    "lars": lambda parameters: LARS(parameters, lr=2.0, weight_decay=0.1, trust_coefficient=0.05),
    "lamb": lambda parameters: LAMB(parameters, lr=0.05, weight_decay=0.1, max_weight_norm=1.5),
    "lamb vectors": lambda parameters: LAMB(parameters, lr=0.05, adapt_vectors=True),
}


def published_lars(w, g, state, lr, decay, coefficient, momentum, adapts):
    """Algorithm 1 of the paper, for one parameter."""
    norm, step = w.square().sum().sqrt(), g.square().sum().sqrt()
    local = coefficient * norm / (step + decay * norm) if adapts and norm > 0 and step > 0 else 1.0
    state["v"] = momentum * state.get("v", 0.0) + lr * local * (g + decay * w)
    return w - state["v"]


def published_lamb(w, g, state, lr, decay, most, adapts, betas=(0.9, 0.999), eps=1e-6):
    """Algorithm 2 of the paper, for one parameter."""
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g * g
    u = state["m"] / (1 - betas[0] ** t) / ((state["v"] / (1 - betas[1] ** t)).sqrt() + eps) + decay * w
    norm, step = w.square().sum().sqrt(), u.square().sum().sqrt()
    ratio = min(norm, most) / step if adapts and norm > 0 and step > 0 else 1.0
    return w - lr * ratio * u


FORMULAS = {
    "lars": lambda w, g, state: published_lars(w, g, state, 2.0, 0.1, 0.05, 0.9, w.dim() > 1),
    "lamb": lambda w, g, state: published_lamb(w, g, state, 0.05, 0.1, 1.5, w.dim() > 1),
    "lamb vectors": lambda w, g, state: published_lamb(w, g, state, 0.05, 0.0, float("inf"), True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_published_formula(kind):
    """Also where a parameter is zero, has no gradient at times, and after the state was saved and loaded."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (3,), (2, 2), (2, 5)]
    expected = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    expected[2].zero_()
    parameters = [nn.Parameter(value.clone()) for value in expected]
    optimizer, states = OPTIMIZERS[kind](parameters), [{} for _ in shapes]
    for step in range(4):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn(shapes[index], generator=generator, dtype=torch.float64)
            if (step, index) == (1, 3):
                parameter.grad = None
                continue
            expected[index] = FORMULAS[kind](expected[index], parameter.grad, states[index])
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = pickle.loads(pickle.dumps(OPTIMIZERS[kind](parameters[:3])))
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": parameters})
            optimizer.load_state_dict(saved)
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in parameters], expected, rtol=1e-12, atol=1e-13)


def test_norms_of_sixteen_bits_and_what_is_refused():
    parameter = nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 1e-3)
    LARS([parameter], lr=1.0, momentum=0.0).step()
    assert parameter.isfinite().all()  # squares in half precision would overflow
    torch.testing.assert_close(parameter.mean(dtype=torch.float32), torch.tensor(300 - 0.3), rtol=1e-3, atol=0.0)
    # As DeepSpeed does.
    optimizer = LAMB([nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(4))]
    with pytest.raises(ValueError, match=r"shape \(4,\)\. DeepSpeed's ZeRO flattens"):
        optimizer.step()
    for wrong in ({"lr": -1.0}, {"momentum": -0.1}, {"trust_coefficient": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            LARS([parameter], **wrong)


def network(hidden=7):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


class Language(LightningModule):
    """Queries, keys and values in one weight; the embedding is the head as well."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        config = GPT2Config(
            n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        self.model, self.kind = GPT2LMHeadModel(config).double(), kind

    def training_step(self, batch, index):
        return self.model(batch, labels=batch).loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())


def batches():
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randint(16, (4, 6), generator=generator) for _ in range(3)], batch_size=None)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("kind", ["lars", "lamb"])
@distributed(world_size=4)
def test_divided_as_on_one_process(kind):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    module, expected = Language(kind), Language(kind)
    trainer = trainer_for(HybridParallelStrategy(**sizes), 4, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, batches())
    trainer_for(max_epochs=1).fit(expected, batches())
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_shards_that_two_ranks_hold(group):
    """A head of keys for two of queries: each element counts once."""
    whole = torch.randn(10, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rule = Shard.packed(0, [ShardPart.queries(2, 2, 1), ShardPart.keys(1, 2), 4], 2)
    assert rule.replicated
    parameters = [nn.Parameter(rule.split(whole, group.rank)), nn.Parameter(whole)]
    norms = ShardNorms({id(parameters[0]): "qk"}, {"qk": rule}, group)
    found = norms(parameters, parameters, [None, 2 * whole])
    torch.testing.assert_close(found, whole.norm() * torch.tensor([[1.0, 1.0], [0.0, 2.0]], dtype=torch.float64))


def expect_equal_steps(optimizer_of, expected, module, x):
    """Train both; the parameters of `module` are DTensors."""
    optimizers = [optimizer_of(each.parameters()) for each in (expected, module)]
    for _ in range(3):
        for each, optimizer in zip((expected, module), optimizers):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    whole = {name: value.full_tensor() for name, value in module.state_dict().items()}
    torch.testing.assert_close(whole, dict(expected.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=4)
def test_shards_of_fsdp_over_tensor_parallelism(group):
    """Both dimensions of the mesh divide the first of a weight, which torch then calls a strided shard."""
    x, expected, module = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5), network(8), network(8)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    expect_equal_steps(OPTIMIZERS["lamb vectors"], expected, module, x)


@distributed(world_size=2)
def test_shards_of_fsdp(group):
    """Of FSDP2, the norms are those of the whole; FSDP1 flattens parameters, and is refused."""

    x, expected, module = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5), network(), network()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(module, mesh=mesh)
    expect_equal_steps(OPTIMIZERS["lamb"], expected, module, x)
    flat = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"FSDP1 has flattened them. Use FSDP2"):
        LARS(flat.parameters())
    comm.barrier(Group.of())
