"""Loss and MLPs in tiles of positions (`tiled="auto"`): equal to one process, through the Trainer."""

import contextlib
import functools
import logging
import os

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.compat import patched
from lightning_parallel.tensor import tiled_loss, tiled_modules
from tests.harness import distributed
from tests.strategies.models import trainer_for
from tests.tensor.test_tiled_logits import small_tiles

CLASSES, LENGTH, WIDTH = 48, 10, 16


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """A model in the manner of nanoGPT, with tied weights; logs its accuracy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.wte, self.wpe = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.wte.weight = self.lm_head.weight
        self.double()

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.norm(x))

    def training_step(self, batch, index):
        logits = self(batch)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), batch[:, 1:].reshape(-1), ignore_index=0)
        self.log("loss", loss)
        self.log("accuracy", (logits[:, :-1].argmax(-1) == batch[:, 1:]).double().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(module, strategy, devices, replicas=1, **options):
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    tokens = torch.randint(CLASSES, (16, LENGTH), generator=torch.Generator().manual_seed(2))
    sampler = DistributedSampler(tokens, replicas, rank // (devices // replicas), shuffle=False)
    # The mean over the targets that count is the mean of the replicas' means only if these count alike.
    tokens[tokens == 0] = 1
    loader = DataLoader(tokens, batch_size=8 // replicas, sampler=sampler)
    trainer = trainer_for(strategy, devices, **{"max_epochs": 1, **options})
    with small_tiles():
        trainer.fit(module, loader)
    return trainer


@functools.cache
def on_one_process(accumulated=1):
    module = GPT()
    return module, fit(module, "auto", 1, accumulate_grad_batches=accumulated)


def check(trainer, tolerance=1e-10):
    expected, alone = on_one_process(trainer.accumulate_grad_batches)
    full = trainer.strategy.lightning_module_state_dict()
    if trainer.global_rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=tolerance, atol=1e-12, msg=name)
    assert trainer.callback_metrics.keys() == alone.callback_metrics.keys()


@contextlib.contextmanager
def counted_tiles():
    """Note the number of tiles of each call of an MLP."""
    found = []
    joined = tiled_modules._joined

    def noted(parts, *rest):
        parts = list(parts)
        found.append(len(parts))
        return joined(parts, *rest)

    with patched(tiled_modules, "_joined", noted):
        yield found


@contextlib.contextmanager
def counted_losses():
    """Note the number of tiles of each loss."""
    found = []
    tell = tiled_loss._tell_of_tiles
    with patched(tiled_loss, "_tell_of_tiles", lambda flat, tiling: (found.append(tiling.count), tell(flat, tiling))):
        yield found
        assert all(count > 1 for count in found)


def test_one_process():
    module = GPT()
    with counted_losses() as losses, counted_tiles() as counts:
        trainer = fit(module, HybridParallelStrategy(tiled="auto"), 1)
    assert len(losses) == 2
    assert counts == [5] * 2 * 4  # 2 steps of 4 layers; tiles of 2 positions
    check(trainer)


CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
TWO = {
    "data": ({"activation_checkpointing": "selective"}, 2),
    "zero 3": ({"zero_stage": 3}, 2),
    "pipeline": (PIPELINE, 1),
    "tensor": ({"tensor_parallel_size": 2, "activation_checkpointing": "full"}, 1),
    "context": (CONTEXT, 1),
    "sequence": ({"tensor_parallel_size": 2, "sequence_parallel": True}, 1),
}
FOUR = {
    "tensor, context": ({"tensor_parallel_size": 2, **CONTEXT}, 1),
    "pipeline, context": ({**PIPELINE, **CONTEXT, "activation_checkpointing": "selective"}, 1),
    "zero 3, context": ({"zero_stage": 3, **CONTEXT}, 2),
}


def run_and_check(group, layout, accumulated=1):
    sizes, replicas = {**TWO, **FOUR}[layout]
    with counted_losses() as losses, counted_tiles() as counts:
        strategy = HybridParallelStrategy(tiled="auto", **sizes)
        trainer = fit(
            GPT(), strategy, group.size, replicas, verifies=group.size == 2, accumulate_grad_batches=accumulated
        )
    assert all(count > 1 for count in counts)
    assert bool(counts) == (layout != "sequence")
    # The last stage of a pipeline has the head.
    assert bool(losses) == ("pipeline" not in layout or group.rank >= group.size // 2)
    check(trainer)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", TWO)
@distributed(world_size=2)
def test_two_ranks(group, layout):
    run_and_check(group, layout)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", FOUR)
@distributed(world_size=4)
def test_four_ranks_that_accumulate_gradients(group, layout):
    run_and_check(group, layout, 2)


@distributed(world_size=2)
def test_half_precision(group):
    before, alone, module = (GPT().float() for _ in range(3))
    fit(alone, "auto", 1, precision="bf16-mixed")
    with counted_losses() as losses, counted_tiles() as counts:
        fit(module, HybridParallelStrategy(tiled="auto", **CONTEXT), 2, precision="bf16-mixed")
    assert losses
    assert counts
    for name, first in before.state_dict().items():
        update = alone.state_dict()[name] - first
        assert (module.state_dict()[name] - first - update).norm() <= 0.02 * update.norm(), name


class Pretrained(GPT):
    """A model of transformers, which computes its loss itself."""

    def __init__(self, kind):
        LightningModule.__init__(self)
        torch.manual_seed(5)
        self.model = transformers_model(kind).double()

    def training_step(self, batch, index):
        found = self.model(input_ids=batch, labels=batch.masked_fill(batch % 5 == 0, -100))
        self.log("loss", found.loss)
        return found.loss


def transformers_model(kind):
    sizes = {"vocab_size": CLASSES, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2 * LENGTH}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(**sizes, head_dim=8, final_logit_softcapping=5.0, pad_token_id=0)
        return transformers.Gemma3ForCausalLM(config)
    off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=CLASSES, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32, **off)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_models_of_transformers(kind, monkeypatch):
    # The library casts logits to single precision, which would hide a small difference.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    expected, module = Pretrained(kind), Pretrained(kind)
    fit(expected, "auto", 1)
    with counted_losses() as losses:
        fit(module, HybridParallelStrategy(tiled="auto"), 1)
    assert len(losses) == 2
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=name)


class Regression(GPT):
    def training_step(self, batch, index):
        return self(batch).square().mean()


def test_a_step_without_cross_entropy_is_told(caplog):
    with caplog.at_level(logging.INFO):
        fit(Regression(), HybridParallelStrategy(tiled="auto"), 1)
    assert "no loss in tiles: the step computes no cross-entropy of class indices" in caplog.text
