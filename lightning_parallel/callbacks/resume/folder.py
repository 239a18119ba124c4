"""Where and when checkpoints of a run that may be interrupted are written: aside first, the newest few are kept."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from lightning_parallel import comm
from lightning_parallel.checkpoint.folder import new_key, remove_abandoned, state_beside
from lightning_parallel.comm import Group

__all__ = ["ResumeFolder", "SaveClock"]

_NAME = re.compile(r"step-(\d+)(-end)?\.ckpt")
_ASIDE = ".partial-"
_EARLIER = re.compile(r"\.partial-(replaced-|removed-)?(step-\d+(-end)?\.ckpt)")
"""Names of earlier releases, which did not tell who has begun it."""


class ResumeFolder:
    """Checkpoints named by their step, files or folders alike; used on one rank.

    A checkpoint is written under another name, and gets its own when it is complete: one that was being written when
    the process died is never taken for a checkpoint.

    Args:
        path: The folder.
        key: Names the process that writes; on all its ranks that of the first.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path = path
        self._key = key or new_key()

    def create(self) -> None:
        """Create the folder, and remove what dead processes have left incomplete in it; what lives stays."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_ASIDE}*"):
            if _EARLIER.fullmatch(left.name):
                _remove(left)
        for folder in (self.path, Path(state_beside(self.path / "any")).parent):
            if folder.is_dir():
                remove_abandoned(folder)

    def place(self, step: int, is_end: bool) -> Path:
        """Return where the checkpoint of a step belongs."""
        return self.path / f"step-{step:08d}{'-end' if is_end else ''}.ckpt"

    def aside(self, place: Path) -> Path:
        """Return where a checkpoint is written until it is complete."""
        return place.with_name(f"{_ASIDE}{self._key}{place.suffix}")

    def _hidden(self) -> Path:
        return self.path / f"{_ASIDE}{new_key()}"

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
            self._rename(place)
        found = self.found()
        for path in found[max(keep, found.index(place) + 1) :]:
            self.drop(path)

    def _rename(self, place: Path) -> None:
        written, replaced = self.aside(place), self._hidden()
        if place.exists():
            # Of an attempt before that went further than the checkpoint it was resumed from; folders do not replace.
            place.rename(replaced)
        _move_state(written, place)
        written.rename(place)
        _remove(replaced)

    def drop(self, path: Path) -> None:
        """Remove a checkpoint, which stops being one before its files are gone."""
        removed = self._hidden()
        path.rename(removed)
        _remove(removed)
        _remove(Path(state_beside(path)))


def _move_state(written: Path, place: Path) -> None:
    """Move what ranks have written beside a checkpoint to where it belongs with the checkpoint's own name.

    What belongs to the checkpoint that has had the name stays: until the new one has it, it is the one to be found.
    """
    beside, target = Path(state_beside(written)), Path(state_beside(place))
    if beside.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in beside.iterdir():
            path.replace(target / path.name)
        beside.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class SaveClock:
    """Tells all ranks at the same step that it is time to save.

    Ranks agree on how many steps they go on before they ask again, so that they need not communicate in each: half of
    the steps that the rest of the time would take, but no more than there were since the last checkpoint.

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
        # Clocks of ranks differ: that of the first counts.
        is_due, pause = comm.broadcast_object((left_s <= 0, pause), self._group)
        self._next = step + pause
        return is_due
