"""Mixture-of-Experts layers: divided inside of each expert, they compute what one process computes."""

import contextlib
import functools

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.experts import Experts
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_
from tests.harness import distributed

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


def _loss(model, steps):
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(steps))
    if hasattr(model, "config"):
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


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
            names = [name for name, _ in model.named_parameters() if name in sharding.partial]
            reduce_partial_({name: model.get_parameter(name).grad for name in names}, sharding.shards, group)
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
    assert [name for name, gradient in found.items() if gradient is None] == [
        name for name, gradient in gradients.items() if gradient is None
    ]
    for name, expected in gradients.items():
        if expected is None:
            continue
        scale = expected.abs().max().clamp(min=1e-3)
        if name in sharding.shards:
            expected = sharding.shards[name].split(expected, group.rank)
        torch.testing.assert_close(found[name] / scale, expected / scale, rtol=tolerance, atol=tolerance, msg=name)
    held = sum(parameter.numel() for parameter in model.parameters())
    return sharding.plan, held / sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=2)
def test_hugging_face_models(group, name):
    for experts, dtype in IMPLEMENTATIONS.items():
        build = functools.partial(hugging_face, name, experts)
        plan, share = compare(group, build, 1e-10 if dtype == torch.float64 else 1e-4)
        assert any(isinstance(style, Experts) for style in plan.styles.values())
        assert share < 1 / group.size + 0.12
