"""Training that no longer moves ends, with the name of the rank that did not come."""

import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_parallel.callbacks import HangWatchdog
from lightning_parallel.callbacks.monitors.hang import EXIT_STATUS, Watchdog, explain_hang
from lightning_parallel.comm import Process
from tests.harness import free_port, start_script
from tests.strategies.models import Net, loader, trainer_for
from tests.timing import compares_durations, durations

SCRIPT = Path(__file__).with_name("hang_script.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """For each way to hang: what the first of two ranks left behind, the process numbers of both, and the folder."""
    waits, folders = {}, {way: tmp_path_factory.mktemp(way) for way in ("stop", "skip")}
    for way, folder in folders.items():  # at once, as they mostly wait
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0", "WORLD_SIZE": "2"}
        waits[way] = [start_script(SCRIPT, folder, way, LOCAL_RANK=str(rank), **address) for rank in range(2)]
    results = {}
    for way, folder in folders.items():
        first, second = (wait() for wait in waits[way])
        pids = [int(pid) for done in (first, second) for pid in re.findall(r"pid (\d+)", done.stdout)]
        results[way] = first, pids, folder
    return results


def is_running(pid):
    """Neither gone nor a zombie that nobody has collected yet."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def check_end(done, pids, folder):
    assert done.returncode == EXIT_STATUS, done.stderr
    assert "the end" not in done.stdout
    until = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    (written,) = folder.glob("hang-*")
    assert re.fullmatch(r"hang-\d{8}-\d{6}-[0-9a-f]{8}", written.name), "nobody else makes it by chance"
    assert (written / "verdict.txt").read_text().strip() in done.stderr
    stacks = (written / "rank0.txt").read_text()
    assert "in training_step" in stacks
    return written


def test_a_stopped_process_is_named_and_killed(ended):
    done, pids, folder = ended["stop"]
    written = check_end(done, pids, folder)
    assert "rank 1 does not answer" in done.stderr
    assert "killed rank 1" in done.stderr
    assert not (written / "rank1.json").exists()


def test_a_rank_that_skips_a_collective_is_named(ended):
    done, pids, folder = ended["skip"]
    written = check_end(done, pids, folder)
    missing = r"rank 1 did not enter all_reduce along world, call \d+ of ranks \[0, 1\], where rank 0 waits"
    assert re.search(missing, done.stderr)
    assert "rank 0 did not enter" not in done.stderr or "ranks wait for each other" in done.stderr
    assert '"op": "all_reduce"' in (written / "rank1.json").read_text()
    assert "in backward" in (written / "rank1.txt").read_text()


def test_training_is_watched_and_nothing_else():
    seen = {}

    class Look(Callback):
        def on_train_batch_end(self, *_):
            seen["training"] = any("watchdog" in thread.name for thread in threading.enumerate())

        def on_fit_end(self, *_):
            seen["after"] = any("watchdog" in thread.name for thread in threading.enumerate())

    for callbacks in ([HangWatchdog(), Look()], [Look(), HangWatchdog()]):
        trainer_for(callbacks=callbacks).fit(Net().double(), loader())
        assert seen == {"training": True, "after": False}


# ---------------------------------------------------------------------------------------------- the watchdog alone


def watchdog(tmp_path, deadline):
    ended = threading.Event()
    dog = Watchdog(0, [Process.of()], tmp_path / "hang", deadline, end=ended.set)
    dog.start()
    return dog, ended


@compares_durations
def test_progress_keeps_the_process_alive(tmp_path):
    dog, ended = watchdog(tmp_path, deadline=0.5)
    for _ in range(10):
        time.sleep(0.1)
        dog.progress("a batch")
    dog.stop()
    with durations():
        assert not ended.is_set()
        assert not (tmp_path / "hang").exists()
        assert 0.1 <= dog.longest < 0.5


def test_a_rank_sees_the_alarm_of_another(tmp_path):
    dog, ended = watchdog(tmp_path, deadline=200.0)
    (tmp_path / "hang").mkdir()
    assert ended.wait(100), "long before its own deadline"
    dog.stop()
    assert "the start" in (tmp_path / "hang" / "verdict.txt").read_text()


def test_where_details_cannot_be_written_it_says_so_and_ends(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    dog, ended = watchdog(tmp_path / "file", deadline=0.2)
    assert ended.wait(100)
    dog.stop()
    said = capfd.readouterr().err
    assert "no progress in the start; could not write details: NotADirectoryError" in said
    assert "in test_where_details" in said


def test_a_process_of_a_container_with_the_same_hostname_is_not_killed():
    child = subprocess.Popen(["sleep", "100"])
    try:
        process = Process.of(child.pid)
        assert process._replace(host=socket.gethostname()).kill() is False
        assert child.poll() is None
        assert process.kill() is True
    finally:
        child.kill()
        child.wait()


def test_a_process_number_that_was_used_again_is_not_killed():
    assert Process.of()._replace(started="1").kill() is False


def test_a_deadline_must_be_positive():
    with pytest.raises(ValueError, match="`deadline_s` must be a number of seconds above 0"):
        HangWatchdog(deadline_s=0)


# ------------------------------------------------------------------------------------------------- who is to blame


def state(rank, waits=(), calls=(), progress=5, groups=None, waited_for=True):
    flights = [
        {
            "op": op,
            "axis": axis,
            "ranks": ranks,
            "group": axis,
            "peer": peer,
            "tag": tag,
            "sequence": n,
            "waited_for": waited_for,
            "began_at": 100.0 - age,
        }
        for op, axis, ranks, peer, tag, n, age in waits
    ]
    made = [
        {"axis": axis, "ranks": ranks, "group": axis, "op": op, "peer": peer, "tag": tag, "count": count}
        for axis, ranks, op, peer, tag, count in calls
    ]
    where = {"where": f"training batch {progress}", "line": "train.py:3 (step)", "progress": progress}
    return {"rank": rank, **where, "in_flight": flights, "calls": made, "torch_groups": groups or {}}


def test_the_end_of_a_chain_of_waits_is_to_blame():
    """Rank 0 waits for 1 along one axis, 1 for 3 along another; 2 and 3 wait for nothing."""
    states = {
        0: state(0, waits=[("all_reduce", "a", [0, 1], None, None, 4, 9.0)], calls=[("a", [0, 1], "", None, None, 5)]),
        1: state(1, waits=[("all_reduce", "b", [1, 3], None, None, 7, 8.0)], calls=[("b", [1, 3], "", None, None, 8)]),
        2: state(2),
        3: state(3, calls=[("b", [1, 3], "", None, None, 7)]),
    }
    lines = explain_hang(states, 4)
    assert lines[0] == "rank 3 did not enter all_reduce along b, call 7 of ranks [1, 3], where rank 1 waits"
    assert not any(line.startswith("rank 1 did not") for line in lines)


def circle(since, later):
    """What is said where rank 1 skipped a call along a and waits along b, and rank 0 waits along a."""
    made = [[(axis, [0, 1], "", None, None, n) for axis, n in (("a", a), ("b", b))] for a, b in ((5, 2), (4, 3))]
    states = {
        0: state(0, waits=[("all_reduce", "a", [0, 1], None, None, 4, since)], calls=made[0]),
        1: state(1, waits=[("all_reduce", "b", [0, 1], None, None, 2, later)], calls=made[1]),
    }
    return [line for line in explain_hang(states, 2) if not line.endswith("[0, 1]")]


def test_in_a_circle_all_are_named_and_who_was_waited_for_first_comes_first():
    first, second = (
        f"rank {rank} did not enter all_reduce along {axis}, call {call} of ranks [0, 1], where rank {1 - rank} waits"
        for rank, axis, call in ((1, "a", 4), (0, "b", 2))
    )
    assert circle(9.0, 7.0)[1:] == [first, second]
    assert circle(7.0, 9.0)[1:] == [second, first]
    assert "ranks wait for each other" in circle(9.0, 7.0)[0]


def test_what_is_waited_for_out_of_sight_counts_if_nothing_else_does():
    call = ("all_reduce", "data_parallel", [0, 1], None, None, 5, 3.0)
    made = [("data_parallel", [0, 1], "", None, None, 6)]
    states = {0: state(0, waits=[call], calls=made, waited_for=False), 1: state(1)}
    assert explain_hang(states, 2)[0].startswith("rank 1 did not enter all_reduce along data parallel, call 5")


def test_a_message_that_was_not_sent_is_blamed_on_its_sender():
    sent = [("pipeline_parallel", [0, 1], "send", 1, 7, 2)]
    states = {
        0: state(0, calls=sent),
        1: state(1, waits=[("recv", "pipeline_parallel", [0, 1], 0, 7, 2, 1.0)]),
    }
    assert explain_hang(states, 2)[0].startswith("rank 0 did not send message 2 along pipeline parallel to rank 1")
    states[0] = state(0, calls=[("pipeline_parallel", [0, 1], "send", 1, 7, 3)])
    assert not any("did not send" in line for line in explain_hang(states, 2))


def test_collectives_that_torch_issued_tell_who_is_behind():
    groups = [{"0": {"count": count, "last": "all_reduce", "name": "default_pg"}} for count in (9, 8)]
    states = {rank: state(rank, groups=groups[rank]) for rank in range(2)}
    assert explain_hang(states, 2)[0] == "rank 1 did not enter all_reduce, call 9 of torch's group default_pg"


def test_a_rank_that_did_less_is_behind():
    assert (
        explain_hang({0: state(0), 1: state(1, progress=4)}, 2)[0]
        == "rank 1 is behind; the furthest rank is in training batch 5"
    )
    assert "no rank is known to be late" in explain_hang({0: state(0), 1: state(1)}, 2)[0]
