"""The files of a sharded checkpoint: what is read is what was written, in any cut, or an error."""

import errno
import hashlib
import json
import os
import random
import shutil
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.checkpoint import (
    PartialTensor,
    SavedCheckpoint,
    ShardedWriter,
    as_parts,
    manifest,
    place,
    reader,
    writer,
)
from lightning_parallel.checkpoint.commands import find_damage, reshard
from lightning_parallel.checkpoint.folder import LATEST, MANIFEST, Folder
from lightning_parallel.checkpoint.manifest import Manifest, SavedTensor, check_coverage
from lightning_parallel.checkpoint.reader import bytes_of
from lightning_parallel.checkpoint.writer import SAFETENSORS_DTYPES, TensorPart, write_file
from lightning_parallel.comm import Group
from lightning_parallel.tensor.sharding import Shard, ShardPart
from tests.harness import run, start_script

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64, torch.bool]


@st.composite
def rules(draw, size, ndim):
    """A rule for a dimension of `size`: even or not, of several parts, or with heads that ranks share."""
    ranks = draw(st.sampled_from([ranks for ranks in (1, 2, 3, 4) if ranks * 2 <= size]))
    dim = draw(st.integers(0, ndim - 1)) - draw(st.sampled_from([0, ndim]))
    kind = draw(st.sampled_from(["even", "packed", "shared"]))
    if kind == "even":
        return Shard.even(dim, size, ranks)
    if kind == "packed":
        first = draw(st.integers(ranks, size - ranks))
        return Shard.packed(dim, [first, size - first], ranks)
    return Shard.packed(
        dim,
        [ShardPart(size, size // 2 if size % 2 == 0 else size, shared=True)],
        ranks,
    )


def saved(path, full, rule):
    """Write a tensor as the ranks of `rule` do; returns the checkpoint."""
    os.makedirs(path, exist_ok=True)
    parts, files = [], {}
    for rank in range(1 if rule is None else rule.ranks):
        part = TensorPart(full)
        if rule is not None:
            local = rule.owned(rule.split(full, rank), rank)
            if local.numel() == 0:
                continue
            part = TensorPart(local, rule.dim % full.dim(), rule.owned_ranges(rank))
        files[f"{rank}.safetensors"], found = write_file(Folder.at(path), f"{rank}.safetensors", {"x": part})
        parts.append(found["x"])
    name = str(full.dtype).removeprefix("torch.")
    tensors = {"x": SavedTensor(name, tuple(full.shape), True, tuple(parts))}
    assert not check_coverage(tensors)
    content = Manifest({"x": {"$tensor": "x"}}, tensors, files).to_json()
    return SavedCheckpoint(Folder.at(path), Manifest.from_json(content, "memory"))


@st.composite
def cases(draw):
    size, ndim = draw(st.integers(4, 12)), draw(st.integers(1, 3))
    full = torch.randn([size] * ndim, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 50
    before = draw(st.none() | rules(size, ndim))
    return full.to(draw(st.sampled_from(DTYPES))), before, draw(st.none() | rules(size, ndim))


@settings(max_examples=200, deadline=None)
@given(cases(), st.randoms())
def test_what_is_read_is_what_was_written_in_any_cut(tmp_path_factory, case, rng):
    full, before, after = case
    path = tmp_path_factory.mktemp("saved")
    checkpoint = saved(str(path), full, before)
    ranks = 1 if after is None else after.ranks

    def read():
        return [checkpoint.read("x", after, rank) for rank in range(ranks)]

    for rank, found in enumerate(read()):
        assert torch.equal(found, full if after is None else after.split(full, rank))
    checkpoint.close()
    part = rng.choice(checkpoint.manifest.tensors["x"].parts)
    file = path / part.file
    content = bytearray(file.read_bytes())
    content[part.begin + rng.randrange(part.num_bytes)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{part.file} is damaged: bytes .* of the tensor `x`"):
        read()


def test_a_rank_reads_each_block_that_holds_its_bytes_once(tmp_path, monkeypatch):
    """A rank reads no block without bytes that it needs: of rows hardly more than the rows."""
    size, full = 512, torch.randn(64, 96, 8)
    for module in (manifest, reader, writer):
        monkeypatch.setattr(module, "BLOCK", size)
    for before in (None, Shard.even(0, 64, 4), Shard.even(1, 96, 3), Shard.packed(1, [48, 48], 2)):
        for dim, extent in enumerate(full.shape):
            after = Shard.even(dim, extent, 4)
            checkpoint = saved(str(tmp_path), full, before)
            found = checkpoint.read("x", after, 1)
            assert torch.equal(found, after.split(full, 1))
            assert checkpoint.bytes_read == needed_blocks(checkpoint, full, after, size), (before, dim)
            checkpoint.close()


def needed_blocks(checkpoint, full, after, size):
    """The bytes of all blocks that hold an element that rank 1 needs, from the place of each element in the file."""
    is_needed = torch.zeros(full.shape, dtype=torch.bool)
    is_needed.narrow(after.dim, *after.ranges[1][0][:1], after.local_size(1)).fill_(True)
    total = 0
    for part in checkpoint.manifest.tensors["x"].parts:
        held = [is_needed.narrow(part.dim, start, stop - start) for start, stop in part.ranges or ((0, len(full)),)]
        wanted = torch.cat(held, part.dim).flatten().repeat_interleave(4)
        total += sum(len(block) for block in wanted.split(size) if block.any())
    return total


@pytest.mark.parametrize("damage", ["zeros", "torn", "bit", "exchanged"])
def test_a_slice_is_checked_by_the_rank_that_reads_it_alone(tmp_path, damage):
    """Other blocks are not: a rank can read what is whole, and `checkpoint verify` names what is not."""
    full = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    checkpoint = saved(str(tmp_path), full, None)
    (part,) = checkpoint.manifest.tensors["x"].parts
    path = tmp_path / part.file
    content = bytearray(path.read_bytes())
    second = part.begin + manifest.BLOCK
    third = second + manifest.BLOCK
    if damage == "zeros":  # as a file system leaves them whose host lost its power
        content[second:third] = bytes(manifest.BLOCK)
    elif damage == "torn":
        content[second + 4096 : third] = bytes(manifest.BLOCK - 4096)
    elif damage == "bit":
        content[second + 5] ^= 4
    else:
        content[second:third], content[third : third + manifest.BLOCK] = (
            content[third:][: manifest.BLOCK],
            content[second:third],
        )
    path.write_bytes(content)
    rows = Shard.even(0, 1024, 4)  # a block each
    for rank in range(4):
        is_damaged = rank == 1 or (rank == 2 and damage == "exchanged")
        if is_damaged:
            with pytest.raises(ValueError, match=f"bytes {part.begin + rank * manifest.BLOCK} to .* of the tensor `x`"):
                checkpoint.read("x", rows, rank)
        else:
            assert torch.equal(checkpoint.read("x", rows, rank), rows.split(full, rank))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.read("x", Shard.even(1, 1024, 4), 3)
    (found,) = find_damage(checkpoint, lambda count: None)
    assert f"bytes {second} to {third}" in found


def every_dtype():
    """Yield each dtype whose tensors torch can copy, with one (8, 3) of random bytes."""
    numbers = np.random.RandomState(0)
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
        count = 24 * dtype.itemsize
        found = numbers.randint(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
        with suppress(NotImplementedError, RuntimeError):
            yield dtype, torch.from_numpy(found).view(dtype).view(8, 3).clone()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_the_library_reads_the_files_and_every_dtype_comes_back(tmp_path):
    from safetensors.torch import load_file

    tensors = dict(every_dtype())
    assert {torch.float8_e4m3fnuz, torch.complex32, torch.complex128, torch.uint64} <= tensors.keys()
    parts = {str(dtype): TensorPart(tensor) for dtype, tensor in tensors.items()}
    parts["empty"], parts["scalar"] = TensorPart(torch.zeros(0, 3)), TensorPart(torch.tensor(2.5))
    write_file(Folder.at(str(tmp_path)), "a.safetensors", parts)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        is_named = not part.local.is_complex() and part.local.dtype in SAFETENSORS_DTYPES
        assert not is_named or found[name].dtype == part.local.dtype
        assert np.array_equal(bytes_of(found[name]), bytes_of(part.local)), name
    for dtype, tensor in tensors.items():
        for before in (None, Shard.even(0, 8, 2)):
            checkpoint = saved(str(tmp_path / "saved"), tensor, before)
            whole, column = checkpoint.read("x"), checkpoint.read("x", Shard.even(1, 3, 3), 2)
            assert whole.dtype == column.dtype == dtype
            assert np.array_equal(bytes_of(whole), bytes_of(tensor)), dtype
            assert np.array_equal(bytes_of(column), bytes_of(tensor[:, 2:].contiguous())), dtype
            checkpoint.close()


# --------------------------------------------------------------------------------------------------------- the folder


def write(path, value=1.0, step=1, size=1000):
    tensors = as_parts({"weight": torch.full((size,), value), "bias": torch.full((3,), value)}, is_mine=True)
    ShardedWriter(Group.alone("world"), {}).save({"state_dict": tensors, "global_step": step}, str(path))


def value_at(path):
    checkpoint = SavedCheckpoint.open(str(path)).checkpoint()
    values = torch.cat([tensor * 1 for tensor in checkpoint["state_dict"].values()]).unique()
    assert len(values) == 1, "parts of different saves"
    return values.item()


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def files_of(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_save_replaces_the_one_before_and_leaves_nothing_else(checkpoint):
    write(checkpoint, 2.0, step=2)
    assert value_at(checkpoint) == 2.0
    assert files_of(checkpoint.parent) == ["a.ckpt", LATEST]
    assert len(files_of(checkpoint)) == 2
    write(checkpoint.parent / "b.ckpt", 3.0, step=3)
    assert value_at(checkpoint.parent) == 3.0
    assert json.loads((checkpoint.parent / LATEST).read_text())["checkpoint"] == "b.ckpt"
    Folder.at(str(checkpoint.parent / "b.ckpt")).remove()
    assert value_at(checkpoint.parent) == 2.0


def test_without_an_exchange_of_names_a_save_replaces_the_one_before(checkpoint, monkeypatch):
    monkeypatch.setattr(place, "_exchange", lambda one, other: False)
    write(checkpoint, 2.0)
    assert value_at(checkpoint) == 2.0
    assert files_of(checkpoint.parent) == ["a.ckpt", LATEST]


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "manifest", "manifest missing", "flipped byte"])
def test_what_is_damaged_is_refused_by_name(checkpoint, damage):
    (shard,) = checkpoint.glob("*.safetensors")
    manifest = checkpoint / MANIFEST
    expected = shard.name
    if damage == "missing":
        shard.unlink()
    elif damage in ("truncated", "empty"):
        with shard.open("r+b") as stream:
            stream.truncate(shard.stat().st_size - 4 if damage == "truncated" else 0)
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"step": 1', b'"step": 2'))
        expected = "its checksum does not match"
    elif damage == "manifest missing":
        manifest.unlink()
        expected = "Its save was not finished"
    else:
        content = bytearray(shard.read_bytes())
        content[-2000] ^= 1
        shard.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        value_at(checkpoint)


def test_one_flipped_byte_anywhere_is_seen(checkpoint):
    rng = random.Random(0)
    for _ in range(30):
        file = rng.choice([checkpoint / name for name in files_of(checkpoint)])
        before = file.read_bytes()
        content = bytearray(before)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        try:
            found = value_at(checkpoint)
        except ValueError:
            pass
        else:
            # The header of a file says again what the manifest says, for other readers.
            assert found == 1.0
            assert file.suffix == ".safetensors"
        file.write_bytes(before)
    assert value_at(checkpoint) == 1.0


def changed_manifest(path, change):
    """Change a manifest as somebody would who knows its checksum."""
    body = json.loads((path / MANIFEST).read_bytes().split(b"\n", 1)[1])
    change(body)
    text = json.dumps(body).encode()
    head = json.dumps({"sha256": hashlib.sha256(text).hexdigest()}).encode()
    (path / MANIFEST).write_bytes(head + b"\n" + text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m["files"].update({"../../etc/passwd": 4}), "not the name of a file"),
        (lambda m: m["tensors"]["state_dict/bias"]["parts"][0].update(file="other"), "which is too short"),
        (lambda m: m["tensors"]["state_dict/bias"].update(dtype="save"), "The dtype must be one"),
        (lambda m: m["tensors"]["state_dict/bias"].update(shape=[-3]), "at least 0"),
        (lambda m: m["tensors"]["state_dict/bias"].update(shape=[2**40]), "does not match its shape"),
        (lambda m: m["tensors"]["state_dict/bias"].update(parts=[]), "no part holds it"),
        (lambda m: m["tensors"]["state_dict/bias"]["parts"][0].update(checksums=[]), "0 checksums of blocks"),
        (lambda m: m["tensors"]["state_dict/bias"]["parts"][0].update(checksums=["x"]), "at least 0"),
        (lambda m: m.update(document={"$call": "os.system"}), "must be one of"),
        (lambda m: m.update(document={"a": {"$tensor": "nowhere"}}), "does not hold"),
        (lambda m: m.update(document={"a": {"$dtype": "save"}}), "must be of kind \\$dtype"),
        (lambda m: m.update(document={"a": {"$enum": [[], "x", 1]}}), "must be of kind \\$enum"),
        (lambda m: m.update(document={"a": {"$enum": ["enum", "Enum", 1]}}), "must be a member of `enum.Enum`"),
        (lambda m: m.update(document={"$tuple": {"$range": [0, 10**12, 1]}}), "must be of kind \\$tuple"),
        (lambda m: m.update(document={"$device": "x"}), "must be of kind \\$device"),
        (lambda m: m.update(document={"$timedelta": [10**20, 0, 0]}), "must be of kind \\$timedelta"),
        (lambda m: m.update(version=2), "newer release"),
        *(
            (lambda m, name=name: m.update(name=name), "not the name of a folder")
            for name in ("/etc/x", "../../x", "..", ".", "a/b", "a\0b", "..\\x", 3, None, ["x"], {})
        ),
        *((lambda m, step=step: m.update(step=step), "at least 0") for step in ("1", -1, 1.5, None, True, [])),
        *(
            (lambda m, created=created: m.update(created=created), "must be in seconds since 1970")
            for created in ("now", None, -1, 1e300, 10**400, True)
        ),
        *(
            (lambda m, layout=layout: m.update(layout=layout), "must be the manifest|the number of ranks")
            for layout in (3, None, ["tensor"], {"tensor": "2"}, {"tensor": 0})
        ),
        *(
            (lambda m, versions=versions: m.update(versions=versions), "must be the manifest|`versions` must be text")
            for versions in (3, None, ["torch"], {"torch": 2})
        ),
        (lambda m: m.update(files={next(iter(m["files"])): True}), "not the name of a file"),
        (lambda m: m["tensors"]["state_dict/bias"].update(shape=[3, 0, 10**30]), "The shape of a tensor must"),
        (lambda m: m["tensors"]["state_dict/bias"].update(shape=[3] + [1] * 99), "The shape of a tensor must"),
        (lambda m: m["tensors"].update({"x": m["tensors"]["state_dict/bias"]}), "in the same bytes of"),
        (lambda m: m.update(tensors=3), "must be the manifest"),
    ],
)
def test_a_hostile_manifest_is_refused(checkpoint, change, expected):
    changed_manifest(checkpoint, change)
    with pytest.raises(ValueError, match=expected):
        value_at(checkpoint)


def test_a_save_that_was_begun_by_others_moves_nowhere(tmp_path):
    """What a killed save has left is given its name back, if that is a checkpoint's beside it."""
    place = tmp_path / "checkpoints"
    for name in (str(tmp_path / "autostart"), "../autostart", "..", "a/../../autostart", ".ssh", "mine.ckpt"):
        write(place / "a.ckpt")
        left = place / ".replaced-0123-4567-1-1"
        os.rename(place / "a.ckpt", left)
        changed_manifest(left, lambda manifest, name=name: manifest.update(name=name))
        write(place / "b.ckpt", 2.0)
        assert files_of(tmp_path) == ["checkpoints"], name
        assert set(files_of(place)) == {"b.ckpt", LATEST, "mine.ckpt" if name == "mine.ckpt" else left.name}, name
        shutil.rmtree(place)


def test_newest_is_found_beside_damaged_ones_and_never_outside(checkpoint, tmp_path):
    """`latest.json` may name nothing but an entry of the folder."""
    shutil.copytree(checkpoint, tmp_path / "outer")
    inner = tmp_path / "outer" / "inner"
    for name, value in (("b.ckpt", 2.0), ("c.ckpt", 3.0)):
        write(inner / name, value, step=int(value))
    changed_manifest(inner / "b.ckpt", lambda manifest: manifest.update(step="9"))
    (inner / "pipe.ckpt").mkdir()
    os.mkfifo(inner / "pipe.ckpt" / MANIFEST)  # reading it would wait for a writer
    for latest in ("..", "../a.ckpt", ".", "", "c.ckpt/../..", 3, None, ["c.ckpt"], "pipe.ckpt"):
        (inner / LATEST).write_text(json.dumps({"checkpoint": latest}))
        assert value_at(inner) == 3.0, latest


def test_a_pickle_in_place_of_a_file_is_not_executed(checkpoint, tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for file in checkpoint.iterdir():
        before = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(ValueError, match="damaged|must be the manifest"):
            value_at(checkpoint)
        file.write_bytes(before)
    assert not (tmp_path / "executed").exists()


def test_what_has_no_form_is_refused_with_its_path(tmp_path):
    state = {"callbacks": {"mine": {"model": object(), "x": [print]}}, "hyper_parameters": {"lr": 0.1, "f": print}}
    with pytest.raises(TypeError, match="(?s)callbacks/mine/model: builtins.object.*callbacks/mine/x/0"):
        ShardedWriter(Group.alone("world"), {}).save(state, str(tmp_path / "a.ckpt"))
    assert files_of(tmp_path) == []
    del state["callbacks"]
    left_out = ShardedWriter(Group.alone("world"), {}).save(state, str(tmp_path / "a.ckpt"))
    assert left_out == ["hyper_parameters/f"]
    assert SavedCheckpoint.open(str(tmp_path / "a.ckpt")).checkpoint() == {"hyper_parameters": {"lr": 0.1}}


class Kinds(Enum):
    NAMED = 1
    OF_OBJECTS = (print,)


def test_values_come_back_as_they_were_or_are_left_out(tmp_path):
    """Keys that read alike share a path, and no tensor; what a file could not give back is not written to it."""
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    odd = {Kinds.OF_OBJECTS: 1, Kinds.NAMED: 2, print: 3, "object": Kinds.OF_OBJECTS, "text": np.str_("x")}
    state = {
        "alike": {1: one, "1": other, "a/b": one.clone(), "a": {"b": other.clone()}},
        "hyper_parameters": odd,
        "hparams_type": dict,
        "datamodule_hyper_parameters": {"transform": print, "size": 4},
    }
    left_out = ShardedWriter(Group.alone("world"), {}).save(state, str(tmp_path / "a.ckpt"))
    found = SavedCheckpoint.open(str(tmp_path / "a.ckpt")).checkpoint()
    assert [*found["alike"].values()] == [one, other, one, {"b": other}]
    assert found["hyper_parameters"] == {Kinds.NAMED: 2, "text": "x"}
    assert found["datamodule_hyper_parameters"] == {"size": 4}
    assert {path.partition("/")[0] for path in left_out} == state.keys() - {"alike"}


def test_what_a_killed_reshard_has_left_is_removed(checkpoint):
    left = []

    def seen(count):
        # As of a process that had this one's number before it.
        (written,) = checkpoint.parent.glob(".partial-*") if not left else left[1:]
        name, _, start = written.name.rpartition("-")
        left[:] = [shutil.copytree(written, written.with_name(f"{name}-{int(start) - 1}"), dirs_exist_ok=True), written]
        assert left[0].is_dir()

    # The note which checkpoint is the latest is the next save.
    reshard(SavedCheckpoint.open(str(checkpoint)), str(checkpoint.parent / "b.ckpt"), 1, seen)
    assert len(left) == 2
    assert files_of(checkpoint.parent) == ["a.ckpt", "b.ckpt", LATEST]
    write(checkpoint)
    assert files_of(checkpoint.parent) == ["a.ckpt", "b.ckpt", LATEST]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_cannot_be_removed_is_told_and_stays(checkpoint, monkeypatch, is_late):
    # The other ranks are not asked, and would wait for the first one if it raised.
    saving = ShardedWriter(Group.alone("world"), {}, in_background=is_late)

    def refused(folder):
        raise PermissionError(errno.EACCES, "Permission denied", folder.path)

    monkeypatch.setattr(Folder, "remove", refused)

    def remove():
        saving.remove(str(checkpoint))
        saving.wait()

    with pytest.warns(UserWarning, match=r"Cannot remove the checkpoint .*a.ckpt: .*Permission denied"):
        remove()
    saving.close()
    assert value_at(checkpoint) == 1.0


def test_removing_a_link_leaves_what_it_leads_to(checkpoint, tmp_path):
    link = tmp_path / "last.ckpt"
    link.symlink_to(checkpoint, target_is_directory=True)
    Folder.at(str(link)).remove()
    assert not link.is_symlink()
    SavedCheckpoint.open(str(checkpoint))


def test_memory_of_fsspec_holds_checkpoints():
    write("memory://saved/a.ckpt")
    write("memory://saved/a.ckpt", 2.0, step=2)
    assert value_at("memory://saved/a.ckpt") == 2.0
    assert value_at("memory://saved") == 2.0
    fs = Folder.at("memory://saved/a.ckpt").fs
    assert len(fs.ls("/saved/a.ckpt")) == 2


def test_two_runs_that_write_to_one_folder_leave_a_whole_checkpoint(tmp_path):
    script = Path(__file__).with_name("repeated_writer.py")
    started = [start_script(script, value, tmp_path / "a.ckpt") for value in (1.0, 2.0)]
    seen = set()
    while not all((tmp_path / f"{value}.over").exists() for value in (1.0, 2.0)):
        if (tmp_path / "a.ckpt").exists():
            try:
                seen.add(value_at(tmp_path / "a.ckpt"))
            except (ValueError, FileNotFoundError):
                continue  # replaced while it was read
    assert [script().returncode for script in started] == [0, 0]
    assert seen <= {1.0, 2.0}
    assert value_at(tmp_path / "a.ckpt") in (1.0, 2.0)
    assert files_of(tmp_path) == ["1.0.over", "2.0.over", "a.ckpt", LATEST]


def test_storage_that_fails_for_a_moment_is_tried_again(checkpoint, monkeypatch):
    failures = [errno.EIO, errno.ESTALE]
    real = writer._write_part

    def failing(*args):
        if failures:
            raise OSError(failures.pop(), "for a moment")
        return real(*args)

    monkeypatch.setattr(place, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(writer, "_write_part", failing)
    write(checkpoint, 2.0)
    assert value_at(checkpoint) == 2.0
    failures += [errno.EIO] * 9
    with pytest.raises(OSError, match="for a moment"):
        write(checkpoint, 3.0)
    assert value_at(checkpoint) == 2.0
    failures.clear()

    for is_folder, what in ((True, "of the folder"), (False, "of the file")):

        def fsync(descriptor, is_folder=is_folder, what=what):
            if os.path.isdir(f"/proc/self/fd/{descriptor}") is is_folder:
                raise OSError(errno.EIO, what)
            os.fsync(descriptor)

        monkeypatch.setattr(place, "os", SimpleNamespace(**{**vars(os), "fsync": fsync}))
        with pytest.raises(OSError, match=what):
            write(checkpoint, 3.0)
        assert value_at(checkpoint) == 2.0
    assert files_of(checkpoint.parent) == ["a.ckpt", LATEST]


def test_a_long_save_tells_how_far_it_is(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(writer, "REPORT_EVERY_S", 0.0)
    tensors = as_parts({"weight": torch.zeros(1 << 19)}, is_mine=True)
    ShardedWriter(Group.alone("world"), {}, report=lines.append).save({"state_dict": tensors}, str(tmp_path / "a"))
    assert lines[-1] == "Saving a: 2 MiB of 2 MiB on rank zero (100%)"


@pytest.mark.sweep
@pytest.mark.parametrize("renames", ["exchange", "two-renames"])
def test_a_kill_at_any_moment_leaves_one_whole_checkpoint(tmp_path, renames):
    moments = [("os", "fsync", 7), ("os", "rename", 3), ("os", "replace", 3), ("writer", "_write_part", 2)]
    started = []
    for owner, name, calls in moments:
        for number in range(calls):
            path = tmp_path / f"{name}{number}" / "a.ckpt"
            write(path)
            script = Path(__file__).with_name("killed_writer.py")
            started.append((path, start_script(script, owner, name, number, path, renames)))
    found = set()
    for path, script in started:
        killed = script().returncode != 0
        value = value_at(path)
        found.add((killed, value))
        assert killed or value == 2.0
        write(path, 3.0, step=3)
        assert value_at(path) == 3.0
        assert files_of(path.parent) == ["a.ckpt", LATEST], "what was left behind is removed"
    assert {(True, 1.0), (True, 2.0)} <= found, "before and after the commit"


def write_apart(group, path, fails_on):
    """Write a tensor of two parts, each rank to a folder of its own."""
    full, own = torch.arange(40.0).reshape(8, 5), Path(path) / f"rank{group.rank}" / "a.ckpt"
    begin = 4 * group.rank
    tensor = PartialTensor.of(full.shape, full.dtype, TensorPart(full[begin : begin + 4], 0, ((begin, begin + 4),)))
    if group.rank == fails_on:
        own.mkdir(parents=True)
        (own / "other").touch()  # something else that has the name
    try:
        ShardedWriter(group, {}).save({"state_dict": {"weight": tensor}}, str(own), is_apart=True)
    except ValueError as error:
        return str(error)
    return sorted(one.name for one in own.iterdir())


@pytest.mark.parametrize("fails_on", [None, 1])
def test_folders_of_ranks_that_are_copied_into_one_are_the_checkpoint(fails_on, tmp_path):
    told = run(write_apart, 2, path=str(tmp_path), fails_on=fails_on)
    if fails_on is not None:
        assert all("got a folder with other files" in one for one in told)
        left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
        assert left == ["rank1/a.ckpt/other"]
        return
    assert told[0][1:] == [MANIFEST]
    assert (len(told[0]), len(told[1])) == (2, 1), "each has its own part alone"
    with pytest.raises(ValueError, match="00001"):
        SavedCheckpoint.open(str(tmp_path / "rank0" / "a.ckpt")).checkpoint()["state_dict"]["weight"] * 1
    for rank in (0, 1):
        shutil.copytree(tmp_path / f"rank{rank}", tmp_path / "storage", dirs_exist_ok=True)
    found = SavedCheckpoint.open(str(tmp_path / "storage")).checkpoint()["state_dict"]["weight"] * 1
    assert torch.equal(found, torch.arange(40.0).reshape(8, 5))
