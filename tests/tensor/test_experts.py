"""Mixture-of-Experts layers: divided inside of each expert, they compute what one process computes."""

import contextlib
import functools

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.experts import Experts
from lightning_parallel.tensor.layers import Column
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_
from tests.harness import distributed
from tests.tensor.oracle import same_gradients

VOCABULARY = 101  # does not divide
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MODELS = {
    "MixtralForCausalLM": {"num_local_experts": 4, **AUXILIARY},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "mlp_only_layers": [0],
        **AUXILIARY,
    },
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, **AUXILIARY},
    "GptOssForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "intermediate_size": 32,  # as wide as the hidden states
        "sliding_window": 4,
        **AUXILIARY,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
# Plain stacks; and stacks with biases, transposed, with gate and up in turns. The kernels are the same for all models.
WITH_ALL_KERNELS = ("MixtralForCausalLM", "GptOssForCausalLM")
IMPLEMENTATIONS = {"eager": torch.float64, "batched_mm": torch.float64, "grouped_mm": torch.float32}


@contextlib.contextmanager
def in_double():
    """Let models that compute some steps in single precision (norms, routers, losses) do them in double, too."""
    before = Tensor.float, Tensor.to, Tensor.type, F.softmax

    def doubled(function):
        def run(*args, **kwargs):
            given = [torch.float64 if value is torch.float32 else value for value in args]
            named = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
            return function(*given, **named)

        return run

    Tensor.float, (Tensor.to, Tensor.type, F.softmax) = Tensor.double, map(doubled, before[1:])
    try:
        yield
    finally:
        Tensor.float, Tensor.to, Tensor.type, F.softmax = before


def hugging_face(name, experts="eager", **changes):
    """Return a small model whose experts are computed by one of transformers' implementations."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, **MODELS[name], **changes}))
    model.set_experts_implementation(experts)
    with torch.no_grad():  # zeros at the start (biases) would hide what is added twice
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.to(IMPLEMENTATIONS[experts])


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Loop(nn.Module):
    """A list of experts, each called with the tokens that chose it, if any did; may keep a loss for its balance."""

    def __init__(self, width, hidden, experts, chosen=2, keeps=False):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))
        self.chosen, self.keeps, self.balance = chosen, keeps, None

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens).softmax(-1)
        weights, index = scores.topk(self.chosen, -1)
        if self.keeps:
            self.balance = scores.mean(0).square().sum()
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                output.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return output.view_as(x)


class Dense(nn.Module):
    """Stacks of weights and the router in one module, every expert sees every token; returns a loss for its balance."""

    def __init__(self, width, hidden, experts, dropout=0.0, keeps=False):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.w_in = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.b_in = nn.Parameter(torch.randn(experts, hidden))
        self.w_out = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.b_out = nn.Parameter(torch.randn(experts, width))
        self.dropout, self.keeps, self.balance = nn.Dropout(dropout), keeps, None

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
        hidden = self.dropout(F.gelu(torch.einsum("btd,edh->bteh", x, self.w_in) + self.b_in))
        output = torch.einsum("bteh,ehd->bted", hidden, self.w_out) + self.b_out
        output = (output * (scores * chosen)[..., None]).sum(2)
        balance = (scores.mean((0, 1)) * chosen.mean((0, 1))).sum()
        if self.keeps:
            self.balance = balance
            return output
        return output, balance


class Gated(nn.Module):
    """Gate and up in turns in one stack; sizes from attributes; as wide inside as outside; a scale for all outputs."""

    def __init__(self, width, hidden, experts):
        super().__init__()
        self.ffn_dim, self.count = hidden, experts
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x, scores):
        both = torch.einsum("btd,ehd->bteh", x, self.up).view(*x.shape[:2], self.count, self.ffn_dim, 2)
        hidden = F.silu(both[..., 0]) * both[..., 1]
        return torch.einsum("bteh,edh,bte->btd", hidden, self.down, scores) + self.bias


class Around(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.choose = nn.Linear(width, experts)
        self.experts = Gated(width, hidden, experts)

    def forward(self, x):
        return self.experts(x, self.choose(x).softmax(-1))


class Language(nn.Module):
    """Blocks around layers of experts, and the losses for their balance."""

    def __init__(self, layer, width):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.double()

    def loss(self, tokens):
        x, balance = self.embed(tokens), 0.0
        for norm, layer in zip(self.norms, self.layers):
            found = layer(norm(x))
            found, beside = found if isinstance(found, tuple) else (found, getattr(layer, "balance", None))
            x = x + found
            balance = balance if beside is None else balance + beside
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + 0.5 * balance


OWN = {
    "a list of experts": lambda: Language(lambda: Loop(12, 20, 6), 12),
    "a list that keeps a loss": lambda: Language(lambda: Loop(12, 20, 6, keeps=True), 12),
    "a list of more experts than tokens": lambda: Language(lambda: Loop(12, 20, 16, chosen=1), 12),
    "stacked with the router": lambda: Language(lambda: Dense(12, 20, 6), 12),
    "stacked, with sizes that do not divide": lambda: Language(lambda: Dense(12, 13, 5), 12),
    "stacked, in turns": lambda: Language(lambda: Around(12, 12, 5), 12),
}


def _loss(model, steps):
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(steps))
    if hasattr(model, "config"):
        return model(input_ids=tokens, labels=tokens).loss
    return model.loss(tokens)


def train(model, sharding=None, group=None, steps=2):
    """Losses, and the gradients of the last step by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        double = next(model.parameters()).dtype == torch.float64
        with in_double() if double else contextlib.nullcontext():
            loss = _loss(model, step)
        loss.backward()
        if sharding is not None:
            held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            partial = {name: gradient for name, gradient in held.items() if name in sharding.partial}
            reduce_partial_(partial, sharding.shards, group)
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(group, build, tolerance=1e-10):
    """Divide one copy, train both, compare losses and every gradient by name; returns the plan and the share held."""
    whole = build()
    losses, gradients = train(whole)
    model = build()
    sharding = apply_plan(model, make_plan(model, "auto", group), group)
    found_losses, found = train(model, sharding, group)
    torch.testing.assert_close(found_losses, losses, rtol=tolerance, atol=tolerance)
    same_gradients(found, gradients, sharding.shards, group, tolerance)
    held = sum(parameter.numel() for parameter in model.parameters())
    return sharding.plan, held / sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=2)
def test_hugging_face_models(group, name):
    for experts, dtype in IMPLEMENTATIONS.items() if name in WITH_ALL_KERNELS else [("eager", torch.float64)]:
        build = functools.partial(hugging_face, name, experts)
        plan, share = compare(group, build, 1e-10 if dtype == torch.float64 else 1e-4)
        assert any(isinstance(style, Experts) for style in plan.styles.values())
        assert share < 1 / group.size + 0.12


@distributed(world_size=2)
def test_kernels_that_need_aligned_rows_get_them(group):
    # 24 features in half precision: 12 would be rows of 24 bytes, which the kernel refuses.
    whole, model = (hugging_face("Qwen3MoeForCausalLM", "grouped_mm").bfloat16() for _ in range(2))
    sharding = apply_plan(model, make_plan(model, "auto", group), group)
    rule = sharding.shards["model.layers.1.mlp.experts.down_proj"]
    assert rule.ranges == (((0, 16),), ((16, 24),))
    losses, found = (train(each, facts, group)[0] for each, facts in ((whole, None), (model, sharding)))
    torch.testing.assert_close(found, losses, rtol=1e-2, atol=1e-2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", OWN)
@distributed(world_size=2)
def test_own_layers_of_experts(group, name):
    plan, _ = compare(group, OWN[name])
    expected = Column if name == "a list that keeps a loss" else Experts
    assert sum(isinstance(style, expected) for style in plan.styles.values()) >= 2
    routers = [path for path, _ in OWN[name]().named_modules() if path.endswith(("gate", "choose"))]
    outside = [path for path in routers if path.rpartition(".")[0] not in plan.styles]
    assert all("chooses between the experts" in plan.notes[path] for path in outside)
    assert not set(routers) & plan.styles.keys()


@distributed(world_size=2)
def test_experts_that_cannot_be_divided_stay_whole_with_the_reason(group):
    layers = {
        "random numbers": lambda: Dense(12, 20, 6, dropout=0.3),
        "keep parts for the loss": lambda: Dense(12, 20, 6, keeps=True),
    }
    for reason, layer in layers.items():
        plan = make_plan(Language(layer, 12), "auto", group)
        assert not any(isinstance(style, Experts) for style in plan.styles.values())
        assert reason in plan.notes["layers.0"]
