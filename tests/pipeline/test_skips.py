"""Connections that skip over a cut: found by dry runs, sent along, and exact like everything else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.pipeline.skips import Skip
from tests.harness import distributed, recorded_communication
from tests.pipeline import other_models
from tests.pipeline.models import Outer, built, pipeline
from tests.pipeline.test_engine import engine_for, expect_equal


class Towers(nn.Module):
    """Two towers, one after the other; a loss compares what they return."""

    def __init__(self):
        super().__init__()
        self.image = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.text = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.image_head = nn.Linear(6, 5)
        self.text_head = nn.Linear(6, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch):
        image, text = batch
        for layer in self.text:
            text = layer(text).tanh()
        text = F.normalize(self.text_head(text), dim=-1)
        for layer in self.image:
            image = layer(image).tanh()
        return (F.normalize(self.image_head(image), dim=-1) * text).sum(-1) * self.temperature.exp()


class Position(Outer):
    """A parameter of the model itself goes into what is needed last."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(4))

    def forward(self, x):
        start = self.embed(x) + self.position
        return super().forward(x) * start


class Changed(Outer):
    """The connection is changed in place before and after it is used."""

    def forward(self, x):
        start = self.embed(x)
        start.mul_(2)
        x = start.clone()
        for layer in self.layers:
            x = layer(x)
        start += x
        return start


class Dropped(Outer):
    """The output of a layer that draws numbers is used again: drawn once."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x):
        start = x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return torch.cat([x, start.eq(0).to(x.dtype), start])


class Collected(Outer):
    """Hooks collect what the layers return, and their inputs."""

    def __init__(self):
        super().__init__()
        self.features = {}
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda layer, args, output, index=index: self._collect(index, args[0], output))

    def _collect(self, index, x, output):
        self.features[index] = output
        if index == 0:
            self.features["start"] = x

    def forward(self, x):
        return super().forward(x) + sum(feature.tanh() for feature in self.features.values())


class CollectedOnce(Collected):
    """Registers its hooks when it is first called, and notes that it has, as large language models do."""

    def __init__(self):
        Outer.__init__(self)
        self.features, self.has_hooks = {}, False

    def _collect(self, index, x, output):
        self.features[len(self.features)] = output

    def forward(self, x):
        if not self.has_hooks:
            self.has_hooks = True
            for layer in self.layers:
                layer.register_forward_hook(lambda layer, args, output: self._collect(1, args[0], output))
        self.features.clear()
        return super().forward(x)


class Teacher(nn.Module):
    """A teacher of the same structure, called without gradients, before the student."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.teacher = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def model_of(kind):
    torch.manual_seed(0)
    model = kind().double()
    if kind is Towers:
        batch = [torch.randn(7, 6, dtype=torch.double), torch.randn(7, 6, dtype=torch.double)]
        return model, lambda batch: F.softplus(model(batch)).mean(), batch
    return model, lambda batch: model(batch[0]).square().mean(), [torch.randn(7, 4, dtype=torch.double)]


KINDS = [Towers, Position, Changed, Collected, CollectedOnce, Teacher]
NAMED = [("outer", {"kind": kind}) for kind in ("Outer", "Skipping", "PrologueInLoss")]


def models():
    for kind in KINDS:
        yield kind.__name__, lambda kind=kind: model_of(kind)
    for name, options in NAMED:
        yield options["kind"], lambda name=name, options=options: built(name, **options)
    yield "unet", lambda: built("unet", source=vars(other_models))


def expect_one_process(group, build, schedule):
    reference, reference_step, batch = build()
    model, step, _ = build()
    loss = reference_step(batch)
    loss.backward()
    engine = engine_for(group, model, step, batch, schedule)
    assert any(engine.plan.skips)
    result = engine.forward_backward(step, batch)
    expect_equal(engine, model, result, reference, loss)
    # A smaller last batch, and evaluation, go the same way.
    model.zero_grad()
    reference.zero_grad()
    part = type(batch)(entry[:3] for entry in batch)
    loss = reference_step(part)
    loss.backward()
    expect_equal(engine, model, engine.forward_backward(step, part), reference, loss)
    evaluated = engine.forward(step, part)
    if group.rank == engine.last_rank:
        total = sum(weight * output for weight, output in zip(evaluated.weights, evaluated.outputs))
        torch.testing.assert_close(total, loss.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, _ in models()])
@distributed(world_size=2)
def test_gradients_equal_those_of_one_process(group, name):
    expect_one_process(group, dict(models())[name], "1f1b")


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@distributed(world_size=2)
def test_every_schedule_carries_them(group, schedule):
    for name in ("Towers", "Outer"):
        expect_one_process(group, dict(models())[name], schedule)


class DeepUNet(nn.Module):
    """Four levels down and four up, each of which gets what the level opposite has returned."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(2, 2, 3, 2, 1) for _ in range(4))
        self.up = nn.ModuleList(nn.ConvTranspose1d(4, 2, 2, 2) for _ in range(4))

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(x := layer(x).tanh())
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1))
        return x


def deep_unet():
    torch.manual_seed(0)
    model = DeepUNet().double()
    return model, lambda batch: model(batch[0]).square().mean(), [torch.randn(7, 2, 32, dtype=torch.double)]


@distributed(world_size=4)
def test_a_unet_in_four_stages_by_every_schedule(group):
    for schedule in SCHEDULES:
        expect_one_process(group, deep_unet, schedule)


@distributed(world_size=3)
def test_stages_between_pass_them_on(group):
    for name in ("Towers", "Position", "PrologueInLoss", "Collected"):
        build = dict(models())[name]
        expect_one_process(group, build, "1f1b")


@distributed(world_size=2)
def test_what_was_drawn_is_sent_and_not_drawn_again(group):
    model, _, batch = model_of(Dropped)
    engine = engine_for(group, model, lambda batch: model(batch[0]).square().mean(), batch)
    result = engine.forward(lambda batch: model(batch[0]), batch)
    for output in result.outputs:
        _, zeros, start = output.chunk(3)
        assert torch.equal(zeros.bool(), start == 0)
        assert 0 < zeros.sum() < zeros.numel()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.linear(x) * scale, scale


class Passed(nn.Module):
    """Layers get a parameter as an argument, as relative positions are, and return it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x):
        scale = self.scale
        for layer in self.layers:
            x, scale = layer(x, scale)
        return x


@distributed(world_size=2)
def test_an_evaluation_sends_parameters_without_their_gradient(group):
    expected = model_of(Passed)[0]
    model, step, batch = model_of(Passed)
    engine = engine_for(group, model, step, batch)
    with torch.no_grad():
        result = engine.forward(lambda batch: model(batch[0]), batch)
        if group.rank == 1:
            torch.testing.assert_close(torch.cat(result.outputs), expected(batch[0]))


@distributed(world_size=3)
def test_only_what_is_needed_is_sent(group):
    model, step, batch = model_of(Towers)
    engine = engine_for(group, model, step, batch, microbatches=1)
    assert engine.plan.skips == ((), (), (Skip("text_head", 0, 0),))
    engine.forward_backward(step, batch)
    with recorded_communication() as records:
        engine.forward_backward(step, batch)
    sent = sum(record.bytes for record in records if record.op == "send")
    # Rank 1: the text's and the image's tower meet in it. Rank 2 gets an image, and the text that rank 1 has finished.
    expected = {0: 32 + 7 * 6 * 8, 1: 7 * 6 * 8 + 32 + 7 * (6 + 5) * 8, 2: 7 * (6 + 5) * 8}
    assert sent == expected[group.rank]


@distributed(world_size=2)
def test_an_evaluation_that_needs_other_connections_finds_its_own(group):
    model, step, batch = built("outer", kind="Skipping")
    reference = built("outer", kind="Skipping")[0]
    engine = engine_for(group, model, step, batch)

    def other(net):
        return lambda batch: {"both": net(batch[0]) + net.layers[0].weight.sum() * 0, "first": batch[0]}

    def with_start(net):
        def run(batch):
            start = x = net.embed(batch[0])
            for layer in net.layers:
                x = layer(x)
            return x * start.exp()

        return run

    skips = engine.find_skips(with_start(model), batch)
    assert skips == ((), (Skip("embed", 0, 0),))
    result = engine.forward(with_start(model), batch, skips=skips)
    if group.rank == engine.last_rank:
        torch.testing.assert_close(torch.cat(result.outputs), with_start(reference)(batch).detach())


@distributed(world_size=2)
def test_a_plan_with_connections_is_saved_and_agreed(group):
    model, step, batch = model_of(Towers)
    engine = engine_for(group, model, step, batch)
    plan = engine.plan
    assert PipelinePlan.from_dict(plan.to_dict()) == plan
    if group.rank == 0:
        assert "receives the output of `text_head`" in str(plan) or not any(plan.skips)
    wrong = plan.to_dict()
    wrong["skips"][1] = [["nobody", 0, 0]]
    with pytest.raises(ValueError, match="sends the output of `nobody`, which is not in the model"):
        PipelinePlan.from_dict(wrong).check_fits(model_of(Towers)[0], group.size)


@distributed(world_size=2)
def test_what_a_layer_leaves_elsewhere_is_still_refused(group):
    for name in ("losses_in_hooks", "losses_in_attributes"):
        model, step, batch = built(name, source=vars(other_models))
        with pytest.raises(ValueError, match="which is on an earlier pipeline stage"):
            pipeline(model, group, "1f1b", (step, batch), balance="uniform")
