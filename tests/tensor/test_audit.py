"""The audit of a step, around any callable: a whole step, or the part of it that one pipeline stage runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_parallel.tensor.audit import StepAudit
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
    return net, apply_plan(net, make_plan(net, {"*.up": "column", "*.down": "row"}, group), group)


@distributed(world_size=2)
def test_a_step_that_keeps_to_the_division_passes(group):
    net, sharding = _net(group)
    audit = StepAudit(net, sharding)
    x = torch.randn(3, 4)

    def step(scale, as_mapping=False):
        loss = scale * net(x).pow(2).sum()
        return {"loss": loss, "norm": net[0].up.weight.detach().norm()} if as_mapping else loss

    audited = audit.wrap(step)
    assert audited.__name__ == "step"
    assert torch.equal(audited(2.0), step(2.0))
    assert audited(1.0, as_mapping=True)["norm"] > 0


TERMS = {
    "computes with `0.up.weight` outside its layer": lambda net: sum(p.pow(2).sum() for p in net.parameters()),
    "the loss depends on an activation .* only a piece": lambda net: net[0].hidden.abs().mean(),
}


@pytest.mark.parametrize("message", TERMS)
@distributed(world_size=2)
def test_a_step_that_uses_shards_is_refused(group, message):
    net, sharding = _net(group)
    audited = StepAudit(net, sharding).wrap(lambda x: {"loss": net(x).sum() + TERMS[message](net)})
    with pytest.raises(RuntimeError, match=message):
        audited(torch.randn(3, 4))


@distributed(world_size=2)
def test_a_pipeline_stage_is_audited_by_what_it_holds(group):
    net, sharding = _net(group)
    for layer in (net[0].up, net[0].down):  # owned by another stage
        layer.weight = layer.bias = None
    audit = StepAudit(net, sharding)
    received = torch.randn(3, 4, requires_grad=True)
    with audit.watch():
        sent = net[1](received)
    audit.check_output(sent, "the output of the stage")
    with pytest.raises(RuntimeError, match="the output of the stage depends on an activation"):
        audit.check_output(sent + net[1].hidden.sum(), "the output of the stage")
    with audit.watch(), pytest.raises(RuntimeError, match=r"computes with `1.down.weight` outside its layer"):
        net[1].down.weight.norm()


@distributed(world_size=2)
def test_the_audit_ends_with_the_step_however_it_is_left(group):
    class StageExit(BaseException):
        pass

    net, sharding = _net(group)

    def step():
        raise StageExit

    with pytest.raises(StageExit):
        StepAudit(net, sharding).wrap(step)()
    assert net[0].up.weight.norm() > 0, "no longer watched"


class Gated(Block):
    """A block with other doors than `x`: what comes through them is whole, and multiplies this rank's features."""

    def __init__(self):
        super().__init__()
        self.gate, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(()))

    def forward(self, x, door=None):
        hidden = F.relu(self.up(x))
        extra = {None: 1.0, "scale": self.scale, "gate": self.gate(x), "input": x.mean(-1, keepdim=True)}[door]
        return x + self.down(hidden * extra)


DOORS = {
    "scale": r"`1.scale` inside a region",
    "gate": r"`1.gate.(weight|bias)` inside a region",
    "input": r"replicated activation \(.*of `0.down`\) inside a region",
}


@pytest.mark.parametrize("door", DOORS)
@distributed(world_size=2)
def test_gradients_that_enter_a_region_by_another_door_are_refused(group, door):
    torch.manual_seed(0)
    net = nn.Sequential(Gated(), Gated())
    audit = StepAudit(net, apply_plan(net, make_plan(net, {"*.up": "column", "*.down": "row"}, group), group))
    x = torch.randn(3, 4)
    audit.check_output(net(x).sum(), "the loss")
    with pytest.raises(RuntimeError, match=DOORS[door]):
        audit.check_output(net[1](net[0](x), door).sum(), "the loss")
    x.requires_grad_()
    audit.check_output(net(x).sum(), "the loss")


@distributed(world_size=2)
def test_a_term_that_uses_a_shard_is_refused_in_the_graph_too(group):
    net, sharding = _net(group)
    audit = StepAudit(net, sharding)
    with pytest.raises(RuntimeError, match="the loss computes with `0.up.weight` outside its layer"):
        audit.check_output(net(torch.randn(3, 4)).sum() + net[0].up.weight.norm(), "the loss")


@distributed(world_size=2)
def test_a_backward_without_the_strategy_is_checked(group):
    net, sharding = _net(group)
    with pytest.raises(RuntimeError, match="the loss depends on an activation"), StepAudit(net, sharding).watch():
        (net(torch.randn(3, 4)).sum() + net[0].hidden.mean()).backward()
    assert all(parameter.grad is None for parameter in net.parameters())


@distributed(world_size=2)
def test_a_loss_is_checked_in_the_first_steps_and_when_its_terms_are_new(group):
    net, sharding = _net(group)
    audit, checked = StepAudit(net, sharding), []
    check = audit.check_output
    audit.check_output = lambda *args: (checked.append(step), check(*args))
    for step in range(1, 21):
        audit.check_loss(net(torch.randn(3, 4)).pow(2).sum(), epoch=step // 13)
    assert checked == [1, 2, 4, 8, 13, 16]
    step = 21
    with pytest.raises(RuntimeError, match="computes with `0.up.weight` outside its layer"):
        audit.check_loss(net(torch.randn(3, 4)).pow(2).sum() + net[0].up.weight.square().sum(), epoch=1)
