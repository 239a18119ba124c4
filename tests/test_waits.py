"""For what the host waits in a step, counted on the CPU: a GPU would have to finish all that is queued before."""

import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.tensor import regions
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from tests.harness import distributed
from tests.launches import Launches, Reads
from tests.pipeline.other_models import Block


def waits_of(call):
    """Return the operations for which the host waits, after a first call that may measure and compare."""
    call()
    call()
    with Launches() as seen, Reads(seen):
        call()
    return {name: count for name, count in seen.waited.items() if count}


class Attention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


@distributed(world_size=2)
def test_tensor_parallel_layers_wait_for_nothing(group):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    plan = make_plan(model, "auto", group)
    assert len(plan.styles) > 8
    apply_plan(model, plan, group)
    x = torch.randn(2, 6, 16)
    # In training, states of the CPU's generator are read, where those of a GPU's are numbers of the host.
    with (
        patched(regions, "_draw", lambda generator: 1),
        patched(regions, "_state", lambda generator: (1, 1)),
        patched(regions, "_restore", lambda generator, state: None),
    ):
        found = waits_of(lambda: model(x).square().mean().backward())
    assert not found, found


@distributed(world_size=2)
def test_the_reducer_waits_once(group):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    reducer = GradientReducer(dict(model.named_parameters()), group, bucket_bytes=300)
    x = torch.randn(4, 8)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()
        reducer.reduce()

    # The flags, between hosts: not for the device.
    found = waits_of(step)
    assert sum(found.values()) <= 1, found


def test_an_engine_of_one_stage_waits_for_nothing():
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    for schedule in ("1f1b", "zb_h1", "interleaved_1f1b"):
        model = nn.Sequential(nn.Linear(6, 8), *(Block(8) for _ in range(4)), nn.Linear(8, 3))

        def step(batch, model=model):
            return F.mse_loss(model(batch[0]), batch[1])

        plan = analyze(model, 1, schedule, num_microbatches=2, example=(step, [x, y]), balance="uniform")
        engine = PipelineEngine(model, plan, Group.alone("pipeline_parallel"))
        found = waits_of(lambda engine=engine: engine.forward_backward(step, [x, y]))
        assert found == {"_local_scalar_dense": 1}, f"{schedule}: {found}; the seed is drawn on the host"
