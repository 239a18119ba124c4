"""Do ranks that must hold equal values still do?

Each rank hashes what it shares with others. What the same ranks share is one class, and of a class only the hash of
its hashes is exchanged: a few numbers per rank, whatever the size of the model. Where those differ the hashes follow,
and of what differs, the values.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, Optional

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich import box
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.holdings import Held, Key, holdings
from lightning_parallel.comm import Group, fingerprints
from lightning_parallel.recorder import Window

__all__ = ["Disagreement", "DriftAccumulator", "ReplicaDriftMonitor", "disagreements", "shared_classes"]

Ranks = tuple[int, ...]
Action = Literal["warn", "raise", "heal"]
Gather = Callable[[Any], Optional[list[Any]]]

MAX_COMPARED = 16
"""Of so many values that differ is also found out by how much, unless they are healed, for which all are needed."""


_KINDS = ("option", "parameter", "buffer", "optimizer")
"""Kinds of values; what comes first makes what follows drift, rather than the other way round."""


class Difference(NamedTuple):
    """By how much a value differs from the reference: the largest difference, and all in words."""

    largest: float
    text: str


@dataclass(frozen=True)
class Disagreement:
    """A value that ranks should share and do not.

    Attributes:
        key: Of the value.
        reference: The rank whose value counts: the first of the majority, or of all where there is none.
        different: The ranks with other values than the reference.
        ranks: Those that are known to be wrong, or all that hold it where there is no majority.
    """

    key: Key
    reference: int
    different: Ranks
    ranks: Ranks

    @property
    def is_certain(self) -> bool:
        """Whether a majority tells who is wrong."""
        return self.ranks == self.different

    @property
    def order(self) -> tuple[Any, ...]:
        """Likely causes first: those of which it is certain who is wrong, then by kind."""
        return not self.is_certain, _KINDS.index(self.key.kind)


def shared_classes(keys_by_rank: Sequence[Sequence[Key]]) -> dict[Ranks, list[Key]]:
    """Sort keys by the ranks that hold them, where these are several."""
    holders: dict[Key, list[int]] = {}
    for rank, keys in enumerate(keys_by_rank):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    classes: dict[Ranks, list[Key]] = {}
    for key in sorted(holders):
        if len(holders[key]) > 1:
            classes.setdefault(tuple(holders[key]), []).append(key)
    return classes


def disagreements(hashes_by_rank: Sequence[Mapping[Key, int]]) -> list[Disagreement]:
    """The keys that several ranks hold with different hashes, likely causes first."""
    found = []
    for ranks, keys in shared_classes([list(hashes) for hashes in hashes_by_rank]).items():
        for key in keys:
            values = {rank: hashes_by_rank[rank][key] for rank in ranks}
            (common, most), *others = Counter(values.values()).most_common()
            if not others:
                continue
            is_certain = most > others[0][1]
            reference = next(rank for rank in ranks if values[rank] == common) if is_certain else ranks[0]
            different = tuple(rank for rank in ranks if values[rank] != values[reference])
            found.append(Disagreement(key, reference, different, different if is_certain else ranks))
    return sorted(found, key=lambda disagreement: (disagreement.order, disagreement.key))


class DriftAccumulator(Accumulator):
    """What was found to differ between ranks.

    Args:
        group: All ranks; used by nobody else while a check runs.
        gather: Gives the value of every rank, or None if they do not all answer.
        action: `heal` overwrites what differs; otherwise nothing is changed here.

    Attributes:
        findings: One for each value that drifted, with its first step.
        checks: How often everything was compared.
        classes: Keys by the ranks that share them.
    """

    def __init__(self, group: Group, gather: Gather, action: Action = "warn") -> None:
        self._group, self._gather, self._action = group, gather, action
        self.findings: list[dict[str, Any]] = []
        self.checks = 0
        self.classes: dict[Ranks, list[Key]] = {}
        self._keys: list[Key] | None = None
        self._known: set[Disagreement] = set()

    @property
    def _rank(self) -> int:
        return self._group.rank

    @override
    def add(self, window: Window) -> None:
        """Steps are not looked at."""

    @override
    def share(self) -> None:
        """Nothing: a check leaves all ranks with the same findings."""

    @override
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        kinds = Counter(key.kind for keys in self.classes.values() for key in keys)
        return {"findings": list(self.findings), "checks": self.checks, "compared": dict(kinds)}

    @override
    def scalars(self) -> dict[str, float]:
        return {"replica_drift/findings": float(len(self.findings))}

    def check(self, step: int, held: Mapping[Key, Held]) -> list[dict[str, Any]]:
        """Compare what the ranks hold; every rank must call it at the same `step`. Returns what was not known yet."""
        if self._group.size == 1:
            return []
        drifted = self._drifted(held)
        if drifted is None:
            return []
        self.checks += 1
        new = [disagreement for disagreement in drifted if disagreement not in self._known]
        if self._action == "heal":
            details = self._details(new, held)
        else:
            self._known |= set(new)
            details = self._details(new[:MAX_COMPARED], held)
        unknown = Difference(0.0, "")
        new.sort(key=lambda drift: (drift.order, -details.get(drift.key, unknown).largest))
        findings = [_finding(step, drift, details.get(drift.key, unknown).text) for drift in new]
        self.findings += findings
        return findings

    # --------------------------------------------------------------------------------------------------- comparing

    def _drifted(self, held: Mapping[Key, Held]) -> list[Disagreement] | None:
        """What differs anywhere, alike on all ranks; None if a rank does not answer."""
        answers = self._gather(None if sorted(held) != self._keys else self._digests(held))
        if answers is not None and None in answers:  # somewhere there is something new, such as the optimizer's state
            self._keys = sorted(held)
            keys = self._gather(self._keys)
            if keys is None:
                return None
            self.classes = shared_classes(keys)
            answers = self._gather(self._digests(held))
        if answers is None:
            return None
        different = [ranks for ranks in self.classes if len({answers[rank][ranks] for rank in ranks}) > 1]
        if not different:
            return []
        keys_in_doubt = [key for ranks in different for key in self._mine(ranks)]
        hashes_by_rank = self._gather(_hashes(keys_in_doubt, held))
        return None if hashes_by_rank is None else disagreements(hashes_by_rank)

    def _mine(self, ranks: Ranks) -> list[Key]:
        return self.classes[ranks] if self._rank in ranks else []

    def _digests(self, held: Mapping[Key, Held]) -> dict[Ranks, bytes]:
        """One hash for each class of values that this rank shares."""
        mine = {ranks: keys for ranks, keys in self.classes.items() if self._rank in ranks}
        hashes = _hashes([key for keys in mine.values() for key in keys], held)
        return {
            ranks: hashlib.blake2b(str([hashes[key] for key in keys]).encode(), digest_size=16).digest()
            for ranks, keys in mine.items()
        }

    # -------------------------------------------------------------------------------------------- by how much, healing

    @torch.no_grad()
    def _details(self, drifted: Sequence[Disagreement], held: Mapping[Key, Held]) -> dict[Key, Difference]:
        """Send the reference's values to the ranks that differ, which say by how much, and heal if they may."""
        if not drifted:
            return {}
        mine = {
            drift.key: held[drift.key].value for drift in drifted if self._rank in (drift.reference, *drift.different)
        }
        numbers = {key: value for key, value in mine.items() if not isinstance(value, Tensor)}
        numbers_by_rank = self._gather(numbers)
        if numbers_by_rank is None:
            return {}
        found: dict[Key, Difference] = {}
        for drift in drifted:
            if drift.key not in mine:
                continue
            value = mine[drift.key]
            reference = numbers_by_rank[drift.reference].get(drift.key)
            if isinstance(value, Tensor):
                reference = self._reference(drift, value)
            if self._rank in drift.different:
                found[drift.key] = self._compare(drift, held[drift.key], reference)
        return {key: how for differences in self._gather(found) or [] for key, how in differences.items()}

    def _reference(self, drift: Disagreement, value: Tensor) -> Tensor | None:
        if self._rank == drift.reference:
            sent = value.detach().cpu().contiguous()
            for pending in [comm.isend(sent, self._group, rank) for rank in drift.different]:
                pending.wait()
            return None
        received = torch.empty(value.shape, dtype=value.dtype)
        return comm.irecv(received, self._group, drift.reference).wait()

    def _compare(self, drift: Disagreement, held: Held, reference: Any) -> Difference:
        found = difference(held.value, reference)
        if self._action != "heal":
            return found
        held.replace(reference)
        return found._replace(text=f"{found.text}; now that of rank {drift.reference}")


def difference(value: Any, reference: Any) -> Difference:
    """How a value differs from the reference."""
    if not isinstance(value, Tensor):
        return Difference(0.0, f"{value} instead of {reference}")
    mine, other = value.detach().cpu(), reference
    count = int((mine != other).sum())
    if count == 0:
        return Difference(0.0, "bits that do not change the value, such as the sign of a zero")
    wide = torch.complex128 if mine.is_complex() else torch.float64
    largest = float((mine.to(wide) - other.to(wide)).abs().max())
    text = f"{count} of {mine.numel()} elements, by up to {largest:.3g}"
    return Difference(largest if isfinite(largest) else inf, text)


def _finding(step: int, drift: Disagreement, text: str) -> dict[str, Any]:
    doubt = "" if drift.is_certain else "no majority tells which is right"
    against = f"differs from rank {drift.reference}"
    detail = "; ".join(part for part in (f"{against}: {text}" if text else against, doubt) if part)
    return {"step": step, "name": drift.key.name, "ranks": list(drift.ranks), "detail": detail}


def _hashes(keys: Sequence[Key], held: Mapping[Key, Held]) -> dict[Key, int]:
    tensors = [key for key in keys if isinstance(held[key].value, Tensor)]
    hashes = dict(zip(tensors, fingerprints(held[key].value for key in tensors)))
    return {key: hashes[key] if key in hashes else _number_hash(held[key].value) for key in keys}


def _number_hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


class ReplicaDriftMonitor(MeasuringCallback):
    """Compares what ranks must hold alike, bit for bit, and names what differs.

    Between the replicas of the data-parallel axis: parameters, buffers, optimizer state. Between the ranks of the
    tensor axis: whatever is not divided, and pieces that several of them hold. Between pipeline stages: parameters that
    both hold. Everywhere: learning rate, momentum and the other options of the optimizers. Under FSDP, what ranks hold
    pieces of is compared where two of them have the same piece.

    Not compared: buffers that DDP overwrites at each forward, statistics of normalisation layers that are not
    synchronised (but under the strategies of this library they are), and the optimizer state of DeepSpeed.

    `report()` has, besides the common keys:

        findings: [{step, name, ranks, detail}]    `step` as `trainer.global_step` counts; `ranks` that are wrong, or
                                                   all that hold it if no majority tells
        checks: how often everything was compared
        compared: {parameter, buffer, optimizer, option: how many values several ranks hold}

    Logged: `replica_drift/findings`, their number so far.

    Args:
        every_n_steps: Optimizer steps between two checks; the first is before training, the last after it. A check
            reads all values once.
        action: `warn`; `raise` an error on every rank; or `heal`: overwrite what differs with the value of the
            majority, or of the first rank that holds it where there is none.
        dirpath, show_table: See `MeasuringCallback`.

    Raises:
        ValueError: If an argument is none of these.
        RuntimeError: In training, on every rank, under `raise`.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        action: Literal["warn", "raise", "heal"] = "warn",
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        if every_n_steps < 1:
            raise ValueError(f"expected every_n_steps >= 1, got {every_n_steps}")
        if action not in ("warn", "raise", "heal"):
            raise ValueError(f"expected `action` to be 'warn', 'raise' or 'heal', got {action!r}")
        self.every_n_steps, self.action = every_n_steps, action
        self._checked_step = 0

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> DriftAccumulator:
        assert self.session is not None
        return DriftAccumulator(self.session.group, self.session.gather, self.action)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._check(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step - self._checked_step >= self.every_n_steps:
            self._check(trainer, pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._checked_step:
            self._check(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(self._accumulator, DriftAccumulator)
        self._checked_step = trainer.global_step
        findings = self._accumulator.check(trainer.global_step, holdings(trainer, pl_module))
        if not findings:
            return
        listed = "\n".join(f"  {one['name']}, ranks {one['ranks']}: {one['detail']}" for one in findings[:MAX_COMPARED])
        more = f"\n  and {len(findings) - MAX_COMPARED} more" if len(findings) > MAX_COMPARED else ""
        message = f"Ranks that must hold equal values do not, at optimizer step {trainer.global_step}:\n{listed}{more}"
        if self.action == "raise":
            raise RuntimeError(message)
        rank_zero_warn(message)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        findings = report["findings"]
        if not findings:
            return None
        header = "optimizer step", "name", "ranks", "detail"
        table = Table(*header, title="Values that drifted apart", box=box.SIMPLE_HEAD)
        for one in findings[:MAX_COMPARED]:
            table.add_row(str(one["step"]), one["name"], ", ".join(map(str, one["ranks"])), one["detail"])
        return table

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(report["findings"])
