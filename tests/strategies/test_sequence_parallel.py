"""Sequence parallelism of LightningModules without a `forward`: losses and every gradient by name of one process."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.compat import ParallelState
from tests.harness import distributed
from tests.pipeline.models import causal_loss
from tests.strategies.models import trainer_for
from tests.strategies.test_pipeline_models import Rows, expect_equal

WIDTH, HEADS, TOKENS, LENGTH = 16, 4, 23, 7
SIZES = {
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 4": {"tensor_parallel_size": 4},
    "tensor 2 x pipeline 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def halved_if_large(p):
    if p.grad.norm() > 1e-2:
        p.grad.mul_(0.5)


class Block(nn.Module):
    """Has its attention in its own `forward`."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChunkedBlock(Block):
    """Takes the number of heads from a global name, so that its attention computes all heads."""

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, HEADS, d // HEADS).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x.add(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    block = Block

    def __init__(self, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        # Before the sum over the ranks, the gradients of norms are partial.
        for block in self.blocks:
            block.norm1.weight.register_hook(lambda g: g / (1 + g.norm()))
            block.norm2.bias.register_hook(lambda g: None)
            block.down.bias.register_post_accumulate_grad_hook(halved_if_large)
            block.qkv.weight.register_hook(lambda g: g / (1 + g.norm()))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ChunkedGPT(GPT):
    block = ChunkedBlock


def qwen3():
    import transformers

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=HEADS, head_dim=4, vocab_size=TOKENS)
    model = transformers.Qwen3ForCausalLM(config)
    model.loss_function = causal_loss  # its own is computed in single precision
    return model


class Module(LightningModule):
    """Has no `forward`, and takes a dict."""

    def __init__(self, build):
        super().__init__()
        self.model = build()
        self.losses, self.gradients = [], []

    def loss(self, batch):
        if not isinstance(self.model, GPT):
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"])[:, :-1]
        return F.cross_entropy(logits.reshape(-1, TOKENS), batch["labels"][:, 1:].reshape(-1))

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(build, strategy="auto", devices=1):
    torch.manual_seed(3)
    module = Module(build).double()
    tokens = torch.randint(TOKENS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = Rows({"input_ids": tokens, "labels": tokens.clone()})
    trainer = trainer_for(strategy, devices, use_distributed_sampler=False)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    return module, trainer


@functools.lru_cache(maxsize=1)  # on all ranks alike, for one layout after the other
def on_one_process(build):
    return train(build)[0]


def check(build, layout):
    sizes = SIZES[layout]
    strategy = HybridParallelStrategy(num_microbatches=2, sequence_parallel=True, **sizes)
    module, trainer = train(build, strategy, math.prod(sizes.values()))
    expect_equal(module, trainer, on_one_process(build), 1)
    return ParallelState.of(module).sharding.plan


MODELS = {"Qwen3": qwen3, "GPT": GPT, "chunked GPT": ChunkedGPT}


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=2)
def test_two_ranks(name):
    (region,) = check(MODELS[name], "tensor 2").sequence_regions
    assert len(region.blocks) == 4


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["tensor 4", "tensor 2 x pipeline 2"])
@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=4)
def test_four_ranks(name, layout):
    (region,) = check(MODELS[name], layout).sequence_regions
    assert len(region.blocks) == 4
