"""Intercepted modules: who decides what a call does, and what happens to copies."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.step_trace.interception import ActiveHandler, Call, CallSite, intercept
from tests.pipeline.models import built, pipeline


class Doubling:
    """Doubles what layers return, and passes over the modules around them."""

    def layer(self, call):
        return 2 * call.run()

    def outer_module(self, call):
        return call.args[0]


@pytest.mark.parametrize(("places", "expected"), [((0,), 6.0), ((), 1.0)])
def test_the_active_handler_decides(places, expected):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(3.0)
    active = ActiveHandler()
    intercept(layer, CallSite(active, "layer", "kind", places))
    intercept(layer, CallSite(active, "layer", "kind", places))
    assert layer(torch.ones(1)) == 3.0
    with active.use(Doubling()):
        assert layer(torch.ones(1)) == expected
    assert layer(torch.ones(1)) == 3.0
    assert type(layer).__name__ == "Linear"
    assert isinstance(layer, nn.Linear)


def test_a_slice_of_an_intercepted_container_calls_its_layers():
    layers, active = nn.Sequential(nn.Identity(), nn.Identity()), ActiveHandler()
    for module, place in ((layers, ()), (layers[0], (0,)), (layers[1], (1,))):
        intercept(module, CallSite(active, "layers", "kind", place))
    with active.use(Doubling()):
        assert layers[1:](torch.ones(1)) == 2.0


def test_a_handler_does_not_stay_after_an_error():
    active = ActiveHandler()
    with pytest.raises(ZeroDivisionError), active.use(Doubling()):
        raise ZeroDivisionError
    assert active.handler is None


def test_a_module_of_another_stage_cannot_be_called():
    layer = nn.Linear(1, 1)
    site = CallSite(ActiveHandler(), "layers.3", "kind", (3,), present=False)
    intercept(layer, site)
    with pytest.raises(RuntimeError, match="`layers.3` is on another pipeline stage"):
        layer(torch.ones(1))
    with pytest.raises(ValueError, match="`head` is not one of the repeated layers"):
        _ = Call(CallSite(ActiveHandler(), "head", "head"), layer, layer.forward, (), {}).layer_index


def test_a_cut_module_can_be_copied_but_not_pickled():
    model, step, batch = built("gpt2")
    alone = Group.alone("pipeline_parallel")
    engine = pipeline(model, alone, build_schedule("gpipe", 1, 2, virtual_stages=2), (step, batch), balance="uniform")
    expected = model(**batch).logits
    duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(**batch).logits, expected)
    ours, theirs = (dict(module.named_parameters()) for module in (model, duplicate))
    assert ours.keys() == theirs.keys()
    assert not {id(parameter) for parameter in ours.values()} & {id(parameter) for parameter in theirs.values()}
    engine.forward_backward(step, batch)
    assert all(parameter.grad is None for parameter in duplicate.parameters())
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(
            RuntimeError, match=r"split into pipeline stages.*write a checkpoint.*`load_from_checkpoint`"
        ):
            save(model)
    pickle.dumps(model.state_dict())
