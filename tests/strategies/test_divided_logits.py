"""Heads of models as their authors wrote them: trained without a gather of the logits, equal to one process."""

import functools
import math

import pytest
import torch
from torch import nn

from lightning_parallel import HybridParallelStrategy, TensorParallelStrategy
from lightning_parallel.compat import Patches
from lightning_parallel.tensor import pieces
from tests.harness import distributed
from tests.pipeline.models import built, causal_loss
from tests.strategies import test_pipeline_models
from tests.strategies.test_pipeline_models import expect_equal, train

VOCABULARY = 61
SIZES = {
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 3": {"tensor_parallel_size": 3},
    "tensor 2 x data 2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "tensor 2 x pipeline 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
_CONFIG = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
_DECODER = {**_CONFIG, "intermediate_size": 24, "num_key_value_heads": 3, "head_dim": 4, "use_cache": False}


def _language(name, **options):
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    config.pad_token_id = None
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    model.loss_function = causal_loss  # its own is computed in single precision

    def step(batch):
        labels = batch.clone()
        labels[:, :2] = -100
        return model(input_ids=batch, labels=labels).loss

    return model, step, torch.randint(VOCABULARY, (6, 8))


def gpt2():
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _language("GPT2", vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=3, n_positions=16, **rates)


def llama():
    return _language("Llama", **_DECODER)


def qwen3():
    return _language("Qwen3", **_DECODER)


def gemma2():
    return _language("Gemma2", **_DECODER, query_pre_attn_scalar=4, final_logit_softcapping=3.0)


class Plain(nn.Module):
    """A language model without attention, with a head and its loss by torch's modules."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)
        )
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def plain():
    model = Plain()
    return model, lambda batch: _plain_step(model, batch), torch.randint(VOCABULARY, (6, 8))


def _plain_step(model, batch):
    found = model(batch[:, :-1])
    accuracy = (found.argmax(-1) == batch[:, 1:]).double().mean()
    return model.criterion(found.transpose(1, 2), batch[:, 1:]) + 0 * accuracy


def changed():
    model = Plain()
    return model, lambda batch: _changed_step(model, batch), torch.randint(VOCABULARY, (6, 8))


def _changed_step(model, batch):
    found = model(batch[:, :-1])
    found.div_(2.0)  # on the part
    found[..., :3] = -5.0  # on the full logits
    return model.criterion(found.transpose(1, 2), batch[:, 1:])


@functools.lru_cache(maxsize=1)  # on all ranks alike, for one layout after the other
def on_one_process(name):
    return train(name, "auto", 1)[0]


class Counter:
    """How often something was called."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def check(name, layout, is_gathered=False):
    sizes = SIZES[layout]
    ranks, replicas = math.prod(sizes.values()), sizes.get("data_parallel_size", 1)
    patches = Patches()
    patches.replace(test_pipeline_models, "build", lambda name: built(name, source=globals()))
    made, gathered = Counter(pieces.Piece.of), Counter(pieces._gather)
    try:
        expected = on_one_process(name)
        patches.replace(pieces.Piece, "of", made)
        patches.replace(pieces, "_gather", gathered)
        options = {"num_microbatches": 3} if "pipeline_parallel_size" in sizes else {}
        strategy = (HybridParallelStrategy if options else TensorParallelStrategy)(**sizes, **options)
        module, trainer = train(name, strategy, ranks, replicas)
    finally:
        patches.undo()
    assert made.calls
    assert bool(gathered.calls) == is_gathered
    expect_equal(module, trainer, expected, replicas)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", "gpt2", "llama", "qwen3", "gemma2"])
@distributed(world_size=2)
def test_two_ranks(name):
    check(name, "tensor 2")


@distributed(world_size=2)
def test_logits_that_change_in_place_by_part_and_in_full():
    check("changed", "tensor 2", is_gathered=True)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", "gpt2"])
@distributed(world_size=3)
def test_uneven_classes(name):
    check(name, "tensor 3")


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layout"), [("plain", "tensor 2 x data 2"), ("gpt2", "tensor 2 x pipeline 2")])
@distributed(world_size=4)
def test_with_other_axes(name, layout):
    check(name, layout)
