"""What a rank holds of a model that was cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from tests.harness import distributed
from tests.pipeline.models import Encoder, built, pipeline

CPU = torch.device("cpu")


def engine_of(group, builder, schedule="1f1b", microbatches=2, options=None, **engine_options):
    model, step, batch = built(builder, **(options or {}))
    schedule = build_schedule(schedule, group.size, microbatches)
    engine_options.setdefault("balance", "uniform")  # measured, the cut would depend on the machine's load
    return model, step, batch, pipeline(model, group, schedule, (step, batch), **engine_options)


@distributed(world_size=2)
def test_each_rank_holds_its_stages_only(group):
    whole, _, _ = built("gpt2")
    names = set(whole.state_dict())
    total = sum(value.numel() for value in whole.parameters())
    model, _, _, engine = engine_of(group, "gpt2")
    held = dict(model.named_parameters())
    mine = {name for name, stages in engine.plan.parameter_stages.items() if group.rank in stages}
    assert set(held) == mine
    assert set(model.state_dict()) <= names
    tied = engine.tied["transformer.wte.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert tied.ranks == (0, 1)
    assert engine.counted_by_others == (frozenset(["transformer.wte.weight"]) if group.rank else frozenset())
    shared = held["transformer.wte.weight"].numel()
    assert sum(value.numel() for value in held.values()) < 0.6 * total + shared
    layer = f"transformer.h.{3 if group.rank else 0}.attn.c_attn.weight"
    assert torch.equal(held[layer], whole.get_parameter(layer)), "a kept parameter must not change"
    absent = model.get_submodule(f"transformer.h.{3 if group.rank == 0 else 0}.attn.c_attn")
    assert isinstance(absent.weight, PlaceholderTensor)
    assert (absent.weight.shape, absent.weight.device) == ((16, 48), CPU)
    with pytest.raises(RuntimeError, match="is on another pipeline stage and cannot be called on its own"):
        model(torch.zeros(1, 2, dtype=torch.long))


@distributed(world_size=2)
def test_a_model_on_the_meta_device(group):
    whole, step, batch = built("encoder")
    with torch.device("meta"):
        model = Encoder().double()
    engine = pipeline(model, group, build_schedule("1f1b", 2, 2), (lambda b: F.cross_entropy(model(b[0]), b[1]), batch))
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(whole.get_parameter(name).detach().clone())
        assert parameter.is_meta
        setattr(owner, name.rpartition(".")[2], value)
    result = engine.forward_backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
    if group.rank == 1:
        torch.testing.assert_close(result.loss, step(batch).detach(), rtol=1e-10, atol=1e-10)
