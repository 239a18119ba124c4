"""Gradient compression between the replicas of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, Union

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_parallel.comm import Group, MeshGroups, NodeGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression import HierarchicalReducer, Reducer, bind_to_module
from lightning_parallel.compression.compressor_state import gather_states
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices, ScatteringReducer
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.mesh import DATA
from lightning_parallel.strategies.compressed.ddp import drop_gradients
from lightning_parallel.strategies.compressed.nodes import Hierarchical, between_nodes, hosts_of, size_of_node
from lightning_parallel.strategies.compressed.parts import PARTS, assemble_state, divide_state
from lightning_parallel.strategies.compressed.state_files import (
    KEY,
    KeptState,
    Place,
    is_memory_of,
    read_compression,
    refers_to_files,
    without_memory,
    write_compression,
)
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["MeshCompression", "gradient_reducer"]


@dataclass
class MeshCompression:
    """A compressor that averages gradients over the replicas of a mesh.

    Args:
        reducer: The user's compressor.
        module: The user's module.
        groups: The mesh's groups.
        means: What takes the means: `reducer`, or what divides its work among the replicas of a node.
        kept: What checkpoints keep of its memory.
        drifts: Whether it averages drifts of parameters instead, for somebody else.
    """

    reducer: Reducer
    module: LightningModule
    groups: MeshGroups
    means: Union[Reducer, HierarchicalReducer]
    kept: KeptState = "local"
    drifts: bool = False

    @classmethod
    def of(
        cls,
        reducer: Optional[Reducer],
        module: LightningModule,
        groups: MeshGroups,
        kept: KeptState,
        drifts: bool = False,
        hierarchical: Hierarchical = False,
        node_rank: int = 0,
    ) -> MeshCompression | None:
        """Return the object for `reducer`, None without a compressor; every rank of the mesh must call it.

        Raises:
            ValueError: On every rank, if nodes have different numbers of replicas.
        """
        if reducer is None:
            return None
        if groups.data_parallel.size == 1:
            rank_zero_warn("`compression` has no effect: it works between replicas, and this run has one replica.")
            return cls(reducer, module, groups, reducer, kept, drifts)
        bind_to_module(module, reducer)
        if not hierarchical:
            return cls(reducer, module, groups, reducer, kept, drifts)
        nodes = groups.nodes(hosts_of(groups.world, node_rank), size_of_node(hierarchical), KEY)
        rules = ParallelState.of(module).rules
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        for name in shapes.keys() & rules.keys():
            shapes[name] = rules[name].full_shape(shapes[name])
        # Tensor ranks have the same owners: those of one divide what they share with the others in the same way.
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        return cls(reducer, module, groups, between_nodes(reducer, nodes, sizes), kept, drifts)

    @property
    def nodes(self) -> NodeGroups | None:
        """The groups in and across nodes, with `hierarchical`."""
        return self.means.nodes if isinstance(self.means, HierarchicalReducer) else None

    @property
    def replicas_and_owners(self) -> tuple[int, int]:
        """How many take part in compression, and how many ranks each of them is."""
        return (
            (self.groups.data_parallel.size, 1)
            if self.nodes is None
            else (self.nodes.across.size, self.nodes.inside.size)
        )

    def reducer_options(self) -> dict[str, Any]:
        """Return the arguments for a `GradientReducer`; every rank of the mesh must call it."""
        if self.groups.data_parallel.size == 1:
            return {}
        inside = 1 if self.nodes is None else self.nodes.inside.size
        return {
            "compression": self.means,
            "bucket_bytes": BUCKET_BYTES * inside,  # each of them compresses its part
            # Its own group, since it communicates while backward still uses the others.
            "side_group": self.groups.extra(DATA, "compression"),
            "second_group": self._second_group(),
            "replica_group": self.groups.replica,
        }

    def _second_group(self) -> Group | None:
        # It costs threads and sockets: only where buckets overlap, see `GradientSession` and `HierarchicalStep`.
        is_of_use = self.nodes is None and "nccl" not in self.groups.data_parallel.backend
        return self.groups.extra(DATA, "the compression of the next bucket") if is_of_use else None

    def prepare_step(self, precision: Precision) -> None:
        """Set the compressor's loss scale for the coming step: its residuals are kept without it."""
        # Before each step, since the scaler changes the scale after steps.
        scaler = getattr(precision, "scaler", None)
        self.reducer.scale = 1.0 if scaler is None else float(scaler.get_scale())

    def drop_nonfinite_gradients(self, reducer: GradientReducer, precision: Precision) -> None:
        """Drop the gradients of a step that was rolled back, unless a gradient scaler will skip it anyway."""
        if not reducer.applied and getattr(precision, "scaler", None) is None:
            drop_gradients(self.module, reducer.reduced)

    def save(self, checkpoint: dict[str, Any], path: PathLike, rules: Mapping[str, Shard], is_sharded: bool) -> None:
        """Add the compressor's state to a checkpoint that holds more than weights; every rank must call it."""
        if "optimizer_states" not in checkpoint:
            return
        if self.kept == "none":
            checkpoint[KEY] = without_memory(self.reducer)
            return
        if is_sharded:
            checkpoint[KEY] = divide_state(self.means.state_dict(), self.module, rules, self.groups, self.nodes)
            return
        if self.kept == "local":
            checkpoint[KEY] = write_compression(self.means.state_dict(), self._place, path, self.groups.world)
            return
        state = self.means.gather_state(self.groups.data_parallel, exact=self.kept == "exact")
        if self.groups.replica.size > 1:
            positions = gather_states(state, self.groups.replica)
            state = {"layout": "mesh", "model": self._sizes, "step": self.reducer.step, "positions": positions}
        checkpoint[KEY] = state

    def restore(self, checkpoint: dict[str, Any], path: PathLike, rules: Mapping[str, Shard]) -> None:
        """Continue from the compressor's state in `checkpoint`, read at `path`, if it has one."""
        if KEY not in checkpoint or not is_memory_of(checkpoint, self.drifts):
            return
        state = checkpoint[KEY]
        if refers_to_files(state):
            found = read_compression(state, self._place, path, self.groups.world)
            if found is None:
                self.reducer.step = int(state["step"])
            else:
                self.means.load_state_dict(found, self.groups.data_parallel)
            return
        if state.get("layout") == PARTS:
            assembled = assemble_state(state, self.module, rules, self.groups, self.nodes)
            self.means.load_state_dict(assembled, self.groups.data_parallel)
            return
        is_mesh = state.get("layout") == "mesh"
        # A state without positions is of replicas of one rank each.
        saved = state["model"] if is_mesh else [1, 1]
        if saved == self._sizes:
            mine = state["positions"][self.groups.replica.rank] if is_mesh else state
            self.means.load_state_dict(mine, self.groups.data_parallel)
            return
        rank_zero_warn(
            f"The checkpoint holds compression state of {saved[0]} pipeline x {saved[1]} tensor ranks per replica,"
            f" but this run has {' x '.join(map(str, self._sizes))}. Residuals that were not sent yet are lost."
        )
        # Residuals belong to shards that no longer exist. The step goes on: it decides what warm-up and schedules do.
        self.reducer.step = int(state["step"])

    @property
    def _place(self) -> Place:
        # As of strategies that do not cut models.
        cut = "" if self.groups.replica.size == 1 else "{} pipeline x {} tensor".format(*self._sizes)
        if self.nodes is not None:
            return Place(self.nodes.across.rank, self.groups.replica.rank, self.nodes.inside.rank, cut)
        return Place(self.groups.data_parallel.rank, self.groups.replica.rank, cut=cut)

    @property
    def _sizes(self) -> list[int]:
        return [self.groups.pipeline_parallel.size, self.groups.tensor_parallel.size]


def gradient_reducer(
    module: nn.Module,
    groups: MeshGroups,
    data: Group,
    sharding: Sharding | None,
    rules: Mapping[str, Shard],
    options: Any,
    slices: ParameterSlices | None = None,
) -> GradientReducer:
    """Return what reduces the module's gradients over `data`, for one `fit`, to `slices` if there are some.

    `options` are of its compression.
    """
    names = frozenset() if sharding is None else sharding.partial
    # Gradients of whole parameters inside a divided region are sums over the tensor axis.
    prepare = partial(reduce_partial_, rules=rules, group=groups.tensor_parallel) if names else None
    parameters = dict(module.named_parameters())
    if slices is not None:
        return ScatteringReducer(parameters, slices, prepare=prepare, prepare_names=names)
    return GradientReducer(parameters, data, **options, prepare=prepare, prepare_names=names)
