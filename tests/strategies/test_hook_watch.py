"""Hooks of the user that see parts of parameters and gradients: equal to one process, or refused on every rank."""

import copy
import io
import math
import sys
from contextlib import nullcontext

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import parametrize, prune

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_parallel.compat import ParallelState
from lightning_parallel.step_trace.placeholder import PlaceholderError
from lightning_parallel.strategies.hooks.watch import HookError, WatchedHook
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep


def tried(module, body):
    """Run code as a hook that is called for the first time; returns why it is refused, and undoes it then."""
    watch = ParallelState.of(module).watch
    values = [(p, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in module.parameters()]
    with torch.no_grad(), nullcontext() if watch is None else watch.paused():
        try:
            with nullcontext() if watch is None else watch.watching(WatchedHook("`Net.hook`", watch.group)):
                body(module)
        except HookError as error:
            for parameter, value, gradient in values:
                parameter.data, parameter.grad = value, gradient
            return str(error)
    return ""


class Hooked(Net):
    """Tries many pieces of code before the step and after it."""

    def __init__(self, refused=None, equal=None):
        super().__init__()
        self.double()
        self.refused, self.equal = refused or {}, equal or {}
        self.found, self.said = [], {}

    def on_before_optimizer_step(self, optimizer):
        kept = list(self.found)
        if self.global_step == 3:  # the last step, with a state of the optimizer
            self.said |= {name: tried(self, body) for name, (body, _) in self.refused.items()}
        self.found = kept
        for name, body in self.equal.items():
            self.said[name] = tried(self, body)
            self.found.append([value.norm() for value in self.state_dict().values()])


def weight(module):
    return module.net[0].weight


def grads(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


def seeded(module):
    generator = torch.Generator().manual_seed(module.global_step)
    for p in module.parameters():
        p.add_(0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def clip_by_hand(module):
    norm = math.sqrt(sum(g.pow(2).sum() for g in grads(module)))
    for g in grads(module):
        g.mul_(min(1.0, 0.1 / norm))


def centre(module):
    for g in grads(module):
        if g.dim() > 1:
            g.sub_(g.mean(tuple(range(1, g.dim())), keepdim=True))


def adaptive(module):
    for p in module.parameters():
        if p.grad is not None and p.dim() > 1:
            limit = p.norm(dim=1, keepdim=True).clamp_(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad))


def vector(module):
    found = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(found + 0.01 * found.norm(), module.parameters())


def renorm(module):
    for layer in module.net:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(torch.renorm(layer.weight, 2, 0, 0.5))


def rows_of_the_other(module):
    module.net[2].weight.div_(module.net[2].weight.norm(dim=1, keepdim=True))


def shadow(module):
    if not hasattr(module, "copies"):
        module.copies = [p.detach().clone() for p in module.parameters()]
        module.deep = [copy.deepcopy(module.net)]  # no submodule
    for mine, p in zip(module.copies, module.parameters()):
        mine.lerp_(p, 0.3)
        p.add_(mine - p, alpha=0.1)
    for mine, p in zip(module.deep[0].parameters(), module.net.parameters()):
        mine.mul_(0.9).add_(p.data, alpha=0.1)
        p.mul_(0.5).add_(0.5 * mine)


def masks(module):
    for p in module.parameters():
        p.clamp_(-0.3, 0.3)
        p.mul_((p.abs() > 0.01).to(p.dtype))
        p.data = torch.where(p.data > 0, p.data, 0.9 * p.data)
        if p.grad is not None:
            p.grad.add_(p, alpha=1e-2)
            p.grad = torch.nan_to_num(p.grad.sign() * p.grad.abs().sqrt())


def foreach(module):
    found = [p.detach() for p in module.parameters()]
    olds = torch._foreach_mul(found, 0.5)
    torch._foreach_lerp_(found, olds, 0.1)
    torch._foreach_add_(found, 1e-3)


def libraries(module):
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    nn.utils.clip_grad_value_(module.parameters(), 0.01)


def states(module):
    state = module.state_dict()
    module.found.append({name: float(value.norm()) for name, value in state.items()})
    module.found.append({name: float(value.norm()) for name, value in copy.deepcopy(module.state_dict()).items()})
    module.found.append(float(module.net(torch.ones(2, 12).double()).sum()))


def whole_rows(module):
    w = weight(module)
    w.copy_(F.normalize(w.clone(), dim=1))
    w.div_(w.pow(2).sum(1, keepdim=True).add(1).sqrt())
    w.sub_(0.1 * torch.full_like(w, 0.2) + torch.zeros(w.shape, dtype=w.dtype))
    w.view(-1).mul_(0.9)
    w.t().add_(0.1)
    module.net[0].bias.unsqueeze(1).mul(w).add_(1)


def constants(module):
    nn.init.zeros_(module.net[0].bias)
    nn.init.constant_(module.net[2].weight, 0.1)
    module.net[3].reset_parameters()
    module.net[3].weight.mul_(module.net[3].weight.norm())


REFUSED = {
    "clip by hand": (clip_by_hand, "sum"),
    "centralisation": (centre, "mean"),
    "adaptive clipping": (adaptive, "norm"),
    "renorm": (renorm, "renorm"),
    "noise of a generator": (seeded, "combines random numbers with `net.0.weight`"),
    "noise in place": (lambda m: weight(m).normal_(), "draws random numbers"),
    "noise like a gradient": (lambda m: weight(m).grad.add_(torch.randn_like(weight(m))), "random numbers"),
    "noise that is data": (lambda m: setattr(weight(m), "data", torch.rand_like(weight(m))), "random"),
    "noise of numpy": (lambda m: weight(m).add_(torch.from_numpy(from_numpy(weight(m)))), "random"),
    "initialised": (lambda m: nn.init.xavier_uniform_(weight(m)), "draws random numbers"),
    "a layer anew": (lambda m: m.net[2].reset_parameters(), "draws random numbers"),
    "an identity": (lambda m: nn.init.eye_(weight(m)), "eye"),
    "orthogonal": (lambda m: nn.init.orthogonal_(weight(m)), "random numbers"),
    "a vector": (vector, "cat"),
    "a logged norm": (lambda m: m.log("norm", weight(m).grad.norm()), "norm"),
    "a logged sum": (lambda m: m.log("sum", weight(m).abs().sum()), "sum"),
    "a histogram": (lambda m: m.found.append(weight(m).histc(4)), "histc"),
    "numpy": (lambda m: m.found.append(weight(m).detach().numpy().std()), "numpy"),
    "a list": (lambda m: m.found.append(weight(m).detach().tolist()), "tolist"),
    "one element": (lambda m: m.found.append(weight(m)[0, 0].item()), "indexes"),
    "a row": (lambda m: weight(m)[1].zero_(), "indexes"),
    "finiteness": (lambda m: m.found.append(bool(torch.isfinite(weight(m).grad).all())), "all"),
    "a product": (lambda m: weight(m).grad.copy_(weight(m).grad @ weight(m).grad.T @ weight(m)), "mm"),
    "columns that are parts": (rows_of_the_other, "norm"),
    "the optimizer's state": (lambda m: m.log("m", momentum(m).norm()), "momentum_buffer"),
    "many norms at once": (lambda m: m.log("n", torch.stack(torch._foreach_norm(grads(m))).norm()), "norm"),
    "a copy": (lambda m: m.found.append(copy.deepcopy(m.net)[0].weight.norm()), "norm"),
    "another shape": (lambda m: weight(m).mul_(torch.ones(18, 12).double()), "another shape"),
    "a state dict": (lambda m: m.state_dict()["net.0.weight"].mul_(0.9), "writes (`mul`) into the gathered copy"),
    "memory of a state dict": (
        lambda m: m.state_dict()["net.0.weight"].set_(torch.zeros(24, 12).double()),
        "writes (`set`) into the gathered copy",
    ),
    "state dicts": (lambda m: torch._foreach_mul_([*m.net.state_dict().values()], 0.9), "into the gathered copy"),
    "a file": (lambda m: torch.save(weight(m), io.BytesIO()), "takes values out of torch"),
}
EQUAL = {
    "copies": shadow,
    "element by element": masks,
    "many at once": foreach,
    "torch's clipping": libraries,
    "whole states": states,
    "along whole rows": whole_rows,
    "constants": constants,
}


def from_numpy(value):
    return numpy.random.default_rng(0).normal(size=tuple(value.shape))


def momentum(module):
    return module.trainer.optimizers[0].state[weight(module)]["momentum_buffer"]


def fit(module, strategy, devices, rank=0, replicas=1, callbacks=(), **options):
    options = {"max_epochs": 2, "limit_train_batches": 2, "callbacks": list(callbacks), **options}
    trainer = trainer_for(strategy, devices, **options)
    trainer.fit(module, loader(replicas, rank))
    return trainer


def assert_same(mine, alone):
    torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine.found, alone.found, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_what_a_hook_may_do_with_shards(group):
    mine, alone = Hooked(REFUSED, EQUAL), Hooked({}, EQUAL)
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2)
    said = {name: (reason, mine.said[name]) for name, (_, reason) in REFUSED.items()}
    passed = {name: text for name, (reason, text) in said.items() if reason not in text or ", line " not in text}
    assert not passed, passed
    assert not any(mine.said[name] for name in EQUAL), {name: mine.said[name] for name in EQUAL}
    assert_same(mine, alone)


class Clips(Net):
    """Has its code in whichever hook it is given."""

    def __init__(self, **bodies):
        super().__init__()
        self.double()
        self.bodies, self.found = bodies, []

    def run(self, hook, *args):
        with torch.no_grad():
            self.bodies.get(hook, lambda *_: None)(self, *args)

    def on_fit_start(self):
        self.run("fit_start")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.run("clipping")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.run("step")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.run("post"))
        optimizer.register_step_pre_hook(lambda *_: self.run("pre"))
        return optimizer


class Renormalizes(Callback):
    def on_train_batch_end(self, trainer, module, *args):
        with torch.no_grad():
            renorm(module)


def by_norm(module):
    weight(module).register_hook(lambda gradient: gradient / gradient.norm())


def after_accumulation(module):
    def centre_one(parameter):
        parameter.grad.sub_(parameter.grad.mean())

    weight(module).register_post_accumulate_grad_hook(centre_one)


def late(module):
    if module.global_step >= 3:
        weight(module).mul_(1.0 - 0.1 * weight(module).norm())


PLACES = {
    "Clips.configure_gradient_clipping": ({"clipping": clip_by_hand}, ()),
    "Clips.optimizer_step": ({"step": late}, ()),
    "a hook of `SGD.step`": ({"post": renorm}, ()),
    "a hook for the gradient of `net.0.weight`": ({"fit_start": by_norm}, ()),
    "`centre_one`": ({"fit_start": after_accumulation}, ()),
    "Clips.on_fit_start": ({"fit_start": lambda m: nn.init.xavier_uniform_(weight(m))}, ()),
    "Renormalizes.on_train_batch_end": ({}, (Renormalizes(),)),
}


def late_in_a_line(module):
    late(module) if module.global_step >= 4 else None


def late_in_a_helper(module):
    for name, p in module.named_parameters():
        late_for_one(module, name, p)


def late_for_one(module, name, p):
    if module.global_step >= 4 and name == "net.2.weight":
        p.div_(p.norm())


def late_beside_another(module):
    for p in module.parameters():
        if p.grad is None:
            continue
        p.mul_(1.0)
    if module.global_step >= 4:
        clip_by_hand(module)


@distributed(world_size=2)
def test_what_a_hook_begins_to_do_is_refused_at_once(group):
    for body in (late, late_in_a_line, late_in_a_helper, late_beside_another):
        module = Clips(step=body)
        with pytest.raises(HookError):
            fit(module, TensorParallelStrategy(tensor_parallel_size=2), 2, limit_train_batches=4)
        assert module.global_step == (3 if body is late else 4), body.__name__


@distributed(world_size=2)
def test_a_hook_of_which_all_lines_have_run_is_not_traced(group):
    traced = []

    def body(module):
        for p in module.parameters():
            p.mul_(1.0)
        traced.append(sys.gettrace() is not None)

    fit(Clips(step=body), TensorParallelStrategy(tensor_parallel_size=2), 2, limit_train_batches=3)
    assert traced == [True, True, False, True, False, False], traced


class ByHand(Net):
    """Optimizes manually, with code between backward and the optimizer's step."""

    def __init__(self, body, is_plain=False):
        super().__init__()
        self.double()
        self.automatic_optimization = False
        self.body, self.is_plain, self.found = body, is_plain, []

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        loss.backward() if self.is_plain else self.manual_backward(loss)
        with torch.no_grad():
            self.body(self)
        optimizer.step()


def by_hand(module):
    libraries(module)
    module.clip_gradients(module.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    states(module)
    masks(module)
    with torch.enable_grad():
        penalty = F.cross_entropy(module.net(torch.ones(4, 12).double()), torch.zeros(4).long())
        torch.autograd.grad(penalty, module.net[3].bias, retain_graph=True)
        module.manual_backward(penalty)


@distributed(world_size=2)
def test_a_manual_step_without_the_self_check_is_watched_behind_its_backward(group):
    for body in (clip_by_hand, lambda m: m.log("norm", weight(m).grad.norm()), renorm):
        for is_plain in (False, True) if body is clip_by_hand else (False,):
            module = ByHand(body, is_plain)
            with pytest.raises(HookError, match="`ByHand.training_step` must give the result of a single-process run"):
                fit(module, TensorParallelStrategy(tensor_parallel_size=2, verify="off"), 2)
            assert module.global_step <= 1
    mine, alone = ByHand(by_hand), ByHand(by_hand)
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2, verify="off"), 2)
    assert_same(mine, alone)


class Looks(Net):
    """Looks at a weight in its steps."""

    def __init__(self, body):
        super().__init__()
        self.double()
        self.body = body

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        factor = self.body(self)
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if factor is None else loss * factor


def orthogonal(module):
    found = weight(module).detach()
    return (found @ found.T - torch.eye(18).double()).square().sum()


def anchored(module):
    anchor = module.state_dict()["net.0.weight"]
    return 1 + (weight(module) - anchor).square().sum()


class LooksInValidation(Net):
    """Looks at a weight in validation only; `behind` a value, where the record of the step ends."""

    def __init__(self, behind=False):
        super().__init__()
        self.double()
        self.behind = behind

    def validation_step(self, batch, index):
        if not self.behind or self.net(batch[0]).sum() < 1e9:
            self.log("far", orthogonal(self))


@distributed(world_size=2)
def test_what_does_not_fit_shards_is_refused_with_its_line(group):
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "verifies": True}
    logged = []
    for strategy in ("auto", TensorParallelStrategy(tensor_parallel_size=2)):
        trainer = trainer_for(strategy, 1 if strategy == "auto" else 2, **options)
        trainer.fit(LooksInValidation(), loader(1, 0), loader(1, 0))
        logged.append(trainer.callback_metrics["far"])
    torch.testing.assert_close(*logged, rtol=1e-10, atol=1e-12)
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, **options)
    with pytest.raises(RuntimeError, match="meets other shapes") as caught:
        trainer.fit(LooksInValidation(behind=True), loader(1, 0), loader(1, 0))
    assert "test_hook_watch.py, line" in str(caught.value), str(caught.value)
    # The records of the steps show products with the weight, so its layer stays replicated.
    for body in (orthogonal, anchored):
        mine, alone = Looks(body), Looks(body)
        fit(alone, "auto", 1)
        fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2, verifies=True)
        torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_hooks_are_refused_on_every_rank(group):
    for place, (bodies, callbacks) in PLACES.items():
        with pytest.raises(HookError) as caught:
            fit(Clips(**bodies), TensorParallelStrategy(tensor_parallel_size=2), 2, callbacks=callbacks)
        assert place.strip("`") in str(caught.value), str(caught.value)
    bodies = {
        "pre": lambda m: weight(m).clamp_(-0.2, 0.2),
        "post": lambda m: m.net[2].weight.mul_(0.99),
        "step": lambda m: weight(m).mul_(0.9),
        "clipping": libraries,
        "fit_start": lambda m: weight(m).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
    }
    mine, alone = Clips(**bodies), Clips(**bodies)
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2)
    assert_same(mine, alone)
    if group.rank:  # last, as the ranks end apart
        with pytest.raises(RuntimeError, match="weight"):
            fit(Clips(post=lambda m: None, clipping=on_rank_zero), TensorParallelStrategy(tensor_parallel_size=2), 2)
    else:
        with pytest.raises(HookError, match="on_rank_zero"):
            fit(Clips(post=lambda m: None, clipping=on_rank_zero), TensorParallelStrategy(tensor_parallel_size=2), 2)


def on_rank_zero(module):
    if module.global_rank == 0:
        module.found.append(weight(module).norm())


class Staged(Deep):
    """Tries code in a pipeline, on whatever a stage holds."""

    def __init__(self, refused=None, equal=None):
        super().__init__()
        self.refused, self.equal, self.said = refused or {}, equal or {}, {}

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 3:
            self.said |= {name: tried(self, body) for name, body in self.refused.items()}
        for name, body in self.equal.items():
            self.said[name] = tried(self, body)


def perturb(module):
    for p in module.parameters():
        p.add_(0.01 * torch.randn_like(p))


def log_norms(module):
    for name, p in module.named_parameters():
        module.log(f"norm/{name}", p.grad.norm())


def total(module):
    found = torch.zeros((), dtype=torch.float64)
    for p in module.parameters():
        found += p.grad.square().sum()
    for p in module.parameters():
        p.grad.div_(found)


def by_own_norm(module):
    for p in module.parameters():
        p.grad.div_(p.grad.norm() + 1)
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))


def stage_shadow(module):
    if not hasattr(module, "copies"):
        module.copies = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        module.copies[name].lerp_(p, 0.3)
        p.add_(module.copies[name] - p, alpha=0.1)
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


STAGES_REFUSED = {
    "perturbed": perturb,
    "initialised": lambda m: [block.up.reset_parameters() for block in m.blocks if block.up.weight.is_cpu],
    "clip by hand": clip_by_hand,
    "logged norms": log_norms,
    "a total": total,
    "a vector": vector,
    "numbers": lambda m: m.found.append([p.sum().item() for p in m.parameters()]),
}
STAGES_EQUAL = {"by its own norm": by_own_norm, "copies": stage_shadow}


@distributed(world_size=2)
def test_hooks_of_a_pipeline(group):
    mine, alone = Staged(STAGES_REFUSED, STAGES_EQUAL), Staged({}, STAGES_EQUAL)
    mine.found = []
    fit(alone, "auto", 1)
    fit(mine, PipelineParallelStrategy(num_microbatches=2), 2)
    passed = [name for name in STAGES_REFUSED if "pipeline stages" not in mine.said[name]]
    assert not passed, {name: mine.said[name] for name in passed}
    assert not any(mine.said[name] for name in STAGES_EQUAL), mine.said
    torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_hooks_where_replicas_hold_slices(group):
    def run(stage, **bodies):
        alone, mine = Clips(**bodies), Clips(**bodies)
        fit(alone, "auto", 1)
        fit(mine, HybridParallelStrategy(data_parallel_size=2, zero_stage=stage), 2, group.rank, 2)
        assert_same(mine, alone)

    whole = {"post": renorm, "pre": lambda m: m.found.append(weight(m).norm())}
    run(1, **whole, clipping=clip_by_hand)
    run(2, **whole, clipping=libraries)
    run(2, step=lambda m: m.trainer.optimizers[0].zero_grad())
    freed = "reads the gradient of `net.0.weight`.*2 replicas"
    for stage, bodies, reason in (
        (2, {"clipping": clip_by_hand}, "sharded over 2 replicas"),
        (1, {"step": lambda m: m.found.append(momentum(m).norm())}, "sharded over 2 replicas"),
        (2, {"step": lambda m: m.found.append([g.norm() for g in grads(m)])}, freed),
        (2, {"step": lambda m: m.found.append(nn.utils.clip_grad_norm_(m.parameters(), 1e9))}, freed),
        (2, {"post": lambda m: m.found.append(grad_norm(m, 2))}, freed),
    ):
        with pytest.raises(HookError, match=reason):
            run(stage, **bodies)


def halved_later(p):
    p.grad.mul_(0.5)


class GradientHooked(Deep):
    """Has hooks for gradients of parameters on each stage, of a tied one, and of what is computed between."""

    def __init__(self):
        super().__init__()
        self.embed = self.head = nn.Linear(8, 8).double()
        self.embed.weight.register_hook(lambda g: g / (1 + g.norm()))
        for block in self.blocks:
            block.up.weight.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
            block.up.weight.register_hook(lambda g: g * 0.3)
            block.down.bias.register_hook(lambda g: None)
            block.down.weight.register_post_accumulate_grad_hook(halved_later)
            block.norm.weight.register_hook(lambda g: g.sign() * 1e-2)

    def on_fit_start(self):
        self.blocks[3].norm.bias.register_hook(lambda g: g / g.norm())

    def training_step(self, batch, index):
        x = self.embed(batch[0][:, :8])
        x.register_hook(lambda g: 2 * g)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch[0][:, :8])

    def on_train_batch_end(self, *args):
        pass


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@distributed(world_size=2)
def test_hooks_for_gradients_run_once_for_a_batch_in_a_pipeline(group, schedule):
    alone, mine = GradientHooked(), GradientHooked()
    options = {"limit_train_batches": 4, "accumulate_grad_batches": 2}
    fit(alone, "auto", 1, **options)
    strategy = PipelineParallelStrategy(num_microbatches=2, schedule=schedule)
    fit(mine, strategy, 2, verifies=schedule == "1f1b", **options)
    torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_hooks_for_gradients_are_compared_in_shards(group):
    def build():
        module = Clips()
        weight(module).register_hook(lambda g: g.clamp(-1e-2, 1e-2))
        weight(module).register_hook(lambda g: module.found.append(1.0))
        weight(module).register_post_accumulate_grad_hook(halved_later)
        return module

    alone, mine = build(), build()
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2, verifies=True)
    assert_same(mine, alone)


_seen_norms = []


def append_itself(module):
    module.blocks[0].up.weight.register_hook(module.found.append)


def append_and_scale(module):
    def scaled(g):
        _seen_norms.append(g.norm())
        return g * 0.5

    module.head.weight.register_hook(scaled)


def count_in_a_cell(module):
    count = 0

    def counted(p):
        nonlocal count
        count += 1

    module.head.weight.register_post_accumulate_grad_hook(counted)


def prune_last(module):
    prune.l1_unstructured(module.blocks[3].up, "weight", 0.5)


def parametrize_first(module):
    parametrize.register_parametrization(module.embed, "weight", nn.Identity())


@distributed(world_size=2)
def test_hooks_for_gradients_that_leave_something_behind_are_refused_in_a_pipeline(group):
    class Kept(Callback):
        def on_fit_start(self, trainer, module):
            self.norms = []
            module.blocks[3].register_full_backward_hook(lambda m, given, outer: self.norms.append(outer[0].norm()))

    class InStep(Staged):
        def training_step(self, batch, index):
            self.blocks[3].up.weight.register_hook(lambda g: g * 0.9)
            return super().training_step(batch, index)

    class Left(Staged):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                append_itself(self)

    def refused(match, prepare=lambda module: None, kind=Staged, verifies=True, callbacks=()):
        module = kind()
        module.found = []
        prepare(module)
        with pytest.raises(HookError, match=match):
            fit(module, PipelineParallelStrategy(num_microbatches=2), 2, callbacks=callbacks, verifies=verifies)

    refused("`list.append` for the gradient of `blocks.0.up.weight` changes `self.found`", append_itself)
    refused("`scaled` .*line.* of `head.weight` changes `_seen_norms`", append_and_scale, verifies=False)
    refused("`counted` .* changes `count`", count_in_a_cell)
    refused("draws random", lambda m: m.head.weight.register_hook(lambda g: g + torch.randn_like(g)))
    refused("backward pass of `training_step` must change only gradients; got a change of `norms`", callbacks=[Kept()])
    refused("got `<lambda>` .* of `blocks.3.up.weight`, which `training_step` registers", kind=InStep)
    refused("of `blocks.0.up.weight` changes `self.found`", kind=Left, verifies=False)

    class Reads(Staged):
        def training_step(self, batch, index):
            g = self.blocks[3].up.weight.grad
            return super().training_step(batch, index)["loss"] * (1 if g is None else 1 + g.norm())

        on_train_batch_end = LightningModule.on_train_batch_end

    with pytest.raises(RuntimeError, match="must not read the gradient of a parameter; got a read in `training_step`"):
        fit(Reads(), PipelineParallelStrategy(num_microbatches=2), 2)
    for change in (prune_last, parametrize_first):

        class Changed(Staged):
            def on_train_batch_start(self, batch, index, change=change):
                if index:
                    change(self)

        with pytest.raises(PlaceholderError, match="registered as `weight.* in `(prune_last|parametrize_fi)"):
            fit(Changed(), PipelineParallelStrategy(num_microbatches=2), 2)
