"""A step through the pipeline against the same step in one process: loss and every gradient by name."""

from unittest import mock

import pytest
import torch

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.strategies.setup.divide import message_groups
from tests.harness import distributed
from tests.pipeline.models import built, pipeline
from tests.strict_order import strict_order


def compare(
    group,
    builder,
    schedule="1f1b",
    microbatches=4,
    steps=2,
    virtual=None,
    options=None,
    message_groups=None,
    **analysis,
):
    """Run both ways; returns the engine."""
    options = options or {}
    reference, reference_step, batch = built(builder, **options)
    loss = reference_step(batch)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}

    model, step, batch = built(builder, **options)
    built_schedule = build_schedule(schedule, group.size, microbatches, virtual)
    engine_options = {"message_groups": message_groups}
    engine = pipeline(model, group, built_schedule, (step, batch), engine_options=engine_options, **analysis)
    for _ in range(steps):
        model.zero_grad()
        result = engine.forward_backward(step, batch)
        for name, parameter in model.named_parameters():
            assert expected[name] is None or parameter.grad is not None, name
            if expected[name] is not None:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        if group.rank == engine.last_rank:
            torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-10, atol=1e-10)
        else:
            assert result.loss is None
            assert not result.outputs
    mine = set(engine.stages)
    held = {name for name, _ in model.named_parameters()}
    assert held == {name for name, stages in engine.plan.parameter_stages.items() if mine & set(stages)}
    return engine


@pytest.mark.parametrize(
    ("builder", "schedule"),
    [
        *(("mlp", name) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv")),
        *(("llama", name) for name in ("interleaved_1f1b", "zb_h1")),
    ],
)
@distributed(world_size=2)
def test_every_schedule(group, schedule, builder):
    compare(group, builder, schedule)


MODELS = [
    ("gpt2", {"checkpointing": True}),
    ("gpt2", {"checkpointing": False}),
    ("llama", {"checkpointing": True}),
    ("llama", {"checkpointing": False, "tie": True}),
    ("llama", {"attention": "eager"}),
    ("mixtral", {}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("builder", "options"), MODELS, ids=[f"{b}-{o}" for b, o in MODELS])
@distributed(world_size=2)
def test_models_as_they_are(group, builder, options):
    compare(group, builder, "1f1b", 3, options=options)


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_weight_gradients_of_checkpointed_layers_that_come_later(group, reentrant):
    compare(group, "llama", "zb_h1", 3, options={"checkpointing": reentrant})


@pytest.mark.sweep
@pytest.mark.parametrize("builder", ["two_streams", "tied", "gpt2"])
@distributed(world_size=4)
def test_four_ranks(group, builder):
    compare(group, builder, "zb_h1", 5)


@pytest.mark.parametrize("builder", ["two_streams", "tied"])
@distributed(world_size=2)
def test_both_ends_on_one_rank(group, builder):
    compare(group, builder, "zbv", 3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@distributed(world_size=2)
def test_separate_message_groups(group, schedule):
    groups = MeshGroups(Mesh(pipeline_parallel=2))
    with strict_order():
        channels = message_groups(groups, build_schedule(schedule, 2, 4))
        with mock.patch.object(comm, "exchange", wraps=comm.exchange) as sent:
            compare(groups.pipeline_parallel, "mlp", schedule, message_groups=channels)
    ways = {(bool(call.args[0]), call.args[2].process_group) for call in sent.call_args_list}
    used = {process_group for _, process_group in ways}
    assert len(ways) == len(used), "one direction per group"
    assert used == {channel.process_group for channel in channels.values()}
