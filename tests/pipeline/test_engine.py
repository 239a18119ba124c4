"""What surrounds a step: odd batches, evaluation, precision, accumulation, random numbers, hooks, memory."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.weight_gradients import WeightGradients, deferring, shared_parameters
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.weight_gradients import split_linears
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from tests.harness import distributed, recorded_communication
from tests.pipeline.models import built, pipeline


def engine_for(group, model, step, batch, schedule="1f1b", microbatches=4, **options):
    options.setdefault("balance", "uniform")
    schedule = build_schedule(schedule, group.size, microbatches)
    own = {name: options.pop(name) for name in ("split_batch", "microbatch_weight") if name in options}
    return pipeline(model, group, schedule, (step, batch), engine_options=own, **options)


def expect_equal(engine, model, result, reference, loss, tolerance=1e-10):
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)
    if engine.group.rank == engine.last_rank:
        torch.testing.assert_close(result.loss, loss.detach(), rtol=tolerance, atol=tolerance)


@distributed(world_size=2)
def test_batches_of_changing_size_and_length(group):
    reference, reference_step, _ = built("gpt2")
    model, step, batch = built("gpt2")
    engine = engine_for(group, model, step, batch, "zb_h1")
    for samples, length in [(5, 10), (5, 10), (3, 7), (1, 7), (8, 12)]:
        ids = torch.randint(3, 60, (samples, length), generator=torch.Generator().manual_seed(samples + length))
        batch = {"input_ids": ids, "labels": ids}
        model.zero_grad()
        reference.zero_grad()
        loss = reference_step(batch)
        loss.backward()
        expect_equal(engine, model, engine.forward_backward(step, batch), reference, loss)


@distributed(world_size=2)
def test_a_description_is_sent_only_when_it_changes(group):
    model, step, batch = built("llama", layers=4)
    engine = engine_for(group, model, step, batch, microbatches=2)

    def messages(size):
        part = {key: value[:size] for key, value in batch.items()}
        with recorded_communication() as records:
            engine.forward_backward(step, part)
        return [record.bytes for record in records if record.op == ("recv" if group.rank else "send")]

    word, hidden = 32, 2 * 10 * 16 * 8
    first = messages(4)
    assert (first[0], *first[2:]) == (word, hidden, word, hidden), "a description follows the first word"
    assert messages(4) == [hidden + word] * 2
    changed = messages(2)
    # The tensors that were expected travel once more.
    assert (changed[0], *changed[2:]) == (hidden + word, hidden // 2, word, hidden // 2)
    assert messages(2) == [hidden // 2 + word] * 2
    # A known layout has a number.
    assert messages(4) == [hidden // 2 + word, hidden, word, hidden]


@distributed(world_size=2)
def test_accumulation_with_tied_weights_and_a_loss_scale(group):
    reference, reference_step, batch = built("tied")
    model, step, _ = built("tied")
    engine = engine_for(group, model, step, batch)
    halves = [batch[:4], batch[4:]]
    for number, half in enumerate(halves):
        loss = reference_step(half)
        (loss * 8).backward()
        result = engine.forward_backward(step, half, scale=torch.tensor(8.0), synchronize=number == 1)
    expect_equal(engine, model, result, reference, loss)


@distributed(world_size=2)
def test_evaluation_gives_every_microbatch(group):
    reference, _, batch = built("encoder")
    model, step, _ = built("encoder")
    reference.eval()
    expected = reference(batch[0])
    engine = engine_for(group, model, step, batch, "interleaved_zb")
    model.eval()
    with torch.inference_mode():
        result = engine.forward(lambda batch: {"logits": model(batch[0])}, batch)
    assert result.loss is None
    if group.rank == engine.last_rank:
        logits = torch.cat([output["logits"] for output in result.outputs])
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-10, atol=1e-10)
        assert [len(output["logits"]) for output in result.outputs] == [2, 2, 2, 1]
    else:
        assert not result.outputs
    model.train()
    loss = F.cross_entropy(reference.train()(batch[0]), batch[1])
    loss.backward()
    expect_equal(engine, model, engine.forward_backward(step, batch), reference, loss)


@distributed(world_size=2)
def test_mixed_precision(group):
    reference, _, batch = built("encoder")
    model, _, _ = built("encoder")
    reference.float()
    model.float()

    def step_of(net):
        def step(batch):
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(net(batch[0]).float(), batch[1])

        return step

    loss = step_of(reference)(batch)
    loss.backward()
    engine = engine_for(group, model, step_of(model), batch, "zb_h1")
    result = engine.forward_backward(step_of(model), batch)
    expect_equal(engine, model, result, reference, loss, tolerance=2e-2)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@distributed(world_size=2)
def test_frozen_parameters_and_a_backbone_without_gradients(group):
    for frozen in (["embed.weight"], [f"encoder.layers.{i}." for i in range(4)], ["encoder.", "embed", "position"]):
        reference, reference_step, batch = built("encoder")
        model, step, _ = built("encoder")
        for net in (reference, model):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(not name.startswith(tuple(frozen)))
        loss = reference_step(batch)
        loss.backward()
        engine = engine_for(group, model, step, batch, "zb_h1")
        expect_equal(engine, model, engine.forward_backward(step, batch), reference, loss)
        assert all(p.grad is None for name, p in model.named_parameters() if name.startswith(tuple(frozen)))


@distributed(world_size=2)
def test_random_numbers_drawn_before_the_layers_agree(group):
    model, _, batch = built("tied")
    drawn = {}

    def step(part):
        mask = torch.rand(part.shape) < 0.5
        masked = torch.where(mask, 0, part)
        drawn[part.sum().item()] = masked
        return F.cross_entropy(model(masked).flatten(0, 1), part.flatten())

    engine = engine_for(group, model, step, batch, microbatches=3)
    state = torch.get_rng_state()
    for _ in range(2):
        drawn.clear()
        engine.forward_backward(step, batch)
        both = comm.all_gather_object(drawn, group)
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
    torch.set_rng_state(state)
    torch.randint(2**62, ())
    torch.randint(2**62, ())
    expected = torch.rand(2)
    torch.set_rng_state(state)
    engine.forward_backward(step, batch)
    engine.forward_backward(step, batch)
    assert torch.equal(torch.rand(2), expected), "a step draws one seed and nothing else"


class Dropping(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


@distributed(world_size=2)
def test_dropout_differs_between_layers_and_microbatches(group):
    model = Dropping()
    masks = []
    for layer in model.layers:
        layer[1].register_forward_hook(lambda module, args, output: masks.append(output.flatten() == 0))
    batch = torch.randn(4, 64)
    engine = engine_for(group, model, lambda part: model(part).mean(), batch)
    masks.clear()
    engine.forward_backward(lambda part: model(part).mean(), batch)
    mine = [mask for mask in masks if not isinstance(mask, PlaceholderTensor)]
    everywhere = [mask for masks in comm.all_gather_object(mine, group) for mask in masks]
    assert len(everywhere) == 16
    assert len({tuple(mask.tolist()) for mask in everywhere}) == 16


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@distributed(world_size=2)
def test_gradient_hooks_fire_as_in_one_process(group, schedule):
    model, step, batch = built("tied")
    engine = engine_for(group, model, step, batch, schedule, microbatches=3)
    fired = {name: [0, 0] for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired[name].__setitem__(0, fired[name][0] + 1))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: fired[name].__setitem__(1, fired[name][1] + 1)
        )
    engine.forward_backward(step, batch)
    assert all(count == [3, 3] for count in fired.values()), fired


@distributed(world_size=2)
def test_weight_gradients_wait_for_their_turn(group):
    model, step, batch = built("mlp")
    engine = engine_for(group, model, step, batch, "zb_h1", microbatches=4)
    seen = []
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("w"))
    original = engine.model.handled_by
    engine.model.handled_by = lambda handler: seen.append("f") or original(handler)
    engine.forward_backward(step, batch)
    row = engine.schedule.rows[group.rank]
    wanted = [action.kind.value.lower() for action in row if action.kind.value in "FW"]
    assert [event for event in seen if event in "fw"][-len(wanted) :].count("w") == 4
    if group.rank:
        assert seen[-1] == "w"


class Position(nn.Module):
    """With one sample in a microbatch, both terms of the sum get the same gradient, the first a view of it."""

    def __init__(self):
        super().__init__()
        self.position, self.linear = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x):
        position = self.position.unsqueeze(0)
        return position + self.linear(x)


@distributed(world_size=2)
def test_weight_gradients_that_wait_for_what_autograd_would_add_to(group):
    torch.manual_seed(2)
    reference, model = (nn.Sequential(*[Position() for _ in range(4)]).double() for _ in range(2))
    model.load_state_dict(reference.state_dict())
    batch = torch.randn(4, 3, 4, dtype=torch.float64)
    loss = reference(batch).square().mean()
    loss.backward()
    engine = engine_for(group, model, lambda part: model(part).square().mean(), batch, "zb_h1", microbatches=4)
    result = engine.forward_backward(lambda part: model(part).square().mean(), batch)
    expect_equal(engine, model, result, reference, loss)
    # A failure after the gradients were sent must not send them again: the next step would receive them.
    separate = WeightGradients.separate
    try:
        if group.rank == 1:
            WeightGradients.separate = lambda *_: 1 / 0
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            engine.forward_backward(lambda part: model(part).square().mean(), batch)
    finally:
        WeightGradients.separate = separate
    model.zero_grad()
    result = engine.forward_backward(lambda part: model(part).square().mean(), batch)
    expect_equal(engine, model, result, reference, loss)


def test_weight_gradients_that_cannot_wait():
    shared, alone = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([shared, nn.Linear(4, 4), alone])
    model[1].weight = shared.weight
    split_linears(model)
    x = torch.randn(2, 4)
    later = WeightGradients(shared_parameters(model))
    with deferring(later):
        sum(layer(x).sum() for layer in model).backward()
    assert len(later) == 4, "the biases and the weight that is not shared"
    assert shared.weight.grad is not None
    x.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place since\..*`1f1b`"):
        later.compute()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Outside(nn.Module):
    """A custom autograd function between the layers reads what only the first of a stage was called with."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(4))

    def forward(self, x):
        start = x = self.embed(x)
        for layer in self.layers:
            x = layer(x, start) + Square.apply(start)
        return x


@distributed(world_size=2)
def test_custom_functions_outside_of_the_layers(group):
    torch.manual_seed(2)
    reference, model = Outside().double(), Outside().double()
    model.load_state_dict(reference.state_dict())
    batch = torch.randn(6, 4, dtype=torch.float64)
    loss = reference(batch).square().mean()
    loss.backward()
    engine = engine_for(group, model, lambda part: model(part).square().mean(), batch, microbatches=3)
    result = engine.forward_backward(lambda part: model(part).square().mean(), batch)
    expect_equal(engine, model, result, reference, loss)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@distributed(world_size=2)
def test_checkpoints_around_the_calls_of_layers(group):
    torch.manual_seed(2)
    reference, model = Checkpointed(False).double(), Checkpointed(False).double()
    model.load_state_dict(reference.state_dict())
    batch = torch.randn(6, 4, dtype=torch.float64)
    loss = reference(batch).square().mean()
    loss.backward()
    engine = engine_for(group, model, lambda part: model(part).square().mean(), batch, microbatches=3)
    result = engine.forward_backward(lambda part: model(part).square().mean(), batch)
    expect_equal(engine, model, result, reference, loss)


@distributed(world_size=2)
def test_a_reentrant_checkpoint_around_the_boundary_is_refused(group):
    model = Checkpointed(True)
    batch = torch.randn(4, 4)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        engine_for(group, model, lambda part: model(part).mean(), batch)


def _most_saved(run):
    """The most tensors that autograd holds at once during `run`."""
    held = peak = 0

    def pack(tensor):
        nonlocal held, peak
        held += 1
        peak = max(peak, held)
        return _Box(tensor, release)

    def release():
        nonlocal held
        held -= 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        run()
    assert held == 0, "something outlives the step"
    return peak


@distributed(world_size=4)
def test_activations_in_flight_follow_the_schedule(group):
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        step, batch = (lambda part, model=model: model(part).square().mean()), torch.randn(64, 32)
        engine = engine_for(group, model, step, batch, schedule, 8)
        peaks[schedule] = _most_saved(lambda run=engine.forward_backward, step=step, batch=batch: run(step, batch))
    assert peaks["gpipe"] / peaks["1f1b"] == pytest.approx(8 / (4 - group.rank), rel=0.3)


class _Box:
    def __init__(self, tensor, release):
        self.tensor, self.release = tensor, release

    def __del__(self):
        self.release()


@distributed(world_size=2)
def test_batches_and_losses_that_make_no_sense_are_refused(group):
    model, step, batch = built("mlp")
    engine = engine_for(group, model, step, batch)
    with pytest.raises(ValueError, match=r"`\[0\]` has 10 and `\[1\]` has 7"):
        engine.forward_backward(step, (batch[0], batch[1][:7]))
    engine.microbatch_weight = lambda part: 0
    with pytest.raises(ValueError, match="positive in sum"):
        engine.forward_backward(step, batch)


def test_batch_normalization_gives_a_warning():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)])
    with pytest.warns(UserWarning, match="one microbatch at a time"):
        pipeline(model, Group.alone("pipeline_parallel"), build_schedule("gpipe", 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(model, Group.alone("pipeline_parallel"), build_schedule("gpipe", 1, 1))
