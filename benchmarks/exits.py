"""How processes end: each strategy, ended in each way, started several times.

    python benchmarks/exits.py --times 20 [--kinds tensor local] [--ends fit alone] [--launcher torchrun]

A row for each kind and end: how often each pair of exit statuses was seen, and the longest run in seconds. The ranks
are forks of a server that has imported everything, which end as the interpreter does; `torchrun` starts interpreters.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SCRIPT = Path(__file__).parents[1] / "tests/strategies/ending.py"


def started_by_fork(kind, end):
    """Return the exit statuses of both ranks, and what they wrote to stderr."""
    from tests.harness import free_port, start_script

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    ranks = [start_script(SCRIPT, kind, end, RANK=str(r), LOCAL_RANK=str(r), **address) for r in range(2)]
    ended = [rank() for rank in ranks]
    return tuple(one.returncode for one in ended), "\n".join(one.stderr for one in ended)


def started_by_torchrun(kind, end):
    """Return the exit status of torchrun, and what was written."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), kind, end]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    return (ended.returncode,), ended.stderr


def started_by_lightning(kind, end):
    """Return the exit status of a script whose launcher runs it again for rank 1, and what was written."""
    ended = subprocess.run([sys.executable, str(SCRIPT), kind, end], capture_output=True, text=True, timeout=300)
    return (ended.returncode,), ended.stderr


LAUNCHERS = {"fork": started_by_fork, "torchrun": started_by_torchrun, "popen": started_by_lightning}


def main():
    """Print a table."""
    from tests.strategies.ending import ENDS, LOOPS, STRATEGIES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=[*STRATEGIES, *LOOPS])
    parser.add_argument("--ends", nargs="*", default=ENDS)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="fork")
    options = parser.parse_args()
    for kind in options.kinds:
        for end in options.ends if kind not in LOOPS else ["fit"]:
            seen, longest, texts = Counter(), 0.0, {}
            for _ in range(options.times):
                begin = time.monotonic()
                statuses, text = LAUNCHERS[options.launcher](kind, end)
                longest = max(longest, time.monotonic() - begin)
                seen[statuses] += 1
                texts[statuses] = text
            told = ", ".join(f"{count} x {statuses}" for statuses, count in seen.most_common())
            print(f"{kind:16}{end:10}{told}   longest {longest:.1f} s", flush=True)
            for statuses, text in texts.items():
                path = Path(tempfile.gettempdir()) / "exits" / f"{kind}-{end}-{statuses}.txt".replace(" ", "_")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)


if __name__ == "__main__":
    main()
