"""A deferred build gives the bits of one process, leaves generators where it would, and holds nothing meanwhile."""

import copy
import gc
import pickle
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.strategies.deferred import tensor as deferred_tensor
from lightning_parallel.strategies.deferred.chain import OperationLink
from lightning_parallel.strategies.deferred.init import deferred_init, move_to_meta, replace_data
from lightning_parallel.strategies.deferred.tensor import is_deferred, materialize


def big():
    return torch.empty(200, 160)


class Tensors(nn.Module):
    """Holds tensors as parameters or buffers."""

    def __init__(self, *tensors):
        super().__init__()
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"parameter{index}", tensor)
            else:
                self.register_buffer(f"buffer{index}", tensor)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 50, padding_idx=3)
        self.head = nn.Linear(50, 1000)
        self.head.weight = self.embedding.weight
        self.view = nn.Parameter(self.embedding.weight.data[:500])  # other parameter, same memory
        nn.init.trunc_normal_(self.embedding.weight)


class Reading(nn.Module):
    """Reads the data of large tensors in its constructor, and draws as many numbers as they say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 160) * 0.1)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 20_000)[:3]]
        self.norm = float(self.weight.norm())
        self.scale = torch.rand(int(10 * self.norm)).tolist()
        self.bias = nn.Parameter(torch.tensor([self.weight[0, 0], self.weight[1, 1]]))
        self.table = nn.Parameter(torch.from_numpy(self.weight.detach().numpy() * 2))
        self.mask = nn.Buffer(torch.tril(torch.ones(200, 200)).view(1, 200, 200))
        if self.weight.sum() > 0:
            nn.init.normal_(self.weight)
        self.new = self.weight.new_tensor([1.0, 2.0])
        assert not self.weight.is_meta
        assert "tensor" in repr(self.weight)


def initializers():
    tensors = [big() for _ in range(7)] + [torch.empty(64, 64, 3, 3), torch.empty(20_000, 2)]
    nn.init.eye_(tensors[0])
    nn.init.sparse_(tensors[1], 0.3)
    nn.init.kaiming_normal_(tensors[2])
    nn.init.xavier_normal_(tensors[3])
    nn.init.constant_(tensors[4], 2.0)
    nn.init.trunc_normal_(tensors[5])
    nn.init.orthogonal_(tensors[6])
    nn.init.dirac_(tensors[7])
    nn.init.orthogonal_(tensors[8].t())
    return Tensors(*map(nn.Parameter, tensors))


def samplers():
    tensors = []
    arguments = {"uniform_": (0, 1), "normal_": (), "random_": (3, 10), "exponential_": (), "cauchy_": ()}
    arguments |= {"log_normal_": (), "geometric_": (0.3,), "bernoulli_": (0.3,)}
    for name, values in arguments.items():
        for tensor in (big(), torch.empty(200, 320)[:, ::2], torch.empty(160, 200).t()):
            tensors.append(getattr(tensor, name)(*values))
    p = torch.rand(200, 160)
    tensors += [big().bernoulli_(p), torch.bernoulli(p), torch.poisson(p * 5), torch.multinomial(p, 100), p]
    tensors += [torch.rand_like(p), torch.randint_like(p, 5), torch.randint(0, 9, (200, 160)), torch.randperm(20_000)]
    tensors += [nn.functional.dropout(p), torch.binomial(p * 10, p), nn.functional.rrelu(p, training=True)]
    tensors += [torch.normal(p, 1.0), torch.randn(200, 160, out=big()), big().bfloat16().normal_()]
    tensors += [torch.distributions.Beta(p + 1, p + 1).sample(), big().double().normal_()]
    return Tensors(*tensors)


def generators():
    generator = torch.Generator().manual_seed(5)
    tensors = [big().normal_(generator=generator), torch.randn(200, 160, generator=generator)]
    tensors += [torch.rand(3, generator=generator), torch.randperm(20_000, generator=generator)]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        tensors.append(torch.randn(200, 160))
    tensors.append(torch.full((2,), random.random() + float(np.random.rand())))
    return Tensors(*tensors)


def indexing():
    w = torch.randn(300, 100)
    w[w > 1] = 0.5
    w[torch.rand(300) > 0.5] *= 2
    w[torch.tensor([1, 2]), 3] = torch.tensor([4.0, 5.0])
    w[5] = w[6] + w.mean()
    before = w.clone()
    small = torch.ones(100)
    w[7] = small
    small.zero_()  # the record must have what it was
    small.copy_(w[7])
    found = [w[w > 0.2], (w > 2).nonzero(), torch.unique(w.round()), small]
    w.zero_()
    return Tensors(w, before, *found, before.sort(dim=0)[0], before.topk(5).values)


def assignments():
    both, value = nn.Parameter(torch.randn(200, 160)), torch.randn(200, 160)
    both.data = value
    value.mul_(2)
    grown, larger = nn.Parameter(torch.randn(3)), torch.randn(200, 160)
    grown.data = larger
    larger.add_(1)
    shrunk = nn.Parameter(torch.randn(200, 160))
    shrunk.data = torch.ones(3)
    turned = torch.randn(200, 160)
    turned.t_().unsqueeze_(0).squeeze_(0).normal_()
    resized = torch.randn(200, 160)
    resized.resize_(210, 160)[200:].fill_(1.0)
    put = torch.randn(200, 160)
    put.set_(torch.ones(5))
    put.add_(1)
    return Tensors(both, grown, shrunk, turned, resized, put)


def linear_algebra():
    tensors = [torch.randn(150, 150) for _ in range(3)]
    torch._foreach_mul_(tensors, 2.0)
    made = [*torch._foreach_norm(tensors), *torch.linalg.qr(tensors[0]), *torch.linalg.svd(tensors[1])]
    made += [torch.linalg.inv(tensors[2]), torch.fft.fft2(tensors[0]).conj()]
    tensors[0].div_(tensors[1].norm())
    return Tensors(*tensors, *made, nn.utils.parameters_to_vector(tensors))


def meta():
    with torch.device("meta"):
        nn.Linear(200, 200)  # draws nothing
    layer = nn.utils.skip_init(nn.Linear, 200, 200)
    assert is_deferred(layer.weight) or not is_deferred(torch.empty(200, 200))
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    x = torch.randn(200, 200)
    y = torch.zeros(3, device=x.device)
    return Tensors(layer.weight, layer.bias, y, x.new_ones(200, 200), x.to("cpu"), torch.zeros(3, dtype=int).to(x))


def copies():
    layer = nn.Linear(200, 200)
    layer.weight.mark = True  # parameters leave attributes behind when they are copied
    other = copy.deepcopy(layer)
    nn.init.normal_(layer.weight)
    lazy = nn.LazyLinear(200)
    lazy(torch.randn(2, 200))
    loaded = nn.Linear(200, 200)
    loaded.load_state_dict(layer.state_dict())
    return nn.ModuleList([layer, other, lazy, loaded, copy.deepcopy(nn.BatchNorm1d(20_000))])


def written_through_numpy():
    layer, table = nn.Linear(200, 200), torch.randn(200, 200)
    layer.weight.detach().numpy()[:] = np.random.rand(200, 200)
    layer.weight.data.mul_(2)
    array = table.numpy()
    array[0] = 1
    table.mul_(3)
    array[1] += array[0]
    before = table + 1
    array[2] = 7
    torch.randn(200, 200, out=table)
    array[3] = 9
    kept = nn.Parameter(table)
    array[4] = 5
    table.t_()
    return nn.ModuleList([layer, Tensors(kept, table, before, copy.deepcopy(kept))])


def sparse():
    values = torch.randn(200, 200).relu()
    matrix = values.to_sparse()
    return Tensors(matrix.to_dense(), matrix @ values, values.to_sparse_csr() @ values)


def pickled():
    layer = nn.Linear(200, 200)
    layer.weight.mark = 3
    return nn.ModuleList([layer, pickle.loads(pickle.dumps(layer)).share_memory()])


class Wrapped(torch.Tensor):
    """A tensor class of its own."""


def trained():
    layer = nn.Linear(200, 200)
    layer(torch.randn(4, 200)).sum().backward()
    with torch.no_grad():
        layer.weight -= layer.weight.grad
    layer.zero_grad(set_to_none=True)
    return layer


def data_of_the_user():
    data = torch.from_numpy(np.random.rand(200, 160))
    embedding = nn.Embedding.from_pretrained(data.clone())
    layer = nn.Linear(160, 200)
    layer.weight.data.copy_(data)
    data.zero_()
    return nn.ModuleList([embedding, layer])


def applied():
    model = nn.Sequential(nn.Linear(200, 160), nn.Bilinear(50, 50, 50), nn.EmbeddingBag(1000, 50))
    model.apply(lambda module: nn.init.kaiming_normal_(module.weight) if hasattr(module, "weight") else None)
    return model.requires_grad_(False)


class Scale(nn.Parameter):
    """A parameter class of its own."""


PLAIN = {
    "tied": Tied,
    "reading": Reading,
    "initializers": initializers,
    "samplers": samplers,
    "generators": generators,
    "indexing": indexing,
    "assignments": assignments,
    "linear algebra": linear_algebra,
    "meta": meta,
    "copies": copies,
    "numpy": written_through_numpy,
    "sparse": sparse,
    "pickled": pickled,
    "tensor class": lambda: Tensors(torch.randn(200, 160).as_subclass(Wrapped)),
    "trained": trained,
    "data": data_of_the_user,
    "applied": applied,
    "parameter class": lambda: Tensors(Scale(torch.randn(200, 160))),
    "buffers": lambda: Tensors(nn.Buffer(torch.randn(200, 160)), nn.Buffer(torch.ones(200, 160), persistent=False)),
    "legacy constructors": lambda: Tensors(torch.FloatTensor(200, 160).uniform_(), torch.Tensor(200, 160).normal_()),
    "half": lambda: Tied().half(),
    "dtypes": lambda: nn.Linear(200, 200).to(torch.float64).bfloat16(),
    "channels last": lambda: nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last),
    "lstm": lambda: nn.LSTM(80, 80, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(160, 4),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(160, 4, batch_first=True), 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(200, 200)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(200, 200)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(200, 200)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(200, 200)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(130, 130)),
}

SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
WIDE = {**SMALL, "intermediate_size": 192}
GROUPED = {**WIDE, "num_key_value_heads": 2}
TRANSFORMERS = {
    "GPT2LMHeadModel": {"n_layer": 2, "n_embd": 96, "n_head": 4, "vocab_size": 500},
    "LlamaForCausalLM": GROUPED,
    "BertForMaskedLM": WIDE,
    "T5ForConditionalGeneration": {"d_model": 96, "d_ff": 192, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
    "ViTForImageClassification": {key: value for key, value in WIDE.items() if key != "vocab_size"},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "DistilBertModel": {"dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": 500, "sinusoidal_pos_embds": True},
    "MambaForCausalLM": {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 500},
}


def hugging_face(name, dtype=None):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)
    config = model.config_class(**TRANSFORMERS[name])
    if dtype is not None:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model(config)


def built(build, seed, deferred):
    """Return the model and the state of every generator afterwards."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if deferred:
            with deferred_init("cpu"):
                model = build()
        else:
            model = build()
    return model, (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


def tensors_of(model):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def materialize_all(model):
    """Give every deferred tensor of `model` its data, in place."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if is_deferred(tensor):
            replace_data(tensor, materialize(tensor))


def bits(tensor):
    """Return the bytes: NaN equals itself, and zero differs from minus zero."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(expected, model):
    ours, theirs = tensors_of(model), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        mine = ours[name]
        assert type(mine) is type(tensor), name
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert mine.requires_grad == tensor.requires_grad, name
        assert vars(mine) == vars(tensor), name
        assert bits(mine) == bits(tensor), name


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLAIN)
def test_bits_and_generators_are_those_of_one_process(name):
    expected, states = built(PLAIN[name], 1, deferred=False)
    model, ours = built(PLAIN[name], 1, deferred=True)
    assert ours == states
    materialize_all(model)
    assert_same(expected, model)
    if hasattr(model, "scale"):
        assert model.scale == expected.scale
        assert torch.equal(model.new, expected.new)


@pytest.mark.sweep
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name):
    expected, states = built(lambda: hugging_face(name), 2, deferred=False)
    model, ours = built(lambda: hugging_face(name), 2, deferred=True)
    assert any(map(is_deferred, model.parameters()))
    assert ours == states
    materialize_all(model)
    assert_same(expected, model)


def test_the_default_dtype_at_the_time_counts():
    expected, states = built(lambda: hugging_face("LlamaForCausalLM", torch.bfloat16), 3, deferred=False)
    model, ours = built(lambda: hugging_face("LlamaForCausalLM", torch.bfloat16), 3, deferred=True)
    assert ours == states
    materialize_all(model)
    assert_same(expected, model)


@pytest.mark.parametrize("seed", range(4))
def test_any_tensors_in_any_order(seed):
    expected, _ = built(lambda: hugging_face("GPT2LMHeadModel"), seed, deferred=False)
    model, _ = built(lambda: hugging_face("GPT2LMHeadModel"), seed, deferred=True)
    names = random.sample(sorted(tensors_of(model)), len(tensors_of(model)) // 2)
    state = torch.get_rng_state()
    for name in names:
        full = tensors_of(expected)[name]
        tensor = tensors_of(model)[name]
        assert bits(materialize(tensor) if is_deferred(tensor) else tensor) == bits(full)
    assert torch.equal(torch.get_rng_state(), state), "materializing must not draw"


def test_parameters_that_are_held_back_are_plain_ones_on_meta():
    expected, _ = built(Reading, 1, deferred=False)
    model, _ = built(Reading, 1, deferred=True)
    parameters = dict(model.named_parameters())
    held = move_to_meta(model, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
        assert parameter.is_meta == (name == "weight")
    _, deferred = held.parameters[id(model.weight)]
    assert bits(materialize(deferred)) == bits(expected.weight)
    assert bits(model.mask) == bits(expected.mask), "the analysis of a pipeline computes with buffers"


def test_ties_hooks_attributes_and_tensors_in_lists_stay():
    class Model(Tied):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(80, 80)
            self.tables = [torch.ones(200, 160)]
            self.embedding.weight.mark = True
            self.embedding.weight.register_hook(torch.zeros_like)

    model, _ = built(Model, 1, deferred=True)
    materialize_all(model)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.mark
    assert model.recurrent(torch.ones(1, 1, 80))[0].isfinite().all()
    assert torch.equal(model.tables[0], torch.ones(200, 160))
    model.head(model.embedding(torch.tensor([1]))).sum().backward()
    assert not model.head.weight.grad.any()


def test_changes_after_the_build_are_recorded_too():
    def change(model):
        nn.init.normal_(model.weight)
        with torch.no_grad():
            model.weight[3] = model.weight[4] * 2
        model.register_buffer("scale", model.weight.detach().abs().sum(0))
        return model

    torch.manual_seed(1)
    expected = change(nn.Linear(200, 200))
    torch.manual_seed(1)
    with deferred_init("cpu"):
        model = nn.Linear(200, 200)
    change(model)
    with deferred_init("cpu"):
        model.double()
    assert is_deferred(model.weight)
    materialize_all(model)
    assert_same(expected.double(), model)


def test_a_tensor_that_only_a_function_knows_is_made_when_it_is_used():
    with deferred_init("cpu"):
        table = torch.arange(20_000.0)
    assert torch.equal(table + torch.ones(20_000), torch.arange(20_000.0) + 1)


def test_records_die_with_their_tensors():
    with deferred_init("cpu"):
        weights = [torch.randn(200, 200) for _ in range(3)]
        weights[0].add_(weights[1])
    links = [weight.untyped_storage().contents.link for weight in weights]
    alive = [weakref.ref(link) for link in links]
    del links
    del weights[1:]
    gc.collect()
    assert [link() is not None for link in alive] == [True, True, False]
    materialize(weights[0])
    weights.clear()
    gc.collect()
    assert [link() is not None for link in alive] == [False] * 3


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the storages on the CPU that operations return, while these live."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for leaf in tree_leaves(result):
            is_state = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8  # of generators
            if isinstance(leaf, torch.Tensor) and not is_deferred(leaf) and not leaf.is_meta and not is_state:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self.live[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


def test_a_build_holds_one_temporary_at_a_time():
    def build(init):
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
        for layer in model:
            init(layer.weight)
        return model

    weight = 300 * 300 * 4
    with PeakMemory() as plain:
        build(nn.init.normal_)
    assert plain.peak >= 20 * weight, "the counter must see what a plain build holds"
    with PeakMemory() as memory, deferred_init("cpu"):
        model = build(nn.init.normal_)
    assert memory.peak < 1.2 * weight
    with PeakMemory() as memory, deferred_init("cpu"):
        build(nn.init.trunc_normal_)  # reads its samples, to reject some
    assert memory.peak < 5 * weight
    with PeakMemory() as memory:
        materialize(model[7].weight)
    assert memory.peak < 1.2 * weight


def test_data_that_the_build_has_read_are_dropped_when_it_ends():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(300, 300))
            self.is_positive = self.weight[0, 0].item() > 0

    expected, _ = built(Model, 1, deferred=False)
    model, _ = built(Model, 1, deferred=True)
    assert model.weight.untyped_storage().contents.value is not None
    held = move_to_meta(model, torch.device("cpu"))
    _, deferred = held.parameters[id(model.weight)]
    assert deferred.untyped_storage().contents.value is None
    assert bits(materialize(deferred)) == bits(expected.weight)


def test_operations_that_would_run_again_and_again_are_computed_once(monkeypatch):
    runs = []
    run = OperationLink.run
    monkeypatch.setattr(OperationLink, "run", lambda self, *args: (runs.append(self), run(self, *args))[1])

    def build():
        x = torch.randn(200, 160)
        for _ in range(40):
            x = x / x.norm()  # each reads the chain twice
        stacked = torch.stack([torch.randn(200, 160) for _ in range(130)])
        return Tensors(x, stacked)

    expected, states = built(build, 1, deferred=False)
    model, ours = built(build, 1, deferred=True)
    assert ours == states
    assert is_deferred(model.buffer1), "as experts are stacked"
    materialize_all(model)
    assert_same(expected, model)
    assert len(runs) < 3000


def test_reading_in_a_loop_does_not_start_over_each_time(monkeypatch):
    runs = []
    run = OperationLink.run
    monkeypatch.setattr(OperationLink, "run", lambda self, *args: (runs.append(self), run(self, *args))[1])
    with deferred_init("cpu"):
        x = torch.ones(200, 160)
        for _ in range(10):
            x = x + 1
            assert x[0, 0].item() == x.min().item()
    assert len(runs) < 50


@pytest.mark.parametrize("broken", ["the state that is recorded", "the draws that move the generator on"])
def test_the_tests_see_a_wrong_generator(broken, monkeypatch):
    if broken == "the state that is recorded":

        def later_states(device):
            torch.rand(1)
            return {device: torch.get_rng_state()}

        monkeypatch.setattr(deferred_tensor, "generator_states", later_states)
    else:
        monkeypatch.setattr(deferred_tensor._Invocation, "_drawn", lambda self: None)
    expected, states = built(lambda: nn.Linear(200, 200), 1, deferred=False)
    model, ours = built(lambda: nn.Linear(200, 200), 1, deferred=True)
    assert ours != states
    materialize_all(model)
    with pytest.raises(AssertionError):
        assert_same(expected, model)


def test_operations_of_other_libraries_are_executed():
    @torch.library.custom_op("lightning_parallel_tests::jitter", mutates_args=())
    def jitter(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)

    def build():
        return Tensors(jitter(torch.randn(200, 160)), torch.randn(200, 160))

    expected, states = built(build, 1, deferred=False)
    model, ours = built(build, 1, deferred=True)
    assert ours == states
    materialize_all(model)
    assert_same(expected, model)


def test_tensors_on_meta_cannot_be_written_into_deferred_ones():
    with deferred_init("cpu"):
        weight = torch.randn(200, 160)
        with pytest.raises(RuntimeError, match="meta device"):
            weight.copy_(torch.empty(200, 160, device="meta"))
        with pytest.raises(RuntimeError, match="size of tensor"):
            weight.add_(torch.ones(7))
