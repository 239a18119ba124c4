"""Files of checkpoints: disks that are full or fail, writers that are killed, damage, and who learns of it."""

import errno
import functools
import io
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import fsspec
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    TensorParallelStrategy,
    TopK,
    comm,
    load_weights,
)
from lightning_parallel.checkpoint import place as placing
from lightning_parallel.checkpoint.place import NewFile, new_key
from lightning_parallel.comm import Group, presence
from lightning_parallel.compat import patched
from lightning_parallel.compat.lightning import finish_saves, innermost_io
from lightning_parallel.strategies.checkpoints import files
from lightning_parallel.strategies.checkpoints.files import SafeCheckpointIO, check_file
from lightning_parallel.strategies.checkpoints.rank_files import Place, RankFiles
from tests.harness import distributed, run_script, start_script
from tests.strategies.models import Net, fit_single, loader, trainer_for

IO = SafeCheckpointIO()
SMALL, LARGE = 1_000, 400_000  # numbers of 8 bytes, on a disk of 1 MiB


def state(version, size=SMALL):
    return {"version": version, "weights": {f"w{n}": torch.full((size // 4,), float(version)) for n in range(8)}}


def assert_whole(path, versions):
    """Check that `path` is one of `versions`, and not a mixture."""
    check_file(path)
    found = torch.load(path)
    assert found["version"] in versions
    assert all(bool((tensor == found["version"]).all()) for tensor in found["weights"].values())
    return found["version"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@contextmanager
def small_disk():
    """A file system of 1 MiB; gives its folder."""
    folder = tempfile.mkdtemp(prefix="lightning_parallel_disk_")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        shutil.rmtree(folder)
        pytest.skip("mounting a small file system needs root")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        os.rmdir(folder)


def failing(function, code, times=None):
    """Return `function` failing with an errno, the first `times` or always; its `calls` are counted."""

    def call(*args, **kwargs):
        call.calls += 1
        if times is None or call.calls <= times:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    call.calls = 0
    return call


@contextmanager
def system(**functions):
    """Let the module that puts files in place alone see other functions of `os`."""
    changed = SimpleNamespace(**{**vars(os), **functions})
    with patched(placing, "os", changed):
        yield


@contextmanager
def patient():
    """Record the waits between tries, without waiting."""
    waits = []
    with patched(placing, "time", SimpleNamespace(sleep=waits.append)):
        yield waits


# -- writing -----------------------------------------------------------------------------------------------------------


def test_it_is_written_beside_its_target_piece_by_piece(tmp_path):
    path, seen, pieces = tmp_path / "last.ckpt", [], []

    def write(file, data):
        seen.append(names(tmp_path))
        pieces.append(len(data))
        return os.write(file, data)

    with system(write=write):
        IO.save_checkpoint(state(1), path)
    assert {len(found) for found in seen} == {1}
    assert all(name.startswith(".") and "last" not in name and "ckpt" not in name for (name,) in seen)
    assert max(pieces) == SMALL // 4 * 4  # one tensor in fp32: never the whole
    assert names(tmp_path) == ["last.ckpt"]
    assert_whole(path, {1})


def test_it_has_the_mode_of_files_that_are_made_here(tmp_path):
    (tmp_path / "other").touch()
    IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_it_is_on_the_disk_before_it_replaces_and_so_is_the_folder_after(tmp_path):
    events = []

    def note(name):
        def call(*args):
            is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
            events.append("folder" if is_folder else name)
            return getattr(os, name)(*args)

        return call

    with system(**{name: note(name) for name in ("write", "fsync", "replace")}):
        IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert events[-4:] == ["write", "fsync", "replace", "folder"]
    assert events.count("fsync") == 1


def test_a_full_disk_leaves_the_one_before():
    with small_disk() as folder:
        path = folder / "last.ckpt"
        IO.save_checkpoint(state(1), path)
        with pytest.raises(
            RuntimeError, match=rf"{path} cannot be written: No space left on device \(ENOSPC\); 1\.0 MiB"
        ):
            IO.save_checkpoint(state(2, LARGE), path)
        assert names(folder) == ["last.ckpt"]
        assert_whole(path, {1})
        IO.save_checkpoint(state(3), path)
        assert_whole(path, {3})


@pytest.mark.filterwarnings("ignore:.*cannot be written")
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EDQUOT])
def test_an_error_leaves_the_one_before_and_no_other_file(tmp_path, call, code):
    path = tmp_path / "last.ckpt"
    IO.save_checkpoint(state(1), path)
    broken = failing(getattr(os, call), code)
    with patient() as waits, system(**{call: broken}), pytest.raises(RuntimeError, match=errno.errorcode[code]):
        IO.save_checkpoint(state(2), path)
    assert names(tmp_path) == ["last.ckpt"]
    assert_whole(path, {1})
    # An input/output error may pass, the others do not.
    assert waits == (list(placing.PAUSES_S) if code == errno.EIO else [])


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_what_may_pass_is_tried_again_with_growing_waits(tmp_path, call, code):
    files = []

    def replace(source, target):
        files.append(Path(source).read_bytes())
        os.replace(source, target)

    functions = {"replace": replace}
    functions[call] = failing(functions.get(call, getattr(os, call)), code, times=2)
    with patient() as waits, system(**functions), pytest.warns(UserWarning, match="next attempt"):
        IO.save_checkpoint(state(2), tmp_path / "a.ckpt")
    assert waits == list(placing.PAUSES_S[:2])
    assert waits == sorted(waits)
    # Written anew: after a failed fsync the next one finds nothing to do, though the disk has not got it.
    assert len(files) == 1
    assert_whole(tmp_path / "a.ckpt", {2})
    assert names(tmp_path) == ["a.ckpt"]


def test_an_error_of_pickle_is_raised_as_it_is(tmp_path):
    with pytest.raises(Exception, match="pickle|lambda"):
        IO.save_checkpoint({"function": lambda: None}, tmp_path / "a.ckpt")
    assert names(tmp_path) == []


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(RuntimeError, match="Is a directory"):
        IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_folders_that_are_not_local_go_through_fsspec():
    IO.save_checkpoint(state(1), "memory://checkpoints/a.ckpt")
    assert IO.load_checkpoint("memory://checkpoints/a.ckpt")["version"] == 1
    check_file("memory://checkpoints/a.ckpt")
    IO.remove_checkpoint("memory://checkpoints/a.ckpt")
    with pytest.raises(FileNotFoundError):
        IO.load_checkpoint("memory://checkpoints/a.ckpt")


def test_a_local_path_may_be_a_url(tmp_path):
    with system(replace=failing(os.replace, errno.EACCES)), pytest.raises(RuntimeError, match="EACCES"):
        IO.save_checkpoint(state(1), f"file://{tmp_path}/a.ckpt")
    IO.save_checkpoint(state(1), f"file://{tmp_path}/a.ckpt")
    assert_whole(tmp_path / "a.ckpt", {1})


# -- killed writers ----------------------------------------------------------------------------------------------------

WRITER = """
import os, signal, sys, types, torch
from pathlib import Path
from lightning_parallel.checkpoint import place
from lightning_parallel.strategies.checkpoints.files import SafeCheckpointIO

signal.alarm(100)
path, moment = sys.argv[1:]
size = 40 if moment == "any" else 400

def state(version):
    return {"version": version, "weights": {f"w{n}": torch.full((size,), float(version)) for n in range(8)}}

counts = dict.fromkeys(("write", "fsync", "replace"), 0)

def until_killed(name):
    def call(*args):
        counts[name] += 1
        if moment == f"{version} {name} {counts[name]}":
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)(*args)
    return call

if moment == "wait":
    file = place.NewFile(Path(path).parent)
    print("ready", flush=True)
    signal.pause()
functions = {**vars(os), **{name: until_killed(name) for name in counts}}
io = SafeCheckpointIO()
io.save_checkpoint(state(1), path)
if moment != "any":
    place.os = types.SimpleNamespace(**functions)
print("ready", flush=True)
version = 2
while True:
    counts.update(write=0, fsync=0, replace=0)
    io.save_checkpoint(state(version), path)
    version += 1
"""


@pytest.fixture
def writer(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    (tmp_path / "checkpoints").mkdir()
    return script, tmp_path / "checkpoints"


def wait_for_writer(writer):
    out = writer.folder / "out"
    while not out.exists() or "ready" not in out.read_text():
        assert writer.process.is_alive(), writer().stderr
        time.sleep(0.05)


# The second of two fsyncs is that of the folder, which comes after the new file is in place.
@pytest.mark.parametrize(
    ("moment", "version"),
    [
        *[("2 write 1", 1), ("2 write 40", 1), ("2 fsync 1", 1), ("2 replace 1", 1)],
        *[("2 fsync 2", 2), ("5 replace 1", 4)],
    ],
)
def test_a_killed_writer_leaves_a_whole_file_and_what_it_leaves_is_removed(writer, moment, version):
    script, folder = writer
    path = folder / "last.ckpt"
    ended = run_script(script, path, moment, deadline_s=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert_whole(path, {version})
    assert len(names(folder)) == (1 if moment == "2 fsync 2" else 2)
    IO.save_checkpoint(state(9), folder / "other.ckpt")
    assert names(folder) == ["last.ckpt", "other.ckpt"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(writer):
    script, folder = writer
    for delay_s in (0.0, 0.011, 0.023, 0.037):
        started = start_script(script, folder / "last.ckpt", "any", deadline_s=60)
        wait_for_writer(started)
        time.sleep(delay_s)
        started.send(signal.SIGKILL)
        started()
        check_file(folder / "last.ckpt")
        assert_whole(folder / "last.ckpt", range(1, 10**9))


def test_the_file_of_a_live_writer_stays(writer):
    script, folder = writer
    started = start_script(script, folder / "last.ckpt", "wait", deadline_s=60)
    wait_for_writer(started)
    left = names(folder)
    assert len(left) == 1
    os.utime(folder / left[0], (0, 0))  # however long it takes
    with NewFile(folder):
        assert set(left) < set(names(folder))  # of this process, too
        IO.save_checkpoint(state(1), folder / "a.ckpt")
        assert len(names(folder)) == 3
    started.send(signal.SIGKILL)
    started()
    IO.save_checkpoint(state(1), folder / "a.ckpt")
    assert names(folder) == ["a.ckpt"]


def of_other_host(**changes):
    """The key of a writer on another host; its process number may be that of a dead process here."""
    random, _, pid, start = new_key().split("-")
    return f"{random}-00000000-{pid}-{changes.get('start', start)}"


@pytest.mark.parametrize("start", ["0", "1"])  # 0: the host does not tell, as Windows and macOS
def test_the_file_of_another_host_stays_until_its_writer_has_not_touched_it_for_long(tmp_path, start):
    left = tmp_path / f".partial-{of_other_host(start=start)}.tmp"
    left.write_bytes(b"half")
    with patched(time, "time", lambda: 1e12):  # the clock of the file system counts
        IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert left.exists()
    os.utime(left, (0, 0))
    IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_a_slow_writer_on_another_host_touches_its_file_and_folder(tmp_path):
    """However long a save takes, another host sees that its writer lives."""
    file, folder = (tmp_path / f".partial-{of_other_host()}{suffix}" for suffix in (".tmp", ""))
    file.write_bytes(b"half")
    folder.mkdir()
    with patched(placing, "TOUCH_S", 0.02), placing.touched(file), placing.touched(folder):
        for _ in range(5):
            for path in (file, folder):
                os.utime(path, (0, 0))
                until = time.monotonic() + 60
                while path.stat().st_mtime == 0 and time.monotonic() < until:
                    time.sleep(0.01)
            placing.collect_leftovers(tmp_path)
            assert names(tmp_path) == sorted([file.name, folder.name])
    for path in (file, folder):
        os.utime(path, (0, 0))
    time.sleep(0.1)
    placing.collect_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_hidden_files_of_other_programs_stay(tmp_path):
    for name in (".partial-mine", ".saving-1.tmp", f".partial-{new_key()}-1"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    IO.save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert len(names(tmp_path)) == 4


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.99, 0.9999])
def test_a_truncated_file_is_refused_by_name(tmp_path, part):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(RuntimeError, match=rf"{path} is damaged"):
        check_file(path)


@pytest.mark.sweep(kept=None)
def test_no_flipped_bit_is_loaded(tmp_path):
    path = tmp_path / "a.ckpt"
    value = {"weights": torch.arange(6.0), "name": "some text", "step": 7}
    IO.save_checkpoint(value, path)
    content = path.read_bytes()
    passed = 0
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            check_file(path)
            passed += 1  # of padding, dates, versions
            found = IO.load_checkpoint(path)
        except RuntimeError as error:
            found = error
        if isinstance(found, RuntimeError):
            assert str(path) in str(found), position
            continue
        assert torch.equal(found.pop("weights"), value["weights"]), position
        assert found == {"name": "some text", "step": 7}, position
    assert passed < 0.6 * len(content)


def test_the_damaged_record_is_named(tmp_path):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1), path)
    content = bytearray(path.read_bytes())
    position = content.index(torch.full((SMALL // 4,), 1.0).numpy().tobytes())
    content[position + 9] ^= 4
    path.write_bytes(content)
    assert torch.load(path)["version"] == 1  # torch sees nothing
    with pytest.raises(RuntimeError, match=r"record '.*data/0': Bad CRC-32"):
        check_file(path)


def test_a_record_marked_as_a_folder_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1), path)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0"))
    content[entry + 38] ^= 0x10
    path.write_bytes(content)
    assert torch.load(path)["version"] == 1  # with weights that nobody has written
    with pytest.raises(RuntimeError, match="marked as a folder"):
        check_file(path)


def test_records_larger_than_the_file_are_refused(tmp_path):
    """A small file could fill the memory; torch writes records as they are."""
    path, small = tmp_path / "a.ckpt", tmp_path / "small.ckpt"
    IO.save_checkpoint({"state_dict": {"w": torch.zeros(LARGE)}}, path)
    with ZipFile(path) as archive, ZipFile(small, "w", ZIP_DEFLATED) as other:
        for record in archive.infolist():
            other.writestr(record.filename, archive.read(record))
    assert small.stat().st_size < path.stat().st_size / 100
    with pytest.raises(RuntimeError, match=rf"{small} is damaged: .*larger than the file"):
        check_file(small)
    with pytest.raises(ValueError, match=rf"{small} must be a file that `torch.save`.*larger in memory"):
        load_weights(torch.nn.Linear(2, 2), small)


class Bomb:
    """Runs a command when its pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_file_runs_code_unless_the_user_says_so(tmp_path, monkeypatch):
    """Neither a local one, nor one of a store, nor one of the web, which Lightning would load."""
    torch.save({"state_dict": {}, "x": Bomb(tmp_path / "executed")}, tmp_path / "bomb.ckpt")
    IO.save_checkpoint(state(1), tmp_path / "good.ckpt")
    fsspec.filesystem("memory").pipe_file("/bombs/bomb.ckpt", (tmp_path / "bomb.ckpt").read_bytes())
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert IO.load_checkpoint(f"{url}/good.ckpt")["version"] == 1
            for path in (f"{url}/bomb.ckpt", tmp_path / "bomb.ckpt", "memory://bombs/bomb.ckpt"):
                for given in ((), (None, None)):
                    with pytest.raises(RuntimeError, match=rf"(?s){path} cannot be loaded: .*mkdir"):
                        IO.load_checkpoint(path, *given)
            trainer = trainer_for(TensorParallelStrategy(), 1, max_epochs=1)
            with pytest.raises(RuntimeError, match=r"(?s)bomb.ckpt cannot be loaded: .*mkdir"):
                trainer.fit(Net(), loader(), ckpt_path=f"{url}/bomb.ckpt")
            assert not (tmp_path / "executed").exists()
            IO.load_checkpoint(f"{url}/bomb.ckpt", weights_only=False)
            assert (tmp_path / "executed").exists()
        finally:
            server.shutdown()
            thread.join()


def test_the_files_beside_a_checkpoint_are_those_beside_it(tmp_path):
    """What a checkpoint says of them may be anybody's: a key is no path."""
    world, place, files = Group.alone("world"), Place(0, 0), RankFiles("kind", "states", "They are lost")
    saved = files.write({"step": 3, "residual": {"w": torch.ones(2)}}, place, tmp_path / "a.ckpt", world)
    assert files.read(saved, place, tmp_path / "a.ckpt", world)["step"] == 3
    written = tmp_path / "rank-state" / "a.ckpt" / f"kind-{saved['key']}-0.pt"
    (tmp_path / "elsewhere").mkdir()
    for key in (f"../../elsewhere/{saved['key']}", str(tmp_path / "elsewhere" / saved["key"]), "..", 3, None):
        content = {**torch.load(written), "key": key}
        torch.save(content, tmp_path / "elsewhere" / written.name)
        with pytest.raises(ValueError, match="a.ckpt is damaged"):
            files.read({**saved, "key": key}, place, tmp_path / "a.ckpt", world)
    for places in (3, None, [3], [[0]], [["0", 0, 0, ""]], [[0, 0, 0, "", 5]]):
        with pytest.raises(ValueError, match="a.ckpt is damaged"):
            files.read({**saved, "places": places}, place, tmp_path / "a.ckpt", world)


def test_files_without_checksums_pass(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(state(1), path, _use_new_zipfile_serialization=False)
    check_file(path)
    assert IO.load_checkpoint(path)["version"] == 1
    torch.serialization.set_crc32_options(False)
    try:
        IO.save_checkpoint(state(2), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_whole(path, {2})
    path.write_bytes(b"no checkpoint at all")
    with pytest.raises(RuntimeError, match="it begins with b'no c'"):
        check_file(path)
    check_file(tmp_path / "missing.ckpt")  # the one who reads it says so


# -- strategies --------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "mesh": lambda **options: TensorParallelStrategy(tensor_parallel_size=2, **options),
    "ddp": lambda **options: CompressedDDPStrategy(TopK(0.1), **options),
    "fsdp": lambda **options: CompressedFSDPStrategy(TopK(0.1), **options),
}


def fit(kind, group, ckpt_path=None, plugin=None, **options):
    """Train on two ranks; the trainer."""
    strategy = STRATEGIES[kind](**({} if plugin is None else {"checkpoint_io": plugin}))
    trainer = trainer_for(strategy, group.size, **options)
    data = loader(*(() if kind == "mesh" else (group.size, group.rank)), dtype=torch.float32)
    trainer.fit(Net(), data, data, ckpt_path=ckpt_path)
    return trainer


def shared_folder(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else "", group))


def assert_same_error(error, group):
    """Check that all ranks had the same error, and return its text."""
    texts = comm.all_gather_object(str(error.value), group)
    assert all(text.startswith(texts[0]) for text in texts), texts
    return texts[0]


@pytest.mark.parametrize("kind", STRATEGIES)
@distributed(world_size=2)
def test_a_disk_that_fails_is_an_error_on_all_ranks_and_leaves_the_one_before(group, kind):
    folder = shared_folder(group)
    trainer = fit(kind, group, max_epochs=1)
    path = folder / "last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    with system(write=failing(os.write, errno.ENOSPC)), pytest.raises(RuntimeError, match="No space left") as error:
        trainer.save_checkpoint(path)
    assert str(path) in assert_same_error(error, group)
    assert path.read_bytes() == before
    assert not [name for name in names(folder) if name.startswith(".")]
    # The others go on with what is there.
    assert fit(kind, group, ckpt_path=path).current_epoch == 2


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
@distributed(world_size=2)
def test_a_damaged_file_is_refused_on_all_ranks(group, kind, damage):
    folder = shared_folder(group)
    path = folder / "a.ckpt"
    fit(kind, group, max_epochs=1).save_checkpoint(path)
    if group.rank == 0:
        content = bytearray(path.read_bytes())
        content[content.index(b"data/0") + 200] ^= 1
        path.unlink()
        if damage != "missing":
            path.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    comm.barrier(group)
    kinds = {"truncated": "end with the list of records is missing", "flipped": "Bad CRC-32", "missing": str(path)}
    expected = Exception if damage == "missing" else RuntimeError
    with pytest.raises(expected, match=kinds[damage]) as error:
        fit(kind, group, ckpt_path=path)
    assert str(path) in assert_same_error(error, group)


class Fills(ModelCheckpoint):
    """Leaves no room on the disk after the first checkpoint of an epoch."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            # A thread may still be writing those of the epoch before.
            until = time.monotonic() + 60
            while not (Path(self.dirpath) / "last.ckpt").exists() and time.monotonic() < until:
                time.sleep(0.01)
            filler = Path(self.dirpath).parent / "filler"
            filler.write_bytes(b"x" * (os.statvfs(self.dirpath).f_bavail * 4096 - 4096))
        trainer.strategy.barrier()


@pytest.mark.parametrize("is_async", [False, True])
@distributed(world_size=2)
def test_a_full_disk_ends_all_ranks_and_leaves_best_and_last(group, is_async):
    disk = small_disk()
    folder = Path(comm.broadcast_from(lambda: str(disk.__enter__()), group))
    try:
        best = {"monitor": "train_loss", "filename": "{epoch}", "save_top_k": 1}
        callback = Fills(folder / "checkpoints", save_last=True, save_on_train_epoch_end=True, **best)
        options = {"plugins": [AsyncCheckpointIO()]} if is_async else {}
        strategy = STRATEGIES["mesh"]()
        trainer = trainer_for(
            strategy, 2, max_epochs=3, callbacks=[callback], enable_checkpointing=True, limit_val_batches=0, **options
        )
        with pytest.raises(RuntimeError, match="No space left") as error:
            trainer.fit(Net(), loader(dtype=torch.float32))
        assert_same_error(error, group)
        found = [name for name in names(folder / "checkpoints") if "ckpt" in name]
        assert found == ["epoch=0.ckpt", "last.ckpt"], found
        assert not [name for name in names(folder / "checkpoints") if name.startswith(".")]
        for name in ("epoch=0.ckpt", "last.ckpt"):
            check_file(folder / "checkpoints" / name)
            assert torch.load(folder / "checkpoints" / name)["epoch"] == 0
        comm.barrier(group)
    finally:
        if group.rank == 0:
            disk.__exit__(None, None, None)


@pytest.mark.sweep
@pytest.mark.parametrize("is_async", [False, True])
@distributed(world_size=2)
def test_the_best_before_is_removed_after_the_new_one_is_there(group, is_async):
    folder = shared_folder(group)
    events = []

    def replace(source, target):
        time.sleep(0.1)  # a slow disk: in a thread, the loop is far ahead
        os.replace(source, target)
        events.append(("saved", Path(target).name))

    class Notes(SafeCheckpointIO):
        def remove_checkpoint(self, path):
            events.append(("removed", Path(path).name))
            super().remove_checkpoint(path)

    plugin = AsyncCheckpointIO(Notes()) if is_async else Notes()
    callback = ModelCheckpoint(folder, monitor="train_loss", filename="{epoch}", save_last=True)
    with system(replace=replace):
        fit(
            "mesh",
            group,
            plugin=plugin,
            max_epochs=3,
            callbacks=[callback],
            enable_checkpointing=True,
            limit_val_batches=0,
        )
    assert names(folder) == ["epoch=2.ckpt", "last.ckpt"]
    # The model learns, so each epoch is the best.
    expected = [("saved", "epoch=0.ckpt"), ("saved", "last.ckpt")]
    for epoch in (1, 2):
        expected += [("saved", f"epoch={epoch}.ckpt"), ("removed", f"epoch={epoch - 1}.ckpt"), ("saved", "last.ckpt")]
    assert events == (expected if group.rank == 0 else [])


@distributed(world_size=2)
def test_what_fails_in_a_thread_is_an_error_on_all_ranks_at_the_end(group):
    folder = shared_folder(group)
    broken = system(fsync=failing(os.fsync, errno.EDQUOT))

    class Last(ModelCheckpoint):
        def on_train_end(self, trainer, module):
            if trainer.is_global_zero:
                broken.__enter__()
            trainer.save_checkpoint(folder / "end.ckpt")

    # No other file is under way when the disk fails.
    last = Last(folder, save_top_k=0)
    options = {"plugins": [AsyncCheckpointIO()], "callbacks": [last], "enable_checkpointing": True}
    trainer = trainer_for(STRATEGIES["mesh"](), 2, max_epochs=1, **options)
    beats = []

    def finish(queue):
        beats.append(presence._heartbeat is not None)
        return finish_saves(queue)

    with patched(files, "finish_saves", finish), pytest.raises(RuntimeError, match="EDQUOT") as error:
        trainer.fit(Net(), loader(dtype=torch.float32))
    assert "end.ckpt" in assert_same_error(error, group)
    assert beats[0], "a rank that is lost in the last save must be named"
    if group.rank == 0:
        broken.__exit__(None, None, None)
    assert isinstance(innermost_io(trainer.strategy.checkpoint_io), SafeCheckpointIO)


class Rows(CheckpointIO):
    """A plugin of the user's, with a format of its own."""

    fails = False

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if self.fails:
            raise ValueError("the store of the rows is closed")
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).write_bytes(b"rows" + buffer.getvalue())

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(io.BytesIO(Path(path).read_bytes()[4:]))

    def remove_checkpoint(self, path):
        Path(path).unlink()


@pytest.mark.parametrize("kind", ["mesh", "ddp"])
@distributed(world_size=2)
def test_a_plugin_of_the_users_is_left_alone_but_its_error_is_everyones(group, kind):
    folder, rows = shared_folder(group), Rows()
    trainer = fit(kind, group, plugin=rows, max_epochs=1)
    assert trainer.strategy.checkpoint_io is rows
    trainer.save_checkpoint(folder / "a.rows")
    assert (folder / "a.rows").read_bytes().startswith(b"rows")
    assert fit(kind, group, plugin=rows, ckpt_path=folder / "a.rows").current_epoch == 2
    rows.fails = group.rank == 0
    with pytest.raises(ValueError, match="the store of the rows is closed") as error:
        trainer.save_checkpoint(folder / "a.rows")
    assert_same_error(error, group)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: TensorParallelStrategy(**options),
        lambda **options: CompressedDDPStrategy(TopK(0.1), **options),
        lambda **options: CompressedFSDPStrategy(TopK(0.1), **options),
        lambda **options: CompressedModelParallelStrategy(TopK(0.1), **options),
    ],
    ids=["mesh", "ddp", "fsdp", "model parallel"],
)
def test_it_is_the_default_also_inside_of_others_and_no_more_than_that(make):
    assert type(make().checkpoint_io) is SafeCheckpointIO
    given = TorchCheckpointIO()
    strategy = make()
    strategy.checkpoint_io = given
    assert strategy.checkpoint_io is given
    for wrapper in (AsyncCheckpointIO(), AsyncCheckpointIO(AsyncCheckpointIO())):
        strategy = make()
        strategy.checkpoint_io = wrapper
        assert strategy.checkpoint_io is wrapper
        assert type(innermost_io(strategy.checkpoint_io)) is SafeCheckpointIO
    strategy = make()
    strategy.checkpoint_io = AsyncCheckpointIO(given)
    assert innermost_io(strategy.checkpoint_io) is given


def test_stock_lightning_loads_it(tmp_path):
    trainer = fit_single(Net().double(), max_epochs=1)
    IO.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), tmp_path / "a.ckpt")
    assert fit_single(Net().double(), ckpt_path=tmp_path / "a.ckpt").current_epoch == 2
