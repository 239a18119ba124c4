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

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, NodeGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression import HierarchicalReducer, Reducer, bind_to_module
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices, ScatteringReducer
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.strategies.checkpoints.rank_files import Place
from lightning_parallel.strategies.compressed.ddp import drop_gradients
from lightning_parallel.strategies.compressed.memory import KEY, CompressorMemory, KeptState, is_memory_of
from lightning_parallel.strategies.compressed.nodes import Hierarchical, between_nodes, hosts_of, size_of_node
from lightning_parallel.strategies.compressed.parts import PARTS, StateParts
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
        means: `reducer`, or the hierarchical reducer that divides its work among the replicas of a node.
        kept: The argument `compressor_state`.
        drifts: Whether the compressor averages drifts of parameters for `LocalSGDStrategy` rather than gradients.
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
        if groups.gradients.size == 1:
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
        # The full sizes give all tensor-parallel ranks the same owners, so their copies of a replicated parameter get
        # equal means.
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        return cls(reducer, module, groups, between_nodes(reducer, nodes, sizes), kept, drifts)

    @property
    def nodes(self) -> NodeGroups | None:
        """The groups inside and across nodes, with `hierarchical`."""
        return self.means.nodes if isinstance(self.means, HierarchicalReducer) else None

    @property
    def replicas_and_owners(self) -> tuple[int, int]:
        """The number of participants in compression, and the ranks of each participant."""
        return (
            (self.groups.gradients.size, 1) if self.nodes is None else (self.nodes.across.size, self.nodes.inside.size)
        )

    def reducer_options(self) -> dict[str, Any]:
        """Return the arguments for a `GradientReducer`; every rank of the mesh must call it."""
        if self.groups.gradients.size == 1:
            return {}
        inside = 1 if self.nodes is None else self.nodes.inside.size
        return {
            "compression": self.means,
            "bucket_bytes": BUCKET_BYTES * inside,  # each rank of a node compresses its part
            # An extra group, because compression communicates while backward still uses the groups of the mesh.
            "side_group": self.groups.extra(comm.GRADIENTS, "compression"),
            "second_group": self._second_group(),
            "replica_group": self.groups.model,
        }

    def _second_group(self) -> Group | None:
        # The group costs threads and sockets, so only buckets that overlap get it: see `GradientSession` and
        # `HierarchicalStep.overlaps`.
        is_of_use = self.nodes is None and "nccl" not in self.groups.gradients.backend
        return self.groups.extra(comm.GRADIENTS, "the compression of the next bucket") if is_of_use else None

    def prepare_step(self, precision: Precision) -> None:
        """Set the compressor's loss scale for the next step: the residuals are kept without the loss scale."""
        # Before each step, because the scaler changes the scale after steps.
        scaler = getattr(precision, "scaler", None)
        self.reducer.scale = 1.0 if scaler is None else float(scaler.get_scale())

    def drop_nonfinite_gradients(self, reducer: GradientReducer, precision: Precision) -> None:
        """Drop the gradients of a step that was rolled back, unless a gradient scaler will skip the step."""
        if not reducer.applied and getattr(precision, "scaler", None) is None:
            drop_gradients(self.module, reducer.reduced)

    def save(self, checkpoint: dict[str, Any], path: PathLike, rules: Mapping[str, Shard], is_sharded: bool) -> None:
        """Add the compressor's state to a checkpoint that holds more than weights; every rank must call it."""
        if "optimizer_states" not in checkpoint:
            return
        if is_sharded and self.kept != "none":
            checkpoint[KEY] = StateParts(self.module, rules, self.groups, self.nodes).divide(self.means.state_dict())
        else:
            checkpoint[KEY] = self._memory.save(path)

    def restore(self, checkpoint: dict[str, Any], path: PathLike, rules: Mapping[str, Shard]) -> None:
        """Continue from the compressor's state in `checkpoint`, which was read from `path`, if there is one.

        Every rank must call it. An error of one rank is raised on all ranks.
        """
        if KEY not in checkpoint or not is_memory_of(checkpoint, self.drifts):
            return
        state = checkpoint[KEY]
        if state.get("layout") == PARTS:
            # Each rank reads different parts, and a damaged part must stop all ranks.
            with comm.failing_together(self.groups.world):
                state = StateParts(self.module, rules, self.groups, self.nodes).assemble(state)
        self._memory.restore(state, path)

    @property
    def _memory(self) -> CompressorMemory:
        place, nodes = Place.of(self.groups), self.nodes
        if nodes is not None:
            # A node counts as one replica, and each of its ranks holds a part of the state.
            place = place._replace(replica=nodes.across.rank, part=nodes.inside.rank)
        return CompressorMemory(self.means, place, self.groups.gradients, self.groups.world, self.kept)


def gradient_reducer(
    module: nn.Module,
    groups: MeshGroups,
    data: Group,
    sharding: Sharding | None,
    rules: Mapping[str, Shard],
    options: Any,
    slices: ParameterSlices | None = None,
) -> GradientReducer:
    """Return the reducer of the module's gradients over `data` for one `fit`.

    Args:
        options: Arguments for compression; see `MeshCompression.reducer_options`.
        slices: If given, each replica receives its slices of the means (`zero_stage`).
    """
    names = frozenset() if sharding is None else sharding.partial
    # Gradients of replicated parameters inside a sharded region are partial: their sum over the tensor axis is needed.
    prepare = partial(reduce_partial_, rules=rules, group=groups.tensor_parallel) if names else None
    parameters = dict(module.named_parameters())
    if slices is not None:
        return ScatteringReducer(parameters, slices, prepare=prepare, prepare_names=names)
    return GradientReducer(parameters, data, **options, prepare=prepare, prepare_names=names)
