"""The record of a step without data: calls, their arguments, the use of parameters, and modules that read values."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.step_trace.record import record_step

CPU = torch.device("cpu")


class Router(nn.Module):
    """Sends each sample to one of two experts, which it chooses by its values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        return torch.stack([self.experts[int(index)](row) for row, index in zip(x, chosen)])


class Net(nn.Module):
    def __init__(self, block=None):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), block or nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids, mask):
        self.seen += 1
        self.last = x = self.embed(ids) * mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x) * self.scale
        return x


IDS = torch.tensor([1, 2, 3])
MASK = torch.tensor([1.0, 1.0, 0.0])


def loss(model):
    return lambda batch: F.cross_entropy(model(*batch), batch[0])


def test_calls_hold_real_values_of_the_batch_and_placeholders_of_the_model():
    model = Net()
    trace = record_step(model, loss(model), (IDS, MASK), CPU)
    assert trace.error is None
    assert [(call.path, call.parent) for call in trace.calls] == [
        ("", -1),
        ("embed", 0),
        ("blocks.0", 0),
        ("blocks.1", 0),
    ]
    ids, mask = trace.calls[0].args
    assert ids is IDS
    assert mask is MASK
    (hidden,) = trace.calls_of("blocks.0")[0].args
    assert type(hidden) is PlaceholderTensor
    assert hidden.shape == (3, 4)
    assert trace.output.shape == ()


def test_each_use_of_a_parameter_is_recorded_with_its_place():
    model = Net()
    trace = record_step(model, loss(model), (IDS, MASK), CPU)
    uses = [
        (operation.call, operation.after)
        for operation in trace.operations
        if any(value.parameter == "scale" for value in operation.inputs)
    ]
    assert uses == [(0, 3), (0, 4)], "by the model itself, after each of the blocks"
    inside = [
        trace.calls[operation.call].path
        for operation in trace.operations
        if any(value.parameter == "blocks.1.weight" for value in operation.inputs)
    ]
    assert {*inside} == {"blocks.1"}


def _by_methods(model):
    state = model.state_dict(keep_vars=True)
    return state["blocks.0.weight"].sum() + model.get_parameter("blocks.0.weight").sum()


def _by_functional_call(model):
    halved = {name: value / 2 for name, value in model.blocks[0].named_parameters()}
    return torch.func.functional_call(model.blocks[0], halved, (torch.ones(1, 4),)).sum()


@pytest.mark.parametrize("reads", [_by_methods, _by_functional_call])
def test_parameters_that_torch_returns_or_exchanges_are_placeholders(reads):
    model = Net()
    trace = record_step(model, lambda batch: loss(model)(batch) + reads(model), (IDS, MASK), CPU)
    assert trace.error is None
    lines = [each.line for each in trace.operations if any(value.view_of == "blocks.0.weight" for value in each.inputs)]
    assert any(f"`{reads.__name__}`" in (line or "") or "comp>" in (line or "") for line in lines), lines
    # The weight is itself again, also for methods that give it by name.
    assert model.get_parameter("blocks.0.weight") is model.blocks[0].weight
    made = [each.output for each in trace.operations if each.line is not None]
    users = [each for each in trace.operations if any(value is one for value in each.inputs for one in made)]
    assert users, "the result of the read is used"


def test_recording_changes_nothing():
    model = Net(Router())
    before, attributes = copy.deepcopy(model.state_dict()), {*vars(model)}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    record_step(model, loss(model), (IDS, MASK), CPU)
    assert torch.equal(torch.rand(3), expected)
    assert {*vars(model)} == attributes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert type(model.scale) is nn.Parameter


def test_draws_and_lines_of_the_step_are_recorded():
    model = Net(nn.Dropout())

    def step(batch):
        return (model(*batch) + torch.randn(4)).sum() + F.scaled_dot_product_attention(*[model.scale.view(1, 1, 4)] * 3)

    trace = record_step(model, step, (IDS, MASK), CPU, places=True)
    drawn = trace.draws
    assert drawn[0] == "`blocks.1`", drawn
    assert len(drawn) == 2, "attention without dropout draws nothing"
    assert drawn[1].startswith("`step` (test_record.py, line "), drawn
    assert len({each.place for each in trace.operations if each.call < 0}) == 1
    makers, users = trace.places_around(trace.calls_of("blocks.1")[0])
    assert len(makers) == len(users) == 1, "products with the scale in `forward`"


class Meddler(Net):
    """Its step registers a copy, freezes a parameter, and writes tensors that belong to nobody."""

    def __init__(self, elsewhere):
        super().__init__()
        self.elsewhere = elsewhere

    def forward(self, ids, mask):
        self.copy = copy.deepcopy(self.blocks)
        self.blocks[0].weight.requires_grad_(False)
        weight = self.elsewhere[0].weight
        with torch.no_grad():
            weight.mul_(0.5).add_(1)
            weight[0].zero_()
        return super().forward(ids, mask)


def test_what_a_step_changes_by_hand_is_undone():
    elsewhere = [nn.Linear(4, 4)]
    model = Meddler(elsewhere)
    before = elsewhere[0].weight.detach().clone()
    trace = record_step(model, loss(model), (IDS, MASK), CPU)
    assert trace.error is None
    assert not hasattr(model, "copy")
    assert model.blocks[0].weight.requires_grad
    assert torch.equal(elsewhere[0].weight, before)


class Caching(nn.Module):
    """Its layers write into one cache, as of keys and values, an entry each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CachingLayer(4, 4) for _ in range(3))

    def forward(self, x):
        cache = SimpleNamespace(entries=[])
        for layer in self.layers:
            x = layer(x, cache)
        return x


class CachingLayer(nn.Linear):
    def forward(self, x, cache):
        cache.entries.append(SimpleNamespace(key=x))
        cache.entries[0].count = len(cache.entries)
        return super().forward(x)


def test_arguments_are_recorded_before_the_call_changes_them():
    model = Caching()
    trace = record_step(model, model, torch.ones(2, 4), CPU)
    assert trace.error is None
    caches = [call.args[1] for call in trace.calls[1:]]
    assert [len(cache.entries) for cache in caches] == [0, 1, 2]
    assert [cache.entries[0].count for cache in caches[1:]] == [1, 2]
    last = caches[2].entries[1].key
    assert last is trace.calls[2].args[0]


def test_only_the_module_that_reads_values_runs_on_random_data():
    model = Net(Router())
    trace = record_step(model, loss(model), (IDS, MASK), CPU)
    assert trace.error is None
    assert [call.path for call in trace.calls if call.has_data] == ["blocks.1"]
    assert type(trace.calls_of("blocks.1")[0].output) is PlaceholderTensor


def test_a_step_that_reads_a_value_is_recorded_up_to_there():
    model = Net()

    def step(batch):
        found = model(*batch).sum()
        return found if found.item() > 0 else -found

    trace = record_step(model, step, (IDS, MASK), CPU)
    assert "needs the data of" in str(trace.error)
    assert [call.path for call in trace.calls][-1] == "blocks.1"


def test_parameters_may_be_on_the_meta_device():
    with torch.device("meta"):
        model = Net()
    trace = record_step(model, loss(model), (IDS, MASK), CPU)
    assert trace.error is None
    assert len(trace.calls) == 4


def test_few_positions_of_tokens_tell_the_calls():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    batch = {"ids": torch.ones(2, 300, dtype=torch.long), "mask": torch.ones(2, 1, 300, 300)}
    trace = record_step(model, lambda batch: (model(batch["ids"]), batch["mask"].sum()), batch, CPU, shorten=True)
    assert trace.calls_of("1")[0].args[0].shape == (2, 256, 4)
    assert trace.output[1] == 2 * 256 * 256
    fixed = torch.ones(300, 4)
    trace = record_step(model, lambda batch: model(batch["ids"]) + fixed, batch, CPU, shorten=True)
    assert trace.calls_of("1")[0].args[0].shape == (2, 300, 4)


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=4, num_heads=4, d_ff=32, vocab_size=50, num_layers=2, decoder_start_token_id=0
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_steps_of_language_models_are_recorded_to_their_end(name):
    model = MODELS[name]()
    ids = torch.arange(12).view(2, 6)
    trace = record_step(model, lambda batch: model(**batch).loss, {"input_ids": ids, "labels": ids}, CPU)
    assert trace.error is None
    blocks = [path for path, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    layers = [
        f"{path}.{index}" for path in blocks if path.rpartition(".")[2] in ("layers", "block") for index in (0, 1)
    ]
    assert all(len(trace.calls_of(path)) == 1 for path in layers)
