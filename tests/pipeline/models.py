"""Models as people write them, to be cut without a change. Each builder gives (model, step, batch), in fp64."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.comm import MeshGroups
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.strategies.setup.divide import message_groups


def pipeline(model, group, schedule, example=None, *, engine_options=None, **analysis_options):
    """Analyze and cut `model` in one call."""
    plan = analyze(model, group.size, schedule, example=example, sync_group=group, **analysis_options)
    engine_options = engine_options or {}
    if group.is_ordered and engine_options.get("message_groups") is None:
        groups = MeshGroups(Mesh(pipeline_parallel=group.size))
        engine_options = {**engine_options, "message_groups": message_groups(groups, plan.schedule)}
    return PipelineEngine(model, plan, group, **engine_options)


class Sleep(torch.autograd.Function):
    """Takes a time that is known: `seconds` forward, twice as long backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


def mlp(samples=10):
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
    return (
        model,
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        (torch.randn(samples, 8), torch.randn(samples, 8)),
    )


def convolutional(samples=6):
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)) for _ in range(4)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(*blocks), head)
    batch = {"image": torch.randn(samples, 1, 6, 6), "label": torch.randint(3, (samples,))}
    return model, lambda batch: F.cross_entropy(model(batch["image"]), batch["label"]), batch


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask, a learned position that is a bare parameter, and a pooled head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 5)  # registered before the layers, used after them
        self.embed = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def encoder(samples=7, length=9):
    model = Encoder()
    tokens = torch.randint(1, 20, (samples, length))
    tokens[::2, -2:] = 0
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (tokens, torch.randint(5, (samples,)))


class TwoStreams(nn.Module):
    """Several tensors, a dict and a tuple pass the boundary; a tensor made before the layers reaches them all."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, streams, *, gate, scale=1.0, extra=None):
            left, (right, count) = streams["left"], streams["rest"]
            left = left + torch.tanh(self.left(right)) * gate * scale
            left.mul_(0.9)
            right = right + self.right(left) * extra[0]
            return {"left": left, "rest": (right, count + 1)}

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.gate = nn.Linear(3, 6)
        self.slope = nn.Parameter(torch.rand(6))
        self.blocks = nn.ModuleList(self.Layer() for _ in range(5))
        self.last = nn.Linear(12, 1)

    def forward(self, x):
        start = self.first(x)
        streams = {"left": start, "rest": (start * 2, torch.zeros(len(x), dtype=torch.long))}
        gate = torch.sigmoid(self.gate(x))
        extra = (self.slope.exp(), "unused")
        for number, block in enumerate(self.blocks):
            streams = block(streams, gate=gate, scale=1.0 + number, extra=extra)
        right, count = streams["rest"]
        assert (count == len(self.blocks)).all()
        return self.last(torch.cat([streams["left"], right], 1))


def two_streams(samples=8):
    model = TwoStreams()
    return model, lambda batch: {"loss": model(batch["x"]).square().mean(), "n": 3}, {"x": torch.randn(samples, 3)}


class Tied(nn.Module):
    """The head multiplies by the embedding's matrix, read as a parameter; a norm is shared by all layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.shared = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(self.shared(x)).relu()
        return F.linear(x, self.embed.weight)


def tied(samples=6):
    model = Tied()

    def step(batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return model, step, torch.randint(11, (samples, 7))


class Outer(nn.Module):
    """The residual is added outside of the layers, so the stream itself is no layer's argument."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x.relu())
        return x


class Skipping(Outer):
    """The last layers read what the first ones made."""

    def forward(self, x):
        made = [self.embed(x)]
        for number, layer in enumerate(self.layers):
            made.append(layer(made[-1]) if number < 2 else layer(made[-1] * made[3 - number]))
        return made[-1]


class Twice(Outer):
    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class PrologueInLoss(Outer):
    def forward(self, x):
        start = x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x - start


def outer(kind="Outer"):
    model = globals()[kind]()
    return model, lambda batch: model(batch[0]).square().mean(), [torch.randn(6, 4)]


def causal_loss(logits, labels, vocab_size, **_):
    """Transformers' own causal loss, without its cast to single precision."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def _language(model, samples=5, length=10, padded=True, **extra):
    if "Causal" in type(model).__name__ or "LMHead" in type(model).__name__:
        model.loss_function = causal_loss
    ids = torch.randint(3, 60, (samples, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -3:] = 0
    # Every sample has the same number of labels, so weighting by samples is exact.
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone(), **extra}
    return model, lambda batch: model(**batch).loss, batch


_SMALL = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}


def gpt2(checkpointing=None, dropout=0.0, use_cache=True):
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(**_SMALL, n_positions=32, use_cache=use_cache, **rates)
    return _language(_checkpointed(GPT2LMHeadModel(config), checkpointing))


def llama(checkpointing=None, tie=False, layers=4, attention="sdpa"):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {**_SMALL, "num_hidden_layers": layers}
    config = LlamaConfig(
        **small, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=tie, attn_implementation=attention
    )
    return _language(_checkpointed(LlamaForCausalLM(config), checkpointing))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_SMALL, intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _language(BertForMaskedLM(config))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_SMALL, intermediate_size=24, num_key_value_heads=1, num_local_experts=3)
    config._experts_implementation = "eager"
    return _language(MixtralForCausalLM(config))


def _checkpointed(model, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def built(builder, seed=3, source=None, **options):
    """Build in fp64 from a seed, by a builder of this module or of another's variables."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    try:
        model, step, batch = (source or globals())[builder](**options)
        return model.double(), step, batch
    finally:
        torch.set_default_dtype(before)
