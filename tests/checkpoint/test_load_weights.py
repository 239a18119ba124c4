"""`load_weights`: from every kind of file, into every kind of module; of a divided one each rank reads its part."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import nn

from lightning_parallel import HybridParallelStrategy, comm, load_weights
from lightning_parallel.checkpoint import SavedCheckpoint, ShardedWriter, as_parts
from lightning_parallel.checkpoint.weights import WeightFiles, stored_weights
from lightning_parallel.cli import main
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.strategies.deferred.chain import stored_origin
from lightning_parallel.strategies.deferred.init import deferred_init
from lightning_parallel.strategies.deferred.tensor import is_deferred, materialize
from tests.harness import distributed, free_port, run_script
from tests.strategies.models import trainer_for
from tests.strategies.test_materialize_owned import WIDTH, Built, build, data


class Network(nn.Module):
    """Large and small tensors, a buffer, and a tied head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.register_buffer("scale", torch.rand(3))
        self.head = nn.Linear(WIDTH, 128, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


class Wrapped(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model


def untied(state):
    """Without the second name of the tied parameter, as Hugging Face saves it."""
    return {name: value for name, value in state.items() if name != "head.weight"}


def write_safetensors(state, path):
    save_file(untied(state), path / "weights.safetensors")
    return path / "weights.safetensors"


def write_hub_folder(state, path):
    ShardedWriter(Group.alone("test"), {}).save({"state_dict": as_parts(state, True)}, str(path / "saved"))
    assert main(["checkpoint", "export", str(path / "saved"), str(path / "hub"), "--max-shard-size", "90KB"]) == 0
    assert (path / "hub/model.safetensors.index.json").is_file()
    return path / "hub"


def write_sharded(state, path):
    ShardedWriter(Group.alone("test"), {}).save({"state_dict": as_parts(state, True)}, str(path / "saved"))
    assert main(["checkpoint", "reshard", str(path / "saved"), str(path / "two"), "--files", "2"]) == 0
    return path / "two"


def write_pt(state, path):
    torch.save(state, path / "model.pt")
    return path / "model.pt"


def write_ckpt(state, path):
    torch.save({"state_dict": state, "epoch": 3}, path / "model.ckpt")
    return path / "model.ckpt"


WRITERS = [write_safetensors, write_hub_folder, write_sharded, write_pt, write_ckpt]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_kind_of_file(write, tmp_path):
    expected = Network()
    path = write(expected.state_dict(), tmp_path)
    model = Network()
    load_weights(model, path)
    assert model.head.weight is model.embed.weight
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with deferred_init():
        model = Network()
        load_weights(model, str(path))
    assert is_deferred(model.layer.weight)
    assert stored_origin(model.layer.weight) is not None
    assert model.head.weight is model.embed.weight
    for name, value in model.state_dict().items():
        value = materialize(value) if is_deferred(value) else value
        assert torch.equal(value, expected.state_dict()[name]), name


def test_dtypes_are_those_of_the_module(tmp_path):
    expected = Network(torch.bfloat16)
    path = write_safetensors(expected.state_dict(), tmp_path)
    plain = Network()
    load_weights(plain, path)
    with deferred_init():
        model = Network()
        load_weights(model, path)
        model.to(torch.float64)
    for name, value in expected.state_dict().items():
        assert plain.state_dict()[name].dtype == torch.float32
        assert torch.equal(plain.state_dict()[name], value.float())
        found = model.state_dict()[name]
        assert found.dtype == torch.float64
        assert torch.equal(materialize(found) if is_deferred(found) else found, value.double())
    stored, dtypes = stored_origin(model.layer.weight)
    assert (stored.dtype, dtypes) == (torch.bfloat16, [torch.float32, torch.float64])


def test_what_is_done_with_them_afterwards_counts(tmp_path):
    expected = Network()
    path = write_safetensors(expected.state_dict(), tmp_path)
    with deferred_init():
        model = Network()
        load_weights(model, path)
        with torch.no_grad():
            model.embed.weight.mul_(2)
            model.layer.weight = nn.Parameter(model.layer.weight.T)
    assert stored_origin(model.embed.weight) is None
    assert stored_origin(model.layer.weight) is None
    assert torch.equal(materialize(model.embed.weight), 2 * expected.embed.weight)
    assert torch.equal(materialize(model.layer.weight), expected.layer.weight.T)


def test_names_begin_with_a_prefix(tmp_path):
    expected = Wrapped(Network())
    path = write_ckpt({**expected.state_dict(), "metric.total": torch.ones(2)}, tmp_path)
    model = Network()
    load_weights(model, path, prefix="model.")
    assert torch.equal(model.layer.weight, expected.model.layer.weight)
    with pytest.raises(ValueError, match="got `net.`, which begins none"):
        load_weights(model, path, prefix="net.")
    with pytest.raises(ValueError, match="unexpected in the file:\n    metric.total"):
        load_weights(Wrapped(model), path)
    load_weights(Wrapped(model), path, strict=False)


@pytest.mark.parametrize("is_built_deferred", [False, True])
def test_all_that_does_not_fit_is_named(tmp_path, is_built_deferred):
    state = {**Network().state_dict(), "other": torch.ones(2), "layer.weight": torch.ones(3, WIDTH)}
    del state["layer.bias"], state["embed.weight"], state["head.weight"]
    path = write_safetensors(state, tmp_path)
    with deferred_init() if is_built_deferred else torch.no_grad():
        model = Network()
    with pytest.raises(ValueError, match="do not fit `Network`") as info:
        load_weights(model, path)
    text = str(info.value)
    assert f"layer.weight must be [{WIDTH}, {WIDTH}]; got [3, {WIDTH}]" in text
    for name in ("layer.bias", "embed.weight", "head.weight", "other"):
        assert f"    {name}" in text
    del state["layer.weight"]
    with pytest.raises(ValueError, match="missing in the file:\n    embed.weight\n    layer.weight\n    layer.bias"):
        load_weights(model, write_safetensors(state, tmp_path))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_files_that_are_none_are_refused(tmp_path):
    model = Network()
    torch.save({"state_dict": model.state_dict(), "x": Bomb(tmp_path / "trace")}, tmp_path / "bomb.ckpt")
    with pytest.raises(ValueError, match=r"may run code; got .*system.*add_safe_globals"):
        load_weights(model, tmp_path / "bomb.ckpt")
    assert not (tmp_path / "trace").exists()
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for wrong in (b"", b"\xff" * 16, (tmp_path / "bomb.ckpt").read_bytes()[:-40], (tmp_path / "old.pt").read_bytes()):
        (tmp_path / "damaged.ckpt").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"damaged.ckpt must be a file that `torch.save` of torch 1.6 or later"):
            load_weights(model, tmp_path / "damaged.ckpt")
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        load_weights(model, "gpt2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"a folder without `model.safetensors`"):
        load_weights(model, tmp_path / "empty")
    path = write_safetensors(model.state_dict(), tmp_path)
    content = path.read_bytes()
    for wrong in (content[:-1], content[:50], b"", b"\xff" * 16):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="must be a `safetensors` file"):
            load_weights(model, path)
    weight = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    for changed in (
        {"a": {**weight, "shape": [-2, -3]}},
        {"a": {**weight, "shape": ["2", 3]}},
        {"a": {**weight, "shape": [2, 0, 10**30], "data_offsets": [0, 0]}},
        {"a": {**weight, "data_offsets": ["0", "24"]}},
        {"a": {**weight, "data_offsets": [0.0, 24.0]}},
        {"a": {**weight, "dtype": ["F32"]}},
        {"a": weight, "b": weight},
        {"a": weight, "b": {**weight, "shape": [1], "data_offsets": [20, 24]}},
        {"a": [["x"] * 3]},
        ["a"],
    ):
        head = json.dumps(changed).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 24)
        with pytest.raises(ValueError, match="must be a `safetensors` file"):
            stored_weights(path)
    deep = b'{"a":' * 100_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ValueError, match="must be a `safetensors` file.*recursion"):
        stored_weights(path)
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate((1 << 40) + 8)  # takes no space, and is not read
    with pytest.raises(ValueError, match="header too large"):
        stored_weights(path)
    path.write_bytes(content)
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match="on the meta device"):
        load_weights(model, path)


# ---------------------------------------------------------------------------------------------------------- divided


class Loaded(Built):
    """Takes its weights from a file, in `configure_model`."""

    def __init__(self, kind, path):
        super().__init__(kind)
        self.path = path

    def configure_model(self):
        if self.model is None:
            self.model = build(self.kind)
            load_weights(self.model, self.path)


def shared_weights(group, kind):
    """Write the weights of a model that is like no initial one; returns it, and the folder."""
    path = Path(comm.broadcast_object(tempfile.mkdtemp(prefix="lightning_parallel_test_"), group))
    torch.manual_seed(11)
    model = build(kind)
    if kind == "llama" and group.rank == 0:
        model.save_pretrained(path / "hub", max_shard_size="300KB")
    elif group.rank == 0:
        save_file(model.state_dict(), path / "weights.safetensors")
    comm.barrier(group)
    return model, path / "hub" if kind == "llama" else path / "weights.safetensors"


def fit(module, group, sizes):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE=str(group.size))
    strategy = HybridParallelStrategy(num_microbatches=2, balance="uniform", gather_after_fit="off", **sizes)
    trainer = trainer_for(strategy, group.size, max_epochs=1)
    torch.manual_seed(11)  # for what is no weight
    trainer.fit(module, data())
    return {name: value.float() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", "llama"])
@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
@distributed(world_size=2)
def test_each_rank_reads_what_it_owns(group, kind, axis):
    model, path = shared_weights(group, kind)
    expected = Built(kind, model)
    trainer = trainer_for("auto", 1, max_epochs=1)
    trainer.fit(expected, data())
    whole = sum(value.numel() * value.element_size() for value in expected.parameters())
    read = [0]

    def counted(source, name, rule=None, rank=0):
        value = before(source, name, rule, rank)
        read[0] += value.numel() * value.element_size()
        return value

    with patched(WeightFiles, "read", counted) as before:
        found = fit(Loaded(kind, path), group, {axis: 2})
    assert 0.2 * whole < read[0] < 0.7 * whole
    if group.rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@distributed(world_size=2)
def test_a_sharded_checkpoint_is_read_by_parts_and_checked(group):
    model, folder = shared_weights(group, "plain")
    path = comm.broadcast_object(str(folder.parent / "saved"), group)
    ShardedWriter(group, {}).save({"state_dict": as_parts(model.state_dict(), group.rank == 0)}, path)
    expected = Built("plain", model)
    trainer_for("auto", 1, max_epochs=1).fit(expected, data())
    found = fit(Loaded("plain", path), group, {"tensor_parallel_size": 2})
    if group.rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        part = SavedCheckpoint.open(path).manifest.tensors["state_dict/layers.1.0.weight"].parts[0]
        content = bytearray(Path(path, part.file).read_bytes())
        content[part.begin + 5] ^= 1
        Path(path, part.file).write_bytes(content)
    comm.barrier(group)
    with pytest.raises(ValueError, match=r"is damaged: .*layers.1.0.weight"):
        fit(Loaded("plain", path), group, {"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"is damaged: .*layers.1.0.weight"):
        fit(Loaded("plain", path), group, {"pipeline_parallel_size": 2})


class OfTheOtherPackage(pytorch_lightning.LightningModule):
    def __init__(self, path):
        super().__init__()
        self.path, self.model = path, None
        self.deferred = []

    def configure_model(self):
        if self.model is None:
            self.model = build("plain")
            load_weights(self.model, self.path)
            self.deferred = [hasattr(type(value), "read_later") for value in self.model.parameters()]

    def training_step(self, ids, index):
        return self.model(ids).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@distributed(world_size=2)
def test_trainers_of_the_other_package(group):
    model, path = shared_weights(group, "plain")
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(tensor_parallel_size=2, gather_after_fit="off")
    strategy.verify = "off"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pytorch_lightning.Trainer(strategy=strategy, devices=2, max_epochs=1, **quiet)
    module = OfTheOtherPackage(path)
    trainer.fit(module, data())
    assert any(module.deferred)
    found = trainer.strategy.lightning_module_state_dict()
    if group.rank == 0:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[f"model.{name}"], value, msg=name)


MEASURE = """
import os, sys, torch, torch.multiprocessing as mp
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from lightning_parallel import HybridParallelStrategy, load_weights
from lightning_parallel.compat import patched
from lightning_parallel.strategies import mesh_strategy

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024

def measured(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    work()
    os.write(1, f"MiB {status('VmHWM') - before:.1f}\\n".encode())

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        self.blocks = nn.ModuleList(layers() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

class Project(LightningModule):
    def configure_model(self):
        self.model = Deep()
        measured(lambda: load_weights(self.model, sys.argv[1]))

    def training_step(self, x, index):
        return self.model(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(rank):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="4")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    torch.set_num_threads(1)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    strategy = HybridParallelStrategy(verify="off", gather_after_fit="off", balance="uniform", **sizes)
    trainer = Trainer(strategy=strategy, devices=4, accelerator="cpu", max_steps=1, logger=False, barebones=True)

    def materialize(*arguments):
        measured(lambda: before(*arguments))

    with patched(mesh_strategy, "materialize_owned", materialize) as before:
        trainer.fit(Project(), torch.utils.data.DataLoader(torch.randn(8, 512), batch_size=8))

if __name__ == "__main__":
    mp.start_processes(fit, (), 4, start_method="fork")
"""


@pytest.mark.sweep(kept=None)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_no_rank_holds_the_model(tmp_path):
    state = {}
    for number in range(8):
        for layer, (rows, columns) in ((0, (2048, 512)), (2, (512, 2048))):
            state[f"blocks.{number}.{layer}.weight"] = 0.01 * torch.randn(rows, columns)
            state[f"blocks.{number}.{layer}.bias"] = torch.zeros(rows)
    save_file(state, tmp_path / "weights.safetensors")
    assert 64 < (tmp_path / "weights.safetensors").stat().st_size / 2**20 < 66
    (tmp_path / "script.py").write_text(MEASURE)
    ended = run_script(tmp_path / "script.py", tmp_path / "weights.safetensors", free_port())
    assert ended.returncode == 0, ended.stderr
    found = [float(number) for number in re.findall(r"MiB ([\d.]+)\n", ended.stdout)]
    # When they are named, and when they are read: a quarter, which is 16, and a few copies of one part, which is 2.
    assert len(found) == 8
    assert max(found) < 28, found
    assert min(found) < 4, found
