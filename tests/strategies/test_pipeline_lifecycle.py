"""What a project does besides one plain `fit`, in pipeline stages."""

import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, PowerSGD, comm
from tests.harness import distributed
from tests.strategies.models import Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit


@distributed(world_size=8)
def test_all_three_axes_with_a_clip_norm():
    expected, module = Deep(), Deep()
    expected_trainer = fit(expected, "auto", 1, gradient_clip_val=0.3, max_epochs=1)
    strategy = HybridParallelStrategy(
        data_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2
    )
    assert_same(fit(module, strategy, 8, 2, gradient_clip_val=0.3, max_epochs=1), module, expected_trainer, expected)


class Clipping(Deep):
    def __init__(self, norm_type):
        super().__init__()
        self.norm_type, self.norms = norm_type, []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.05, self.norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@distributed(world_size=4)
def test_torch_clip_grad_norm_sees_the_whole_model(norm_type):
    expected, module = Clipping(norm_type), Clipping(norm_type)
    expected_trainer = fit(expected, "auto", 1, max_epochs=1)
    trainer = fit(
        module,
        HybridParallelStrategy(data_parallel_size=1, pipeline_parallel_size=2, tensor_parallel_size=2),
        4,
        max_epochs=1,
    )
    torch.testing.assert_close(torch.stack(module.norms), torch.stack(expected.norms), rtol=1e-10, atol=0)
    assert_same(trainer, module, expected_trainer, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@distributed(world_size=4)
def test_precisions(precision):
    tolerance = {"32-true": 1e-5, "64-true": 1e-10}.get(precision, 5e-2)
    dtype = torch.float64 if precision == "64-true" else torch.float32

    class Cast(Deep):
        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self(x.to(next(self.parameters()).dtype)).float(), y)

        def on_train_batch_end(self, outputs, batch, index):
            pass

        validation_step = None

    modules = [Cast().to(dtype) for _ in range(2)]
    options = {"precision": precision, "gradient_clip_val": 0.5, "limit_val_batches": 0, "max_epochs": 1}
    fit(modules[0], "auto", 1, **options)
    trainer = fit(
        modules[1],
        HybridParallelStrategy(data_parallel_size=1, pipeline_parallel_size=2, tensor_parallel_size=2),
        4,
        **options,
    )
    full = trainer.strategy.lightning_module_state_dict()
    for name, tensor in modules[0].state_dict().items() if trainer.global_rank == 0 else ():
        torch.testing.assert_close(full[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


class HalfPrecision(Deep):
    """Trains in fp32 under a gradient scaler; the given rank's gradients overflow in the second step."""

    def __init__(self, overflows_on=None):
        super().__init__()
        self.overflows_on = overflows_on
        self.float()

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def on_after_backward(self):
        if self.overflows_on == self.global_rank and self.global_step == 1:
            next(parameter for parameter in self.parameters() if parameter.grad is not None).grad[0] = float("inf")

    def on_train_batch_end(self, outputs, batch, index):
        pass


@pytest.mark.parametrize("overflows_on", [None, 0, 1])
@distributed(world_size=2)
def test_a_gradient_scaler_is_exact_and_skips_on_all_ranks(group, overflows_on):
    trained = []
    for devices in (1, 2):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
        module = HalfPrecision(overflows_on)
        strategy = "auto" if devices == 1 else PipelineParallelStrategy(pipeline_parallel_size=2)
        os.environ.update(LOCAL_RANK=str(group.rank * (devices > 1)), NODE_RANK="0", WORLD_SIZE=str(devices))
        module.overflows_on = 0 if devices == 1 and overflows_on is not None else overflows_on
        options = {"max_epochs": 1, "gradient_clip_val": 0.5, "plugins": [plugin], "limit_val_batches": 0}
        if devices > 1:
            options.pop("plugins")
            strategy.precision_plugin = plugin
        trainer = trainer_for(strategy, devices, **options)
        trainer.fit(module, loader(dtype=torch.float32))
        trained.append((trainer.strategy.lightning_module_state_dict(), plugin.scaler.get_scale()))
    (expected, scale), (found, my_scale) = trained
    assert my_scale == scale == (2.0**10 if overflows_on is None else 2.0**9)
    for name, tensor in expected.items() if group.rank == 0 else ():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@distributed(world_size=4)
def test_monitors_and_schedulers_agree(group):
    class Watched(Deep):
        def validation_step(self, batch, index):
            self.log("watched", F.cross_entropy(self(batch[0]), batch[1]))  # each replica has its own value

        def on_validation_epoch_end(self):
            pass

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "watched"}}

    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    best = ModelCheckpoint(folder, monitor="watched", filename="{epoch}")
    stop = EarlyStopping("watched", patience=1, min_delta=0.5)
    module = Watched()
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, data_parallel_size=2)
    trainer = fit(module, strategy, 4, 2, max_epochs=8, callbacks=[best, stop], enable_checkpointing=True)
    facts = (trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"], best.best_model_path)
    assert len(set(comm.all_gather_object(facts, group))) == 1
    assert trainer.current_epoch < 8
    assert facts[1] < 0.1
    trainer.validate(module, loader(2, group.rank // 2), ckpt_path="best", verbose=False)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 2},
        {"max_steps": 3, "check_val_every_n_epoch": 2, "accumulate_grad_batches": 3},
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


@distributed(world_size=2)
def test_smaller_last_batches_and_lengths_that_change(group):
    class Varying(Deep):
        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self(x).mean(1), y)
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            pass

    torch.manual_seed(2)
    batches = [
        (torch.randn(samples, length, 12, dtype=torch.float64), torch.randint(5, (samples,)))
        for samples, length in ((8, 3), (7, 5), (3, 5), (8, 2), (1, 4))
    ]
    results = []
    for devices, strategy in ((1, "auto"), (2, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4))):
        os.environ.update(LOCAL_RANK=str(group.rank * (devices > 1)), NODE_RANK="0", WORLD_SIZE=str(devices))
        module = Varying()
        trainer = trainer_for(strategy, devices)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        results.append((trainer, module))
    assert_same(*results[1], *results[0])


@distributed(world_size=4)
def test_the_data_follow_the_replica(group):
    seed_everything(1, workers=True, verbose=False)
    module = Deep()
    trainer = trainer_for(PipelineParallelStrategy(pipeline_parallel_size=2, data_parallel_size=2), 4, max_epochs=1)
    trainer.fit(module, DataLoader(Samples(), batch_size=4, shuffle=True))
    os.environ.pop("PL_SEED_WORKERS"), os.environ.pop("PL_GLOBAL_SEED")
    sampler = trainer.train_dataloader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank) == (2, group.rank // 2)


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
        trainer_for(PipelineParallelStrategy(pipeline_parallel_size=2), 2).fit(
            module, DataLoader(Samples(), batch_size=8, shuffle=True)
        )
        losses.append(torch.stack(module.losses))
    assert torch.equal(*losses)
    assert len(set(comm.all_gather_object(losses[0].sum().item(), group))) == 1


@distributed(world_size=4)
def test_compression_between_replicas_of_a_pipeline(group):
    module = Deep()
    fit(
        module,
        PipelineParallelStrategy(pipeline_parallel_size=2, data_parallel_size=2, compression=PowerSGD(rank=2)),
        4,
        2,
    )
    values = comm.all_gather_object([parameter.sum().item() for parameter in module.parameters()], group)
    assert values[0] == values[2]
    assert values[1] == values[3]


@distributed(world_size=4)
def test_a_rank_holds_its_stage_and_nothing_else():
    module = Deep(blocks=8)
    bytes_of = {name: parameter.numel() * 8 for name, parameter in module.named_parameters()}
    trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=4, balance="uniform"), 4, max_epochs=1)
    stage = trainer.strategy.engine.stages[0]
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
def test_fit_again_and_on_other_data():
    expected, module = Deep(), Deep()
    fit(expected, "auto", 1, max_epochs=1)
    expected_trainer = fit(expected, "auto", 1, max_epochs=1)
    fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1)
    trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1)
    assert_same(trainer, module, expected_trainer, expected)
    data = TensorDataset(Samples().x[:5], Samples().y[:5])
    trainer.validate(module, DataLoader(data, 5), verbose=False)


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


@distributed(world_size=2)
def test_compiled_layers():
    def build():
        module = Deep(blocks=2)
        module.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in module.blocks)
        return module

    expected, module = build(), build()
    expected_trainer = fit(expected, "auto", 1, max_epochs=1)
    assert_same(
        fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2, max_epochs=1),
        module,
        expected_trainer,
        expected,
    )
