"""Place and time of the checkpoints of `AutoResume`: written under a hidden name first; only the newest few stay."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lightning_parallel import comm
from lightning_parallel.checkpoint.folder import remove_abandoned, state_beside
from lightning_parallel.checkpoint.place import hidden_path, new_key, put_in_place, remove_path
from lightning_parallel.comm import Group

__all__ = ["ResumeFolder", "SaveClock"]

_NAME = re.compile(r"step-(\d+)(-end)?\.ckpt")


class ResumeFolder:
    """Checkpoints named by their step, either files or folders; used on one rank.

    A checkpoint is written under a hidden name, and gets its final name when it is complete. If the writer dies, the
    checkpoint keeps the hidden name, and no run resumes from it.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The first rank sends this object to all ranks, so all ranks have the same key.
        self._key = new_key()

    def create(self) -> None:
        """Create the folder, and remove the incomplete checkpoints of dead processes from it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, Path(state_beside(self.path / "any")).parent):
            if folder.is_dir():
                remove_abandoned(folder)

    def place(self, step: int, is_end: bool) -> Path:
        """Return the final path of the checkpoint of a step."""
        return self.path / f"step-{step:08d}{'-end' if is_end else ''}.ckpt"

    def aside(self, place: Path) -> Path:
        """Return the hidden path of a checkpoint that is not yet complete."""
        return Path(hidden_path(place.parent, self._key, place.suffix))

    def found(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        places = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match:
                places.append((int(match[1]), bool(match[2]), path))
        return [path for *_, path in sorted(places, reverse=True)]

    def commit(self, place: Path, keep: int, is_aside: bool) -> None:
        """Rename a complete hidden checkpoint to its final name; then remove all but the newest `keep` checkpoints."""
        if is_aside:
            written = self.aside(place)
            # The state beside it first: a checkpoint that has its name must have its state, too.
            _move_state(written, place)
            # An earlier attempt may have written a checkpoint of this step.
            put_in_place(str(written), str(place))
        found = self.found()
        # Keep at least the new checkpoint: an earlier attempt may have left checkpoints of later steps.
        for path in found[max(keep, found.index(place) + 1) :]:
            self.drop(path)

    def drop(self, path: Path) -> None:
        """Remove a checkpoint; rename it first, so that no run finds a half-removed checkpoint."""
        removed = hidden_path(self.path)
        path.rename(removed)
        remove_path(removed)
        remove_path(state_beside(path))


def _move_state(written: Path, place: Path) -> None:
    """Move the files of the ranks beside a checkpoint to their place beside its final name.

    The files of an earlier checkpoint of this name stay. A restarted run finds the earlier checkpoint until the rename.
    """
    beside, target = Path(state_beside(written)), Path(state_beside(place))
    if beside.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in beside.iterdir():
            path.replace(target / path.name)
        beside.rmdir()


class SaveClock:
    """Tells all ranks at the same step that it is time to save.

    Ranks agree on a number of steps until their next question, so they need not communicate in each step. The number
    is half of the steps that fit into the remaining time. It is at most the number of steps since the last checkpoint.

    Args:
        minutes: Time between two checkpoints; None for no limit.
        group: All ranks.
    """

    def __init__(self, minutes: float | None, group: Group) -> None:
        self._group = group
        self._every_s = None if minutes is None else 60 * minutes
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restart the interval at `step`."""
        self._begun_s, self._begun = time.monotonic(), step
        self._next = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due; every rank must ask at the same steps."""
        if self._every_s is None or step < self._next:
            return False
        waited_s, steps = time.monotonic() - self._begun_s, max(1, step - self._begun)
        left_s = self._every_s - waited_s
        pause = max(1, min(steps, int(left_s / 2 * steps / max(waited_s, 1e-9))))
        # The clocks of the ranks differ, so the clock of the first rank counts.
        is_due, pause = comm.broadcast_object((left_s <= 0, pause), self._group)
        self._next = step + pause
        return is_due
