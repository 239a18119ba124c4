"""Models built on the meta device get the values of the one-process initialisation."""

import pytest
import torch
from torch import nn

from lightning_parallel.compat.initialization import initialize_tensors

CPU = torch.device("cpu")


def _net(tied=False):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    if tied:
        net.append(nn.Linear(4, 4))
        net[3].weight = net[2].weight
    return net


def test_equals_construction_and_keeps_the_parameter_objects():
    torch.manual_seed(3)
    expected = _net()
    state = torch.get_rng_state()
    with torch.device("meta"):
        net = _net()
    net[0].weight.note = "kept"
    net[2].bias.requires_grad_(False)
    before = list(net.parameters())
    torch.manual_seed(3)
    initialize_tensors(net, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter is known for parameter, known in zip(net.parameters(), before, strict=True))
    assert net[0].weight.note == "kept"
    assert not net[2].bias.requires_grad
    assert net[2].weight.requires_grad
    for (name, tensor), value in zip(net.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, value), name


def test_a_tied_parameter_gets_the_values_of_the_first_module_that_has_it():
    with torch.device("meta"):
        net = _net(tied=True)
    torch.manual_seed(3)
    initialize_tensors(net, CPU)
    torch.manual_seed(3)
    untied = nn.Sequential(*_net(), nn.Linear(4, 4))
    assert net[3].weight is net[2].weight
    assert torch.equal(net[2].weight, untied[2].weight)
    assert torch.equal(net[3].bias, untied[3].bias), "the last layer drew numbers for its weight too"


def test_tensors_with_values_keep_them():
    with torch.device("meta"):
        net = _net()
    net[0].bias = nn.Parameter(torch.full((4,), 7.0))
    initialize_tensors(net, CPU)
    assert net[0].bias.tolist() == [7.0] * 4
    assert not net[0].weight.is_meta


def test_only_what_is_kept_leaves_the_meta_device():
    with torch.device("meta"):
        net = _net()
    owned = {id(parameter) for parameter in net[2].parameters()}
    torch.manual_seed(3)
    initialize_tensors(net, CPU, keep=lambda tensor, full: full if id(tensor) in owned else None)
    assert all(tensor.is_meta for tensor in [*net[0].parameters(), *net[1].parameters(), *net[1].buffers()])
    torch.manual_seed(3)
    assert torch.equal(net[2].weight, _net()[2].weight)


def test_a_module_without_initialiser_is_named_and_nothing_changes():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(ValueError, match=r"must have `reset_parameters`; got `1` \(Scale\)"):
        initialize_tensors(net, CPU)
    assert all(parameter.is_meta for parameter in net.parameters())


def test_a_failing_initialiser_leaves_the_module_as_it_was():
    class Broken(nn.Linear):
        def reset_parameters(self):
            raise RuntimeError("no values")

    net = Broken.__new__(Broken)
    nn.Module.__init__(net)
    net.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    before = net.weight
    with pytest.raises(RuntimeError, match="no values"):
        initialize_tensors(net, CPU)
    assert net.weight is before
