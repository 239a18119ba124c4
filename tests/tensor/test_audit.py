"""The audit of a loss finds activations of which each rank holds a part."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_parallel.tensor.audit import LossAudit, part_in
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from tests.harness import distributed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        self.hidden = F.relu(self.up(x))
        return x + self.down(self.hidden)


def _net(group):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    apply_plan(net, make_plan(net, {"*.up": "column", "*.down": "row"}, group), group)
    return net


@distributed(world_size=2)
def test_parts_of_activations_in_a_loss_are_found(group):
    net = _net(group)
    x = torch.randn(3, 4, requires_grad=True)
    assert not part_in(net(x).pow(2).sum())
    (gradient,) = torch.autograd.grad(net(x).sum(), net[0].down.bias, create_graph=True)
    assert not part_in(net(x).sum() + gradient.norm())
    assert "met at _ColumnLinearFunction of `0.up`). It would differ" in part_in(net(x).sum() + net[0].hidden.mean())
    # The second block gets a part of an activation of the first.
    hidden = net[0].up(x)
    assert "`0.up`" in part_in(net[1](x + hidden).sum())


@distributed(world_size=2)
def test_a_loss_is_checked_in_the_first_steps_and_when_its_terms_are_new(group, monkeypatch):
    net, audit, checked = _net(group), LossAudit(), []
    monkeypatch.setattr("lightning_parallel.tensor.audit.part_in", lambda loss: checked.append(step) or part_in(loss))
    for number in range(1, 21):
        step = number
        audit.check(net(torch.randn(3, 4)).pow(2).sum())
    assert checked == [1, 2, 4, 8, 16]
    with pytest.raises(RuntimeError, match="each rank holds only a piece"):
        audit.check(net(torch.randn(3, 4)).pow(2).sum() + net[0].hidden.mean())
