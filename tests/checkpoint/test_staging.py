"""Copies of tensors that a process of its own writes: the same files, in memory that is used again, and its faults."""

import errno
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import ShardedWriter, as_parts, staging, writer
from lightning_parallel.checkpoint.folder import Folder
from lightning_parallel.checkpoint.staging import Staging
from lightning_parallel.checkpoint.writer import TensorPart, write_file
from lightning_parallel.comm import Group
from tests.checkpoint.test_sharded_files import every_dtype, files_of, value_at
from tests.harness import run_script


@pytest.fixture
def copies():
    made = Staging(2)
    yield made
    made.close()


@pytest.fixture
def saving():
    made = ShardedWriter(Group.alone("world"), {}, in_background=True)
    yield made
    made.close()


def save(saving, path, value, size=1000):
    tensors = as_parts({"weight": torch.full((size,), value), "bias": torch.full((3,), value)}, is_mine=True)
    saving.save({"state_dict": tensors, "global_step": int(value)}, str(path))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_the_process_writes_the_file_that_the_run_would_write(tmp_path, copies, monkeypatch):
    monkeypatch.setattr(writer, "BLOCK", 512)
    parts = {str(dtype): TensorPart(tensor.repeat(50, 1).T) for dtype, tensor in every_dtype()}
    parts |= {
        "empty": TensorPart(torch.zeros(0, 3)),
        "scalar": TensorPart(torch.tensor(2.5)),
        "int": TensorPart(torch.tensor(3)),
    }
    names = writer._in_file_order(parts)
    seen = []
    copy = copies.copy([parts[name].local for name in names])
    here = write_file(Folder.at(str(tmp_path)), "here", parts)
    there = write_file(Folder.at(str(tmp_path)), "there", parts, seen.append, copy)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    assert [part.checksums for part in here[1].values()] == [part.checksums for part in there[1].values()]
    assert here[0] == there[0]
    assert sum(seen) == sum(part.num_bytes for part in there[1].values())
    copy.release()
    nothing = copies.copy([])
    assert write_file(Folder.at(str(tmp_path)), "nothing", {}, None, nothing)[1] == {}


def test_a_copy_holds_its_values_and_its_memory_is_used_again(copies):
    source = torch.arange(5000.0)
    first = copies.copy([source, source[:3]])
    source.zero_()
    assert torch.equal(first.tensors[0], torch.arange(5000.0))
    second = copies.copy([source])
    used = {first.tensors[0].data_ptr(), second.tensors[0].data_ptr()}
    first.release()
    second.release()
    # Whatever is saved next: the memory grows with the largest copy, and not with their number.
    for _ in range(3):
        again = copies.copy([source[1:], source[:3]])
        assert again.tensors[0].data_ptr() in used
        assert torch.equal(again.tensors[1], source[:3])
        again.release()


def test_a_prepared_memory_holds_the_first_copy(copies):
    """Also a copy that comes while the memory is being made: it waits for that memory, and makes no other."""
    source = torch.arange(1 << 20, dtype=torch.float32)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(copies.prepare, source.nbytes + 100, False)
        while copies._memories[0].size == 0 and not copies._memories[0]._lock.locked():
            time.sleep(0)
        first = copies.copy([source])
        making.result()
    assert copies._process.is_usable
    assert [memory.size for memory in copies._memories] == [source.nbytes + 100, 0]
    assert torch.equal(first.tensors[0], source)
    assert os.fstat(copies._memories[0].descriptor).st_blocks * 512 >= source.nbytes


def test_a_save_without_memory_for_copies_waits_until_it_is_written(tmp_path, saving, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    real, tensor = staging.os.posix_fallocate, torch.full((1000,), 1.0)
    monkeypatch.setattr(staging.os, "posix_fallocate", full)
    saving.prepare(as_parts({"weight": tensor}, is_mine=True))
    with pytest.warns(
        UserWarning, match="no memory for copies of the tensors.*No space left.*written from the tensors"
    ):
        saving.save({"state_dict": as_parts({"weight": tensor}, is_mine=True)}, str(tmp_path / "a.ckpt"))
    tensor.fill_(2.0)  # the next step
    assert value_at(tmp_path / "a.ckpt") == 1.0
    monkeypatch.setattr(staging.os, "posix_fallocate", real)
    save(saving, tmp_path / "a.ckpt", 3.0)
    saving.wait()
    assert value_at(tmp_path / "a.ckpt") == 3.0


def test_a_second_close_closes_no_file_of_the_run(tmp_path):
    made = Staging(2)
    made.copy([torch.zeros(10)]).release()
    made.close()
    with ExitStack() as files:
        some = [files.enter_context((tmp_path / f"{number}").open("w")) for number in range(4)]
        made.close()
        for file in some:
            os.fstat(file.fileno())


def test_what_the_process_cannot_write_is_an_error_of_the_run_with_its_reason(tmp_path, copies, monkeypatch):
    copy = copies.copy([torch.zeros(1 << 18)])
    with pytest.raises(OSError, match="No space left on device.*/dev/full"):
        copy.write("/dev/full", b"", 1 << 10)
    with pytest.raises(FileNotFoundError, match="gone/file"):
        copy.write(str(tmp_path / "gone" / "file"), b"", 1 << 10)
    with pytest.raises(RuntimeError, match="(?s)cannot be written: Traceback.*ZeroDivisionError"):
        copy.write(str(tmp_path / "file"), b"", 0)
    # Opening a pipe that nobody reads blocks, as a storage does that is gone.
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(staging, "SILENCE_S", 0.2)
    with pytest.raises(TimeoutError, match=r"nothing was written for 0.2 s; the storage does not answer.*pipe"):
        copy.write(str(tmp_path / "pipe"), b"", 1 << 10)
    monkeypatch.setattr(staging, "SILENCE_S", 60.0)
    ((size, checksums),) = copy.write(str(tmp_path / "file"), b"head", 1 << 20)
    assert (size, len(checksums)) == (1 << 20, 1)
    assert (tmp_path / "file").read_bytes() == b"head" + bytes(1 << 20)


def test_a_process_that_is_killed_fails_the_save_and_the_next_one_has_another(tmp_path, saving):
    save(saving, tmp_path / "a.ckpt", 1.0)
    saving.wait()
    process = saving._staging._process._process
    # Stopped, so that it is killed during the save, and not before it.
    os.kill(process.pid, signal.SIGSTOP)
    save(saving, tmp_path / "a.ckpt", 2.0)
    while not list(tmp_path.glob(".partial-*")):
        time.sleep(0.01)
    time.sleep(0.1)
    process.kill()
    with pytest.raises(RuntimeError, match="writes checkpoints has ended with the status -9"):
        saving.wait()
    assert value_at(tmp_path / "a.ckpt") == 1.0
    save(saving, tmp_path / "a.ckpt", 3.0)
    saving.wait()
    assert value_at(tmp_path / "a.ckpt") == 3.0
    assert files_of(tmp_path) == ["a.ckpt", "latest.json"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_the_group_of_the_run_does_not_end_the_process(name, tmp_path, saving):
    """SLURM announces the end of a run by SIGUSR1, upon which Lightning saves: the process must live until then."""
    save(saving, tmp_path / "a.ckpt", 1.0)
    saving.wait()
    process = saving._staging._process._process
    assert os.getpgid(process.pid) != os.getpgrp()
    os.kill(process.pid, getattr(signal, name))
    save(saving, tmp_path / "a.ckpt", 2.0)
    saving.wait()
    assert value_at(tmp_path / "a.ckpt") == 2.0
    assert saving._staging._process._process is process


def test_a_storage_that_fails_for_a_moment_is_tried_again_from_the_beginning(tmp_path, saving, monkeypatch):
    failures = [errno.EIO]
    real = staging.StagedCopy.write

    def failing(self, path, *args):
        found = real(self, path, *args)
        if failures:
            raise OSError(failures.pop(), "for a moment")
        return found

    monkeypatch.setattr("lightning_parallel.checkpoint.place.PAUSES_S", (0.01,))
    monkeypatch.setattr(staging.StagedCopy, "write", failing)
    save(saving, tmp_path / "a.ckpt", 1.0)
    saving.wait()
    assert not failures
    assert value_at(tmp_path / "a.ckpt") == 1.0


def test_the_process_ends_with_a_run_that_is_killed(tmp_path):
    """Also while a child of the run lives, which holds the same pipes, as a worker of a `DataLoader` does."""
    ended = run_script(Path(__file__).with_name("killed_run.py"), tmp_path / "a.ckpt")
    assert ended.stdout == "ended\n", ended.stderr
    assert value_at(tmp_path / "a.ckpt") == 1.0


WITHOUT_STREAMS = """
import os
import sys

import torch

from lightning_parallel.checkpoint.staging import Staging

os.close(0)
os.close(1)
copies = Staging(2)
copies.copy([torch.arange(4.0)]).write(sys.argv[1], b"head", 512)
copies.close()
"""


def test_a_run_may_have_closed_its_standard_streams(tmp_path):
    script, path = tmp_path / "run.py", tmp_path / "file"
    script.write_text(WITHOUT_STREAMS)
    ended = run_script(script, path)
    assert path.read_bytes() == b"head" + torch.arange(4.0).numpy().tobytes(), ended.stderr
