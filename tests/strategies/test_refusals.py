"""Bad input: one clear error on every rank, and no hang."""

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from torch import nn

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_parallel.compat import ParallelState
from tests.harness import distributed
from tests.strategies.models import Net, fit_parallel, fit_single, loader, trainer_for
from tests.strategies.test_pipeline import Deep, fit


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@distributed(world_size=4)
def test_sizes_that_do_not_multiply_to_the_world(axis):
    for size, replicas in ((3, 1), (2, 3), (8, "auto"), (2, 1)):
        strategy = HybridParallelStrategy(**{f"{axis}_parallel_size": size}, data_parallel_size=replicas)
        with pytest.raises(ValueError, match=r"multiply to the number of processes, 4"):
            trainer_for(strategy, 4).fit(Net(), loader())


@distributed(world_size=2)
def test_nothing_to_shard():
    module = Net().double()
    module.net = nn.Sequential(nn.LayerNorm(12))
    with pytest.raises(ValueError, match="to shard over"):
        fit_parallel(module, 2, 2)


class Keeps(nn.GELU):
    """Keeps its last output."""

    def forward(self, x):
        output = super().forward(x)
        self.hidden = [output]
        return output


class Penalized(Net):
    """Adds a term of this rank's hidden features to the loss after a warmup."""

    def __init__(self, after=0, manual=False, by_hook=False):
        super().__init__()
        self.after, self.automatic_optimization = after, not manual
        if by_hook:
            self.net[1].register_forward_hook(lambda module, args, output: setattr(module, "hidden", [output]))
        else:
            self.net[1] = Keeps()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.global_step >= self.after:
            loss = loss + self.net[1].hidden[0].abs().mean()
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("manual", [False, True])
@distributed(world_size=2)
def test_a_loss_of_hidden_features_whenever_it_begins(after, manual):
    with pytest.raises(RuntimeError, match=r"the loss depends on an activation .* only a piece"):
        fit_parallel(Penalized(after, manual).double(), 2, 2)


@distributed(world_size=2)
def test_a_loss_of_hidden_features_that_a_hook_keeps_is_right():
    """A hook is known before the division: what it is given stays whole."""
    expected, module = Penalized(by_hook=True).double(), Penalized(by_hook=True).double()
    fit_single(expected)
    fit_parallel(module, 2, 2)
    torch.testing.assert_close(module.losses, expected.losses, rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_a_plan_for_a_missing_module():
    with pytest.raises(ValueError, match=r"`nett.0` must match a module.*'net.0'"):
        fit_parallel(Net().double(), 2, 2, strategy_kwargs={"tensor_plan": {"nett.0": "column"}})


@distributed(world_size=2)
def test_peers_of_one_replica_with_different_batches(group):
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2)
    with pytest.raises(ValueError, match="must get the same batch.*on rank 1 than on rank 0"):
        trainer.fit(Net().double(), loader(2, group.rank))


@distributed(world_size=2)
def test_ranks_with_different_models(group):
    with pytest.raises(ValueError, match=r"(?s)must be the same on all ranks.*rank 0.*rank 1"):
        fit_parallel(Net(hidden=18 + 2 * group.rank).double(), 2, 2)


def expect_the_weights_of_one_process(build):
    alone, module = build().double(), build().double()
    fit_single(alone)
    trainer = fit_parallel(module, 2, 2)
    full = trainer.strategy.lightning_module_state_dict()
    for name, tensor in alone.state_dict().items() if trainer.is_global_zero else ():
        torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


class LayerScaled(torch.optim.Optimizer):
    """Scales the step of each tensor by norms, as LAMB and LARS do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def norm(self, group, tensor):
        return tensor.grad.norm() / tensor.norm()

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.sub_(tensor.grad * group["lr"] / self.norm(group, tensor))
        return loss


class ModelScaled(LayerScaled):
    """Scales all steps by one norm, as those do that estimate a learning rate."""

    def norm(self, group, tensor):
        return sum(other.grad.square().sum() for other in group["params"]).sqrt()


class Cautious(LayerScaled):
    """Scales by the share of elements that go on in the direction of their momentum."""

    def norm(self, group, tensor):
        momentum = self.state[tensor].setdefault("momentum", torch.zeros_like(tensor)).lerp_(tensor.grad, 0.1)
        return (momentum * tensor.grad > 0).to(tensor.dtype).mean()


class Rarely(LayerScaled):
    """Looks at the norm in each tenth step."""

    def norm(self, group, tensor):
        self.steps = getattr(self, "steps", 0) + 1
        return tensor.grad.norm() if self.steps > 9 * len(group["params"]) else 1.0


@pytest.mark.parametrize("kind", ["LBFGS", ModelScaled])
@distributed(world_size=2)
def test_optimizers_that_need_all_parameters(kind):
    class Other(Deep):
        def configure_optimizers(self):
            kinds = {"LBFGS": torch.optim.LBFGS}
            optimizer = kinds.get(kind, kind)(self.parameters(), lr=0.1)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # begins at zero
            return [optimizer], [warmup]

    with pytest.raises(ValueError, match="computes with all parameters at once"):
        fit(Other(), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


@distributed(world_size=2)
def test_optimizers_that_need_the_full_model():
    class Other(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="`LBFGS` computes with full tensors"):
        fit_parallel(Other().double(), 2, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [LayerScaled, ModelScaled, Cautious, Rarely])
@distributed(world_size=2)
def test_steps_of_the_users_optimizers_see_full_tensors(kind):
    class Other(Net):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.01)

    expect_the_weights_of_one_process(Other)


@distributed(world_size=2)
def test_a_search_for_the_batch_size():
    with pytest.raises(ValueError, match="The batch size finder is not supported on several ranks"):
        fit_parallel(Net().double(), 2, 2, callbacks=[BatchSizeFinder()])


@distributed(world_size=2)
def test_pruning_by_the_weights_of_the_whole_model():
    with pytest.raises(ValueError, match="`ModelPruning` is not supported: it compares weights of the full model"):
        fit_parallel(Net().double(), 2, 2, callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def _norms(module):
    return sum(parameter.norm() for parameter in module.parameters())


def _product(module):
    return (module.net[0].weight @ torch.ones(12, dtype=torch.float64)).sum()


def _transposed(module):
    return module.net[2].weight.T.sum()


def _hidden(module):
    return module.net[:2](torch.ones(3, 12, dtype=torch.float64)).square().mean()


class Regularised(Net):
    def __init__(self, regulariser):
        super().__init__()
        self.regulariser = regulariser

    def training_step(self, batch, index):
        return super().training_step(batch, index) + 1e-3 * self.regulariser(self)


@pytest.mark.sweep
@pytest.mark.parametrize("regulariser", [_norms, _product, _transposed, _hidden])
@distributed(world_size=2)
def test_weights_and_hidden_features_that_the_first_step_uses_are_whole(regulariser):
    expect_the_weights_of_one_process(lambda: Regularised(regulariser))


class HiddenLater(Net):
    """Its loss looks at hidden features after the first step."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss + 1e-3 * self.net[:2](batch[0]).square().mean() if self.global_step else loss


class Penalty(Net):
    """Its loss has the gradient with respect to the input."""

    def training_step(self, batch, index):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().training_step(batch, index) + gradient.square().mean()


@distributed(world_size=2)
def test_a_loss_of_hidden_features():
    with pytest.raises(RuntimeError, match="each rank holds only a piece"):
        fit_parallel(HiddenLater().double(), 2, 2)


@distributed(world_size=2)
def test_a_gradient_penalty():
    expect_the_weights_of_one_process(Penalty)


@distributed(world_size=2)
def test_ranks_that_train_differently(group):
    frozen, other = Net().double(), Net(lr=0.1 + 0.1 * group.rank).double()
    frozen.net[0].requires_grad_(group.rank == 0)
    with pytest.raises(ValueError, match="The set of trained parameters must be the same"):
        fit_parallel(frozen, 2, 2)
    with pytest.raises(ValueError, match="The optimizers must be the same"):
        fit_parallel(other, 2, 2)


@pytest.mark.parametrize("plan", [None, "colum", ["net.0"], {"net.0": 3}, {0: "column"}])
def test_plans_of_a_wrong_form(plan):
    with pytest.raises(TypeError, match="`tensor_plan` must"):
        TensorParallelStrategy(tensor_parallel_size=2, tensor_plan=plan)


def test_a_reducer_of_a_wrong_form():
    with pytest.raises(TypeError, match="`compression` must be a compressor"):
        TensorParallelStrategy(tensor_parallel_size=2, compression="powersgd")


@distributed(world_size=2)
def test_a_plan_is_tried_on_equal_weights_without_a_seed(group):
    module = Net().double()
    module.net = nn.Sequential(*(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)))
    module.double()
    for value in module.parameters():
        value.data += 0.1 * group.rank
    fit_parallel(module, 2, 2)
    found = ParallelState.of(module).sharding.plan
    assert all("other results" not in note for note in found.notes.values()), found.notes
