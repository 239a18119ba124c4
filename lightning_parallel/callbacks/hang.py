"""When nothing moves any more: what every rank was doing, who did not come, and an end."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback, made_folder
from lightning_parallel.callbacks.hang_state import blame, read_states, state_of_rank, write_text
from lightning_parallel.recorder import Window

__all__ = ["EXIT_STATUS", "HangReporter", "Process", "Watchdog"]

EXIT_STATUS = 70
"""Of a process that ends because nothing moved."""
GRACE_S = 5.0
"""How long ranks that still run are given to say what they are doing, at least; a twentieth of the deadline if more."""


class Process:
    """A process as others can find it again.

    Attributes:
        host: Where it runs.
        pid: Its number there.
        birth: When it was started, in ticks of that host: numbers are used again.
    """

    def __init__(self, pid: int) -> None:
        self.host, self.pid = socket.gethostname(), pid
        self.birth = _birth(pid)

    def kill(self) -> bool:
        """End the process, also a stopped one, if it is of this host and still the same; whether it was."""
        is_same = self.host == socket.gethostname() and self.birth is not None and _birth(self.pid) == self.birth
        if is_same:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        return is_same


def _birth(pid: int) -> str | None:
    """Field 22 of /proc/<pid>/stat; the second one, the name, may have spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


class Watchdog:
    """Ends the process when it has made no progress for `deadline` seconds, and says why.

    The ranks talk through files in `folder`, which works while their processes are stuck, whichever of them is: the
    first rank that misses its deadline makes the folder, the others see it, and each writes down what it is doing.

        rank0.txt    stacks of all threads
        rank0.json   communication that has begun and not ended, calls made so far, last spans
        verdict.txt  who did not come

    A process of this host that does not answer is killed: a stopped one would stay for ever.

    Args:
        rank: Of this process.
        processes: Of all ranks.
        folder: Of this run alone, the same on all ranks; must not exist.
        deadline: Seconds without progress after which the process ends.
        end: What to do at the end; by default, leave with `EXIT_STATUS`.

    Attributes:
        longest: Seconds of the longest time without progress.
    """

    def __init__(
        self,
        rank: int,
        processes: list[Process],
        folder: Path,
        deadline: float,
        end: Callable[[], Any] = lambda: os._exit(EXIT_STATUS),
    ) -> None:
        self.rank, self.processes, self.folder, self.deadline, self.end = rank, processes, folder, deadline, end
        self.longest = 0.0
        self._main = threading.get_ident()
        self._where, self._count, self._since = "the start", 0, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_parallel-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._main = threading.get_ident()
        self.progress("the start")
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether it watches, or has."""
        return self._thread.ident is not None

    def progress(self, where: str) -> None:
        """Something has been done; what comes now is `where`."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._since)
        self._where, self._since = where, now
        self._count += 1

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=GRACE_S)

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.deadline / 10)):
            if time.monotonic() - self._since > self.deadline or self.folder.exists():
                try:
                    self._report()
                except Exception as error:  # a full disk, say: then it is said here
                    text = f"[rank {self.rank}] no progress in {self._where}; could not write details: {error!r}"
                    print(text, file=sys.stderr, flush=True)  # noqa: T201
                    faulthandler.dump_traceback()
                finally:
                    self.end()
                return

    def _report(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank{self.rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        idle = time.monotonic() - self._since
        state = state_of_rank(self.rank, self._where, self._count, idle, self._main)
        write_text(self.folder / f"rank{self.rank}.json", state)
        states = read_states(self.folder, len(self.processes), max(GRACE_S, self.deadline / 20))
        silent = [rank for rank in range(len(self.processes)) if rank not in states]
        lines = blame(states, len(self.processes))
        lines += [f"killed rank {rank}, which did not answer" for rank in silent if self.processes[rank].kill()]
        text = "\n".join([f"[rank {self.rank}] no progress for {idle:.0f} s", *lines, f"details: {self.folder}"])
        if self.rank == min(states):
            write_text(self.folder / "verdict.txt", text + "\n")
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - loggers may be stuck, and the process ends


class _Pauses(Accumulator):
    """The longest time without progress."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    @override
    def add(self, window: Window) -> None:
        pass

    @override
    def share(self) -> dict[str, Any]:
        return {"rank": self._watchdog.rank, "longest_pause": self._watchdog.longest}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"deadline": self._watchdog.deadline, "ranks": list(shared)}


class HangReporter(MeasuringCallback):
    """Ends training that no longer moves, and says which rank did not come.

    Waiting for a rank that is stopped, stuck, or runs other code ends after half an hour, with an error on ranks that
    did nothing wrong. This callback ends it after `deadline_s`: every rank that still runs writes the stacks of its
    threads, its last spans and its unfinished communication to files, the ranks that are missing from it are named on
    stderr, and the processes end with status 70. A process of the same host that does not answer is killed.

    Progress is a batch, of training or of validation, begun or ended, or an epoch. `deadline_s` must be longer than the
    longest time between two of these, which `report()` tells, with the checkpoints that are saved there. What comes
    after the last epoch is not watched: `on_train_end` of callbacks further down the list, and `on_fit_end`.

    Args:
        deadline_s: Seconds without progress after which the processes end.
        dirpath: Where a folder for the files is made, when they are needed; on a file system that all ranks share. By
            default, the trainer's log folder.

    `report()` has, besides the common keys:

        deadline: as given; ranks: [{rank, longest_pause}], in seconds.

    Raises:
        ValueError: If `deadline_s` is not positive.
    """

    def __init__(self, deadline_s: float = 600.0, dirpath: Optional[str] = None) -> None:
        if not deadline_s > 0:
            raise ValueError(f"expected deadline_s > 0, got {deadline_s}")
        super().__init__(show_table=False)
        self.deadline_s, self.folder = deadline_s, dirpath
        self._watchdog: Watchdog | None = None

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        assert self.session is not None
        base = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        base = made_folder(base, self.session.group)
        name = f"hang-{datetime.now():%Y%m%d-%H%M%S}"
        facts = comm.all_gather_object((base / name, Process(os.getpid())), self.session.group)
        folder, processes = facts[0][0], [process for _, process in facts]
        self._watchdog = Watchdog(self.session.rank, processes, folder, self.deadline_s)
        return _Pauses(self._watchdog)

    def _progress(self, where: str) -> None:
        if self._watchdog is not None:
            self._watchdog.progress(where)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._start()

    def _start(self) -> None:
        assert self._watchdog is not None
        if not self._watchdog.started:
            self._watchdog.start()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress(f"epoch {trainer.current_epoch}")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._progress(f"training batch {batch_idx}")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._progress(f"after training batch {batch_idx}")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._progress(f"validation batch {batch_idx}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._progress("after validation")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress("the end of training")
        super().on_train_end(trainer, pl_module)
        assert self._watchdog is not None
        self._watchdog.stop()  # an export of what was trained may take its time

    @override
    def _leave(self) -> None:
        super()._leave()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
