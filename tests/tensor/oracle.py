"""The oracle of every tensor-parallel test: the same model, undivided, in the same process."""

import copy

import torch

from lightning_parallel.tensor.attention import guard_fast_path
from lightning_parallel.tensor.regions import connect_random_regions
from lightning_parallel.tensor.sharding import reduce_partial_


def divide(model, styles, group):
    """Apply `{module name: style}`; returns the rules and the names of partial gradients of the whole model."""
    rules, partial = {}, set()
    for name, style in styles.items():
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        rules |= {prefix + key: rule for key, rule in style.rules(module, group.size).items()}
        partial |= {prefix + key for key in style.partial(module)}
    for name, style in styles.items():
        style.apply(model.get_submodule(name), group)
    guard_fast_path(model)
    connect_random_regions(model, group)
    return rules, partial


def finish_gradients(model, rules, partial, group):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shared = {name for name, rule in rules.items() if rule.replicated}
    reduce_partial_({name: grad for name, grad in grads.items() if name in partial | shared}, rules, group)


def check(model, styles, inputs, group, steps=2, loss=lambda y: y.pow(2).sum(), atol=1e-10, adapt=None):
    """Train the divided and the whole model side by side: outputs, input gradients, gradients by name, SGD steps."""
    whole = copy.deepcopy(model)
    rules, partial = divide(model, styles, group)
    if adapt is not None:
        adapt(model)
    assert list(model.state_dict()) == list(whole.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, whole)]
    for _ in range(steps):
        ours, theirs = ([x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs] for _ in range(2))
        for optimizer in optimizers:
            optimizer.zero_grad()
        y, expected = model(*ours), whole(*theirs)
        torch.testing.assert_close(y, expected, rtol=atol, atol=atol)
        loss(y).backward()
        loss(expected).backward()
        for x, other in zip(ours, theirs):
            if x.is_floating_point():
                torch.testing.assert_close(x.grad, other.grad, rtol=atol, atol=atol)
        finish_gradients(model, rules, partial, group)
        same_by_name(model, whole, rules, group, "grad", atol)
        for optimizer in optimizers:
            optimizer.step()
    same_by_name(model, whole, rules, group, "data", atol)
    return rules


def same_by_name(model, whole, rules, group, attribute, atol=1e-10):
    for (name, mine), (other, full) in zip(model.named_parameters(), whole.named_parameters()):
        assert name == other
        mine, full = getattr(mine, attribute), getattr(full, attribute)
        if full is None:
            assert mine is None, name
            continue
        expected = rules[name].split(full, group.rank) if name in rules else full
        torch.testing.assert_close(mine, expected, rtol=atol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def same_gradients(found, gradients, rules, group, tolerance):
    """Compare gradients by name with those of the whole model, relative to the largest element of each."""
    missing = [[name for name, value in some.items() if value is None] for some in (found, gradients)]
    assert missing[0] == missing[1]
    for name, expected in gradients.items():
        if expected is None:
            continue
        scale = expected.abs().max().clamp(min=1e-3)
        if name in rules:
            expected = rules[name].split(expected, group.rank)
        torch.testing.assert_close(found[name] / scale, expected / scale, rtol=tolerance, atol=tolerance, msg=name)
