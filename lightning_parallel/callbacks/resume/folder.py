"""Where and when checkpoints of a run that may be interrupted are written: aside first, the newest few are kept."""

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
    """Checkpoints named by their step, files or folders alike; used on one rank.

    A checkpoint is written under a hidden name, and gets its name when it is complete. A checkpoint whose writer died
    keeps the hidden name, so that nobody takes it for a checkpoint.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # All ranks get this object from the first rank, and so the same key.
        self._key = new_key()

    def create(self) -> None:
        """Create the folder, and remove the incomplete checkpoints of dead processes from it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, Path(state_beside(self.path / "any")).parent):
            if folder.is_dir():
                remove_abandoned(folder)

    def place(self, step: int, is_end: bool) -> Path:
        """Return where the checkpoint of a step belongs."""
        return self.path / f"step-{step:08d}{'-end' if is_end else ''}.ckpt"

    def aside(self, place: Path) -> Path:
        """Return where a checkpoint is written until it is complete."""
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
        """Give a complete checkpoint that is aside its name; then remove all but the newest `keep`."""
        if is_aside:
            written = self.aside(place)
            _move_state(written, place)
            # An earlier attempt may have written a checkpoint of this step.
            put_in_place(str(written), str(place))
        found = self.found()
        for path in found[max(keep, found.index(place) + 1) :]:
            self.drop(path)

    def drop(self, path: Path) -> None:
        """Remove a checkpoint, which stops being one before its files are gone."""
        removed = hidden_path(self.path)
        path.rename(removed)
        remove_path(removed)
        remove_path(state_beside(path))


def _move_state(written: Path, place: Path) -> None:
    """Move the files of the ranks beside a checkpoint to their place beside its final name.

    The files of a checkpoint that has the name stay: until the new checkpoint has the name, it is the one to be found.
    """
    beside, target = Path(state_beside(written)), Path(state_beside(place))
    if beside.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in beside.iterdir():
            path.replace(target / path.name)
        beside.rmdir()


class SaveClock:
    """Tells all ranks at the same step that it is time to save.

    Ranks agree on a number of steps before they ask again, so that they need not communicate in each step. It is half
    of the steps that the rest of the time would take, but no more than the steps since the last checkpoint.

    Args:
        minutes: Time between two checkpoints; None without end.
        group: All ranks.
    """

    def __init__(self, minutes: float | None, group: Group) -> None:
        self._group = group
        self._every_s = None if minutes is None else 60 * minutes
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to wait at `step`."""
        self._begun_s, self._begun = time.monotonic(), step
        self._next = step + 1

    def is_due(self, step: int) -> bool:
        """Tell whether it is time; every rank must ask at the same steps."""
        if self._every_s is None or step < self._next:
            return False
        waited_s, steps = time.monotonic() - self._begun_s, max(1, step - self._begun)
        left_s = self._every_s - waited_s
        pause = max(1, min(steps, int(left_s / 2 * steps / max(waited_s, 1e-9))))
        # Clocks of ranks differ: the clock of the first rank counts.
        is_due, pause = comm.broadcast_object((left_s <= 0, pause), self._group)
        self._next = step + pause
        return is_due
