"""Where the parts of a model are used, how the layers are divided, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.layer_stack import cut_units, find_layer_stack
from lightning_parallel.pipeline.module_use import trace_in_order, use_by_registration
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.step_trace.record import record_step
from tests.pipeline import other_models
from tests.pipeline.models import built

CPU = torch.device("cpu")


def traced(model, step, batch):
    return trace_in_order(model, find_layer_stack(model, 2), record_step(model, step, batch, CPU))[1]


def test_the_use_of_modules_is_traced_not_guessed():
    model, step, batch = built("encoder")
    seen = traced(model, step, batch)
    assert seen.modules["head"] == {3}
    assert seen.modules["embed"] == {0}
    assert seen.parameters["position"] == {0}
    assert seen.parameters["encoder.norm.weight"] == {3}
    assert seen.parameters["encoder.layers.2.linear1.weight"] == {2}
    assert use_by_registration(model, find_layer_stack(model, 2)).modules["head"] == {0}, "the head is registered first"
    assert not any(
        isinstance(value, PlaceholderTensor) for module in model.modules() for value in vars(module).values()
    )


def test_what_is_used_on_several_stages_is_kept_on_each():
    model, step, batch = built("tied")
    seen = traced(model, step, batch)
    assert seen.parameters["embed.weight"] == {0, 3}
    assert seen.parameters["shared.weight"] == {0, 1, 2}, "between two layers: with the former"
    gpt2, _, _ = built("gpt2")
    assert use_by_registration(gpt2, find_layer_stack(gpt2, 2)).parameters["transformer.wte.weight"] == {0, 3}


def test_tracing_changes_nothing():
    model, step, batch = built("two_streams")
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traced(model, step, batch)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_every_stage_gets_parameters_but_uniform_counts_layers():
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)]
    assert cut_units(find_layer_stack(nn.Sequential(*layers), 2)) == (4, 1, 1)

    def cut(balance):
        schedule = build_schedule("gpipe", 1, 1, virtual_stages=3)
        return analyze(nn.Sequential(*layers), 1, schedule, balance=balance).layers_per_stage

    assert cut("parameters") == (4, 1, 1)
    assert cut("uniform") == (2, 2, 2)
    assert cut((1, 4, 1)) == (1, 4, 1)


OTHERS_REFUSED = {
    "losses_in_attributes": "The step returns a value made of the output of `layers.0`",
    "losses_in_hooks": "The step returns a value made of a tensor that `layers.0` makes and does not return",
    "losses_in_replaced_methods": "a value made of a tensor that `layers.0` makes and does not return",
    "router_losses": "on another pipeline stage, into a tensor of this|cannot be inferred without real data",
    "data_dependent": "needs the data of the output of `first`",
}


@pytest.mark.parametrize(("name", "message"), OTHERS_REFUSED.items())
def test_other_models_that_cannot_be_cut_are_refused(name, message):
    model, step, batch = built(name, source=vars(other_models))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        analyze(model, 2, example=(step, batch), balance="uniform")


def test_settings_that_do_not_fit_are_refused():
    model, step, batch = built("mlp")
    with pytest.raises(ValueError, match="1 ranks of the pipeline group; got one for 2"):
        analyze(model, 1, build_schedule("1f1b", 2, 2), example=(step, batch))
    nine = build_schedule("gpipe", 1, 2, virtual_stages=9)
    with pytest.raises(ValueError, match="8 layers in `` for 9 stages"):
        analyze(model, 1, nine)
