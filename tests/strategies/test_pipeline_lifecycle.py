"""What a project does besides one plain `fit`, in pipeline stages."""

import os
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, comm
from lightning_parallel.compat import ParallelState
from tests.harness import distributed
from tests.strategies.models import Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit


@pytest.mark.sweep(kept=None)
@distributed(world_size=8)
def test_all_three_axes_with_a_clip_norm():
    expected, module = Deep(), Deep()
    options = {"gradient_clip_val": 0.3, "max_epochs": 1, "limit_val_batches": 0}
    expected_trainer = fit(expected, "auto", 1, **options)
    strategy = HybridParallelStrategy(
        data_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2
    )
    assert_same(fit(module, strategy, 8, 2, **options), module, expected_trainer, expected)


class ReplacesForward(Callback):
    """Replaces the `forward` of a block in a hook, after the model was split."""

    def __init__(self, hook):
        setattr(self, hook, self.replace)

    def replace(self, trainer, module, *_):
        block = module.blocks[2]
        earlier = block.forward
        block.forward = lambda x: 0.7 * earlier(x)


@pytest.mark.sweep
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_end"])
@distributed(world_size=2)
def test_a_forward_replaced_after_the_split_is_the_forward_of_later_steps(hook):
    expected, module = Deep(), Deep()
    options = {"num_sanity_val_steps": 1}
    expected_trainer = fit(expected, "auto", 1, callbacks=[ReplacesForward(hook)], **options)
    trainer = fit(module, PipelineParallelStrategy(), 2, callbacks=[ReplacesForward(hook)], **options)
    assert_same(trainer, module, expected_trainer, expected)


class HalfPrecision(Deep):
    """Trains in fp32 under a gradient scaler; the given rank's gradients overflow in the second step."""

    def __init__(self, overflows_on):
        super().__init__()
        self.overflows_on = overflows_on
        self.float()

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def on_after_backward(self):
        if self.overflows_on == self.global_rank and self.global_step == 1:
            watch = ParallelState.of(self).watch
            # A hook sees full tensors on all ranks, and this rank alone changes its part.
            with nullcontext() if watch is None else watch.paused():
                next(one for one in self.parameters() if one.grad is not None).grad.fill_(float("inf"))

    def on_train_batch_end(self, outputs, batch, index):
        pass


@pytest.mark.parametrize("overflows_on", [0, 1])
@distributed(world_size=2)
def test_a_gradient_scaler_is_exact_and_skips_on_all_ranks(group, overflows_on):
    trained = []
    for devices in (1, 2):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
        module = HalfPrecision(overflows_on)
        strategy = "auto" if devices == 1 else PipelineParallelStrategy(pipeline_parallel_size=2)
        os.environ.update(LOCAL_RANK=str(group.rank * (devices > 1)), NODE_RANK="0", WORLD_SIZE=str(devices))
        module.overflows_on = 0 if devices == 1 else overflows_on
        options = {"max_epochs": 1, "gradient_clip_val": 0.5, "plugins": [plugin], "limit_val_batches": 0}
        if devices > 1:
            options.pop("plugins")
            strategy.precision_plugin = plugin
        trainer = trainer_for(strategy, devices, **options)
        trainer.fit(module, loader(dtype=torch.float32))
        trained.append((trainer.strategy.lightning_module_state_dict(), plugin.scaler.get_scale()))
    (expected, scale), (found, my_scale) = trained
    assert my_scale == scale == 2.0**9
    for name, tensor in expected.items() if group.rank == 0 else ():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 2},
        {"max_steps": 3, "check_val_every_n_epoch": 2, "accumulate_grad_batches": 3, "limit_train_batches": 4},
    ],
    ids=lambda options: next(iter(options)),
)
@distributed(world_size=2)
def test_options_of_the_trainer(options):
    expected, module = Deep(), Deep()
    expected_trainer = fit(expected, "auto", 1, **options)
    trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4), 2, **options)
    assert trainer.global_step == expected_trainer.global_step
    assert_same(trainer, module, expected_trainer, expected)
    assert module.hooks == expected.hooks


@distributed(world_size=2)
def test_a_model_made_late_on_meta_with_frozen_and_unused_parameters():
    class Late(Deep):
        def __init__(self):
            super().__init__()
            self.parts = [self.embed, self.blocks, self.head]
            del self.embed, self.blocks, self.head

        def configure_model(self):
            if hasattr(self, "embed"):
                return
            torch.manual_seed(5)
            with torch.device("meta"):
                self.embed = nn.Linear(12, 8, dtype=torch.float64)
            with torch.device("meta"):
                self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(4))
                self.head = nn.Linear(8, 5, dtype=torch.float64)
            self.blocks[1].requires_grad_(False)
            self.unused = nn.Linear(3, 3, dtype=torch.float64)
            self.parts = []

    trainer = fit(Late(), PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1)
    module = trainer.lightning_module
    assert not any(parameter.is_meta for parameter in module.parameters())
    full = trainer.strategy.lightning_module_state_dict()
    if trainer.global_rank == 0:
        assert full["embed.weight"].shape == (8, 12)
        assert len([name for name in full if name.startswith("blocks")]) == 8
        assert all(tensor.isfinite().all() for tensor in full.values())


class Tokens(Deep):
    """The mean is over the tokens that count, so microbatches differ in their weight."""

    def training_step(self, batch, index):
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        counts = (y > 1).to(losses)
        loss = (losses * counts).sum() / counts.sum()
        self.log("loss", loss, batch_size=int(counts.sum()), on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.outs.append(self.training_step(batch, index))

    def on_train_batch_end(self, outputs, batch, index):
        pass


@distributed(world_size=2)
def test_microbatches_weighted_by_tokens():
    expected, module = Tokens(), Tokens()
    expected_trainer = fit(expected, "auto", 1)
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=2, microbatch_weight=lambda batch: int((batch[1] > 1).sum())
    )
    assert_same(fit(module, strategy, 2), module, expected_trainer, expected)


class Logging(Tokens):
    """Logs means over tokens and over samples, with the number of tokens, with a constant, and without a number."""

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        counts = (y > 1).to(logits)
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = (losses * counts).sum() / counts.sum().clamp(min=1)  # a microbatch may have none
        both = {"on_step": True, "on_epoch": True}
        self.log("over tokens", loss, **both)
        self.log("over tokens with number", loss, batch_size=int(counts.sum()), **both)
        self.log("over samples", losses.mean(), **both)
        self.log("over samples with number", losses.mean(), batch_size=len(x), **both)
        self.log("over samples with constant", losses.mean(), batch_size=7, **both)
        return loss


@distributed(world_size=2)
def test_logs_are_weighted_by_what_they_are_means_over(group):
    metrics = []
    weight = {"microbatch_weight": lambda batch: int((batch[1] > 1).sum())}
    names = ["over samples", "over samples with number", "over samples with constant"]
    names += ["over tokens", "over tokens with number"]
    for devices in (1, 2):
        os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(devices))
        strategy = "auto"
        if devices > 1:
            strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, **weight)
        trainer = trainer_for(strategy, devices, max_epochs=1)
        trainer.fit(Logging(), DataLoader(Samples(), batch_size=7))  # the last batch has four
        metrics.append(trainer.callback_metrics)
    for name in names:
        for key in (f"{name}_step", f"{name}_epoch"):
            torch.testing.assert_close(metrics[1][key], metrics[0][key], rtol=1e-6, atol=1e-7, msg=key)


@distributed(world_size=2)
def test_shuffled_data_and_dropout_are_seeded_alike_on_all_stages(group):
    class Dropping(Deep):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = F.dropout(block(x), 0.5, self.training)
            return self.head(x)

    losses = []
    for _ in range(2):
        seed_everything(11, verbose=False)
        module = Dropping()
        trainer_for(PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1).fit(
            module, DataLoader(Samples(), batch_size=8, shuffle=True)
        )
        losses.append(torch.stack(module.losses))
    assert torch.equal(*losses)
    assert len(set(comm.all_gather_object(losses[0].sum().item(), group))) == 1


@distributed(world_size=4)
def test_a_rank_holds_its_stage_and_nothing_else():
    module = Deep(blocks=8)
    bytes_of = {name: parameter.numel() * 8 for name, parameter in module.named_parameters()}
    strategy = PipelineParallelStrategy(pipeline_parallel_size=4, balance="uniform", gather_after_fit="off")
    trainer = fit(module, strategy, 4, max_epochs=1)
    stage = trainer.strategy.run.engine.stages[0]
    prefixes = [f"blocks.{2 * stage}.", f"blocks.{2 * stage + 1}.", *(["embed."] * (stage == 0))]
    prefixes += ["head."] * (stage == 3)
    expected = sum(size for name, size in bytes_of.items() if name.startswith(tuple(prefixes)))
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    for held in (parameters, gradients, momenta):
        assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()) <= expected
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == expected


@distributed(world_size=2)
def test_a_penalty_on_all_parameters_counts_all_of_them():
    class Penalised(Deep):
        def training_step(self, batch, index):
            output = super().training_step(batch, index)
            return {**output, "loss": output["loss"] + 0.01 * sum(p.pow(2).sum() for p in self.parameters())}

    expected, module = Penalised(), Penalised()
    expected_trainer = fit(expected, "auto", 1, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1)
    if trainer.global_rank == 0:
        assert any("parameters are on several stages" in str(warning.message) for warning in caught)
    assert_same(trainer, module, expected_trainer, expected)


class KeptGradients(Deep):
    """Ties two layers, and keeps gradients over batches."""

    def __init__(self, every):
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.every = every

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % self.every == 0:
            optimizer.zero_grad()


@distributed(world_size=2)
def test_tied_gradients_that_are_kept_over_steps_are_summed_once():
    for every, options in ((2, {}), (3, {"accumulate_grad_batches": 2})):
        expected, module = KeptGradients(every), KeptGradients(every)
        options = {"max_epochs": 1, "limit_train_batches": 4, **options}
        expected_trainer = fit(expected, "auto", 1, **options)
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, **options)
        assert trainer.strategy.run.engine.tied
        assert_same(trainer, module, expected_trainer, expected)


class Terms(Deep):
    """Adds a term with parameters to its loss, one way or another, at first of zero."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.kept, self.start, self.by_name = [], [], {}
        if way in ("made early", "list made early"):
            self.start = [parameter.detach().clone() for parameter in self.parameters()]
            self.kept = list(self.parameters()) if way == "list made early" else []

    def on_fit_start(self):
        if self.way in ("positions", "names that are there", "list of a hook"):
            self.kept = list(self.parameters())
            self.start = [parameter.detach().clone() for parameter in self.kept]
            self.by_name = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def on_train_epoch_end(self):
        if self.way == "second epoch":
            self.by_name = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def term(self, index):
        if self.way in ("positions", "made early"):
            return sum((p - s).square().sum() for p, s in zip(self.parameters(), self.start))
        if self.way in ("list made early", "list of a hook"):
            return sum((p - s).square().sum() for p, s in zip(self.kept, self.start))
        if self.way in ("second epoch", "names that are there"):
            mine = [(p, self.by_name[name]) for name, p in self.named_parameters() if name in self.by_name]
            return sum((p - s).square().sum() for p, s in mine)
        if self.way == "get_parameter":
            return self.get_parameter("embed.weight").square().sum() * index if index else 0.0
        if self.way == "late":
            return sum(p.square().sum() for p in self.blocks.parameters()) if index else 0.0
        if self.way == "late head":
            return self.head.weight.square().sum() if index else 0.0
        if self.way == "products":
            return self.product().square().sum() + self.blocks[0].up.weight[3].norm() * self.numel()
        return next(self.blocks[-1].parameters()).square().sum()

    def product(self):
        return self.blocks[0].up.weight * self.blocks[-1].down.weight.t()

    def numel(self):
        return sum(p.numel() for p in self.parameters()) / 1e4

    def validation_step(self, batch, index):
        if self.way == "products":
            self.log("product", self.product().abs().sum() + self.blocks[1].down.weight.norm() * self.numel())
        super().validation_step(batch, index)

    def training_step(self, batch, index):
        before = sum(p.square().sum() for p in self.parameters()) if self.way == "before the layers" else 0.0
        output = super().training_step(batch, index)
        return {**output, "loss": output["loss"] + 0.01 * (before + self.term(index))}


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_term_with_parameters_that_comes_later_is_exact_or_refused_by_all(group):
    short = {"max_epochs": 1, "limit_val_batches": 0}
    early = ("made early", "list made early", "late head", "last block", "before the layers")
    for way in (*early, "positions", "names that are there", "list of a hook", "second epoch", "get_parameter", "late"):
        expected, module = Terms(way), Terms(way)
        options = short if way != "second epoch" else {"limit_val_batches": 0}
        expected_trainer = fit(expected, "auto", 1, **options)
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, **options)
        assert_same(trainer, module, expected_trainer, expected)
    # The step does not run again after hooks for its gradients.
    module = Terms("late")
    module.embed.weight.register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError, match="parameter `.*A loss term with parameters of several") as raised:
        fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, limit_val_batches=0)
    assert module.global_step == 1
    assert len(set(comm.all_gather_object(str(raised.value).partition("\n(found")[0], group))) == 1


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_terms_with_the_weights_of_other_stages_are_exact_in_shards():
    for way in ("made early", "before the layers", "products", "positions", "late"):
        expected, module = Terms(way), Terms(way)
        expected_trainer = fit(expected, "auto", 1, max_epochs=1)
        sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        trainer = fit(module, HybridParallelStrategy(num_microbatches=2, **sizes), 4, max_epochs=1)
        assert trainer.strategy.run.rules
        assert_same(trainer, module, expected_trainer, expected)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_compiled_layers():
    def build():
        module = Deep(blocks=2)
        module.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in module.blocks)
        return module

    expected, module = build(), build()
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}  # evaluation is compiled again
    with torch.compiler.set_stance("force_eager"):  # computes the same, and is not compiled a second time
        expected_trainer = fit(expected, "auto", 1, **options)
    trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, **options)
    assert_same(trainer, module, expected_trainer, expected)
