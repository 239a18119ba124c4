"""Folders that Lightning's own strategies write by `torch.distributed.checkpoint`: read by any layout, and safely."""

import os
import pickle
import shutil
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.checkpoint import DistributedCheckpoint, SavedCheckpoint
from lightning_parallel.comm import Group
from lightning_parallel.compat.distributed_checkpoint import read_index
from lightning_parallel.tensor.sharding import Shard
from tests.harness import distributed, needs_fully_shard, run
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_compressed_fsdp import PlainFSDP
from tests.strategies.test_pipeline import Block, Deep

SHORT = {"limit_train_batches": 2, "limit_val_batches": 1}


class ShardedFSDP(PlainFSDP):
    """Lightning's FSDP on CPU, with its own checkpoints."""

    def save_checkpoint(self, *args, **kwargs):
        FSDPStrategy.save_checkpoint(self, *args, **kwargs)


class Project(Deep):
    """Divides itself where Lightning's `ModelParallelStrategy` asks for it; two groups, by names."""

    def __init__(self, layout="one process"):
        super().__init__()
        self.layout, self.is_divided = layout, False
        # Lightning's FSDP trains in single precision.
        self.to(torch.float32 if "fsdp1" in layout else torch.float64)

    def configure_model(self):
        if self.is_divided or self.layout not in ("fsdp2", "tensor"):
            return
        self.is_divided = True
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for part in self.blocks if self.layout == "tensor" else (self.embed, *self.blocks, self.head):
            if self.layout == "tensor":
                parallelize_module(part, self.device_mesh["tensor_parallel"], plan)
            else:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        matrices = [value for name, value in self.named_parameters() if name.endswith("weight")]
        others = [value for name, value in self.named_parameters() if name.endswith("bias")]
        # The folder has names: the order within a group may be another one.
        others = others[::-1] if self.is_divided or self.layout == "fsdp1" else others
        groups = [{"params": others, "lr": 0.02}, {"params": matrices, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def strategy_of(layout):
    if layout == "fsdp1":
        return ShardedFSDP(state_dict_type="sharded", auto_wrap_policy={Block})
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return ModelParallelStrategy(**sizes if layout == "fsdp2" else dict(zip(sizes, (1, 2))))


def fit(module, strategy, devices, replicas, rank, **options):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    ckpt_path = options.pop("ckpt_path", None)
    trainer = trainer_for(strategy, devices, use_distributed_sampler=False, **{**SHORT, **options})
    data = loader(replicas, rank // (devices // replicas), dtype=module.head.weight.dtype)
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    return trainer


def write_folder(layout):
    path = str(Path(tempfile.mkdtemp(prefix="lightning_parallel_test_")) / "saved.ckpt")
    run(_write_folder, 2, layout=layout, path=path)
    return path


def _write_folder(group, layout, path):
    if layout == "fsdp2":
        needs_fully_shard()
    replicas = 1 if layout == "tensor" else 2
    trainer = fit(Project(layout), strategy_of(layout), 2, replicas, group.rank, max_epochs=1)
    trainer.save_checkpoint(path)
    comm.barrier(group)


def expected_run(layout):
    module = Project(f"one process, as {layout}")
    trainer = fit(module, "auto", 1, 1, 0)
    return module.state_dict(), trainer.callback_metrics["val_loss"]


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["fsdp2", "tensor", "fsdp1"])
def test_a_folder_of_lightning_is_resumed_by_stages_and_shards(layout):
    path = write_folder(layout)
    assert (Path(path) / ".metadata").is_file()
    run(_resumes, 2, path=path, layout=layout)


def _resumes(group, path, layout):
    expected, loss = expected_run(layout)
    close = {"rtol": 1e-3, "atol": 1e-5} if layout == "fsdp1" else {"rtol": 1e-8, "atol": 1e-10}
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}):
        options = {"gather_after_fit": "off", **sizes}
        module = Project(f"one line, after {layout}")
        trainer = fit(module, HybridParallelStrategy(**options), 2, 1, group.rank, ckpt_path=path)
        found = trainer.strategy.lightning_module_state_dict()
        if group.rank == 0:
            assert list(found) == list(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, **close, msg=f"{name}, {sizes}")
        torch.testing.assert_close(trainer.callback_metrics["val_loss"], loss, rtol=1e-5, atol=1e-6)
        trainer = trainer_for(HybridParallelStrategy(**options), 2, use_distributed_sampler=False, **SHORT)
        data = loader(dtype=module.head.weight.dtype)
        (metrics,) = trainer.validate(Project(module.layout), data, ckpt_path=path)
        assert metrics["val_loss"] > 0


@distributed(world_size=2)
def test_a_rank_reads_the_chunks_that_it_needs(group):
    path = comm.broadcast_object(tempfile.mkdtemp(), group)
    _write_folder(group, "fsdp2", f"{path}/a")
    opened = DistributedCheckpoint.open(f"{path}/a", group)
    state = opened.checkpoint()["state_dict"]
    assert opened.bytes_read < 100_000  # scalars of optimizers
    before = opened.bytes_read
    full = state["blocks.0.up.weight"]
    assert full.shape == (16, 8)
    assert opened.bytes_read == before
    whole, bytes_of_whole = full + 0, opened.bytes_read - before
    rows = Shard.even(0, 16, 2)
    for rank in range(2):
        before = opened.bytes_read
        assert torch.equal(opened.read("state_dict.blocks.0.up.weight", rows, rank), rows.split(whole, rank))
        assert opened.bytes_read - before < 0.6 * bytes_of_whole
    for rule in (Shard.even(1, 8, 2), Shard.packed(0, [8, 8], 2), Shard(0, (((0, 10),), ((6, 16),)))):
        for rank in range(2):
            assert torch.equal(opened.read("state_dict.blocks.0.up.weight", rule, rank), rule.split(whole, rank))


class Bomb:
    """Its pickle runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def folder():
    return write_folder("tensor")


def opened(path):
    return DistributedCheckpoint.open(str(path), Group.alone("test"))


def test_what_would_run_code_is_refused_and_runs_nothing(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    trace = tmp_path / "trace"
    good = (copy / ".metadata").read_bytes()
    hidden = pickle.loads(good)
    hidden.planner_data = {"state_dict.head.weight": Bomb(trace)}
    for content in (pickle.dumps(Bomb(trace)), pickle.dumps(hidden), pickle.dumps(eval), b"\x82\x01."):
        (copy / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"copy/.metadata must be an index of"):
            opened(copy)
    (copy / ".metadata").write_bytes(good)
    torch.save({"hyper_parameters": Bomb(trace)}, copy / "meta.pt")
    with pytest.raises(ValueError, match=r"`meta.pt` .* may run code; got .*system.*add_safe_globals"):
        opened(copy).checkpoint()
    # The same in a value that is not a tensor, in place of one of the optimizer's settings.
    index = read_index(good, "test")
    place = next(place for name, place in index.objects.items() if name.endswith(".betas"))
    torch.save({"x": [Bomb(trace)]}, copy / "bomb.pt")
    content = bytearray((copy / place.file).read_bytes())
    bomb = (copy / "bomb.pt").read_bytes()
    (copy / place.file).write_bytes(content + bomb)
    metadata = pickle.loads(good)
    for key, info in metadata.storage_data.items():
        if key.fqn.endswith(".betas"):
            info.offset, info.length = len(content), len(bomb)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    (copy / "meta.pt").write_bytes((Path(folder) / "meta.pt").read_bytes())
    with pytest.raises(ValueError, match=r"betas` in .* may run code"):
        opened(copy).checkpoint()
    assert not trace.exists()


class Read:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_members_of_enumerations_are_read_as_early_python_3_11_writes_them(folder):
    content = (Path(folder) / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    metadata.member = Read(metadata_module._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    assert read_index(pickle.dumps(metadata), "test") == read_index(content, "test")
    metadata.member = Read(torch.Size, "count")
    with pytest.raises(ValueError, match="reads `count` of .*, which no index needs"):
        read_index(pickle.dumps(metadata), "test")


def test_what_is_damaged_or_leads_elsewhere_is_named(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="is not the name of a file"):
        opened(copy)
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["state_dict.blocks.0.up.weight"]
    described.chunks.pop()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="64 of its 128 elements"):
        opened(copy)
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    name = "state_dict.blocks.0.up.weight"
    second = metadata.state_dict_metadata[name].chunks[1]
    moved = torch.Size([second.offsets[0] - 1, *second.offsets[1:]])
    metadata.storage_data = {
        replace(key, offset=moved) if key.fqn == name and key.offset == second.offsets else key: place
        for key, place in metadata.storage_data.items()
    }
    second.offsets = moved
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=f"chunks of `{name}` overlap"):
        opened(copy)
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    first, second, *_ = [info for info in metadata.storage_data.values() if info.relative_path == "__0_0.distcp"]
    second.offset, second.length = first.offset + 1, first.length - 1
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="in the same bytes of __0_0.distcp"):
        opened(copy)
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    metadata.planner_data["state_dict.head.weight"] = ("state_dict", "blocks.0.up.weight", "x")
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="must hold one value for each key"):
        opened(copy).checkpoint()
    (copy / ".metadata").write_bytes((Path(folder) / ".metadata").read_bytes())
    index, chunks = read_index((copy / ".metadata").read_bytes(), "test"), (copy / "__1_0.distcp").read_bytes()
    name, place = next(
        (name, chunk.place)
        for name, (_, _, chunks) in index.tensors.items()
        for chunk in chunks
        if chunk.place.file == "__1_0.distcp"
    )
    torch.save(Bomb(tmp_path / "trace"), copy / "bomb.pt")
    bomb = (copy / "bomb.pt").read_bytes()
    for content, expected in (
        (bomb, "must hold only tensors"),
        (b"\xff" * len(bomb), "must be a file that `torch.save`"),
    ):
        damaged = bytearray(chunks)
        damaged[place.begin : place.begin + place.num_bytes] = content.ljust(place.num_bytes, b"\0")[: place.num_bytes]
        (copy / "__1_0.distcp").write_bytes(damaged)
        with pytest.raises(ValueError, match=expected) as raised:
            opened(copy).read(name)
        assert f"`{name}` in {copy}/__1_0.distcp" in str(raised.value)
    assert not (tmp_path / "trace").exists()
    (copy / "__1_0.distcp").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"__1_0.distcp must have \d+ bytes; got 2"):
        opened(copy)
    with pytest.raises(FileNotFoundError):
        SavedCheckpoint.open(str(copy))


def test_values_that_need_code_are_loaded_where_the_user_says_so(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rest = torch.load(copy / "meta.pt", weights_only=True)
    torch.save({**rest, "mine": Fraction(1, 3)}, copy / "meta.pt")
    with pytest.raises(ValueError, match=r"may run code; got fractions.Fraction. .*add_safe_globals"):
        opened(copy).checkpoint()
    with torch.serialization.safe_globals([Fraction]):
        assert opened(copy).checkpoint()["mine"] == Fraction(1, 3)
