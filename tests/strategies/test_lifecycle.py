"""What a project does besides one plain `fit`."""

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
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_parallel import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    comm,
)
from lightning_parallel.strategies.hooks.views import HookError
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import Net, Samples, fit_parallel, fit_single, loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit


def _full(trainer):
    return trainer.strategy.lightning_module_state_dict()


def _assert_state(trainer, expected, rtol=1e-10):
    full = _full(trainer)
    if trainer.global_rank == 0:
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(full[name], tensor.to(full[name]), rtol=rtol, atol=rtol, msg=name)


LAYOUTS = {
    "pipeline x data": (PipelineParallelStrategy, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, 2),
    "pipeline x tensor": (HybridParallelStrategy, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 1),
}


def fit_in(layout, module, **options):
    kind, sizes, replicas = LAYOUTS[layout]
    return fit(module, kind(**sizes), 4, replicas, **options)


class TakingNorms(Deep):
    """Takes the norms of its gradients by functions of others, and clips by torch's, in another norm at each step."""

    norms = ()

    def on_before_optimizer_step(self, optimizer):
        self.found = {**grad_norm(self, 2), **grad_norm(self.blocks[1], "inf", "|")}
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.found["total"] = torch.nn.utils.get_total_norm(gradients)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        norm_type = (1.0, 2.0, float("inf"))[len(self.norms) % 3]
        self.norms = (*self.norms, nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type))


@distributed(world_size=4)
def test_functions_that_take_norms_see_the_whole_model():
    expected, module = TakingNorms(), TakingNorms()
    expected_trainer = fit(expected, "auto", 1, max_epochs=1)
    trainer = fit_in("pipeline x tensor", module, max_epochs=1)
    assert module.found.keys() == expected.found.keys()
    for name, norm in expected.found.items():
        torch.testing.assert_close(module.found[name].cpu(), norm, rtol=1e-10, atol=0)
    torch.testing.assert_close(torch.stack(module.norms), torch.stack(expected.norms), rtol=1e-10, atol=0)
    assert_same(trainer, module, expected_trainer, expected)
    assert grad_norm.__module__.startswith("lightning."), "put back at the end of the run"


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@distributed(world_size=4)
def test_precisions(precision):
    dtype, tolerance = (torch.float64, 1e-10) if precision == "64-true" else (torch.float32, 5e-2)

    class Cast(Deep):
        def training_step(self, batch, index):
            x, y = batch
            # A loss in single precision is equal to rounding only: each rank sums the terms of its classes.
            return F.cross_entropy(self(x.to(next(self.parameters()).dtype)).to(dtype), y)

        def on_train_batch_end(self, outputs, batch, index):
            pass

        validation_step = None

    expected, module = Cast().to(dtype), Cast().to(dtype)
    options = {"precision": precision, "gradient_clip_val": 0.5, "limit_val_batches": 0, "max_epochs": 1}
    fit(expected, "auto", 1, **options)
    _assert_state(fit_in("pipeline x tensor", module, **options), expected, rtol=tolerance)


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
    trainer = fit_in("pipeline x data", module, max_epochs=8, callbacks=[best, stop], enable_checkpointing=True)
    facts = (trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"], best.best_model_path)
    assert len(set(comm.all_gather_object(facts, group))) == 1
    assert trainer.current_epoch < 8
    assert facts[1] < 0.1
    trainer.validate(module, loader(2, group.rank // 2), ckpt_path="best", verbose=False)


@distributed(world_size=4)
def test_the_data_follow_the_replica(group):
    seed_everything(1, workers=True, verbose=False)
    kind, sizes, _ = LAYOUTS["pipeline x data"]
    trainer = trainer_for(kind(**sizes), 4, max_epochs=1, limit_train_batches=1)
    trainer.fit(Deep(), DataLoader(Samples(), batch_size=4, shuffle=True))
    os.environ.pop("PL_SEED_WORKERS"), os.environ.pop("PL_GLOBAL_SEED")
    sampler = trainer.train_dataloader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank) == (2, group.rank // 2)
    assert trainer.train_dataloader.worker_init_fn.keywords == {"rank": group.rank // 2}


@distributed(world_size=4)
def test_validate_fit_test_predict_and_fit_again(group):
    """With a last batch that is smaller."""

    class Full(Deep):
        def test_step(self, batch, index):
            self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch, index):
            return {"logits": self(batch[0]), "labels": batch[1]}

    kind, sizes, _ = LAYOUTS["pipeline x data"]
    replica, runs = group.rank // 2, []
    for devices, make, batches in (
        (1, lambda: "auto", loader(batch=14)),
        (4, lambda: kind(**sizes), loader(2, replica, batch=14)),
    ):
        os.environ.update(LOCAL_RANK=str(group.rank * (devices > 1)), NODE_RANK="0", WORLD_SIZE=str(devices))
        module, trainer = Full(), trainer_for(make(), devices, max_epochs=1)
        (validated,) = trainer.validate(module, batches, verbose=False)
        trainer.fit(module, batches)
        (tested,) = trainer.test(module, batches, verbose=False)
        predicted = trainer.predict(module, batches)
        trainer = trainer_for(make(), devices, max_epochs=1)
        trainer.fit(module, batches)
        runs.append((validated, tested, predicted, trainer, module))
    expected, found = runs
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for mine, theirs in zip(found[2], expected[2], strict=True):
        truth = {name: tensor[replica::2] for name, tensor in theirs.items()}
        torch.testing.assert_close(mine, truth, rtol=1e-10, atol=1e-10)
    assert_same(*found[3:], *expected[3:])


class Logging(Deep):
    """Logs the mean of an epoch, with `sync_dist` or without it."""

    def __init__(self, sync):
        super().__init__()
        self.sync = sync

    def training_step(self, batch, index):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=self.sync)
        return {"loss": loss, "logits": logits}


@distributed(world_size=2)
def test_sync_dist_is_recommended_to_code_that_lacks_it_only(group):
    """Lightning forgets the flag where there is one replica, whose processes log equal values in any case."""

    def advice(strategy, sync):
        result.warning_cache.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = Logging(sync)
            trainer_for(strategy, 2, max_epochs=1, limit_train_batches=1).fit(module, loader())
        return any("sync_dist=True" in str(one.message) for one in caught)

    for sync in (True, False):
        assert not advice(TensorParallelStrategy(tensor_parallel_size=2), sync)
        assert not advice(PipelineParallelStrategy(pipeline_parallel_size=2), sync)
        without_sync = not sync and group.rank == 0
        assert advice(TensorParallelStrategy(tensor_parallel_size=1), sync) == without_sync
        assert advice(DDPStrategy(), sync) == without_sync, "afterwards as before"


@distributed(world_size=2)
def test_configure_model_on_meta_and_with_the_mesh(group):
    class Late(Net):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            assert self.device_mesh["tensor_parallel"].size() == 2
            if self.net is None:
                with torch.device("meta"):
                    self.net = Net().net.to("meta", torch.float64)

    seed_everything(5)
    module = Late()
    trainer = fit_parallel(module, 2, 2, max_epochs=1, strategy_kwargs={"gather_after_fit": "off"})
    assert not any(parameter.is_meta for parameter in module.parameters())
    full = _full(trainer)
    torch.manual_seed(5)
    expected = Net().double()
    assert {name: tensor.shape for name, tensor in full.items()} == {
        name: tensor.shape for name, tensor in expected.state_dict().items()
    }
    assert module.net[0].weight.shape == (9, 12)


class Grouped(Net):
    """Frozen parameters, groups by name, and a layer that the even batches do not use."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(12, 5)
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch, index):
        x, y = batch
        logits = self.net(x)
        if y[0] % 2:
            logits = logits + self.extra(x)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        decay = [p for name, p in self.named_parameters() if name.endswith("weight") and p.requires_grad]
        rest = [p for name, p in self.named_parameters() if not name.endswith("weight") and p.requires_grad]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)


@distributed(world_size=2)
def test_frozen_grouped_and_unused_parameters():
    expected = Grouped().double()
    fit_single(expected, limit_train_batches=4)
    trainer = fit_parallel(Grouped().double(), 2, 2, limit_train_batches=4)
    _assert_state(trainer, expected)


@distributed(world_size=4)
def test_a_layer_that_one_replica_does_not_use():
    trainer = fit_parallel(Grouped().double(), 4, 2, limit_train_batches=4)
    state = _full(trainer)
    everyone = comm.all_gather_object(
        {name: tensor.sum().item() for name, tensor in trainer.lightning_module.state_dict().items()},
        comm.Group.of(),
    )
    assert everyone[0] == everyone[2], "replicas stay equal"
    assert everyone[1] == everyone[3]
    assert state


@distributed(world_size=4)
def test_manual_optimization():
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            x, y = batch
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()

    expected = Manual().double()
    fit_single(expected)
    trainer = fit_parallel(Manual().double(), 4, 2)
    _assert_state(trainer, expected)


@distributed(world_size=4)
def test_metrics_count_every_sample_once():
    class Counted(Net):
        def __init__(self):
            super().__init__()
            self.count, self.mean = SumMetric(), MeanMetric()

        def validation_step(self, batch, index):
            x, y = batch
            self.count.update(torch.ones(len(x)))
            self.mean.update(y.double())
            self.log_dict({"count": self.count, "mean": self.mean})

    for tensor in (2, 4):
        trainer = fit_parallel(Counted().double(), 4, tensor, limit_val_batches=1.0, max_epochs=1)
        assert trainer.callback_metrics["count"] == 32
        assert trainer.callback_metrics["mean"].item() == pytest.approx(Samples().y.double().mean().item())


@distributed(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(group):
    class Overflow(Net):
        def on_after_backward(self):
            if group.rank == 1 and self.global_step == 1:
                self.net[0].weight.grad.fill_(float("inf"))

        def validation_step(self, batch, index):
            pass

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    module = Overflow()
    strategy = TensorParallelStrategy(tensor_parallel_size=2, precision_plugin=plugin)
    trainer = trainer_for(strategy, 2, max_epochs=1)
    trainer.fit(module, loader(dtype=torch.float32))
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert comm.all_gather_object(plugin.scaler.get_scale(), group) == [2.0**9] * 2


@distributed(world_size=2)
def test_one_replica_reads_what_one_process_reads(group):
    losses = []
    for devices, strategy in ((1, "auto"), (2, TensorParallelStrategy(tensor_parallel_size=2))):
        os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(devices))
        module = Net().double()
        seed_everything(11, verbose=False)
        plain = DataLoader(Samples(), batch_size=8, shuffle=True)
        trainer_for(strategy, devices, num_sanity_val_steps=2).fit(module, plain, DataLoader(Samples(), batch_size=5))
        losses.append(torch.stack(module.losses))
    assert len(losses[0]) == 8
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)


@distributed(world_size=2)
def test_all_gather_spans_the_replicas():
    class Gathering(Net):
        def training_step(self, batch, index):
            assert self.all_gather(torch.ones(3)).shape == (1, 3)
            return super().training_step(batch, index)

    fit_parallel(Gathering().double(), 2, 2, max_epochs=1)


@distributed(world_size=2)
def test_running_statistics_are_those_of_ddp(group):
    def build():
        module = Net().double()
        module.net.append(nn.BatchNorm1d(5, dtype=torch.float64))
        return module

    ours, peer = build(), build()
    for module, strategy in (
        (ours, TensorParallelStrategy(tensor_parallel_size=1, data_parallel_size=2)),
        (peer, DDPStrategy()),
    ):
        os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
        trainer_for(strategy, 2).fit(module, loader(2, group.rank), loader(2, group.rank))
    for (name, mine), theirs in zip(ours.state_dict().items(), peer.state_dict().values()):
        if group.rank == 0:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=name)
        assert len(set(comm.all_gather_object(mine.sum().item(), group))) == 1, name


@distributed(world_size=4)
def test_a_rank_holds_its_shards_and_nothing_else():
    module = Net(hidden=400).double()
    full = sum(parameter.numel() for parameter in module.parameters())
    trainer = fit_parallel(module, 4, 4, max_epochs=1, strategy_kwargs={"gather_after_fit": "off"})
    held = sum(parameter.untyped_storage().nbytes() // 8 for parameter in module.parameters())
    assert held < 0.3 * full
    state = trainer.optimizers[0].state.values()
    assert sum(entry["momentum_buffer"].untyped_storage().nbytes() // 8 for entry in state) == held


@distributed(world_size=2)
def test_compiled_layers():
    def build():
        module = Net().double()
        for layer in module.net:
            layer.compile(backend="eager")
        module.net[3] = torch.compile(module.net[3], backend="eager")
        return module

    expected = build()
    fit_single(expected, max_epochs=1, limit_val_batches=0)
    _assert_state(fit_parallel(build(), 2, 2, max_epochs=1, limit_val_batches=0), expected)


def _set_up_again(module):
    module.trainer.strategy.setup_optimizers(module.trainer)


def _replace_optimizer(module):
    module.trainer.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.02)]


def _put_on_a_block(module):
    torch.manual_seed(module.trainer.global_rank)  # replicas take that of the first
    module.blocks.append(Block(8).double())
    module.optimizers().add_param_group({"params": module.blocks[-1].parameters()})


def _take_out_blocks(module):
    module.blocks[1] = nn.Identity()
    del module.blocks[3]


def _exchange_head(module):
    torch.manual_seed(3)
    module.head = nn.Linear(8, 5).double()
    _set_up_again(module)


def _prune_embedding(module):
    prune.l1_unstructured(module.embed, "weight", 0.3)


def _prune_block(module):
    prune.l1_unstructured(module.blocks[0].up, "weight", 0.3)


class Changing(Deep):
    """Is changed before its second epoch, and saved after each."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.norm = nn.LayerNorm(8).double()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.change(self)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


ADOPTED = [_set_up_again, _replace_optimizer, _put_on_a_block, _take_out_blocks, _exchange_head]
REFUSED = {
    "tensor": {_prune_embedding: "`embed` must keep its", _prune_block: r"`blocks\.0` must keep its"},
    "pipeline": {
        _put_on_a_block: r"`blocks\.4` must keep its",
        _take_out_blocks: r"`blocks\.1` must keep its",
        _exchange_head: "`head` must keep its",
    },
}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["zero", "tensor", "pipeline"])
@distributed(world_size=2)
def test_what_changes_during_a_run_is_adopted_or_refused_at_once(group, layout):
    strategies = {
        "zero": lambda: HybridParallelStrategy(zero_stage=2),
        "tensor": lambda: TensorParallelStrategy(tensor_parallel_size=2),
        "pipeline": lambda: PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2),
    }
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    refused = REFUSED.get(layout, {})
    for change in [change for change in ADOPTED if change not in refused]:
        expected, module = Changing(change), Changing(change)
        fit(expected, "auto", 1)
        options = {"enable_checkpointing": True, "default_root_dir": folder / change.__name__}
        fit(module, strategies[layout](), 2, 2 if layout == "zero" else 1, **options)
        torch.testing.assert_close(
            dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-12, msg=change.__name__
        )
    for change, text in refused.items():
        module = Changing(change)
        with pytest.raises((ValueError, HookError), match=text):
            fit(module, strategies[layout](), 2)
        assert module.trainer.global_step == 2


class Toggling(Deep):
    """Trains other blocks in each step, which it chooses in the step; the gradient of one weight has a hook."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1) * torch.tensor([0.5, 1.0, 1.5], dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch, index):
        for number, block in enumerate(self.blocks):
            for place, parameter in enumerate(block.parameters()):
                parameter.requires_grad_((self.trainer.fit_loop.total_batch_idx + number + place) % 3 > 0)
        return super().training_step(batch, index)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [
        ({"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2}, 2),
        ({"tensor_parallel_size": 2, "zero_stage": 3}, 2),
        ({"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1}, 2),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2}, 1),
    ],
)
@distributed(world_size=4)
def test_weights_that_a_step_freezes_itself(sizes, replicas):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    expected, module = Toggling(), Toggling()
    fit(expected, "auto", 1, **options)
    trainer = fit(module, HybridParallelStrategy(gather_after_fit="all", **sizes), 4, replicas, **options)
    assert trainer.global_step == 4
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-12)
