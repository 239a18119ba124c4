"""Compressed gradients under DDP, through the Trainer."""

import contextlib
import logging
import os
import threading
import time
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import CompressedDDPStrategy, LocalSGDStrategy, Policy, PowerSGD, Quantize, Sign, TopK, comm
from lightning_parallel.compat import patched
from lightning_parallel.compression import Dense, HookState, compression_hook
from lightning_parallel.strategies.checkpoints import files as checkpoint_files
from lightning_parallel.strategies.checkpoints.files import SafeCheckpointIO
from lightning_parallel.strategies.checkpoints.rank_files import Place, RankFiles
from lightning_parallel.strategies.compressed.memory import CompressorMemory
from tests.harness import distributed, run
from tests.strategies.models import Net, loader, trainer_for

SMALL = {"min_numel": 16}
FILES = RankFiles("optimizers", "states", "They are lost")
EXACT = {"exact_rollback": True, **SMALL}
TWO_BUCKETS = {"bucket_cap_mb": 0.001}
COMPRESSORS = {
    "powersgd": lambda: PowerSGD(2, **SMALL),
    "alternating": lambda: PowerSGD(2, alternate=True, **EXACT),
    "topk_int8": lambda: TopK(0.1, **SMALL) | Quantize(8),
    "int8": lambda: Quantize(8, **SMALL),
    "sign": lambda: Sign(**SMALL),
    "policy": lambda: Policy({"net.0*": None, "*": PowerSGD(1, **EXACT)}),
}


def fit(module, strategy, group, ckpt_path=None, **kwargs):
    trainer = trainer_for(strategy, group.size, **kwargs)
    trainer.fit(module, loader(group.size, group.rank), ckpt_path=ckpt_path)
    return trainer


def same_on_all_ranks(module, group):
    return all(torch.equal(p, q) for p in module.parameters() for q in comm.all_gather(p.detach()[None].clone(), group))


def assert_equal(module, expected):
    for (name, tensor), other in zip(module.state_dict().items(), expected.state_dict().values()):
        assert torch.equal(tensor, other), name


class Equal(Callback):
    """Replicas are bitwise equal after every step."""

    def __init__(self, group):
        self.group, self.steps = group, 0

    def on_train_batch_end(self, trainer, module, *_):
        assert same_on_all_ranks(module, self.group)
        self.steps += 1


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [({}, 1), (TWO_BUCKETS, 2), ({"static_graph": True}, 1), ({"find_unused_parameters": True}, 2)],
)
@distributed(world_size=2)
def test_plain_means_equal_ddp(options, accumulate, group):
    expected, module = Net().double(), Net().double()
    fit(expected, DDPStrategy(**options), group, accumulate_grad_batches=accumulate)
    trainer = fit(module, CompressedDDPStrategy(Dense(), **options), group, accumulate_grad_batches=accumulate)
    assert_equal(module, expected)
    assert trainer.strategy.compression.step == trainer.global_step == 8 // accumulate, "optimizer steps, not backwards"


@distributed(world_size=2)
def test_global_generator_is_left_alone(group):
    states = []
    for strategy in (DDPStrategy(), CompressedDDPStrategy(Quantize(4, stochastic=True, feedback=None, **SMALL))):
        fit(Net().double(), strategy, group)  # seeds
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def train(module, strategy, group, batches, **kwargs):
    trainer = trainer_for(strategy, group.size, max_epochs=1, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


def batches_of(group):
    return [[x, y] for x, y in loader(group.size, group.rank)]


class Scaled(MixedPrecision):
    """Scales the loss as `16-mixed` does, but computes as it is."""

    def __init__(self, **kwargs):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", **kwargs))

    @contextlib.contextmanager
    def forward_context(self):
        yield


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "scaled"), [(name, index % 2 == 0) for index, name in enumerate(COMPRESSORS)])
@distributed(world_size=2)
def test_overflow_on_one_rank_leaves_no_trace(name, scaled, group):
    def plugins():
        return [Scaled(init_scale=2.0**8)] if scaled else None

    module, expected, batches = Net().double(), Net().double(), batches_of(group)
    strategy, compressor = CompressedDDPStrategy(COMPRESSORS[name](), **TWO_BUCKETS), COMPRESSORS[name]()
    compressor.expects_rollback = not scaled
    train(expected, strategy, group, [batches[0], *batches[2:]], plugins=plugins())
    if group.rank == 1:
        batches[1] = [batches[1][0] * torch.inf, batches[1][1]]
    watch = Equal(group)
    train(
        module,
        CompressedDDPStrategy(compressor, **TWO_BUCKETS),
        group,
        batches,
        callbacks=[watch],
        plugins=plugins(),
    )
    assert compressor.step == 3
    assert watch.steps == 4
    assert_equal(module, expected)


@pytest.mark.parametrize("name", ["alternating", "topk_int8"])
@distributed(world_size=2)
def test_residuals_are_free_of_the_loss_scale(name, group):
    """The scale is doubled at every step; powers of two round nothing."""
    module, expected = Net().double(), Net().double()
    fit(expected, CompressedDDPStrategy(COMPRESSORS[name]()), group)
    fit(module, CompressedDDPStrategy(COMPRESSORS[name]()), group, plugins=[Scaled(growth_interval=1)])
    assert_equal(module, expected)


class Unused(Net):
    """Has a layer that is used in the first half of the batches only, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.extra, self.frozen = nn.Linear(12, 12), nn.Linear(12, 12).requires_grad_(False)

    def training_step(self, batch, index):
        x, y = batch
        x = self.frozen(x)
        return super().training_step((self.extra(x) if index < 2 else x, y), index)


class Watch(Callback):
    """The residual of the extra layer, and its weight, after each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        residual = trainer.strategy.compression.state_dict()["residual"]["extra.weight"]
        self.seen.append((residual, module.extra.weight.detach().clone(), module.extra.weight.grad))


@distributed(world_size=2)
def test_residual_of_an_unused_parameter_waits(group):
    module, watch = Unused().double(), Watch()
    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL), find_unused_parameters=True, **TWO_BUCKETS)
    module.momentum = 0.0
    fit(module, strategy, group, callbacks=[watch], max_epochs=1)
    assert watch.seen[1][0].any()
    assert torch.equal(watch.seen[1][0], watch.seen[3][0])
    assert torch.equal(watch.seen[1][1], watch.seen[3][1])
    assert watch.seen[3][2] is None
    assert not [name for name in strategy.compression.state_dict()["residual"] if "frozen" in name]


class Unfreezing(Callback):
    """Trains the head alone for an epoch, as finetuning callbacks do."""

    def setup(self, trainer, module, stage):
        module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer, module):
        module.net[0].requires_grad_(trainer.current_epoch == 1)


@pytest.mark.parametrize("accumulate", [1, 2])
@distributed(world_size=2)
def test_parameters_that_are_unfrozen_are_averaged(accumulate, group):
    expected, module = Net().double(), Net().double()
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    trainer_for(callbacks=[Unfreezing()], **options).fit(expected, loader())
    strategy = CompressedDDPStrategy(Dense(), find_unused_parameters=True, **TWO_BUCKETS)
    fit(module, strategy, group, callbacks=[Unfreezing(), Equal(group)], **options)
    assert strategy.compression.step == 12 // accumulate
    for parameter, other in zip(module.parameters(), expected.parameters()):
        torch.testing.assert_close(parameter, other, rtol=1e-10, atol=1e-12)


class TwoLosses(Net):
    """The gradient of one of two optimizers is not finite in one step."""

    automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[:2].parameters(), lr=0.1), torch.optim.SGD(self.net[2:].parameters(), lr=0.1)

    def training_step(self, batch, index):
        one, two = self.optimizers()
        x, y = batch
        hidden = self.net[0](x)
        self.zero_grad()
        self.manual_backward(hidden.square().mean() * (float("inf") if index == 1 and self.global_rank == 0 else 1))
        assert (self.net[0].weight.grad is None) == (index == 1)
        self.manual_backward(nn.functional.cross_entropy(self.net[2:](hidden.detach()), y))
        self.manual_backward(hidden.detach().sum() * self.net[-1].bias.sum() * float("nan" if index == 2 else 1))
        assert (self.net[-1].bias.grad is None) == (index == 2)
        assert self.net[2].weight.grad is not None
        one.step()
        two.step()


@distributed(world_size=2)
def test_a_skipped_backward_takes_its_own_gradients_only(group):
    module = TwoLosses().double()
    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL), find_unused_parameters=True)
    fit(module, strategy, group, max_epochs=1, callbacks=[Equal(group)])
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@distributed(world_size=2)
def test_a_compressor_that_served_another_model_starts_anew(group):
    compressor = PowerSGD(1, **SMALL)
    first, second, expected = (Net(hidden=width).double() for width in (20, 18, 18))
    fit(first, CompressedDDPStrategy(compressor), group, max_epochs=1)
    with pytest.warns(UserWarning, match="4 steps of another model"):
        fit(second, CompressedDDPStrategy(compressor), group, max_epochs=1)
    fit(expected, CompressedDDPStrategy(PowerSGD(1, **SMALL)), group, max_epochs=1)
    assert_equal(second, expected)


@distributed(world_size=2)
def test_settings_that_differ_between_ranks_are_refused(group):
    with pytest.raises(RuntimeError, match=r"(?s)The compressor and its step.*rank=1.*rank=2"):
        fit(Net().double(), CompressedDDPStrategy(PowerSGD(1 + group.rank, **SMALL)), group)


@distributed(world_size=2)
def test_a_pattern_that_matches_nothing_is_told(group):
    policy = Policy({"nett.0*": PowerSGD(1), "*": None})
    with pytest.warns(UserWarning, match="'nett.0") if group.rank == 0 else contextlib.nullcontext():
        fit(Net().double(), CompressedDDPStrategy(policy), group, max_epochs=1)


@pytest.mark.parametrize("wrong", [None, "powersgd", PowerSGD])
def test_what_is_no_compressor_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a compressor such as"):
        CompressedDDPStrategy(wrong)


@distributed(world_size=2)
def test_manual_optimization(group):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    module, expected = Manual().double(), Net().double()
    fit(expected, CompressedDDPStrategy(PowerSGD(2, **SMALL)), group)
    fit(module, CompressedDDPStrategy(PowerSGD(2, **SMALL)), group)
    assert_equal(module, expected)


@distributed(world_size=2)
def test_dense_checkpoint_starts_compression(group, tmp_path):
    module = Net().double()
    fit(module, DDPStrategy(), group, max_epochs=1).save_checkpoint(tmp_path / "dense.ckpt")
    comm.barrier(group)
    trainer = fit(Net().double(), CompressedDDPStrategy(TopK(0.1)), group, ckpt_path=tmp_path / "dense.ckpt")
    assert trainer.strategy.compression.step == 4
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    comm.barrier(group)
    assert "compression" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    fit(Net().double(), DDPStrategy(), group, ckpt_path=tmp_path / "all.ckpt", max_epochs=3)


def keeps(group, path, state, ckpt_path=None):
    """Train, save; return the residual of a layer, and what the checkpoint has of it."""
    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL), compressor_state=state)
    epochs = 1 if ckpt_path is None else 2
    trainer = trainer_for(strategy, group.size, max_epochs=epochs, limit_train_batches=1)
    trainer.fit(Net().double(), loader(group.size, group.rank), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(path)
    comm.barrier(group)
    return strategy.compression.state_dict()["residual"]["net.0.weight"], strategy.compression.step


def restores(group, path):
    """Load a checkpoint without training on; return the residual of a layer."""
    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL))
    trainer = trainer_for(strategy, group.size, max_epochs=1, limit_train_batches=1)
    trainer.fit(Net().double(), loader(group.size, group.rank), ckpt_path=path)
    return strategy.compression.state_dict().get("residual", {}).get("net.0.weight"), strategy.compression.step


def test_what_checkpoints_keep_of_residuals(tmp_path):
    for state in ("local", "none"):
        path = tmp_path / state / "last.ckpt"
        kept = [residual for residual, _ in run(keeps, 2, path=path, state=state)]
        mean = torch.stack(kept).mean(0)
        for ranks, among in ((2, kept), (4, [mean] * 4)):
            for (found, step), residual in zip(run(restores, ranks, path=path), among):
                assert step == 1
                if state == "none":
                    assert found is None
                else:
                    torch.testing.assert_close(found, residual, rtol=0, atol=1e-15)
        beside = path.parent / "rank-state" / "last.ckpt"
        assert [file.suffix for file in beside.iterdir()] == [".pt"] * 2 if state == "local" else not beside.exists()
    for unknown in ("exact", "mean", None):
        with pytest.raises(ValueError, match="`compressor_state` must be 'local' or 'none'; got"):
            CompressedDDPStrategy(TopK(0.1), compressor_state=unknown)
    # Saved again and again under one name, the files are those of the latest; without them nothing is invented.
    path = tmp_path / "local" / "last.ckpt"
    for _ in range(3):
        run(keeps, 2, path=path, state="local")
    beside = path.parent / "rank-state" / "last.ckpt"
    assert len(list(beside.iterdir())) == 4
    for file in beside.iterdir():
        file.unlink()
    assert [(found, step) for found, step in run(restores, 2, path=path)] == [(None, 1)] * 2


@distributed(world_size=2)
def test_files_that_are_not_those_of_a_save_are_not_taken(group, tmp_path):
    place, written, strategy = Place(group.rank, 0, cut="1 x 1"), 0, CompressedDDPStrategy(TopK(0.1))

    def save(name="last.ckpt"):
        nonlocal written
        written += 1
        state = {"step": written, "residual": {"a": torch.full((100,), float(group.rank))}}
        return FILES.write(state, place, strategy.path_of_parts(tmp_path / name)[0], group)

    def read(saved, name="last.ckpt", at=place):
        return FILES.read(saved, at, tmp_path / name, group)

    def own(saved, rank=group.rank):
        return tmp_path / "rank-state" / "last.ckpt" / f"optimizers-{saved['key']}-{rank}.pt"

    def flipped(file):
        content = bytearray(file.read_bytes())
        content[content.find(torch.ones(4).numpy().tobytes())] ^= 1
        file.write_bytes(content)

    damages = (
        lambda file: file.write_bytes(b"garbage"),
        lambda file: file.write_bytes(file.read_bytes()[:500]),
        flipped,
        lambda file: file.write_bytes(own(saved, 0).read_bytes()),  # of another rank
        lambda file: torch.save(contextlib.nullcontext(), file),  # may run code
    )
    for damage in damages:
        saved = save()
        assert read(saved)["step"] == written
        comm.barrier(group)
        if group.rank == 1:
            damage(own(saved))
        comm.barrier(group)
        assert read(saved) is None
    # Of ranks that divide the model otherwise; then by a link, and named by each rank after a metric of its own.
    assert read(save(), at=place._replace(cut="2 x 1")) is None
    saved = save(f"metric={group.rank}.ckpt")
    if group.rank == 0:
        (tmp_path / "metric=0.ckpt").touch()
        (tmp_path / "link.ckpt").symlink_to("metric=0.ckpt")
    comm.barrier(group)
    assert read(saved, "link.ckpt")["step"] == written
    # Under Ray each writes into a folder of its own, which Ray puts together; one that all name is written once.
    with patched(checkpoint_files, "is_ray_environment", lambda _: True):
        name = f"worker{group.rank}/last.ckpt"
        assert strategy.path_of_parts(tmp_path / name) == (f"{tmp_path}/{name}", True)
        assert strategy.path_of_parts(tmp_path / "last.ckpt") == (f"{tmp_path}/last.ckpt", False)
    # What is removed does not hang on times, which some file systems lack and others round.
    for _ in range(4):
        before, saved = saved, save()
        for file in own(saved).parent.glob(f"*-{group.rank}.pt"):
            os.utime(file, ns=(0, 10**18 if saved["key"] not in file.name else 0))
    assert own(before).exists()
    assert own(saved).exists()
    assert len(list(own(saved).parent.glob(f"*-{group.rank}.pt"))) == 2


def test_a_state_of_a_sharded_checkpoint_leaves_the_step():
    compressor, alone = TopK(0.1, **SMALL), comm.Group.alone("alone")
    compressor.reduce_({"w": torch.randn(8, 8)}, alone)
    saved = {"layout": "parts", "step": 5, "by_name": {}}
    with pytest.warns(UserWarning, match="sharded or split model. Residuals.*are lost"):
        CompressorMemory(compressor, Place(0, 0), alone, alone).restore(saved, "a.ckpt")
    assert compressor.step == 5
    assert compressor.residual_norm == 0


@contextlib.contextmanager
def told():
    """Collect what is said on rank zero."""
    logger, lines = logging.getLogger("lightning.pytorch.utilities.rank_zero"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@distributed(world_size=2)
def test_a_run_begins_with_what_it_saves_and_what_does_not_fit(group):
    class Adam(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    cases = (
        (Net, TopK(0.1, momentum=0.9, **SMALL), "momentum of 0.9 before it selects"),
        (Adam, Policy({"*": Sign(**SMALL)}), "34 % higher"),
        (Adam, PowerSGD(2, **SMALL), None),
    )
    for kind, compression, message in cases:
        for strategy in (CompressedDDPStrategy(compression), LocalSGDStrategy(3, compression=compression)):
            is_told = message is not None and type(strategy) is CompressedDDPStrategy and group.rank == 0
            with warnings.catch_warnings(record=True) as found, told() as lines:
                warnings.simplefilter("always")
                fit(kind().double(), strategy, group, max_epochs=1)
            assert (
                any(message in str(one.message) for one in found) == is_told
                if message
                else not any("than with uncompressed" in str(one.message) for one in found)
            )
            assert any("instead of" in line for line in lines) == (group.rank == 0)


@distributed(world_size=2)
def test_files_of_a_checkpoint_go_with_it(group, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}")
    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL))
    fit(Net().double(), strategy, group, callbacks=[saves], enable_checkpointing=True)
    comm.barrier(group)
    beside = tmp_path / "rank-state"
    assert [path.name for path in beside.iterdir()] == [path.name for path in tmp_path.glob("*.ckpt")]


@distributed(world_size=2)
def test_files_of_a_checkpoint_stay_until_a_later_checkpoint_is_complete(group, tmp_path):
    path, may_write = tmp_path / "last.ckpt", threading.Event()

    class Slow(SafeCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if path.exists():
                may_write.wait(60)
            super().save_checkpoint(checkpoint, path, storage_options)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(path)
            while not path.exists():
                time.sleep(0.01)

        def on_train_end(self, *_):
            key = torch.load(path)["compression"]["key"]
            found = [file.name for file in (tmp_path / "rank-state" / "last.ckpt").iterdir()]
            comm.barrier(group)
            may_write.set()
            assert f"compression-{key}-{group.rank}.pt" in found

    strategy = CompressedDDPStrategy(TopK(0.1, **SMALL))
    options = {"plugins": [AsyncCheckpointIO(Slow())], "callbacks": [Saves()], "limit_train_batches": 4}
    fit(Net().double(), strategy, group, max_epochs=1, **options)


@distributed(world_size=2)
def test_lightnings_own_strategy_takes_the_hook(group):
    """On CUDA; on CPU Lightning passes over it."""
    module = Net()
    state = HookState(PowerSGD(2), module)
    trainer = fit(module.double(), DDPStrategy(ddp_comm_state=state, ddp_comm_hook=compression_hook), group)
    assert state.compressor.step == (trainer.global_step if trainer.strategy.root_device.type == "cuda" else 0)


def test_one_hook_only():
    with pytest.raises(TypeError, match="ddp_comm_hook"):
        CompressedDDPStrategy(PowerSGD(4), ddp_comm_hook=compression_hook)
