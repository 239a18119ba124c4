"""The layer stack: which containers it is, where it may be cut, and which layers are of one kind."""

import pytest
from torch import nn

from lightning_parallel.pipeline.layer_stack import cut_units, find_layer_stack, find_layer_stacks, layer_kinds
from tests.pipeline import other_models
from tests.pipeline.models import built


@pytest.mark.parametrize(
    ("builder", "path"),
    [
        ("mlp", ""),
        ("convolutional", "1"),
        ("encoder", "encoder.layers"),
        ("two_streams", "blocks"),
        ("gpt2", "transformer.h"),
        ("llama", "model.layers"),
        ("bert", "bert.encoder.layer"),
        ("mixtral", "model.layers"),
    ],
)
def test_the_layer_stack_is_found(builder, path):
    model, _, _ = built(builder)
    assert find_layer_stack(model, 2).path == path
    outer = nn.ModuleDict({"wrapped": nn.ModuleDict({"model": model})})
    assert find_layer_stack(outer, 2).path == f"wrapped.model.{path}".rstrip(".")


def test_an_ambiguous_layer_stack_is_refused():
    two = nn.ModuleDict({name: nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]) for name in ("left", "right")})
    with pytest.raises(ValueError, match="(?s)`left`.*`right`.*layers='left'"):
        find_layer_stack(two, 2)
    assert find_layer_stack(two, 2, "right").path == "right"
    with pytest.raises(ValueError, match="got none.*layers='model.blocks'"):
        find_layer_stack(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 2)
    with pytest.raises(ValueError, match="`wrong`.*Containers: `left`, `right`"):
        find_layer_stack(two, 2, "wrong")
    with pytest.raises(ValueError, match="got `left.0`, a Linear"):
        find_layer_stack(two, 2, "left.0")
    with pytest.raises(ValueError, match="4 layers in `left` for 5 stages"):
        find_layer_stack(two, 5, "left")


def test_containers_that_follow_each_other_are_cut_together():
    model = other_models.ResNet()
    row, alone = find_layer_stacks(model, 2)
    assert (row.path, alone.path) == ("layer1, layer2, layer3", "layer3")
    assert row.names == tuple(f"layer{group}.{block}" for group in (1, 2, 3) for block in (0, 1))
    assert [stack.path for stack in find_layer_stacks(model, 4)] == ["layer1, layer2, layer3"], (
        "the largest has too few"
    )
    assert find_layer_stack(model, 2, "layer2, layer3").layers == (*model.layer2, *model.layer3)
    encoder_decoder, _, _ = other_models.encoder_decoder()
    assert layer_kinds(find_layer_stacks(encoder_decoder, 2)[0]) == [0, 0, 0, 1, 1, 1]


def test_layers_of_a_nested_list_stay_together():
    model, _, _ = other_models.nested_lists()
    stack = find_layer_stack(model, 4)
    assert stack.names[:4] == ("layers.0.0", "layers.0.1", "layers.0.2", "layers.1.0")
    assert stack.blocks == cut_units(stack) == (3, 3, 3, 3)
    with pytest.raises(ValueError, match="got 4 layers in `layers` for 5 stages"):
        find_layer_stack(model, 5)


def test_layers_of_one_kind():
    model, _, _ = built("llama")
    assert layer_kinds(find_layer_stack(model, 2)) == [0, 0, 0, 0]
    strides = nn.Sequential(*[nn.Conv1d(2, 2, 3, stride=s) for s in (1, 1, 2, 1)])
    assert layer_kinds(find_layer_stack(strides, 2)) == [0, 0, 1, 0]


def test_layers_with_a_parametrization_are_of_one_kind():
    layers = [nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU()) for _ in range(4)]
    norms = [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(3)]
    assert find_layer_stack(nn.ModuleDict({"a": nn.ModuleList(layers), "b": nn.Linear(4, 4)}), 2, "auto").path == "a"
    assert find_layer_stack(nn.ModuleDict({"a": nn.ModuleList(norms), "b": nn.Linear(4, 4)}), 2, "auto").path == "a"
