"""The plan: plain data, the same from a model on the meta device, saved and loaded, for one model only."""

import json

import pytest
import torch
from torch import nn

from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan, TensorLayout, device_of
from lightning_parallel.pipeline.schedule import Schedule, build_schedule
from lightning_parallel.pipeline.simulate import Link
from tests.pipeline.models import built

SCHEDULE = build_schedule("interleaved_1f1b", 2, 4)


def built_on_meta(builder):
    """Parameters on the meta device, tied ones still tied; buffers have data."""
    model, step, batch = built(builder)
    replaced = {parameter: nn.Parameter(parameter.detach().to("meta")) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, replaced[parameter])
    return model, step, batch


def on_meta(builder):
    return built_on_meta(builder)[0]


def plan_of(builder, schedule=SCHEDULE, **options):
    model, step, batch = built(builder)
    options.setdefault("balance", "parameters")
    return analyze(model, 2, schedule, example=(step, batch), **options)


@pytest.mark.parametrize("builder", ["mlp", "encoder", "tied", "gpt2", "llama"])
def test_a_model_on_the_meta_device_gives_the_same_plan(builder):
    expected = plan_of(builder)
    model, step, batch = built_on_meta(builder)
    assert all(parameter.is_meta for parameter in model.parameters())
    plan = analyze(model, 2, SCHEDULE, example=(step, batch), balance="parameters")
    assert plan == expected
    assert str(plan) == str(expected)
    assert all(parameter.is_meta for parameter in model.parameters()), "nothing is allocated"


def test_gpt2():
    plan = plan_of("gpt2")
    assert plan.container == "transformer.h"
    assert plan.layers == tuple(f"transformer.h.{number}" for number in range(4))
    assert plan.layers_per_stage == (1, 1, 1, 1)
    assert plan.schedule.stages_of(0) == (0, 2)
    assert plan.parameters["transformer.wte.weight"].stages == (0, 3), "the embedding is the head"
    assert plan.parameters["transformer.wpe.weight"].stages == (0,)
    assert plan.parameters["transformer.h.2.ln_1.weight"].stages == (2,)
    assert plan.parameters["transformer.ln_f.weight"].stages == (3,)
    assert plan.outer_names(0) == ["transformer.wte", "transformer.wpe"]
    assert plan.module_stages["lm_head"] == (3,)
    hidden = TensorLayout((5, 10, 16), "float64")
    assert [tensors[0] for tensors in plan.boundaries] == [hidden] * 3
    assert plan.in_flight(0) > plan.in_flight(3)
    wte = plan.parameters["transformer.wte.weight"]
    assert (wte.count, wte.num_bytes, wte.is_trained) == (60 * 16, 60 * 16 * 8, True)


class Normalized(nn.Module):
    """Buffers inside the layers, in a module before them, and in the model itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x * self.scale)
        return x


def test_buffers_are_on_the_stages_of_their_modules():
    model = Normalized()
    schedule = build_schedule("1f1b", 2, 4)
    plan = analyze(model, 2, schedule, example=(lambda x: model(x).mean(), torch.ones(3, 4)), balance="uniform")
    assert plan.buffer_stages.keys() == dict(model.named_buffers()).keys()
    assert plan.buffer_stages["scale"] == (0, 1)
    assert plan.buffer_stages["embed.1.running_mean"] == (0,)
    assert plan.buffer_stages["layers.1.1.running_var"] == (0,)
    assert plan.buffer_stages["layers.2.1.num_batches_tracked"] == (1,)


@pytest.mark.parametrize("balance", ["auto", "parameters"])
def test_a_plan_survives_json(balance, tmp_path):
    plan = plan_of("gpt2", balance=balance, link=Link(1e-5))
    assert plan.costs.are_measured is (balance == "auto")
    assert PipelinePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    plan.save(tmp_path / "plan.json")
    loaded = PipelinePlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.schedule.name, loaded.stage_costs) == (plan.schedule.name, plan.stage_costs)
    assert loaded.link.bytes_per_s == float("inf")


def test_plans_that_cannot_be_saved_or_read_are_refused():
    schedule = build_schedule("1f1b", 2, 2)
    custom = Schedule.from_rows(schedule.rows)
    with pytest.raises(ValueError, match="The schedule of a saved plan must be one of .* got `custom`"):
        plan_of("mlp", custom).to_dict()
    with pytest.raises(ValueError, match="version 2; got 7"):
        PipelinePlan.from_dict({**plan_of("mlp", schedule).to_dict(), "version": 7})


@pytest.mark.parametrize("text", ["", "{nope", "null", "[1, 2]", '"plan"', '{"version": 1}', None])
def test_files_without_a_plan_are_named(tmp_path, text):
    path = tmp_path
    if text is not None:  # the folder itself is no file
        path = tmp_path / "plan.json"
        path.write_text(text)
    with pytest.raises(ValueError, match=f"The pipeline plan `{path}`"):
        PipelinePlan.load(path)
    with pytest.raises(ValueError, match="The pipeline plan"):
        PipelinePlan.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layers_per_stage": [1, 2, 1]}, "numbers of layers .1, 2, 1."),
        ({"layers_per_stage": [2, 2, 2, 3]}, "numbers of layers"),
        ({"layers_per_stage": "2222"}, "numbers of layers"),
        ({"layers_per_stage": [1, 3, 2, 2]}, "runs `1` on stage 1, and holds `1.weight` on .0."),
        ({"layers": ["0", "1", "2", "3", "4", "5", "6", "9"]}, "the layer `9`"),
        ({"module_stages": {"": [4]}}, "on the stages .4. of 4"),
    ],
    ids=str,
)
def test_plans_that_contradict_themselves_are_refused(entries, message):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    data = json.loads(json.dumps(analyze(model, 2, SCHEDULE, balance="uniform").to_dict()))
    PipelinePlan.from_dict(data).check_fits(model, 2)
    with pytest.raises(ValueError, match=f"contradicts itself: .*{message}"):
        PipelinePlan.from_dict({**data, **entries}).check_fits(model, 2)


def test_a_plan_fits_its_own_model_only():
    plan = plan_of("gpt2")
    plan.check_fits(on_meta("gpt2"), 2)
    with pytest.raises(ValueError, match="for the 4 ranks of the pipeline group; got one for 2. Make a new plan"):
        plan.check_fits(on_meta("gpt2"), 4)
    with pytest.raises(ValueError, match="got one for `GPT2LMHeadModel`: `.*` and .* other parameters"):
        plan.check_fits(on_meta("llama"), 2)
    wider = on_meta("gpt2")
    wider.transformer.wpe = nn.Embedding(64, 16)
    with pytest.raises(ValueError, match="`transformer.wpe.weight` and 0 other parameters are missing, new"):
        plan.check_fits(wider, 2)


def test_the_device_is_that_of_the_parameters_with_data():
    assert device_of(on_meta("mlp")) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
