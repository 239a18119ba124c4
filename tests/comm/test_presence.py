"""Lost ranks are found by heartbeats, as they must be where devices wait and hosts do not."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import host, presence
from lightning_parallel.compat import patched
from tests.harness import DEADLINE_S, RankError, distributed, run


def wait_like_a_device():
    """Wait as the thread does whose device waits for another rank: it sees no failure."""
    end_s = time.monotonic() + DEADLINE_S / 2
    while time.monotonic() < end_s:
        time.sleep(0.01)


def _one_is_lost(group, how):
    comm.start_heartbeat(watches=True)
    comm.all_gather_object(None, group)  # no heart has to beat before all do
    if group.rank == 2:
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.report_failure(ValueError("no samples"))
    if group.rank > 0:
        comm.stop_heartbeat()  # rank 1 has finished; rank 0 watches the next one then
        return None  # its process goes on
    with patched(presence, "ENDED_S", 0.5), pytest.raises(comm.LostRankError) as error:
        wait_like_a_device()
    comm.stop_heartbeat()
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("killed", "rank 2 is gone: its process has ended"), ("error", "rank 2 stopped with: ValueError: no samples")],
)
def test_a_lost_rank_is_named_where_the_host_does_not_notice(how, expected):
    with pytest.raises(RankError) as error:
        run(_one_is_named, 3, deadline_s=40, how=how, expected=expected)
    assert f"found: {expected}" in str(error.value)


def _one_is_named(group, how, expected):
    # Ray calls the user's function in a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        message = thread.submit(_one_is_lost, group, how).result() if how == "error" else _one_is_lost(group, how)
    assert message is None, f"found: {message.split('] ', 1)[1]}"


@distributed(world_size=2)
def test_who_is_slow_stopped_or_finished_is_not_lost(group):
    """A process of this machine that exists may go on; a run that has ended is no loss."""
    with patched(presence, "ENDED_S", 0.3), patched(presence, "BEAT_S", 0.1):
        for _ in range(2):
            comm.start_heartbeat(watches=True)
            comm.barrier(group)
            if group.rank == 0:
                presence._heartbeat.stop()  # as where C code keeps the interpreter locked
            time.sleep(1)
            comm.barrier(group)
            comm.stop_heartbeat()
            time.sleep(0.6)


def test_a_silent_rank_of_another_machine_is_lost():
    with pytest.raises(RankError, match="rank 1 is gone: its heartbeat has stopped for"):
        run(_one_is_silent, 2)


def _one_is_silent(group):
    with patched(presence, "SILENT_S", 1.0), patched(host, "host_id", lambda: f"machine{group.rank}"):
        comm.start_heartbeat(watches=True)
        comm.all_gather_object(None, group)
        if group.rank == 1:
            presence._heartbeat.stop()
        else:
            wait_like_a_device()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed on Linux")
def test_looking_for_connections_leaves_no_descriptors_open():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    one, other = socket.socketpair()  # their peers have no port
    with one, other:
        before = len(os.listdir("/proc/self/fd"))
        presence._notice_dead_connections(store, {})
        assert len(os.listdir("/proc/self/fd")) == before


def _with_options():
    """Return the connections of this process that the system ends when nobody answers."""
    found = set()
    for number, descriptor in presence._sockets().items():
        with socket.socket(fileno=os.dup(descriptor)) as one:
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
                found.add(number)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed on Linux")
def test_connections_of_others_keep_their_options():
    """Those of others to the store, too."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    client = dist.TCPStore("127.0.0.1", store.port, None, False)
    before = set(presence._sockets())
    heart = presence._Heartbeat(store, 0, 1, watches=False)
    try:
        found = _with_options()
    finally:
        heart.stop()
    assert client.num_keys() >= 0
    if hasattr(store, "clone"):
        assert len(found) == 1, "the heartbeat's own"
        assert not found & before
