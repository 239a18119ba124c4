"""Logits that stay divided by class: the loss without a gather, and everything else as on whole logits."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import give_data
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.head import find_heads, gathered_heads
from lightning_parallel.tensor.layers import Column
from lightning_parallel.tensor.pieces import Piece, without_pieces
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.plan_table import sharding_rows
from lightning_parallel.tensor.whole_gradients import give_whole_gradients
from tests.harness import distributed, recorded_communication, run

VOCABULARY = 11


class Model(nn.Module):
    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(vocabulary, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.head = nn.Linear(6, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.mlp(x))


def divided(group, model=None):
    whole = (model or Model()).double()
    parts = copy.deepcopy(whole)
    plan = make_plan(parts, "auto", group)
    return whole, parts, apply_plan(parts, plan, group)


def compare(group, loss_of, gathers, check=None):
    """`loss_of(logits, targets)` gives a loss; `gathers` is how often all logits are gathered for it."""
    whole, parts, sharding = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    targets[0, :2] = -100
    expected = loss_of(whole(tokens), targets)
    logits = parts(tokens)
    assert isinstance(logits, Piece)
    assert logits.shape == (2, 5, VOCABULARY)
    with recorded_communication() as records:
        loss = loss_of(logits, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
        assert type(loss) is torch.Tensor
        expected.sum().backward()
        loss.sum().backward()
    found = [record for record in records if record.op == "all_gather" and record.bytes >= 10 * 8 * 3]
    assert len(found) == gathers, records
    for (name, parameter), full in zip(parts.named_parameters(), whole.parameters()):
        rule = sharding.shards.get(name)
        want = full.grad if rule is None else rule.split(full.grad, group.rank)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-10, atol=1e-12)


def flat(logits, targets):
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


@pytest.mark.parametrize("world", [2, 3])
def test_cross_entropy_gathers_no_logits(world):
    run(cross_entropy_of_flat_logits, world)


def cross_entropy_of_flat_logits(group):
    compare(group, flat, gathers=0)


def _shift(logits, targets):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, VOCABULARY), targets[:, 1:].flatten())


def _select(logits, targets):
    counted = targets != -100
    return F.cross_entropy(logits[counted], targets[counted], reduction="sum")


def _select_by_index(logits, targets):
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 2])
    return F.cross_entropy(logits[rows, columns], targets[rows, columns])


def _scaled(logits, targets):
    scale = torch.tensor(1.5, dtype=torch.double, requires_grad=True)
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.double)
    mask = torch.arange(VOCABULARY) == 4
    changed = (scale * logits / 0.7 + bias).masked_fill(mask, -1e9)
    changed = torch.where(mask, -7.0, 5 * torch.tanh(changed / 5))
    return F.cross_entropy(changed.transpose(1, 2), targets)


def _smooth(logits, targets):
    weight = torch.linspace(1, 2, VOCABULARY, dtype=torch.double)
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, reduction="none", ignore_index=3)
    return loss(logits.permute(0, 2, 1), targets.clamp(min=0))


def _log_softmax(logits, targets):
    return F.nll_loss(F.log_softmax(logits, dim=-1).view(-1, VOCABULARY), targets.view(-1))


def _log_softmax_module(logits, targets):
    return nn.NLLLoss()(nn.LogSoftmax(dim=1)(logits.mT), targets)


def _log_softmax_of_type(logits, targets):
    return F.nll_loss(logits.flatten(0, 1).log_softmax(-1, dtype=torch.double), targets.flatten())


def _positional(logits, targets):
    return F.cross_entropy(input=logits.reshape(10, -1), target=targets.reshape(10), ignore_index=-100)


def _one_by_one(logits, targets):
    return sum(F.cross_entropy(row[-1], target[-1]) for row, target in zip(logits.unbind(), targets.unbind()))


def _accuracy(logits, targets):
    best = logits.argmax(-1)
    assert type(best) is torch.Tensor
    assert torch.equal(best, torch.argmax(logits.detach(), dim=2, keepdim=True).squeeze(2))
    return flat(logits, targets) + (best == targets).double().mean() + best.sum()


def _iterated(logits, targets):
    return sum(F.cross_entropy(row, target) for row, target in zip(logits, targets))


def _sum_of_squares(logits, targets):
    return flat(logits, targets) + logits.pow(2).mean() + (logits * logits).mean()


def _log_softmax_looked_at(logits, targets):
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return F.nll_loss(log_p.flatten(0, 1), targets.flatten()) + entropy


@pytest.mark.parametrize(
    "loss_of",
    [
        _shift,
        _select,
        _select_by_index,
        _scaled,
        _smooth,
        _log_softmax,
        _log_softmax_module,
        _log_softmax_of_type,
        _positional,
        _accuracy,
        _iterated,
        _one_by_one,
        _sum_of_squares,
        _log_softmax_looked_at,
    ],
)
def test_losses_gather_no_logits(loss_of):
    run(losses_gather_no_logits, 2, loss_of=loss_of)


def losses_gather_no_logits(group, loss_of):
    compare(group, loss_of, gathers=0)


def _probabilities(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(targets.flatten().clamp(min=0), VOCABULARY).double())


def _changed_in_place(logits, targets):
    view = logits.view(-1, VOCABULARY)
    logits[..., 4] = -3.0
    logits.masked_fill_(logits > 0.5, 0.25)
    return F.cross_entropy(view, targets.view(-1))


def _changed_through_a_view(logits, targets):
    logits.view(-1, VOCABULARY)[2:4] *= 0.5
    return flat(logits, targets)


def _changed_after_a_copy(logits, targets):
    copied = logits.clone()
    scaled = copied / 2
    logits.zero_()
    return flat(copied, targets) + flat(scaled, targets) + copied.exp().mean() + scaled.exp().mean() + logits.sum()


def _other_layout(logits, targets):
    return F.cross_entropy(logits.reshape(5, VOCABULARY, 2), targets.reshape(5, 2))


def _some_classes(logits, targets):
    return F.cross_entropy(logits[..., :7].flatten(0, 1), targets.flatten() % 7) + logits[..., 3].mean()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def _custom_function(logits, targets):
    return _Cube.apply(logits).mean() + flat(logits, targets)


@pytest.mark.parametrize(
    "loss_of",
    [
        _probabilities,
        _changed_in_place,
        _changed_through_a_view,
        _other_layout,
        _some_classes,
        _custom_function,
    ],
)
def test_others_gather_once(loss_of):
    run(others_gather_once, 2, loss_of=loss_of)


def others_gather_once(group, loss_of):
    compare(group, loss_of, gathers=1)


def test_copies_keep_their_values():
    run(copies_keep_their_values, 2)


def copies_keep_their_values(group):
    compare(group, _changed_after_a_copy, gathers=0)


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Piece) and not leaf.is_meta:
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_makes_more_than_its_logits(world):
    run(makes_its_logits_only, world)


def makes_its_logits_only(group):
    whole, parts, _ = divided(group, Model(1009))
    tokens, targets = torch.randint(1009, (2, 4, 16)).unbind()
    largest = {}
    for name, model in (("whole", whole.float()), ("parts", parts.float())):
        with _LargestTensor() as mode:
            logits = model(tokens)
            F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1)).backward()
        largest[name] = mode.numel
    assert largest["whole"] == 4 * 16 * 1009
    assert largest["parts"] <= 4 * 16 * -(-1009 // group.size)


@distributed(world_size=2)
def test_everyone_finds_an_ordinary_tensor(group):
    whole, parts, _ = divided(group)
    tokens = torch.randint(VOCABULARY, (2, 5))
    expected, logits = whole(tokens).detach(), parts(tokens)
    looks = {
        "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
        "array": lambda x: torch.as_tensor(np.asarray(x.detach())),
        "list": lambda x: torch.tensor(x.tolist(), dtype=torch.double),
        "item": lambda x: torch.tensor([[[v.item() for v in row] for row in part] for part in x], dtype=torch.double),
        "data": lambda x: x.data,
        "dlpack": lambda x: torch.from_dlpack(x.detach()),
        "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
        "copy": lambda x: copy.deepcopy(x.detach()),
        "save": lambda x: _saved(x),
        "stack": lambda x: torch.stack(list(x)),
        "checkpoint": lambda x: checkpoint(torch.mul, x, 1.0, use_reentrant=False),
        "parameter": lambda x: nn.Parameter(x.detach()),
        "new": lambda x: x.new_zeros(x.shape) + x,
        "out": lambda x: torch.mul(x.detach(), 1, out=torch.empty(x.shape, dtype=x.dtype)),
        "whole": without_pieces,
    }
    for name, look in looks.items():
        found = look(parts(tokens))
        torch.testing.assert_close(
            without_pieces(found.detach()), expected, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert "Piece" not in repr(logits)
    assert repr(logits.detach()) == repr(without_pieces(logits.detach()))
    with pytest.raises(RuntimeError, match="in-place change .*Use the form that makes a new tensor"):
        logits.detach().transpose_(0, 1)


def _saved(x):
    file = io.BytesIO()
    torch.save({"logits": x}, file)
    file.seek(0)
    found = torch.load(file)["logits"]
    assert type(found) is torch.Tensor
    return found


@distributed(world_size=2)
def test_a_tensor_that_is_given_their_data_has_all(group):
    """It was a tensor without memory: the process died by a segmentation fault."""
    whole, parts, _ = divided(group)
    tokens, patches = torch.randint(VOCABULARY, (2, 5)), Patches()
    give_data(patches)
    try:
        kept = torch.zeros(2, 5, VOCABULARY, dtype=torch.float64)
        kept.data = parts(tokens).detach()
        torch.testing.assert_close(kept, whole(tokens).detach())
    finally:
        patches.undo()


@distributed(world_size=2)
def test_gradients_of_the_logits_can_be_asked_for_before_the_loss(group):
    whole, parts, _ = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    found = []
    for model in (whole, parts):
        logits = model(tokens)
        logits.retain_grad()
        logits.register_hook(lambda grad: 2 * grad)
        flat(logits, targets).backward()
        found.append(logits.grad)
    torch.testing.assert_close(found[1], found[0])
    logits = parts(tokens)
    flat(logits, targets)
    with pytest.raises(RuntimeError, match="Call `retain_grad` or `register_hook` before the loss"):
        logits.retain_grad()


@distributed(world_size=2)
def test_gradients_may_be_asked_for_by_position(group):
    _, parts, sharding = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    logits, unused, patches = parts(tokens), torch.ones(1, requires_grad=True), Patches()
    loss = flat(logits, targets)
    give_whole_gradients(parts, sharding, sharding.shards, group, lambda: False, patches)
    try:
        # The last arguments are `only_inputs` and `allow_unused`.
        assert torch.autograd.grad(loss, [logits, unused], None, True, False, True, True)[1] is None
        with pytest.raises(RuntimeError, match="do not depend on one of the tensors"):
            torch.autograd.grad(loss, [logits, unused], None, True, False, True, False)
    finally:
        patches.undo()


@distributed(world_size=2)
def test_outside_of_training_logits_are_gathered_at_once(group):
    _, parts, _ = divided(group)
    tokens = torch.randint(VOCABULARY, (2, 5))
    with torch.no_grad():
        assert type(parts(tokens)) is torch.Tensor
    assert type(parts.eval()(tokens)) is torch.Tensor


@distributed(world_size=2)
def test_first_of_equal_logits(group):
    _, parts, _ = divided(group)
    nn.init.zeros_(parts.head.weight)
    nn.init.zeros_(parts.head.bias)
    assert parts(torch.zeros(2, 5, dtype=torch.long)).argmax(-1).eq(0).all()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"])
def test_losses_of_transformers(name, dtype):
    run(losses_of_transformers, 2, name=name, dtype=dtype)


def losses_of_transformers(group, name, dtype):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 6}
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    config = kind.config_class(**sizes, num_key_value_heads=2, intermediate_size=12)
    config.pad_token_id = None
    whole, parts, sharding = divided(group, kind(config).train())
    for model in (whole.to(dtype), parts.to(dtype)):
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    tokens = torch.randint(61, (2, 2, 9))
    with recorded_communication() as records:
        outputs = parts(input_ids=tokens[0], labels=tokens[1], use_cache=False)
        outputs.loss.backward()
    is_double = dtype == torch.float64
    # Their losses are computed in single precision: in double, of the whole, which are rounded as in one process.
    assert len([record for record in records if record.op == "all_gather"]) == is_double
    expected = whole(input_ids=tokens[0], labels=tokens[1], use_cache=False)
    expected.loss.backward()
    tolerance = 1e-10 if is_double and "Gemma" not in name else 1e-5
    exact = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(outputs.loss, expected.loss, **exact)
    torch.testing.assert_close(without_pieces(outputs.logits), expected.logits, **exact)
    for (name, parameter), full in zip(parts.named_parameters(), whole.parameters()):
        rule = sharding.shards.get(name)
        want = full.grad if rule is None else rule.split(full.grad, group.rank)
        torch.testing.assert_close(parameter.grad, want, **exact)


def _whole_step(model, tokens, targets):
    logits = model(tokens)
    return F.cross_entropy((logits * 2.0).view(-1, VOCABULARY), targets.view(-1)) + logits.pow(2).mean()


def _compiled_loss(model, tokens, targets):
    return torch.compile(flat, backend="aot_eager")(model(tokens), targets)


def _compiled_model(model, tokens, targets):
    return flat(torch.compile(model, backend="eager")(tokens), targets)


def _compiled_step(model, tokens, targets):
    return torch.compile(_whole_step, backend="eager")(model, tokens, targets)


def _checkpointed_loss(model, tokens, targets):
    return checkpoint(lambda: flat(model(tokens), targets), use_reentrant=False)


def _checkpointed_model(model, tokens, targets):
    return flat(checkpoint(model, tokens, use_reentrant=False), targets)


def _checkpointed_anew(model, tokens, targets):
    x = model.embedding(tokens)
    return flat(checkpoint(lambda x: model.head(x + model.mlp(x)), x, use_reentrant=True), targets)


def _under_autocast(model, tokens, targets):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return _whole_step(model, tokens, targets)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "step",
    [
        *(_compiled_loss, _compiled_model, _compiled_step),
        *(_checkpointed_loss, _checkpointed_model, _checkpointed_anew, _under_autocast),
    ],
)
def test_steps(step):
    run(steps_are_equal, 2, step=step)


def steps_are_equal(group, step):
    whole, parts, sharding = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    losses = [step(model, tokens, targets) for model in (whole, parts)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-12)
    for (name, parameter), full in zip(parts.named_parameters(), whole.parameters()):
        rule = sharding.shards.get(name)
        want = full.grad if rule is None else rule.split(full.grad, group.rank)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_half_precision_and_autocast(group):
    whole, parts, _ = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    for model in (whole, parts):
        model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [flat(model(tokens), targets) for model in (whole, parts)]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)


@distributed(world_size=2)
def test_parameters_beside_the_head_have_whole_gradients(group):
    whole, parts, _ = divided(group)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5)).unbind()
    found = []
    for model in (whole, parts):
        torch.manual_seed(4)
        scale, bias, per_token = (
            torch.rand(size, dtype=torch.double, requires_grad=True) for size in ((), (VOCABULARY,), (2, 5, 1))
        )
        loss = flat(per_token * model(tokens) * scale.exp() + bias, targets)
        found.append(torch.autograd.grad(loss, [scale, bias, per_token]))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_the_table_names_the_head(group):
    _, parts, sharding = divided(group)
    rows = sharding_rows(sharding, {name: tuple(value.shape) for name, value in parts.named_parameters()})
    (row,) = (row for row in rows if row[0] == "head")
    assert row[1] == "head"
    assert "the logits stay sharded by class" in row[-1]
    assert gathered_heads(sharding.plan.styles) == {"head": Column(gather_output=True)}


class Several(nn.Module):
    """Layers that no plan knows, between repeated ones, and two heads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(2))
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleDict({"inside": nn.Linear(8, 5)})
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 7))


def test_heads_are_outside_of_repeated_layers():
    model = Several()
    paths = [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]
    found = find_heads(model, dict.fromkeys(paths, Column(gather_output=True)))
    assert sorted(found) == ["first", "heads.inside", "net.4"]
