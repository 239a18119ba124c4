"""Models on the meta device: divided first, then only the shards get memory, with the values of one process."""

import copy
import functools
import math
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.compat.initialization import initialize_tensors
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.inspection import full_shape
from lightning_parallel.tensor.plan import apply_plan, materialize_shards
from tests.harness import distributed, run
from tests.tensor.test_auto_plan import VOCABULARY, Block, Language

CPU = torch.device("cpu")


class Attention(nn.Module):
    """Fused projections; its initialiser and its forward read the number of heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_head = heads
        self.embed_dim = width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("scale", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        self.scale.fill_(1 / self.n_head)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.scale * q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def _own(blocks=2, tied=True):
    return Language([Block(Attention(32, 4), 32) for _ in range(blocks)], 32, tied, padding=3)


def _llama(tied):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def _gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=VOCABULARY)
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "own": _own,
    "own, not tied": functools.partial(_own, tied=False),
    "llama": functools.partial(_llama, tied=False),
    "llama, tied": functools.partial(_llama, tied=True),
    "gpt2": _gpt2,
}


def _on_meta(name):
    with torch.device("meta"):
        return MODELS[name]()


def _divided(model, group):
    """Divide a model on the meta device; returns it with the facts of its division."""
    sharding = apply_plan(model, make_plan(model, "auto", group), group)
    assert all(parameter.is_meta for parameter in model.parameters())
    return sharding


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in MODELS), ("llama", 4)])
def test_shards_equal_the_one_process_initialisation(name, world):
    run(equals_one_process, world, name=name)


def equals_one_process(group, name):
    model = _on_meta(name)
    expected = copy.deepcopy(model)
    torch.manual_seed(5)
    initialize_tensors(expected, CPU)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    sharding = _divided(model, group)
    materialize_shards(model, CPU, sharding, group)
    assert torch.equal(torch.get_rng_state(), state)
    assert sharding.shards
    for (path, mine), (other, full) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert path == other
        assert full_shape(mine) == full.shape
        value = sharding.shards[path].split(full, group.rank) if path in sharding.shards else full
        assert torch.equal(mine, value), path
    for (path, mine), (_, full) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(mine, full), path
    names = [list(dict(each.named_parameters(remove_duplicate=False))) for each in (model, expected)]
    assert names[0] == names[1], "tied parameters stay tied"
    if name.startswith("own"):
        assert model.blocks[0].attention.n_head == 4 // group.size


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors with data that are made while it is entered."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A placeholder says that it is on a device, and has no memory there.
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and type(leaf) is not PlaceholderTensor:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage):
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes):
        self.live -= num_bytes


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", ["own", "llama"])
@distributed(world_size=2)
def test_no_more_than_the_shards_and_one_layer_is_allocated(group, name):
    model = _on_meta(name)
    layers = [_bytes(module.parameters(recurse=False)) for module in model.modules()]
    total = _bytes(model.parameters())
    sharding = _divided(model, group)
    with LiveBytes() as memory:
        materialize_shards(model, CPU, sharding, group)
    held = _bytes([*model.parameters(), *model.buffers()])
    small = 512  # scalars of the initialisers
    assert memory.live <= held + small
    assert memory.peak <= held + max(layers) + small < total
    assert memory.peak >= held + max(layers) // 2, "the count sees the temporaries"


@distributed(world_size=2)
def test_a_plan_for_a_model_on_meta_allocates_single_blocks(group):
    with torch.device("meta"):
        model = _own(blocks=40)
    with LiveBytes() as memory:
        make_plan(model, "auto", group)
    block = _bytes(model.blocks[0].parameters())
    assert 2 * block < memory.peak < 20 * block, memory.peak / block
    assert all(parameter.is_meta for parameter in model.parameters())


@distributed(world_size=2)
def test_a_stage_holds_its_layers_only(group):
    model = _on_meta("own, not tied")
    expected = copy.deepcopy(model)
    torch.manual_seed(5)
    initialize_tensors(expected, CPU)
    sharding = _divided(model, group)
    held = {id(parameter) for parameter in model.blocks[1].parameters()}
    torch.manual_seed(5)
    materialize_shards(model, CPU, sharding, group, holds=lambda tensor: id(tensor) in held)
    for path, parameter in model.named_parameters():
        assert parameter.is_meta == (not path.startswith("blocks.1."))
    path = "blocks.1.mlp.2.weight"
    mine = sharding.shards[path].split(expected.get_parameter(path), group.rank)
    assert torch.equal(model.get_parameter(path), mine)
    assert math.prod(mine.shape) < expected.get_parameter(path).numel()
