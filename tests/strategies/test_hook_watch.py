"""Hooks of the user see full parameters and gradients, as in one process."""

import copy
import io
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from lightning_parallel import HookError, HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep


class Hooked(Net):
    """Tries many pieces of code before the step."""

    def __init__(self, bodies):
        super().__init__()
        self.double()
        self.bodies, self.found = bodies, []

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 3:  # the last step, with a state of the optimizer
            torch.manual_seed(1)
            for name, body in self.bodies.items():
                body(self)
                self.found.append({f"{name} {key}": value.norm() for key, value in self.state_dict().items()})
                self.found.append({f"{name} {key}": p.grad.norm() for key, p in self.named_parameters()})


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


BODIES = {
    "clip by hand": clip_by_hand,
    "centralisation": centre,
    "adaptive clipping": adaptive,
    "renorm": renorm,
    "noise of a generator": seeded,
    "noise in place": lambda m: weight(m).normal_(),
    "noise like a gradient": lambda m: weight(m).grad.add_(torch.randn_like(weight(m))),
    "noise that is data": lambda m: setattr(weight(m), "data", torch.rand_like(weight(m))),
    "noise of numpy": lambda m: weight(m).add_(torch.from_numpy(from_numpy(weight(m)))),
    "initialised": lambda m: nn.init.xavier_uniform_(weight(m)),
    "a layer anew": lambda m: m.net[2].reset_parameters(),
    "an identity": lambda m: nn.init.eye_(weight(m)),
    "orthogonal": lambda m: nn.init.orthogonal_(weight(m)),
    "a vector": vector,
    "a logged norm": lambda m: m.log("norm", weight(m).grad.norm()),
    "a logged sum": lambda m: m.log("sum", weight(m).abs().sum()),
    "a histogram": lambda m: m.found.append(weight(m).histc(4)),
    "numpy": lambda m: m.found.append(weight(m).detach().numpy().std()),
    "a list": lambda m: m.found.append(weight(m).detach().tolist()),
    "one element": lambda m: m.found.append(weight(m)[0, 0].item()),
    "a row": lambda m: weight(m)[1].zero_(),
    "finiteness": lambda m: m.found.append(bool(torch.isfinite(weight(m).grad).all())),
    "a product": lambda m: weight(m).grad.copy_(weight(m).grad @ weight(m).grad.T @ weight(m)),
    "columns that are parts": rows_of_the_other,
    "the optimizer's state": lambda m: m.log("m", momentum(m).norm()),
    "many norms at once": lambda m: m.log("n", torch.stack(torch._foreach_norm(grads(m))).norm()),
    "a copy": lambda m: m.found.append(copy.deepcopy(m.net)[0].weight.norm()),
    "another shape": lambda m: weight(m).mul_(torch.ones(18, 12).double()),
    "a state dict": lambda m: m.state_dict()["net.0.weight"].mul_(0.9),
    "state dicts": lambda m: torch._foreach_mul_([*m.net.state_dict().values()], 0.9),
    "a file": lambda m: torch.save(weight(m), io.BytesIO()),
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
    mine, alone = Hooked(BODIES), Hooked(BODIES)
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2)
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


def clamped(module):
    weight(module).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


PLACES = (
    ({"clipping": clip_by_hand, "step": late, "post": renorm}, ()),
    ({"fit_start": by_norm}, ()),
    ({"fit_start": after_accumulation, "pre": centre}, ()),
    ({"fit_start": lambda m: torch.manual_seed(1) and nn.init.xavier_uniform_(weight(m))}, (Renormalizes(),)),
    (
        {
            "clipping": libraries,
            "step": masks,
            "fit_start": clamped,
        },
        (),
    ),
)


class ByHand(Net):
    """Optimizes manually, with code between backward and the optimizer's step."""

    def __init__(self, body, is_plain=False, in_closure=False):
        super().__init__()
        self.double()
        self.automatic_optimization = False
        self.body, self.is_plain, self.in_closure, self.found = body, is_plain, in_closure, []

    def objective(self, batch):
        penalty = sum(one.norm() for one in self.parameters())
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * penalty
        loss.backward() if self.is_plain else self.manual_backward(loss)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if self.in_closure:
            optimizer.step(closure=lambda: self.objective(batch))
            return
        self.objective(batch)
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
        gradients = torch.autograd.grad(penalty, list(module.parameters()), retain_graph=True)
        module.found.append([(float(one.norm()), float((2 * one - one.mean()).max())) for one in gradients])
        module.manual_backward(penalty)


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize("verifies", [False, True])
@distributed(world_size=2)
def test_a_manual_step_sees_full_tensors(group, verifies):
    bodies = (by_hand, clip_by_hand, renorm, lambda m: m.log("norm", weight(m).grad.norm()))
    ways = [(body, False, False) for body in bodies] + [(clip_by_hand, True, False), (renorm, False, True)]
    for way in ways:
        mine, alone = ByHand(*way), ByHand(*way)
        fit(alone, "auto", 1)
        fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2, verifies=verifies)
        assert_same(mine, alone)


def in_forward_hook(module):
    """Adds the norm of a weight to the loss, in a hook around the layer."""
    found = []
    handle = module.net[0].register_forward_hook(lambda layer, args, output: found.append(layer.weight.norm()))
    module.net[0](torch.ones(4, 12).double())
    handle.remove()
    return 1 + found[0]


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

    def __init__(self, behind=False, automatic=True):
        super().__init__()
        self.double()
        self.behind, self.automatic_optimization = behind, automatic

    def validation_step(self, batch, index):
        if not self.behind or self.net(batch[0]).sum() < 1e9:
            self.log("far", orthogonal(self))


def in_checkpoint(module):
    """Reads a weight in code that runs again in the backward pass, after the first step."""
    if not module.global_step:
        return None
    return 1 + checkpoint(
        lambda x: (x @ F.normalize(weight(module), dim=0)).norm(), torch.ones(18).double(), use_reentrant=False
    )


@distributed(world_size=2)
def test_steps_compute_with_full_weights_outside_their_layers(group):
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "verifies": True}
    for way in ((False, True), (True, True), (False, False)):
        logged = []
        for strategy in ("auto", TensorParallelStrategy(tensor_parallel_size=2)):
            trainer = trainer_for(strategy, 1 if strategy == "auto" else 2, **options)
            trainer.fit(LooksInValidation(*way), loader(1, 0), loader(1, 0))
            logged.append(trainer.callback_metrics["far"])
        torch.testing.assert_close(*logged, rtol=1e-10, atol=1e-12)
    # The records of the steps show products with the weight, so its layer stays replicated.
    for body in (orthogonal, anchored, in_forward_hook, in_checkpoint):
        mine, alone = Looks(body), Looks(body)
        fit(alone, "auto", 1)
        fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2, verifies=True)
        torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_hooks_of_every_kind_see_full_tensors(group):
    for bodies, callbacks in PLACES:
        mine, alone = Clips(**bodies), Clips(**bodies)
        fit(alone, "auto", 1, callbacks=callbacks)
        fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2, callbacks=callbacks)
        assert_same(mine, alone)
    with pytest.raises(RuntimeError, match="on_rank_zero.* on rank 0"):  # last, as the ranks end apart
        fit(Clips(post=lambda m: None, clipping=on_rank_zero), TensorParallelStrategy(tensor_parallel_size=2), 2)


class Scheduled(Net):
    """Has a learning rate that depends on a weight."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + float(weight(self).norm())))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs, batch, index):
        if self.listens:
            self.net[0].register_forward_hook(lambda module, inputs, output: None)

    listens = False


class Listening(Scheduled):
    listens = True


@distributed(world_size=2)
def test_schedulers_see_full_weights_and_late_forward_hooks_are_refused(group):
    mine, alone = Scheduled().double(), Scheduled().double()
    fit(alone, "auto", 1)
    fit(mine, TensorParallelStrategy(tensor_parallel_size=2), 2)
    torch.testing.assert_close(dict(mine.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)
    with pytest.raises(HookError, match="must exist before the layers are sharded; got .* on `net.0`"):
        fit(Listening().double(), TensorParallelStrategy(tensor_parallel_size=2), 2)


def on_rank_zero(module):
    if module.global_rank == 0:
        module.found.append(weight(module).norm())


class ReadsOnOneRank(Net):
    """Reads a weight under a condition that stands in one line with the rest of the step."""

    def training_step(self, batch, index):
        is_alone = self.global_rank == 0 and self.global_step > 0
        return (weight(self).sum() if is_alone else 0) * 0 + self.loss(batch)

    def loss(self, batch):
        return super().training_step(batch, 0)


@distributed(world_size=2)
def test_a_read_on_one_rank_in_a_step_is_refused(group):
    with pytest.raises(RuntimeError, match="LP013"):
        fit(ReadsOnOneRank().double(), TensorParallelStrategy(tensor_parallel_size=2), 2)


class Tempered(Block):
    """A block with a parameter without dimensions."""

    def __init__(self):
        super().__init__(8)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return super().forward(x) * self.scale


class Staged(Deep):
    """Tries code in a pipeline, on all stages."""

    def __init__(self, bodies=()):
        super().__init__()
        self.blocks = nn.ModuleList(Tempered() for _ in range(4)).double()
        self.bodies, self.found = bodies, []

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        torch.manual_seed(self.global_step)
        for body in self.bodies:
            body(self)


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


def groups_of_the_optimizer(module):
    for group in module.trainer.optimizers[0].param_groups:
        for p in group["params"]:
            p.grad.div_(1 + p.grad.norm())
            p.sub_(0.01 * p.mean())
            momentum = module.trainer.optimizers[0].state[p].get("momentum_buffer")
            if momentum is not None:
                momentum.div_(1 + momentum.norm())
                module.trainer.optimizers[0].state[p]["momentum_buffer"] = torch.ones_like(p) * momentum


STAGES = (
    perturb,
    lambda m: [block.up.reset_parameters() for block in m.blocks],
    clip_by_hand,
    log_norms,
    total,
    vector,
    lambda m: m.found.append([p.sum().item() for p in m.parameters()]),
    by_own_norm,
    stage_shadow,
    groups_of_the_optimizer,
    lambda m: m.state_dict()["blocks.0.up.weight"].mul_(0.9),
    lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_hooks_of_a_pipeline(group):
    mine, alone = Staged(STAGES), Staged(STAGES)
    fit(alone, "auto", 1)
    fit(mine, PipelineParallelStrategy(num_microbatches=2), 2)
    assert_same(mine, alone)


@distributed(world_size=2)
def test_hooks_where_replicas_hold_slices(group):
    def run(stage, **bodies):
        alone, mine = Clips(**bodies), Clips(**bodies)
        fit(alone, "auto", 1)
        fit(mine, HybridParallelStrategy(data_parallel_size=2, zero_stage=stage), 2, group.rank, 2)
        assert_same(mine, alone)

    whole = {"post": renorm, "pre": lambda m: m.found.append(weight(m).norm())}
    run(1, **whole, clipping=clip_by_hand, step=lambda m: m.found.append(momentum(m).norm()))
    run(2, **whole, clipping=libraries)
    run(2, clipping=lambda m: (clip_by_hand(m), centre(m), masks(m), seeded(m)), step=late)
    run(2, clipping=lambda m: (weight(m).grad[3].zero_(), weight(m)[:, 1].mul_(2), m.found.append(weight(m).tolist())))
    run(2, step=lambda m: m.trainer.optimizers[0].zero_grad())
    for bodies in (
        {"step": lambda m: m.found.append([g.norm() for g in grads(m)])},
        {"step": lambda m: m.found.append(nn.utils.clip_grad_norm_(m.parameters(), 1e9))},
        {"post": lambda m: m.found.append(grad_norm(m, 2))},
    ):
        with pytest.raises(HookError, match="the gradient of `net.0.weight` after the optimizer's step"):
            run(2, **bodies)


def gradients_on_rank_zero(module):
    if module.global_rank == 0:
        module.found += [g.norm() for g in grads(module)]


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"data_parallel_size": 2, "zero_stage": 2}], ids=str)
@distributed(world_size=2, deadline_s=60)  # the ranks must not wait for each other without end
def test_a_hook_that_reads_parts_on_one_rank_is_refused_with_its_line(group, layout):
    is_pipeline = "pipeline_parallel_size" in layout
    module = Staged((gradients_on_rank_zero,)) if is_pipeline else Clips(clipping=gradients_on_rank_zero)
    replicas = () if is_pipeline else (group.rank, 2)
    with pytest.raises(RuntimeError, match="on rank 0.* under `if module.global_rank == 0`"):
        fit(module, HybridParallelStrategy(**layout), 2, *replicas)


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


@pytest.mark.sweep
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


@pytest.mark.sweep(kept=None)
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

        with pytest.raises(ValueError, match="`(blocks.3.up|embed).*` must keep its modules and"):
            fit(Changed(), PipelineParallelStrategy(num_microbatches=2), 2)
