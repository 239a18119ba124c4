"""Every reader of files that somebody else may have written, fed with files that are changed at random.

Whatever is in them, a reader gives something, or raises one clear error that names the file; it runs nothing, touches
nothing outside of the folder, and takes no more memory than the files have.
"""

import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import tracemalloc
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_parallel import load_weights
from lightning_parallel.callbacks.report.profile_report import rebuild
from lightning_parallel.callbacks.report.trace import read_trace
from lightning_parallel.callbacks.resume.folder import ResumeFolder
from lightning_parallel.checkpoint import DistributedCheckpoint, SavedCheckpoint, ShardedWriter, as_parts
from lightning_parallel.checkpoint.folder import MANIFEST
from lightning_parallel.checkpoint.weights import stored_weights
from lightning_parallel.cli import main
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies.checkpoints.files import SafeCheckpointIO, check_file
from lightning_parallel.strategies.checkpoints.rank_files import Place, RankFiles
from tests.callbacks.sample import sample_report
from tests.pipeline.models import built

ALONE = Group.alone("test")
MOST_BYTES = 200 << 20
ROUNDS = 20
"""Of each reader: a bounded number and no time, so that a run is like any other."""

CLEAR = (ValueError, RuntimeError, FileNotFoundError)

# ------------------------------------------------------------------------------------------------------------ mutations

VALUES = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, 0.5, "", "..", "../x", "/etc/passwd", "a\0b", "\ud800"),
    *("\x1b[2J", "[/]", "x" * 1000, [], [[]], {}, {"$tensor": "nowhere"}, {"$range": [0, 10**12, 1]}, {"$call": "x"}),
    *({"$enum": [[], 0, 0]}, [0, 2**62], {"a": {"b": {}}}),
)


def places(value, path=()):
    """Yield the paths of all values in JSON data."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


def changed_data(data, rng):
    """Replace, remove or copy some value."""
    data = json.loads(json.dumps(data))
    found = [path for path in places(data) if path]
    for _ in range(rng.randint(1, 3)):
        *keys, last = rng.choice(found)
        inner = data
        try:
            for key in keys:
                inner = inner[key]
            kind = rng.randrange(4)
            if kind == 0 and isinstance(inner, dict):
                del inner[last]
            elif kind == 1 and isinstance(inner, dict):
                inner[rng.choice(["", "..", "/x", "\x1b]0;x\x07", "name"])] = inner[last]
            elif kind == 2:
                inner[last] = [inner[last]] * 3
            else:
                inner[last] = rng.choice(VALUES)
        except (KeyError, IndexError, TypeError):
            continue  # a change before has removed it
    return data


def changed_bytes(content, rng):
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(5), rng.randrange(max(1, len(content)))
        if kind == 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at : at + rng.randint(1, 40)]
        elif kind == 3:
            content[at:at] = content[at : at + rng.randint(1, 40)]
        else:
            content[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")])
    return bytes(content)


def changed_json(content, rng):
    if rng.random() < 0.2:
        half = content[: len(content) // 2]
        return rng.choice([b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, half])
    return json.dumps(changed_data(json.loads(content), rng)).encode()


def changed_entry(content, rng):
    return json.dumps(changed_data(json.loads(content), rng)).encode()


def changed_manifest(content, rng):
    """Change what it says, as somebody would who knows its checksum."""
    if rng.random() < 0.2:
        return changed_bytes(content, rng)
    body = changed_json(content.split(b"\n", 1)[1], rng)
    return json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


def changed_safetensors(content, rng):
    if rng.random() < 0.3:
        return changed_bytes(content, rng)
    size = int.from_bytes(content[:8], "little")
    head = changed_json(content[8 : 8 + size], rng)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def changed_gzip(content, rng):
    if rng.random() < 0.3:
        return changed_bytes(content, rng)
    return gzip.compress(changed_json(gzip.decompress(content), rng), 1)


# --------------------------------------------------------------------------------------------------------- the readers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)


def command(*words):
    """Return a reader that calls a command, of which status 2 and 1 are clear errors."""

    def call(folder):
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main([*words[:2], str(folder / words[2]), *(str(folder / word) for word in words[3:])])
        text = out.getvalue() + err.getvalue()
        assert all(one.isprintable() or one in "\n\r" for one in text.replace("\x1b[", "")), "of what is printed"
        assert status in (0, 1, 2)
        assert "Traceback" not in text
        if status == 2:
            assert str(folder) in text, text
            raise ValueError(text)

    return call


def read_all(folder):
    checkpoint = SavedCheckpoint.open(str(folder / "a.ckpt"))
    try:
        content = checkpoint.checkpoint()
        if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
            [value * 1 for value in content["state_dict"].values() if isinstance(value, torch.Tensor)]
    finally:
        checkpoint.close()


def read_distributed(folder):
    content = DistributedCheckpoint.open(str(folder / "dcp"), ALONE).checkpoint()
    [value * 1 for value in content["state_dict"].values() if isinstance(value, torch.Tensor)]


def read_plain(folder):
    check_file(folder / "plain.ckpt")
    SafeCheckpointIO().load_checkpoint(folder / "plain.ckpt")


BESIDE = RankFiles("compression", "the compressors' state", "It is lost")


def read_beside(folder):
    saved = json.loads((folder / "entry.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        BESIDE.read(saved, Place(0, 0), folder / "plain.ckpt", ALONE)


def read_resume_folder(folder):
    resumed = ResumeFolder(folder)
    resumed.create()
    assert (folder / ".replaced-0123-4567-1-1").exists() or (folder / "left.ckpt").exists()
    resumed.found()


def write_plain(folder):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 3}
    SafeCheckpointIO().save_checkpoint({**state, "callbacks": {"x": (1, {"y"})}}, folder / "plain.ckpt")


def write_sharded(folder):
    state = {"state_dict": as_parts(Model().state_dict(), True), "global_step": 3, "buffer": torch.ones(3)}
    rest = {"tuple": (1, {2, 3}), "none": None, "odd": {1: 2}, "kind": torch.float32, "inf": float("inf")}
    ShardedWriter(ALONE, {"tensor_parallel": 2}).save({**state, **rest}, str(folder / "a.ckpt"))


def write_distributed(folder):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"state_dict": Model().state_dict()}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    torch.save({"global_step": 3}, folder / "dcp" / "meta.pt")


def write_weights(folder):
    save_file(Model().state_dict(), folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(Model().state_dict(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_report(folder):
    events = [{"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.0, "cat": "step"}]
    other = {"clocks": [{"rank": 0, "uncertainty_ns": 3, "unix_ns": 5, "offset_ns": 0}], "left_out": 0, "origin_ns": 1}
    content = json.dumps({"traceEvents": events, "otherData": other}).encode()
    (folder / "trace.json.gz").write_bytes(gzip.compress(content))
    (folder / "report.json").write_text(json.dumps(sample_report()))


def write_beside(folder):
    write_plain(folder)
    entry = BESIDE.write({"step": 3, "residual": {"w": torch.ones(4)}}, Place(0, 0), folder / "plain.ckpt", ALONE)
    (folder / "entry.json").write_text(json.dumps(entry))


def write_left(folder):
    write_sharded(folder)
    (folder / "a.ckpt").rename(folder / ".replaced-0123-4567-1-1")
    changed = (folder / ".replaced-0123-4567-1-1" / MANIFEST).read_bytes().split(b"\n", 1)[1]
    body = json.dumps({**json.loads(changed), "name": "left.ckpt"}).encode()
    head = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
    (folder / ".replaced-0123-4567-1-1" / MANIFEST).write_bytes(head + b"\n" + body)


def write_plan(folder):
    model, step, batch = built("mlp")
    analyze(model, 2, "1f1b", example=(step, batch), num_microbatches=4).save(folder / "pipeline_plan.json")


SHARDED = f"a.ckpt/{MANIFEST}"
READERS = {
    "manifest": (write_sharded, {SHARDED: changed_manifest}, read_all),
    "latest": (
        write_sharded,
        {"latest.json": changed_json},
        lambda folder: SavedCheckpoint.open(str(folder)).checkpoint(),
    ),
    "parts": (write_sharded, {"a.ckpt/*.safetensors": changed_bytes}, read_all),
    "inspect": (write_sharded, {SHARDED: changed_manifest}, command("checkpoint", "inspect", "a.ckpt")),
    "list": (write_sharded, {SHARDED: changed_manifest}, command("checkpoint", "inspect", "")),
    "verify": (
        write_sharded,
        {SHARDED: changed_manifest, "a.ckpt/*.safetensors": changed_safetensors},
        command("checkpoint", "verify", "a.ckpt"),
    ),
    "merge": (write_sharded, {SHARDED: changed_manifest}, command("checkpoint", "merge", "a.ckpt", "merged.ckpt")),
    "sharded weights": (write_sharded, {SHARDED: changed_manifest}, lambda f: load_weights(Model(), f / "a.ckpt")),
    "left behind": (write_left, {f".replaced-0123-4567-1-1/{MANIFEST}": changed_manifest}, read_resume_folder),
    "plain": (write_plain, {"plain.ckpt": changed_bytes}, read_plain),
    "inspect a file": (write_plain, {"plain.ckpt": changed_bytes}, command("checkpoint", "inspect", "plain.ckpt")),
    "weights of a file": (write_plain, {"plain.ckpt": changed_bytes}, lambda f: stored_weights(f / "plain.ckpt")),
    "safetensors": (
        write_weights,
        {"model.safetensors": changed_safetensors},
        lambda folder: load_weights(Model(), folder / "model.safetensors"),
    ),
    "index": (write_weights, {"model.safetensors.index.json": changed_json}, lambda folder: stored_weights(folder)),
    "metadata": (write_distributed, {"dcp/.metadata": changed_bytes}, read_distributed),
    "chunks": (write_distributed, {"dcp/*.distcp": changed_bytes, "dcp/meta.pt": changed_bytes}, read_distributed),
    "report": (write_report, {"report.json": changed_json}, rebuild),
    "trace": (write_report, {"trace.json.gz": changed_gzip}, lambda folder: read_trace(folder / "trace.json.gz")),
    "kineto": (
        write_report,
        {"trace.json.gz": changed_gzip},
        lambda folder: rebuild(folder, [folder / "trace.json.gz"]),
    ),
    "compare": (write_report, {"report.json": changed_json}, command("report", "--", "", "")),
    "compression": (
        write_beside,
        {"entry.json": changed_entry, "rank-state/plain.ckpt/*.pt": changed_bytes},
        read_beside,
    ),
    "plan": (
        write_plan,
        {"pipeline_plan.json": changed_json},
        lambda folder: PipelinePlan.load(folder / "pipeline_plan.json"),
    ),
}


PASSED_OVER = {"verify", "latest", "list", "left behind", "compression"}
"""Where there is another file, or it goes without."""


@pytest.fixture
def bounded_memory():
    """Without room for what no file has: a reader that takes it fails, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.sweep
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_read_or_refused_clearly(tmp_path, name, monkeypatch):
    write, changes, read = READERS[name]
    rng = random.Random(name)
    good, outside = tmp_path / "good", tmp_path / "outside"
    good.mkdir()
    outside.mkdir()
    monkeypatch.chdir(outside)
    write(good)
    read_whole(read, good, tmp_path)
    refused = 0
    for number in range(ROUNDS):
        folder = tmp_path / "work" / "checkpoints"
        shutil.copytree(good, folder)
        for pattern, change in changes.items():
            for path in folder.glob(pattern):
                if rng.random() < 1 / len(changes) or number % 2:
                    path.write_bytes(change(path.read_bytes(), rng))
        failure = None
        tracemalloc.start()
        try:
            read(folder)
        except CLEAR as error:
            failure = error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        refused += failure is not None
        assert failure is None or (type(failure) in CLEAR and str(folder) in str(failure)), f"{number}: {failure!r}"
        assert peak < MOST_BYTES, number
        assert os.listdir(tmp_path / "work") == ["checkpoints"], number
        assert os.listdir(outside) == [], number
        shutil.rmtree(tmp_path / "work")
    assert refused >= ROUNDS // 10 or name in PASSED_OVER, "most changes show"


def read_whole(read, good, tmp_path):
    folder = tmp_path / "first"
    shutil.copytree(good, folder)
    read(folder)
    shutil.rmtree(folder)
