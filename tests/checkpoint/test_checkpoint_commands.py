"""`lightning-parallel checkpoint`: what it shows, finds, and writes for others to read."""

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from safetensors import safe_open

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.checkpoint import SavedCheckpoint, ShardedWriter, as_parts
from lightning_parallel.cli import main
from lightning_parallel.comm import Group
from tests.checkpoint.test_load_weights import Bomb
from tests.checkpoint.test_sharded_files import changed_manifest
from tests.harness import run as run_on_ranks
from tests.harness import run_script
from tests.strategies.test_pipeline import fit
from tests.strategies.test_pipeline_checkpoint import Tied

SHORT = {"num_sanity_val_steps": 0, "limit_val_batches": 1}


def train_and_save():
    path = Path(tempfile.mkdtemp(prefix="lightning_parallel_test_")) / "saved.ckpt"
    return run_on_ranks(_train_and_save, 2, path=str(path))[0]


def _train_and_save(group, path):
    path = comm.broadcast_object(path, group)
    strategy = HybridParallelStrategy(num_microbatches=2, checkpoint_format="sharded", tensor_parallel_size=2)
    fit(Tied("adam"), strategy, 2, max_epochs=1, limit_val_batches=0).save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def saved():
    """A checkpoint of a run in which each of two ranks held half of each layer."""
    path = Path(train_and_save())
    yield path
    shutil.rmtree(path.parent)


def write(path, state, **entries):
    ShardedWriter(Group.alone("test"), {}).save({"state_dict": as_parts(state, True), **entries}, str(path))
    return path


def call(capsys, *words, status=0):
    assert main(["checkpoint", *map(str, words)]) == status
    captured = capsys.readouterr()
    return captured.err if status == 2 else captured.out


def same(path, other):
    one, two = (SavedCheckpoint.open(str(each)) for each in (path, other))
    assert one.manifest.document == two.manifest.document
    assert one.manifest.tensors.keys() == two.manifest.tensors.keys()
    for name in one.manifest.tensors:
        torch.testing.assert_close(one.read(name), two.read(name), rtol=0, atol=0)


def test_inspect_shows_what_is_in_it(capsys, saved):
    out = call(capsys, "inspect", saved, "--width", 140)
    assert "layout    tensor 2" in out
    assert "model:" in out
    assert "optimizer:" in out
    row = next(line for line in out.splitlines() if line.startswith("blocks.0.") and "weight" in line)
    assert "float64" in row
    assert "and " in out
    assert "more; `--tensors` shows all" in out
    assert "global_step" in out
    assert "loops" in out
    full = call(capsys, "inspect", saved, "--tensors", "--width", 140)
    assert "more; `--tensors` shows all" not in full
    assert full.count("exp_avg_sq") > 6


def test_inspect_lists_those_of_a_folder_the_newest_first(capsys, tmp_path):
    for step in (2, 10, 5):
        write(tmp_path / f"step={step}.ckpt", {"w": torch.ones(3)}, global_step=step)
    rows = call(capsys, "inspect", tmp_path, "--width", 140).splitlines()
    assert [row.split()[0] for row in rows if row.startswith("step=")] == ["step=10.ckpt", "step=5.ckpt", "step=2.ckpt"]


HOSTILE = (
    "\x1b[2J\x1b]0;title\x07",
    "\x1b]52;c;Y3VybCBldmlsfHNo\x1b\\",
    "\x9b31mred",
    "[/]",
    "[red]whole[/red]",
    "[link=http://evil]x",
    "\u202etxt.exe",
    "a\nwhole    all",
    "\ud800",
    "back\\",
)


@pytest.mark.parametrize("action", [["inspect"], ["inspect", "--tensors"], ["verify"], ["inspect", "list"]])
def test_names_in_a_checkpoint_do_nothing_to_the_terminal(capsys, tmp_path, action):
    """Escape sequences, markup and ends of lines in what somebody else has written are shown as text."""
    folder = tmp_path / "x[red]\x1b[31m"
    path = write(folder / "saved[red].ckpt", {f"layer.{text}": torch.ones(3) for text in HOSTILE})
    document = {"state_dict": {}, **{f"{text} entry": text for text in HOSTILE}}
    hostile_dict = {text: text for text in HOSTILE}
    change = {"document": document, "versions": hostile_dict, "layout": dict.fromkeys(HOSTILE, 2)}
    changed_manifest(path, lambda manifest: manifest.update(change))
    if action == ["verify"]:
        (file,) = path.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-100:] = b"x" * 100
        file.write_bytes(content)
    if "list" in action:
        write(folder / "other.ckpt", {"w": torch.ones(1)})
        out = call(capsys, "inspect", folder, "--width", 2000)
    else:
        out = call(capsys, *action, path, "--width", 2000, status=int(action == ["verify"]))
    assert {char for char in out if not char.isprintable()} <= {"\n"}
    assert "\\x1b" in out
    assert "[red]" in out
    assert not any(line.startswith("whole") for line in out.splitlines())
    (path / "manifest.json").write_bytes(b'{"sha256": "\x1b[2J"}\n')
    err = call(capsys, "inspect", path, status=2)
    assert {char for char in err if not char.isprintable()} <= {"\n"}


def test_inspect_shows_files_of_lightning(capsys, tmp_path, monkeypatch):
    """What `make train` has written: `.ckpt` files in the folder of a run, which nobody converted."""
    folder = tmp_path / "version_0" / "checkpoints"
    trainer = fit(Tied("adam"), "auto", 1, max_epochs=1, limit_val_batches=0)
    trainer.save_checkpoint(folder / "epoch=0-step=3.ckpt")
    (path,) = folder.iterdir()
    for place in (path, folder, folder.parent):
        out = call(capsys, "inspect", place, "--width", 140)
        assert f"step      {trainer.global_step}" in out
        assert "one file" in out
        (row,) = [line for line in out.splitlines() if line.startswith("blocks.0.up.weight")]
        assert "float64" in row
        assert "optimizer:" in out
        assert "loops" in out
    torch.save({"state_dict": {}, "x": [Bomb(tmp_path / "executed")]}, folder / "bomb.ckpt")
    (folder / "damaged.ckpt").write_bytes(path.read_bytes()[:-100])
    (folder / ".hidden.ckpt").write_bytes(b"")
    torch.save(Tied("adam").state_dict(), folder / "weights.pt")
    write(folder / "sharded.ckpt", {"w": torch.ones(3)}, global_step=99)
    rows = call(capsys, "inspect", folder, "--width", 300).splitlines()
    found = {row.split()[0]: row for row in rows if ".ckpt" in row or ".pt" in row}
    assert found.keys() == {"bomb.ckpt", "damaged.ckpt", path.name, "weights.pt", "sharded.ckpt"}
    assert "may run code" in found["bomb.ckpt"]
    assert "must be a file" in found["damaged.ckpt"]
    assert found["sharded.ckpt"].split()[1] == "99"
    assert "may run code" in call(capsys, "inspect", folder / "bomb.ckpt", status=2)
    assert "model:" in call(capsys, "inspect", folder / "weights.pt")
    assert not (tmp_path / "executed").exists()
    fsspec.filesystem("memory").pipe_file("/files/a.ckpt", path.read_bytes())
    assert "blocks.0.up.weight" in call(capsys, "inspect", "memory://files/a.ckpt", "--width", 140)


def test_verify_names_what_is_damaged(capsys, tmp_path):
    state = {"a": torch.randn(300), "b": torch.randn(40, 5), "c": torch.arange(7)}
    path = write(tmp_path / "saved.ckpt", state)
    assert "whole" in call(capsys, "verify", path)
    manifest = SavedCheckpoint.open(str(path)).manifest
    part = manifest.tensors["state_dict/b"].parts[0]
    content = bytearray((path / part.file).read_bytes())
    content[part.begin + part.num_bytes - 1] ^= 1
    (path / part.file).write_bytes(content)
    out = call(capsys, "verify", tmp_path, status=1)
    assert "`state_dict/b`" in out
    assert "`state_dict/a`" not in out
    assert part.file in out
    content[part.begin + part.num_bytes - 1] ^= 1
    content[12] ^= 255
    (path / part.file).write_bytes(content)
    assert "header" in call(capsys, "verify", path, status=1)
    (path / part.file).unlink()
    assert "is missing" in call(capsys, "verify", path, status=1)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("float32", "float16", 1))
    assert "checksum does not match" in call(capsys, "verify", tmp_path, status=1)


@pytest.mark.parametrize("action", [["inspect"], ["verify"], ["merge", "x"], ["reshard", "x", "--files", "2"]])
def test_what_is_no_checkpoint_is_refused(capsys, tmp_path, action):
    name, *rest = action
    assert "must be a sharded checkpoint" in call(capsys, name, tmp_path / "nothing", *rest, status=2)


def test_a_merged_checkpoint_is_an_ordinary_one(capsys, saved, tmp_path):
    path = tmp_path / "new" / "whole.ckpt"
    call(capsys, "merge", saved, path)
    assert [child.name for child in path.parent.iterdir()] == ["whole.ckpt"]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    merged = torch.load(path, weights_only=False)
    assert torch.load(path, weights_only=True, mmap=True).keys() == merged.keys()
    reference = fit(Tied("adam"), "auto", 1, max_epochs=1, limit_val_batches=0)
    reference.save_checkpoint(tmp_path / "reference.ckpt")
    expected = torch.load(tmp_path / "reference.ckpt", weights_only=False)
    assert list(merged["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(merged["state_dict"][name], value, rtol=1e-10, atol=1e-12)
    state = merged["state_dict"]
    assert state["head.weight"].data_ptr() == state["out.weight"].data_ptr()
    assert state["head.weight"].data_ptr() != state["embed.weight"].data_ptr()
    loaded = Tied.load_from_checkpoint(path, weights_only=False)
    torch.testing.assert_close(loaded.head.weight.detach(), expected["state_dict"]["head.weight"])
    # Stock Lightning goes on from it as from its own.
    found = fit(Tied("adam"), "auto", 1, ckpt_path=path, **SHORT).callback_metrics
    wanted = fit(Tied("adam"), "auto", 1, ckpt_path=tmp_path / "reference.ckpt", **SHORT).callback_metrics
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-7)


def test_a_link_with_the_name_of_the_hidden_file_is_not_followed(tmp_path, capsys):
    path, victim = write(tmp_path / "saved.ckpt", {"a": torch.randn(3)}), tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".whole.ckpt.{os.getpid()}").symlink_to(victim)
    (tmp_path / "whole.ckpt").symlink_to(victim)
    call(capsys, "merge", path, tmp_path / "whole.ckpt")
    assert victim.read_text() == "precious"
    assert torch.load(tmp_path / "whole.ckpt")["state_dict"]["a"].shape == (3,)
    assert (tmp_path / "whole.ckpt").stat().st_mode & 0o777 == victim.stat().st_mode & 0o777, "that of a new file"


def test_merge_keeps_every_kind_of_value(tmp_path, capsys):
    state = {
        "half": torch.randn(3, 5).bfloat16(),
        "complex": torch.randn(4, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "column": torch.randn(4, 6).T,
    }
    extra = {"array": np.arange(5), "plain": torch.arange(3), "nested": [(torch.ones(2), {1: torch.zeros(2)})]}
    path = write(tmp_path / "saved.ckpt", state, callbacks=extra)
    call(capsys, "merge", path, tmp_path / "whole.ckpt")
    found = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    for name, value in state.items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=0, atol=0)
    assert found["callbacks"]["array"].tolist() == [0, 1, 2, 3, 4]
    assert found["callbacks"]["plain"].tolist() == [0, 1, 2]
    (ones, zeros) = found["callbacks"]["nested"][0]
    assert ones.tolist() == [1, 1]
    assert zeros[1].tolist() == [0, 0]


def test_a_merge_that_fails_leaves_nothing(tmp_path, capsys):
    path = write(tmp_path / "saved.ckpt", {"a": torch.randn(300)})
    part = SavedCheckpoint.open(str(path)).manifest.tensors["state_dict/a"].parts[0]
    content = bytearray((path / part.file).read_bytes())
    content[part.begin] ^= 1
    (path / part.file).write_bytes(content)
    for words in (["merge", path, tmp_path / "out/a"], ["reshard", path, tmp_path / "out/b", "--files", "2"]):
        assert "is damaged" in call(capsys, *words, status=2)
    assert "is damaged" in call(capsys, "export", path, tmp_path / "out", status=2)
    assert [child.name for child in (tmp_path / "out").iterdir()] == []


MEASURE = """
import sys
import torch
from pathlib import Path
from lightning_parallel.checkpoint import SavedCheckpoint
from lightning_parallel.checkpoint.commands import find_damage
from lightning_parallel.checkpoint.commands import export_weights, reshard

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

path, output, what = sys.argv[1:]
torch.nn.Linear(8, 8)(torch.randn(2, 8))
work = {
    "verify": lambda saved: list(find_damage(saved, lambda count: None)),
    "reshard": lambda saved: reshard(saved, output, 3),
    "export": lambda saved: export_weights(saved, output, 64 << 20),
}[what]
SavedCheckpoint.open(path + ".small")  # what is imported and allocated once
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
work(SavedCheckpoint.open(path))
print((status("VmHWM") - before) / 1024)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """16 tensors of 16 MiB, in five files, so that most of them are cut."""
    folder = tmp_path_factory.mktemp("large")
    write(folder / "one", {f"layer.{number}": torch.full((2048, 2048), float(number)) for number in range(16)})
    write(folder / "saved.small", {"w": torch.ones(2048)})
    assert main(["checkpoint", "reshard", str(folder / "one"), str(folder / "saved"), "--files", "5"]) == 0
    return folder / "saved"


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
@pytest.mark.parametrize("what", ["verify", "reshard", "export"])
def test_memory_is_that_of_two_tensors_whatever_the_size_of_the_model(large, tmp_path, what):
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    ended = run_script(script, large, tmp_path / "out", what)
    assert ended.returncode == 0, ended.stderr
    # Two tensors of 16 MiB, and a few blocks; all sixteen are 256.
    assert float(ended.stdout.split()[-1]) < 2 * 16 + 16


def test_reshard_writes_equal_files_that_any_run_resumes_from(capsys, saved, tmp_path, large):
    out = call(capsys, "reshard", saved, tmp_path / "new.ckpt", "--files", 3)
    assert "3 files" in out
    same(saved, tmp_path / "new.ckpt")
    sizes = list(SavedCheckpoint.open(str(large)).manifest.files.values())
    assert len(sizes) == 5
    assert max(sizes) < 1.02 * min(sizes)
    same(large, large.parent / "one")
    resumed = run_on_ranks(_resume, 2, path=str(tmp_path / "new.ckpt"))[0]
    assert resumed == pytest.approx(run_on_ranks(_resume, 2, path=str(saved))[0], rel=1e-9)
    # In place, and back into one file.
    call(capsys, "reshard", tmp_path / "new.ckpt", tmp_path / "new.ckpt", "--files", 1)
    same(saved, tmp_path / "new.ckpt")
    assert "`--files` must be at least 1" in call(capsys, "reshard", saved, tmp_path / "x", "--files", 0, status=2)


def _resume(group, path):
    strategy = HybridParallelStrategy(num_microbatches=2, pipeline_parallel_size=2)
    return fit(Tied("adam"), strategy, 2, ckpt_path=path, **SHORT).callback_metrics["train_loss"].item()


def test_stores_of_objects(capsys, saved, tmp_path):
    memory = f"memory://{tmp_path.name}"
    call(capsys, "reshard", saved, f"{memory}/a.ckpt", "--files", 2)
    same(saved, f"{memory}/a.ckpt")
    assert "whole" in call(capsys, "verify", f"{memory}/a.ckpt")
    call(capsys, "merge", f"{memory}/a.ckpt", f"{memory}/whole.ckpt")
    call(capsys, "merge", f"{memory}/a.ckpt", tmp_path / "whole.ckpt")
    with fsspec.open(f"{memory}/whole.ckpt") as stream:
        found = torch.load(stream, weights_only=False)
    assert found["state_dict"].keys() == torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"].keys()
    call(capsys, "export", f"{memory}/a.ckpt", f"{memory}/weights", "--max-shard-size", "1KB")
    assert fsspec.filesystem("memory").exists(f"/{tmp_path.name}/weights/model.safetensors.index.json")


class Wrapped(LightningModule):
    """A Hugging Face model as people wrap it."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def tiny(kind, tied):
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    if kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=32, num_key_value_heads=1, tie_word_embeddings=tied
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=96, n_layer=2, n_head=2, n_embd=16, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False), ("llama", True)])
def test_transformers_loads_what_is_exported(capsys, tmp_path, kind, tied):
    torch.manual_seed(3)
    model = tiny(kind, tied)
    path = write(tmp_path / "saved.ckpt", {**Wrapped(model).state_dict(), "metric.total": torch.ones(2)})
    out = call(capsys, "export", path, tmp_path / "hub", "--prefix", "model.", "--max-shard-size", "8KB")
    assert "left out 1 tensors" in out
    model.config.save_pretrained(tmp_path / "hub")
    index = json.loads((tmp_path / "hub/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    # The same names as transformers writes: of tied ones the first.
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs/model.safetensors", "pt") as theirs:
        assert set(index["weight_map"]) == set(theirs.keys())
    for loader_class in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        loaded, info = loader_class.from_pretrained(tmp_path / "hub", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        is_whole = loader_class is transformers.AutoModelForCausalLM
        expected = (model if is_whole else model.base_model).state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    if tied:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_export_refuses_what_would_be_read_instead(capsys, tmp_path):
    path = write(tmp_path / "saved.ckpt", {"model.w": torch.ones(3)})
    assert "got `net.`. Names begin with model." in call(
        capsys, "export", path, tmp_path / "a", "--prefix", "net.", status=2
    )
    assert "must be a size" in call(capsys, "export", path, tmp_path / "a", "--max-shard-size", "many", status=2)
    call(capsys, "export", path, tmp_path / "a")
    assert "must hold no weights" in call(capsys, "export", path, tmp_path / "a", status=2)
