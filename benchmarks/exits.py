"""How processes end: each strategy, started by each launcher and ended in each way, several times.

    python benchmarks/exits.py --times 20 [--kinds tensor local] [--ends fit alone] [--launchers torchrun slurm]

A row for each kind, launcher and end: how often each list of exit statuses was seen, and the longest run in seconds. A
run that succeeded ends with 0; one that failed with another status and its own error; none with a signal that nobody
sent, and none waits for ever. What is otherwise is marked with `<--`, its output kept, and the status is 1.

Ranks of `ranks` and `slurm`, and the first process of `popen`, `cli`, `spawn` and `fork`, are forks of a server that
has imported everything, which end as the interpreter does; the other processes of the first three are interpreters.
`torchrun` starts interpreters for each run, and `workers` one torchrun, of whose processes the ranks are forks.
"""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SCRIPT = Path(__file__).parents[1] / "tests/strategies/ending.py"
SOON_S = 140.0
CRASHES = ("terminate called", "Fatal Python error", "Segmentation fault", "core dumped", "Exception ignored")


def as_ranks(kind, end, **environment):
    """Start each rank by itself, as a cluster does; returns the exit statuses, and what was written."""
    from tests.harness import free_port, start_script
    from tests.strategies.ending import ranks_of

    count, port = ranks_of(kind), free_port()
    ranks = []
    for rank in range(count):
        mine = {name: text.format(rank=rank, count=count) for name, text in environment.items()}
        mine.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        ranks.append(start_script(SCRIPT, kind, end, deadline_s=SOON_S, **mine))
    ended = [rank() for rank in ranks]
    return tuple(one.returncode for one in ended), "\n".join(one.stdout + one.stderr for one in ended)


def by_ranks(kind, end):
    """With the variables of torch."""
    return as_ranks(kind, end, RANK="{rank}", LOCAL_RANK="{rank}", WORLD_SIZE="{count}", NODE_RANK="0")


def by_slurm(kind, end):
    """With the variables of SLURM."""
    own = {"NTASKS": "{count}", "NTASKS_PER_NODE": "{count}", "PROCID": "{rank}", "LOCALID": "{rank}", "NODEID": "0"}
    names = {f"SLURM_{name}": text for name, text in own.items()}
    return as_ranks(kind, end, **names, SLURM_JOB_ID="1234", SLURM_JOB_NAME="train", SLURM_NODELIST="localhost")


def by_torchrun(kind, end):
    """As interpreters that torchrun starts, whose status is returned."""
    from tests.strategies.ending import ranks_of

    count = str(ranks_of(kind))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, str(SCRIPT), kind, end]
    begun = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = begun.communicate(timeout=SOON_S)
    except subprocess.TimeoutExpired:
        os.killpg(begun.pid, signal.SIGKILL)
        text, _ = begun.communicate()
    return (begun.returncode,), text


class Workers:
    """The processes of one torchrun for each number of ranks, each of which forks itself for each run."""

    def __init__(self):
        self.pipes, self.count = {}, 0

    def __call__(self, kind, end):
        from tests.strategies.ending import ranks_of

        pipes = self._pipes_of(ranks_of(kind))
        self.count += 1
        for pipe in pipes:
            pipe.send((kind, end, self.count))
        statuses, texts = zip(*(pipe.recv() for pipe in pipes))
        return statuses, "\n".join(texts)

    def _pipes_of(self, ranks):
        if ranks not in self.pipes:
            address = f"{tempfile.mkdtemp(prefix='exits_')}/workers"
            words = ["--standalone", "--nproc_per_node", str(ranks), __file__, "--serve", address]
            with Listener(address, "AF_UNIX") as listener:
                subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words])
                self.pipes[ranks] = [listener.accept() for _ in range(ranks)]
        return self.pipes[ranks]


def serve(address):
    """Start a fork for each run that is asked for, as the rank of this worker of torchrun."""
    import tests.preload  # noqa: F401
    from tests.harness import Started, _interpret

    fork = multiprocessing.get_context("fork").Process
    with Client(address, "AF_UNIX") as pipe, suppress(EOFError):
        while True:
            kind, end, number = pipe.recv()
            # torch keeps the keys of each attempt apart in the store of the agent.
            environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(number)}
            folder = tempfile.mkdtemp(prefix="exits_")
            process = fork(target=_interpret, args=([str(SCRIPT), kind, end], os.getcwd(), environment, folder))
            process.start()
            ended = Started(process, Path(folder), SOON_S)()
            pipe.send((ended.returncode, ended.stdout + ended.stderr))


def by_lightning(how):
    """By a script that starts the other processes itself."""

    def start(kind, end):
        from tests.harness import run_script

        ended = run_script(SCRIPT, kind, end, how, deadline_s=SOON_S)
        return (ended.returncode,), ended.stdout + ended.stderr

    return start


LAUNCHERS = {
    "ranks": by_ranks,
    "slurm": by_slurm,
    "torchrun": by_torchrun,
    "workers": Workers(),
    **{how: by_lightning(how) for how in ("popen", "spawn", "fork", "cli")},
}


def is_possible(kind, launcher, end):
    """Tell whether the kind can be started so."""
    from tests.strategies.ending import LOOPS, NAMES, SCRIPTS_ONLY

    if kind in LOOPS:
        return launcher in ("ranks", "torchrun") and end == "fit"
    if launcher in ("spawn", "fork"):
        return kind not in SCRIPTS_ONLY
    if launcher == "workers":
        return kind not in ("deepspeed", "stock")  # they connect by keys that other runs of this torchrun have used
    return launcher != "cli" or kind in NAMES


def reason_against(end, statuses, text):
    """Return what is wrong with how a run ended; None if nothing is."""
    from tests.strategies.ending import SUCCEED

    crash = next((word for word in CRASHES if word in text), None)
    if crash is not None:
        return f"`{crash}`"
    if end in SUCCEED:
        return None if not any(statuses) else "a run that succeeded failed"
    if 0 in statuses:
        return "a run that failed succeeded"
    own = {"fails": "Failure", "setup": "Failure", "alone": "Failure", "killed": "(rank|process) 1"}.get(end, "")
    return None if re.search(own, text) else f"does not tell `{own}`"


def main():
    """Print a table."""
    from tests.strategies.ending import ENDS, LOOPS, STRATEGIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=[*STRATEGIES, *LOOPS])
    parser.add_argument("--ends", nargs="*", default=ENDS)
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=["ranks"])
    options = parser.parse_args()
    rows = [(k, how, e) for how in options.launchers for k in options.kinds for e in options.ends]
    folder, wrong = Path(tempfile.mkdtemp(prefix="exits_")), 0
    for kind, launcher, end in [row for row in rows if is_possible(row[0], row[1], row[2])]:
        seen, longest, reasons = Counter(), 0.0, set()
        for number in range(options.times):
            begin = time.monotonic()
            statuses, text = LAUNCHERS[launcher](kind, end)
            took = time.monotonic() - begin
            longest = max(longest, took)
            seen[statuses] += 1
            reason = "it waits" if took >= SOON_S else reason_against(end, statuses, text)
            if reason is not None:
                reasons.add(reason)
                (folder / f"{kind}-{launcher}-{end}-{number}.txt".replace(" ", "_")).write_text(text)
        told = ", ".join(f"{count} x {statuses}" for statuses, count in seen.most_common())
        mark = f"   <-- {'; '.join(sorted(reasons))}" if reasons else ""
        print(f"{kind:16}{launcher:10}{end:10}{told}   longest {longest:.1f} s{mark}", flush=True)
        wrong += bool(reasons)
    print(f"{wrong} rows are not as they should be" + (f": see {folder}" if wrong else ""))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main())
