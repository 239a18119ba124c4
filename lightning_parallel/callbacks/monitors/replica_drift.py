"""Drift between ranks that must hold equal values: hashes find it bit for bit, and reports name the values.

Each rank hashes its replicated state. Values that the same ranks share form a class. Ranks exchange only one hash per
class, which is a few numbers per rank for a model of any size. If these hashes differ, ranks exchange the hashes of
all values in the class. If the hash of a value differs, ranks exchange the value.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, Optional

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.comm import Group, fingerprints
from lightning_parallel.compat.torch import NormalizationBase
from lightning_parallel.compat.twins import is_a
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.compression.fsdp import plain_name
from lightning_parallel.mesh import Mesh

__all__ = [
    "Disagreement",
    "DriftAccumulator",
    "ReplicaDriftMonitor",
    "StateKey",
    "disagreements",
    "option_values",
    "shared_classes",
]

Ranks = tuple[int, ...]
GatherValues = Callable[[Any], Optional[list[Any]]]
ShardOf = Callable[[str], "str | None"]
"""Maps the name of a parameter or buffer to its shard on this rank: empty if full, None if no other rank has it."""

MAX_COMPARED = 16
"""Most values that ranks send to find the size of their differences."""

_KINDS = ("option", "parameter", "buffer", "optimizer")
"""Kinds of state in causal order: drift in an earlier kind causes drift in later ones."""


class StateKey(NamedTuple):
    """Identifies a value; ranks that hold values under equal keys must hold equal values.

    Attributes:
        kind: `parameter`, `buffer`, `optimizer` or `option`.
        name: The name for users.
        shard: Identifies the shard; empty for a full value.
    """

    kind: str
    name: str
    shard: str = ""


class Difference(NamedTuple):
    """Difference of a value from the reference: the largest difference of an element, and a description."""

    largest: float
    text: str


@dataclass(frozen=True)
class Disagreement:
    """A value that should be equal on several ranks and is not.

    Attributes:
        key: Identifies the value.
        reference: The rank whose value counts as right: the first rank of the majority; without one, the first rank.
        different: The ranks whose values differ from the reference.
        ranks: The ranks with a wrong value; without a majority, all ranks with the value.
    """

    key: StateKey
    reference: int
    different: Ranks
    ranks: Ranks

    @property
    def is_certain(self) -> bool:
        """Whether a majority of equal values shows which ranks are wrong."""
        return self.ranks == self.different

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key, likely causes first: certain drift before uncertain drift, then in causal order."""
        return not self.is_certain, _KINDS.index(self.key.kind)


def shared_classes(keys_by_rank: Sequence[Sequence[StateKey]]) -> dict[Ranks, list[StateKey]]:
    """Group keys by the ranks that hold them; leave out keys of a single rank."""
    holders: dict[StateKey, list[int]] = {}
    for rank, keys in enumerate(keys_by_rank):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    classes: dict[Ranks, list[StateKey]] = {}
    # Sort, so that all ranks hash the keys in the same order.
    for key in sorted(holders):
        if len(holders[key]) > 1:
            classes.setdefault(tuple(holders[key]), []).append(key)
    return classes


def disagreements(hashes_by_rank: Sequence[Mapping[StateKey, int]]) -> list[Disagreement]:
    """Find the keys that several ranks hold with different hashes, likely causes first."""
    found = []
    for ranks, keys in shared_classes([list(hashes) for hashes in hashes_by_rank]).items():
        for key in keys:
            values = {rank: hashes_by_rank[rank][key] for rank in ranks}
            (common, most), *others = Counter(values.values()).most_common()
            if not others:
                continue
            # Two replicas have no majority: the right value is unknown.
            is_certain = most > others[0][1]
            reference = next(rank for rank in ranks if values[rank] == common) if is_certain else ranks[0]
            different = tuple(rank for rank in ranks if values[rank] != values[reference])
            found.append(Disagreement(key, reference, different, different if is_certain else ranks))
    return sorted(found, key=lambda disagreement: (disagreement.order, disagreement.key))


class DriftAccumulator(Accumulator):
    """Compares the replicated state of all ranks, and keeps the findings.

    Args:
        group: All ranks; used for nothing else while a check runs.
        gather: Returns the value of every rank, or None if a rank does not answer.

    Attributes:
        findings: One finding for each drifted value, with its first step.
        checks: Number of complete checks.
        classes: Keys by the ranks that share them.
    """

    def __init__(self, group: Group, gather: GatherValues) -> None:
        self._group = group
        self._gather = gather
        self.findings: list[dict[str, Any]] = []
        self.checks = 0
        self.classes: dict[Ranks, list[StateKey]] = {}
        self._keys: list[StateKey] | None = None
        self._known: set[Disagreement] = set()

    @property
    def _rank(self) -> int:
        return self._group.rank

    @override
    def share(self) -> None:
        """Share nothing: a check leaves all ranks with the same findings."""

    @override
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        kinds = Counter(key.kind for keys in self.classes.values() for key in keys)
        return {"findings": list(self.findings), "checks": self.checks, "compared": dict(kinds)}

    @override
    def scalars(self) -> dict[str, float]:
        return {"replica_drift/findings": float(len(self.findings))}

    def check(self, step: int, state: Mapping[StateKey, Any]) -> list[dict[str, Any]]:
        """Compare the state of all ranks; every rank must call it at the same `step`.

        Args:
            step: Step of the findings.
            state: This rank's state, see `collect_state`.

        Returns:
            The new findings.
        """
        if self._group.size == 1:
            return []
        drifted = self._drifted(state)
        # None: a rank did not answer, which the session reports.
        if drifted is None:
            return []
        self.checks += 1
        new = [disagreement for disagreement in drifted if disagreement not in self._known]
        # Drift stays until training ends, so report each value only once.
        self._known |= set(new)
        details = self._details(new[:MAX_COMPARED], state)
        unknown = Difference(0.0, "")
        new.sort(key=lambda drift: (drift.order, -details.get(drift.key, unknown).largest))
        findings = [_finding(step, drift, details.get(drift.key, unknown).text) for drift in new]
        self.findings += findings
        return findings

    # --------------------------------------------------------------------------------------------------- comparing

    def _drifted(self, state: Mapping[StateKey, Any]) -> list[Disagreement] | None:
        """Find all values that differ, with the same result on all ranks; None if a rank does not answer."""
        answers = self._gather(None if sorted(state) != self._keys else self._digests(state))
        # None asks all ranks to agree on new classes, such as after the first step, which adds optimizer state.
        if answers is not None and None in answers:
            self._keys = sorted(state)
            keys = self._gather(self._keys)
            if keys is None:
                return None
            self.classes = shared_classes(keys)
            answers = self._gather(self._digests(state))
        if answers is None:
            return None
        # The usual case ends here, after one exchange of some bytes for each class.
        different = [ranks for ranks in self.classes if len({answers[rank][ranks] for rank in ranks}) > 1]
        if not different:
            return []
        keys_in_doubt: list[StateKey] = []
        for ranks in different:
            if self._rank in ranks:
                keys_in_doubt += self.classes[ranks]
        hashes_by_rank = self._gather(_hashes(keys_in_doubt, state))
        return None if hashes_by_rank is None else disagreements(hashes_by_rank)

    def _digests(self, state: Mapping[StateKey, Any]) -> dict[Ranks, bytes]:
        """Hash each class of values that this rank shares."""
        mine = {ranks: keys for ranks, keys in self.classes.items() if self._rank in ranks}
        hashes = _hashes([key for keys in mine.values() for key in keys], state)
        return {
            ranks: hashlib.blake2b(str([hashes[key] for key in keys]).encode(), digest_size=16).digest()
            for ranks, keys in mine.items()
        }

    # -------------------------------------------------------------------------------------------- -------- by how much

    @torch.no_grad()
    def _details(self, drifted: Sequence[Disagreement], state: Mapping[StateKey, Any]) -> dict[StateKey, Difference]:
        """Send the reference's values to the ranks that differ; these ranks compare them."""
        if not drifted:
            return {}
        involved = [drift for drift in drifted if self._rank in (drift.reference, *drift.different)]
        mine = {drift.key: state[drift.key] for drift in involved}
        # Numbers are small, so gather them all at once. Tensors go only to the ranks with different values.
        numbers = {key: value for key, value in mine.items() if not isinstance(value, Tensor)}
        numbers_by_rank = self._gather(numbers)
        if numbers_by_rank is None:
            return {}
        found: dict[StateKey, Difference] = {}
        # All ranks go through the values in the same order, so that sends and receives match.
        for drift in involved:
            value = mine[drift.key]
            reference = numbers_by_rank[drift.reference].get(drift.key)
            if isinstance(value, Tensor):
                reference = self._reference(drift, value)
            if self._rank in drift.different:
                found[drift.key] = difference(value, reference)
        details: dict[StateKey, Difference] = {}
        for differences in self._gather(found) or []:
            details.update(differences)
        return details

    def _reference(self, drift: Disagreement, value: Tensor) -> Tensor | None:
        """Send or receive the reference's tensor; None on the rank that sends it."""
        if self._rank == drift.reference:
            # The group uses gloo even with GPUs, so the tensor must be on the host.
            sent = value.detach().cpu().contiguous()
            for pending in [comm.isend(sent, self._group, rank) for rank in drift.different]:
                pending.wait()
            return None
        received = torch.empty(value.shape, dtype=value.dtype)
        return comm.irecv(received, self._group, drift.reference).wait()


def difference(value: Any, reference: Any) -> Difference:
    """Compare a value with the reference."""
    if not isinstance(value, Tensor):
        return Difference(0.0, f"{value} instead of {reference}")
    mine = value.detach().cpu()
    count = int((mine != reference).sum())
    if count == 0:
        return Difference(0.0, "bits that do not change the value, such as the sign of a zero")
    # Half precision would round the difference, and integers may overflow.
    wide = torch.complex128 if mine.is_complex() else torch.float64
    largest = float((mine.to(wide) - reference.to(wide)).abs().max())
    text = f"{count} of {mine.numel()} elements, by up to {largest:.3g}"
    return Difference(largest if isfinite(largest) else inf, text)


def _finding(step: int, drift: Disagreement, text: str) -> dict[str, Any]:
    doubt = "" if drift.is_certain else "no majority shows the right value"
    against = f"differs from rank {drift.reference}"
    detail = "; ".join(part for part in (f"{against}: {text}" if text else against, doubt) if part)
    return {"step": step, "name": drift.key.name, "ranks": list(drift.ranks), "detail": detail}


def _hashes(keys: Sequence[StateKey], state: Mapping[StateKey, Any]) -> dict[StateKey, int]:
    tensors = [key for key in keys if isinstance(state[key], Tensor)]
    hashes = dict(zip(tensors, fingerprints(state[key] for key in tensors)))
    return {key: hashes[key] if key in hashes else _number_hash(state[key]) for key in keys}


def _number_hash(value: Any) -> int:
    # `hash` differs between processes for text, and takes 1, 1.0 and True for the same.
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


class ReplicaDriftMonitor(MeasuringCallback[DriftAccumulator]):
    """Compares values that must be equal on several ranks, bit for bit, and names the values that differ.

    | ranks | compared values |
    |---|---|
    | replicas of the data-parallel axis | parameters, buffers, optimizer state |
    | ranks of the tensor axis | all values that are not sharded, and shards that several ranks hold |
    | pipeline stages | tied parameters |
    | all ranks | learning rate, momentum and the other options of the optimizers |

    Under FSDP, shards are compared if two ranks hold the same shard.

    Three kinds of values are not compared: buffers that DDP overwrites at each forward, statistics of normalisation
    layers that are not synchronised, and the optimizer state of DeepSpeed. Under the strategies of this library, the
    statistics of normalisation layers are compared.

    `report()` returns the common keys and these:

    | key | meaning |
    |---|---|
    | `findings` | `[{step, name, ranks, detail}]` |
    | `checks` | number of checks |
    | `compared` | `{parameter, buffer, optimizer, option}`: for each, the number of values that several ranks hold |

    In a finding, `step` counts like `trainer.global_step`. `ranks` holds the ranks with a wrong value. If there is no
    majority, it holds all ranks with the value.

    Logged: `replica_drift/findings`, the number of findings so far.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import ReplicaDriftMonitor

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[ReplicaDriftMonitor(every_n_steps=100, action="raise")])
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        every_n_steps: Number of optimizer steps between two checks. One more check runs before training, and one after
            it. A check reads all values once.
        action: `warn` warns. `raise` raises an error on every rank.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: In training, on every rank, with `action="raise"`.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        action: Literal["warn", "raise"] = "warn",
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        check_integer("every_n_steps", every_n_steps, least=1)
        if action not in ("warn", "raise"):
            raise ValueError(f"`action` must be 'warn' or 'raise'; got {action!r}")
        self.every_n_steps = every_n_steps
        self.action = action
        self._checked_step = 0

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> DriftAccumulator:
        return DriftAccumulator(self.open_session.group, self.open_session.gather)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Find replicas that begin unequal before the first step.
        self._check(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not by modulo: several optimizers may step in one batch, which may skip a multiple.
        if trainer.global_step - self._checked_step >= self.every_n_steps:
            self._check(trainer, pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._checked_step:
            self._check(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checked_step = trainer.global_step
        findings = self.accumulator.check(trainer.global_step, collect_state(trainer, pl_module))
        if not findings:
            return
        listed = "\n".join(f"  {one['name']}, ranks {one['ranks']}: {one['detail']}" for one in findings[:MAX_COMPARED])
        more = f"\n  and {len(findings) - MAX_COMPARED} more" if len(findings) > MAX_COMPARED else ""
        message = f"Ranks that must hold equal values do not, at optimizer step {trainer.global_step}:\n{listed}{more}"
        if self.action == "raise":
            # All ranks have the same findings, so they all stop here.
            raise RuntimeError(message)
        rank_zero_warn(message)

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        findings = report["findings"]
        if not findings:
            return None
        header = "optimizer step", "name", "ranks", "detail"
        table = Table(*header, title="Values that differ between replicas", box=box.SIMPLE_HEAD)
        for one in findings[:MAX_COMPARED]:
            table.add_row(str(one["step"]), one["name"], ", ".join(map(str, one["ranks"])), one["detail"])
        return table

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(report["findings"])


# ------------------------------------------------------------------------------------------ replicated state


def collect_state(trainer: Trainer, module: LightningModule) -> dict[StateKey, Any]:
    """Collect parameters, buffers, optimizer state and options of the optimizers' parameter groups."""
    found: dict[StateKey, Any] = {}
    # Under local SGD, replicas differ between two exchanges. With ZeRO, ranks with the same parameters hold different
    # parts of the state. So these values are compared between ranks of one replica only.
    differing: frozenset[str] = getattr(trainer.strategy, "differing", frozenset())
    replica = str(_place_of_state(trainer)) if differing else ""
    for key, value in _values(trainer, module):
        if key.kind in differing:
            key = key._replace(shard=f"{key.shard} of replica {replica}")
        # Ranks at the same coordinate of the sharded mesh dimensions hold the same shard.
        if isinstance(value, DTensor):
            key = key._replace(shard=f"{key.shard}{_coordinate(value)}")
            value = value.to_local()
        # Skip sparse tensors, which have no plain bytes to hash, and tensors on the meta device, which have no bytes.
        if not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_meta):
            found[key] = value
    return found


def _values(trainer: Trainer, module: LightningModule) -> Iterator[tuple[StateKey, Any]]:
    shard_of = _shards(trainer)
    strategy = trainer.strategy
    parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    for name, parameter in parameters.items():
        shard = shard_of(name)
        if shard is not None:
            yield StateKey("parameter", name, shard), parameter
    excluded = _unshared_buffers(trainer, module)
    for name, buffer in module.named_buffers():
        if name not in excluded:
            yield StateKey("buffer", name, _rule_shards(trainer)(name) or ""), buffer
    if is_a(strategy, DeepSpeedStrategy):  # DeepSpeed's optimizers hold flattened partitions
        return
    # Optimizers hold parameters without names, so look names up by identity.
    names = {id(parameter): name for name, parameter in parameters.items()}
    for index, optimizer in enumerate(strategy.optimizers):
        prefix = f"optimizer {index}: " if index else ""
        for owner, state in optimizer.state.items():
            name = names.get(id(owner), "")
            shard = shard_of(name)
            if not name or shard is None:
                continue
            for slot, value in state.items():
                if isinstance(value, (Tensor, int, float)):
                    yield StateKey("optimizer", f"{prefix}{slot} of {name}", shard), value
        yield from option_values(optimizer, prefix, _stage(trainer))


def option_values(optimizer: Optimizer, prefix: str, stage: str) -> Iterator[tuple[StateKey, Any]]:
    """Yield learning rate, momentum and the other options of an optimizer's parameter groups.

    With several groups, `stage` becomes part of the keys, because group numbers may differ in meaning between stages.
    """
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        for option, value in group.items():
            if option != "params" and isinstance(value, (Tensor, int, float, tuple)):
                shard = stage if len(groups) > 1 else ""
                yield StateKey("option", f"{prefix}{option} of group {index}", shard), value


# --------------------------------------------------------------------------------------------- which ranks share what


def _shards(trainer: Trainer) -> ShardOf:
    strategy = trainer.strategy
    model = strategy.model
    if is_a(strategy, FSDPStrategy) and isinstance(model, FullyShardedDataParallel):
        if model.sharding_strategy == ShardingStrategy.NO_SHARD:
            return lambda name: ""
        # Under a HYBRID strategy the ranks with the same index in their shard groups hold the same shards.
        shard = f"part {dist.get_rank(model.process_group)} of {dist.get_world_size(model.process_group)}"
        return lambda name: shard
    # Under ZeRO-3, every rank holds a different partition of each parameter, so no value exists twice.
    if is_a(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        return lambda name: None
    if getattr(strategy, "zero_stage", 0) == 3:
        return lambda name: None
    return _rule_shards(trainer)


def _rule_shards(trainer: Trainer) -> ShardOf:
    """Return the shards from the shard rules of the tensor axis; strategies without a mesh shard nothing."""
    strategy: Any = trainer.strategy
    if not isinstance(getattr(strategy, "mesh", None), Mesh):
        return lambda name: ""
    rules: Mapping[str, Any] = strategy.run.rules
    rank = strategy.groups.tensor_parallel.rank
    # By the range of the shard, not by rank: if ranks share heads, several ranks hold the same shard.
    return lambda name: str(rules[name].ranges[rank]) if name in rules else ""


def _stage(trainer: Trainer) -> str:
    place = _mesh_place(trainer, "pipeline_parallel")
    return "" if place is None else f"stage {place}"


def _mesh_place(trainer: Trainer, axis: str) -> int | None:
    """Return this rank's position along an axis; None under strategies without a mesh."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return getattr(mesh.coordinate(trainer.global_rank), axis) if isinstance(mesh, Mesh) else None


def _place_of_state(trainer: Trainer) -> int | None:
    """Return this rank's position among the ranks with the same parameters; None under strategies without a mesh."""
    strategy: Any = trainer.strategy
    return strategy.groups.gradients.rank if isinstance(getattr(strategy, "mesh", None), Mesh) else None


def _unshared_buffers(trainer: Trainer, module: LightningModule) -> set[str]:
    """Return the names of the buffers that may differ between replicas from step to step.

    At each forward, DDP overwrites the buffers of all ranks with the buffers of the first rank. Under strategies
    without a mesh, ranks have different statistics in normalization layers that are not synchronised.
    """
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        return {name for name, _ in module.named_buffers()}
    if isinstance(getattr(trainer.strategy, "mesh", None), Mesh):
        return set()
    names = set()
    for path, child in module.named_modules():
        if isinstance(child, NormalizationBase) and not isinstance(child, nn.SyncBatchNorm):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in child.named_buffers(recurse=False)}
    return names


def _coordinate(tensor: DTensor) -> list[int]:
    """Return the coordinate of this rank on the mesh dimensions along which `tensor` is sharded."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return [index for index, placement in zip(coordinate, tensor.placements) if not placement.is_replicate()]
