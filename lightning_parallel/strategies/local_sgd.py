"""Local SGD: replicas take their own optimizer steps, and average their drifts.

A checkpoint has the format of the mesh strategies, with the parameters on which the replicas agree, and the entry

    "local_sgd": {"steps": optimizer steps, "local_steps", "exchanges", "scalers": [of each replica],
                  "outer": state of the outer optimizer, "are_new", "optimizers": see `replica_optimizers`}

`optimizer_states` holds the states of the first replica; any strategy reads them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import PathLike, move_optimizers, tell
from lightning_parallel.compression import Dense, Reducer, check_reducer
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.data_parallel import DriftExchange, GradientReducer
from lightning_parallel.mesh import DATA
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.strategies.checkpoints.files import LOCAL_STEPS
from lightning_parallel.strategies.compressed.advice import warn_of_misfits
from lightning_parallel.strategies.compressed.memory import KeptState
from lightning_parallel.strategies.compressed.mesh import gradient_reducer
from lightning_parallel.strategies.compressed.nodes import Hierarchical
from lightning_parallel.strategies.compressed.replica_optimizers import ReplicaOptimizers
from lightning_parallel.strategies.optimizers.checks import check_optimizers
from lightning_parallel.strategies.optimizers.norms import give_norms
from lightning_parallel.strategies.optimizers.zero import ZeroStage, refuse_zero_stage
from lightning_parallel.strategies.options import (
    ActivationCheckpointing,
    CheckpointFormat,
    GradientSumDtype,
    OffloadedPart,
    Tiled,
    named,
    spelled,
)
from lightning_parallel.strategies.parallel import HybridParallelStrategy, ScheduleName
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.strategies.ranks.processes import StartMethod
from lightning_parallel.strategies.self_check.proof import Verify
from lightning_parallel.strategies.whole.between_runs import GatherAfterFit
from lightning_parallel.strategies.whole.full_state import averages_of

__all__ = ["LocalSGDStrategy", "OuterOptimizer"]

# As `OptimizerCallable` of LightningCLI, which builds it from a class path and arguments.
OuterOptimizer = Union[Literal["average", "nesterov"], Callable[[Iterable], Optimizer]]
"""How the mean update is applied: by its name, or by an optimizer made from the parameters."""
_OUTER: dict[str, Optional[Callable[[Iterable], Optimizer]]] = {
    "average": None,
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}


@dataclass
class LocalSteps:
    """Holds the state of the local steps of one `fit`. It stays after the run, for checkpoints that are saved then.

    Attributes:
        exchange: Exchanges the drifts.
        averages_gradients: Whether the present reducer averages gradients over the replicas.
        taken: Number of steps of each optimizer, by `id`.
        count: Number of optimizer steps, with the steps before the checkpoint.
        restored_count: Number of steps before the checkpoint.
        meets: Whether replicas wait for each other before the next batch.
        has_agreed: Whether the replicas have been equal since the last step.
        checkpoint: The entry of the checkpoint that the run resumes from.
        checkpoint_path: The path of that checkpoint.
        is_closed: Whether the run has ended.
    """

    exchange: DriftExchange
    averages_gradients: bool = False
    taken: Counter[int] = field(default_factory=Counter)
    count: int = 0
    restored_count: int = 0
    meets: bool = True
    has_agreed: bool = False
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_path: PathLike = ""
    is_closed: bool = False


class LocalSGDStrategy(HybridParallelStrategy):
    """Lets each replica take separate optimizer steps, and averages the replicas every `every_n_steps` steps.

    Use this strategy for slow links: most steps send nothing. An exchange sends the drift, the change of the parameters
    since the last exchange. Any compressor can compress the drift, with its error feedback. A replica is one process,
    or several processes with tensor and pipeline parallelism, as in `HybridParallelStrategy`.

    Replicas also exchange their drifts before validation, before checkpoints and at the end of `fit`, which then use
    one model. Between exchanges, each replica has its own parameters, optimizer state and, under `16-mixed`, loss
    scale. A metric that you do not synchronise has the value of one replica. A signal to end (SIGTERM) takes effect at
    the next exchange.

    A run may resume with more or fewer replicas. With the same number it continues bit for bit; only LBFGS, whose
    history is lists, continues with the history of the first replica. With another number, each replica begins with the
    mean of the optimizer states.

    A replica whose drift is not finite returns to the parameters of the last exchange, with a new optimizer state. The
    other replicas continue. With `every_n_steps=1`, no compression and SGD, the strategy equals DDP.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import LocalSGDStrategy, Quantize

        strategy = LocalSGDStrategy(every_n_steps=30, compression=Quantize(4), outer_optimizer="nesterov")
        trainer = Trainer(devices=2, strategy=strategy)
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        every_n_steps: Optimizer steps between two exchanges.
        compression: Compressor of the drifts. None sends full drifts.
        outer_optimizer: How the mean drift changes the parameters. `average` averages the replicas. `nesterov` applies
            SGD with Nesterov momentum (learning rate 0.7, momentum 0.9). A function takes the parameters and returns an
            optimizer, which takes the mean drift as the gradient.
        average_first: Number of first exchanges that only average, with any outer optimizer. The drifts of the learning
            rate warm-up then do not enter the outer momentum.
        fragments: Number of parts in which the parameters are exchanged, at different steps. Each exchange is smaller,
            the total bytes stay the same.
        overlap_steps: Number of steps between sending a drift and applying the mean. Training continues and keeps its
            changes meanwhile. 0 waits for the mean. `every_n_steps` is asynchronous, one exchange late.
        start_step: Optimizer steps that average gradients, as in DDP, before local steps begin.
        data_parallel_size: Number of replicas. `"auto"` takes the ranks that the other axes leave.
        pipeline_parallel_size: Ranks that share the layers of a replica. `"auto"` takes the ranks that the other axes
            leave.
        tensor_parallel_size: Ranks that share each layer of a replica. `"auto"` takes the ranks that the other axes
            leave.
        tensor_plan: How each layer is sharded. `"auto"` uses the plan of a Hugging Face model, otherwise the structure
            of the model. A dict maps globs over module paths to styles: `column`, `row`, `column_gather`, `row_split`,
            `vocab`, `head`, `attention`, `transformer_layer`, `replicate`, or the style names of Hugging Face.
        sequence_parallel: Also shard the activations between sharded layers along the sequence. This saves memory; the
            backward pass gathers the inputs of attention and MLP once more.
        gather_logits: Gather the logits at once, also in training. By default they stay sharded by class until code
            reads them. Set this if only some ranks read them.
        layers: Dotted name of the container of repeated layers. Join several containers in a row by commas.
        schedule: Order of the microbatches: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`.
            `auto` simulates all of them with measured costs and takes the fastest within `memory_limit_bytes`.
        num_microbatches: Number of parts of each batch. `"auto"` takes four per stage if the batch has as many samples.
        virtual_stages: Stages per rank, for schedules that support several. `"auto"` takes the smallest supported
            number.
        warmup: Forwards that a rank runs ahead, per rank between it and the last rank, for `1f1b`, `zb_h1` and the
            interleaved schedules. More forwards hide slow links, and hold more activations. None takes the default.
        balance: Split points of the layers: `auto` equalises measured time, `parameters` the parameters, `uniform` the
            number of layers. A list gives the layers of each stage.
        memory_limit_bytes: Largest memory per rank, in bytes or such as `"80GiB"`, for measured split points and
            schedules.
        split_batch: Function `(batch, parts) -> microbatches`, or its dotted path. Needed if the samples are not in
            dimension 0.
        microbatch_weight: Function `(microbatch) -> weight` in the loss, or its dotted path. By default the number of
            samples, or of tokens if the loss is a mean over tokens.
        pipeline_plan: A `PipelinePlan` or its file, made by an earlier run. It replaces the pipeline arguments above.
        zero_stage: Must be 0, because replicas have different optimizer states.
        cpu_offload: Tensors in host memory, a tuple of names. `optimizer` keeps the state there, and takes its steps on
            the host. `activations` keeps the inputs of layers that `activation_checkpointing` recomputes.
        tiled: Compute the cross-entropy of the head, and MLPs, in tiles of positions with `auto`. Logits and inner
            features of a long sequence then never exist whole, and backward computes MLPs again. `off` uses no tiles.
        compile_layers: Compile each of the repeated layers with `torch.compile`. Inductor makes kernels if there is a
            compiler for them; otherwise the backend is `aot_eager`. The first steps take longer.
        gradient_sum_dtype: Dtype of sums of gradients of 16-bit parameters, such as with `bf16-true`: `fp32`, or a
            16-bit dtype for sums in the dtype of each parameter. `.grad` holds the sum, rounded once. None takes `fp32`
            if a step adds several gradients: with microbatches, or with `accumulate_grad_batches` above 1.
        compressor_state: How a checkpoint of one file stores the compressor's state. `local` writes one file per rank
            beside it, `none` stores nothing. A sharded checkpoint stores the state of each rank as tensors of it.
        hierarchical: Sum full gradients inside a node, and compress between nodes only. True groups the replicas by
            host. A number sets the replicas per node.
        activation_checkpointing: Recompute activations of the repeated layers in backward, which saves memory and takes
            time. `full` recomputes each layer, and a number n every n-th layer. `selective` keeps the results of
            products, attention and communication. `auto` chooses as few layers as fit in memory. `off` keeps all.
        checkpoint_format: `full` writes one ordinary Lightning checkpoint. `sharded` writes a folder with one file per
            rank. Every layout loads both formats.
        async_save: Write sharded checkpoints in the background. Training waits only for a copy of the tensors.
        verify: Self-check that compares the module's steps with one process, before their first batch. `auto` and
            `always` run the self-check, `off` does not.
        gather_after_fit: Ranks on which the module holds full parameters after a run: `all` or `off`. `auto` takes
            `all` for modules of up to 1 GiB, and prints a message otherwise.
        process_group_backend: Backend of `torch.distributed`. By default it follows the device: gloo for CPU, NCCL for
            CUDA.
        timeout: Deadline of every collective. 30 minutes by default.
        start_method: How Lightning starts processes without a launcher. `popen` runs the script again. `spawn`, `fork`
            and `forkserver` start functions. `auto` takes `fork` in a notebook, and `popen` elsewhere.
        accelerator: Accelerator object, set by the Trainer.
        parallel_devices: Devices of this node, set by the Trainer.
        cluster_environment: Source of ranks and addresses. By default Lightning detects torchrun, SLURM and others.
        checkpoint_io: Lightning plugin that reads and writes files.
        precision_plugin: Precision plugin, set by the Trainer from `precision`.

    Raises:
        TypeError: If `compression` is not a compressor, or `outer_optimizer` is neither a name nor a function.
        ValueError: If a number is out of range.

    Source: local SGD, https://arxiv.org/abs/1805.09767; DiLoCo, https://arxiv.org/abs/2311.08105; Streaming DiLoCo,
    https://arxiv.org/abs/2501.18512; SparseLoCo, https://arxiv.org/abs/2508.15706
    """

    @spelled(
        **dict.fromkeys(
            ("context_parallel_size", "context_parallel_method"),
            "replicas take their own steps, and ranks of a context axis would need their mean in each step. Use"
            " HybridParallelStrategy, or `tensor_parallel_size` with `sequence_parallel=True`.",
        )
    )
    def __init__(
        self,
        every_n_steps: int = 30,
        compression: Optional[Reducer] = None,
        outer_optimizer: OuterOptimizer = "average",
        *,
        average_first: int = 4,
        fragments: int = 1,
        overlap_steps: int = 0,
        start_step: int = 0,
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        pipeline_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        gather_logits: bool = False,
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: Union[Literal["auto"], int] = "auto",
        warmup: Optional[float] = None,
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[Union[float, str]] = None,
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]] = None,
        microbatch_weight: Optional[Union[Callable[[Any], float], str]] = None,
        pipeline_plan: Optional[Union[PipelinePlan, str, Path]] = None,
        zero_stage: ZeroStage = 0,
        cpu_offload: Sequence[OffloadedPart] = (),
        tiled: Tiled = "off",
        compile_layers: bool = False,
        gradient_sum_dtype: Optional[GradientSumDtype] = None,
        compressor_state: KeptState = "local",
        hierarchical: Hierarchical = False,
        activation_checkpointing: ActivationCheckpointing = "off",
        checkpoint_format: CheckpointFormat = "full",
        async_save: bool = False,
        verify: Verify = "auto",
        gather_after_fit: GatherAfterFit = "auto",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        steps = {"average_first": average_first, "start_step": start_step}
        _check_steps(every_n_steps, steps, {"fragments": fragments, "overlap_steps": overlap_steps})
        _check_outer(outer_optimizer)
        if compression is not None:
            check_reducer(compression)
        refuse_zero_stage(zero_stage)
        hybrid = named(locals(), HybridParallelStrategy.__init__)
        # `Dense` sends full drifts: the exchange always takes its means from a compressor.
        super().__init__(**{**hybrid, "compression": Dense() if compression is None else compression})
        self.every_n_steps = every_n_steps
        self.average_first = average_first
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.start_step = start_step
        self._make_outer = _OUTER[outer_optimizer] if isinstance(outer_optimizer, str) else outer_optimizer
        self._local: LocalSteps | None = None

    # ------------------------------------------------------------------------------------------------------- set-up

    compresses_drifts = True
    is_for_replicas = True
    keeps_parameters = True

    @property
    def local(self) -> LocalSteps:
        """The local steps of the present `fit`.

        Raises:
            RuntimeError: If no `fit` runs.
        """
        if self._local is None or self._local.is_closed:
            raise RuntimeError("Replicas take local steps only during `fit`")
        return self._local

    @property
    def _exchange(self) -> DriftExchange | None:
        """The exchange of drifts; None outside `fit`."""
        return None if self._local is None or self._local.is_closed else self._local.exchange

    @property
    @override
    def steps_between_reductions(self) -> int:
        return self.every_n_steps

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # Agree before all hooks: hooks of callbacks replace weights, such as by averages, which is no drift.
        self._agree_before(trainer.fit_loop, "on_run_end")
        self._agree_before(trainer.fit_loop.epoch_loop.val_loop, "on_run_start")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging):
                averages = partial(_averages, trainer, callback)
                self._agree_before(callback, "on_train_epoch_start", averages)

    @override
    def make_reducer(self) -> GradientReducer:
        complex_names = [name for name, value in self.module.named_parameters() if value.is_complex()]
        if complex_names:
            raise ValueError(f"`{complex_names[0]}` is complex, which is not supported by LocalSGDStrategy")
        run = self.run
        data = self.groups.data_parallel
        assert run.compression is not None
        exchange = DriftExchange(
            dict(self.module.named_parameters()),
            data,
            run.compression.means,
            self._make_outer,
            every_n_steps=self.every_n_steps,
            average_first=self.average_first,
            fragments=self.fragments,
            overlap_steps=self.overlap_steps if data.size > 1 else 0,
            # An extra group: the exchange communicates in a thread, while steps use the groups of the mesh.
            side_group=self.groups.extra(DATA, LOCAL_STEPS) if self.overlap_steps and data.size > 1 else None,
            replica_group=self.groups.replica,
            first=() if run.engine is None else run.engine.tied,
            complete=(lambda means: None) if run.engine is None else run.engine.share_tied,
            on_return=self._begin_anew,
        )
        self._local = LocalSteps(exchange)
        if exchange.outer is not None:
            names = run.parameter_names
            tensor = self.groups.tensor_parallel
            give_norms([exchange.outer], names, run.rules, tensor, self._patches)
            # The outer step runs on shards in the exchange, where no rank has full tensors.
            is_cut, world = run.engine is not None, self.groups.world
            check_optimizers([exchange.outer], names, run.rules, is_cut, world, may_show=False)
        # `_begin_step` chooses again: a resumed run learns its step only when it loads the checkpoint.
        return self._local_reducer(averages=False)

    def _local_reducer(self, averages: bool) -> GradientReducer:
        """Return a reducer that completes the gradients of a replica.

        Args:
            averages: Whether the reducer also averages the gradients over all replicas, before local steps begin.
        """
        self.local.averages_gradients = averages
        data = self.groups.data_parallel if averages else Group.alone(DATA)
        return gradient_reducer(self.module, self.groups, data, self.run.sharding, self.run.rules, {})

    @override
    def check_compression(self, compression: Reducer) -> None:
        # The compressor encodes drifts, so the optimizers of the replicas do not matter.
        # The outer optimizer gets the compressed means as gradients.
        if self._exchange is not None and self._exchange.outer is not None:
            warn_of_misfits(compression, self.module, [self._exchange.outer])

    @override
    def teardown(self) -> None:
        local = self._local
        if local is not None and not local.is_closed:
            local.exchange.close()
            if local.exchange.outer is not None:
                move_optimizers([local.exchange.outer], torch.device("cpu"))
            local.is_closed = True
            assert self.compression is not None
            self.compression.leave_device()
        super().teardown()

    # -------------------------------------------------------------------------------------------------------- steps

    @property
    @override
    def differing(self) -> frozenset[str]:
        exchange = self._exchange
        if exchange is None or not exchange.is_begun:
            return frozenset()
        return frozenset({"optimizer"} if exchange.agrees else {"optimizer", "parameter", "buffer"})

    @property
    def steps_per_exchange(self) -> float:
        """Local steps for each exchange so far."""
        exchange = self._exchange
        return 1.0 if exchange is None or not exchange.exchanged else exchange.counted / exchange.exchanged

    @property
    def _is_warming_up(self) -> bool:
        return self.local.count < self.start_step

    @override
    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        local = self.local
        run = self.run
        if self._is_warming_up != local.averages_gradients and run.reducer is not None:
            # Its hooks on the parameters would reduce each gradient a second time.
            run.reducer.close()
            run.reducer = self._local_reducer(averages=self._is_warming_up)
        if not self._is_warming_up and self.groups.data_parallel.size > 1:
            # Not in `setup`: the checkpoint is loaded after it, and warm-up steps move all replicas alike.
            local.exchange.begin()
            if local.has_agreed:
                self._follow_hooks(local)
        super()._begin_step(args, kwargs)
        assert self.compression is not None
        self.compression.scale = 1.0  # drifts are without the loss scale

    def _follow_hooks(self, local: LocalSteps) -> None:
        """Adopt weights that hooks have set since the replicas agreed: these changes are no drift."""
        data = self.groups.data_parallel
        # All replicas share, even if a hook has changed one replica alone: the means are collectives.
        if comm.on_any_rank([not local.exchange.is_at_anchor], data)[0]:
            replicas.share_means([value.detach() for value in self.module.parameters()], data)
            local.exchange.take_anchor()
        local.has_agreed = False

    @override
    def end_step(self, optimizer: Optimizer) -> None:
        local = self.local
        local.has_agreed = False
        # Several optimizers step in turn. The optimizer with most steps counts.
        local.taken[id(optimizer)] += 1
        if local.taken[id(optimizer)] <= local.count - local.restored_count:
            local.exchange.move()
            return
        was_warming_up = self._is_warming_up
        local.count += 1
        if was_warming_up or not local.exchange.is_begun:
            super().end_step(optimizer)
            return
        # Before `count_step`, which adds the failure of this exchange.
        failed = local.exchange.failed
        if local.exchange.count_step():
            self._meet(local, failed)

    def _meet(self, local: LocalSteps, failed: int) -> None:
        """Share further values when the replicas have exchanged their drifts.

        Args:
            local: The local steps.
            failed: Number of failed exchanges before this one.
        """
        local.meets = True
        # Values that are not finite in a replica may have reached its buffers, too.
        replicas.share_finite_buffers(self.module, self.groups)
        if local.exchange.failed > failed:
            rank_zero_warn(
                "The mean drift of the replicas was not finite (fp16 ends at 65504). The replicas have returned to"
                f" their last common parameters. This has happened {local.exchange.failed} times so far."
            )

    def agree(self) -> None:
        """Exchange the drift, so that all replicas are equal; every rank must call this method."""
        exchange = self._exchange
        data = self.groups.data_parallel
        if exchange is None or not exchange.is_begun or self.local.has_agreed:
            return
        failed = exchange.failed
        exchange.flush()
        self._meet(self.local, failed)
        # Teachers and averages follow the parameters without being trained.
        averages = [value.detach() for model in averages_of(self.module.trainer) for value in model.parameters()]
        averages += [value for model in averages_of(self.module.trainer) for value in model.buffers()]
        replicas.share_means([*(value.detach() for value in exchange.others), *averages], data)
        self.local.has_agreed = True

    def _agree_before(self, owner: Any, name: str, when: Callable[[], bool] = lambda: True) -> None:
        """Let the replicas agree before a method of `owner`, during this run."""
        own = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            if when():
                self.agree()
            return own(*args, **kwargs)

        self._patches.replace(owner, name, hook)

    def _begin_anew(self) -> None:
        """Forget the state of the optimizers, which may not be finite either."""
        self._replica_optimizers.clear()
        returned = self.local.exchange.returned
        # At the 1st, 2nd, 4th, ... return: a replica that diverges returns at every exchange.
        if self.groups.replica.rank == 0 and returned & (returned - 1) == 0:
            # Warn on the first rank of this replica: other replicas do not know of the return.
            warnings.warn(
                f"Replica {self.groups.data_parallel.rank} had a parameter that was not finite and returned to the"
                f" last common parameters of all replicas. This has happened {returned} times so far.",
                stacklevel=2,
            )

    @property
    @override
    def replicas_meet(self) -> bool:
        local = self.local
        # The answer holds for one batch. The next exchange sets the flag again.
        meets, local.meets = local.meets or self._is_warming_up, False
        return meets

    @override
    def on_train_end(self) -> None:
        # Hooks may have set weights on one replica alone.
        data = self.groups.data_parallel
        replicas.share_means([value.detach() for value in self.module.parameters()], data)
        replicas.share_finite_buffers(self.module, self.groups)
        super().on_train_end()

    # -------------------------------------------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict of the model on which all replicas agree; called on every rank."""
        self.agree()
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint and self._local is not None:
            # On all ranks, before `super()`, in which only rank zero writes.
            checkpoint[LOCAL_STEPS] = self._state(self._local, self.path_of_parts(filepath)[0])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _state(self, local: LocalSteps, path: PathLike) -> dict[str, Any]:
        exchange = local.exchange
        scaler = getattr(self.precision_plugin, "scaler", None)
        scalers = comm.all_gather_object(None if scaler is None else scaler.state_dict(), self.groups.data_parallel)
        counts = {"steps": local.count, "local_steps": exchange.counted, "exchanges": exchange.exchanged}
        state: dict[str, Any] = {**counts, "scalers": scalers, **self._replica_optimizers.save(path, self.is_sharded)}
        if exchange.outer is not None:
            state["outer"] = self._saved.gather_optimizer(exchange.outer)
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the first replica's optimizer with full tensors, see `lightning_module_state_dict`."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        # The states of the replicas differ, so the replicas must not share the work of writing one state.
        return replace(self._saved, are_alike=False).gather_optimizer(inner, self.run.recorded_groups(inner))

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._exchange is not None and "optimizer_states" in checkpoint:
            self.local.checkpoint = checkpoint.get(LOCAL_STEPS, {})
            # Ranks may name the best checkpoint after the metric of their replica, so all read beside rank 0's file.
            self.local.checkpoint_path = self.broadcast(checkpoint_path)
            if not self.local.checkpoint:
                tell("The checkpoint is from another strategy; local steps start at step 0.")
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._exchange is None or not self.local.checkpoint:
            return
        # Ranks communicate when they read the files of each rank, so this stays outside the block.
        found = self._replica_optimizers.read(self.local.checkpoint, self.local.checkpoint_path)
        # A rank whose part does not fit must not leave its peers waiting in the next collective.
        with comm.failing_together(self.groups.world):
            self._restore(self.local, self.local.checkpoint, found)

    def _restore(self, local: LocalSteps, state: Mapping[str, Any], found: Any) -> None:
        exchange = local.exchange
        replica = self.groups.data_parallel.rank
        # `taken` begins at zero in each run, so `end_step` subtracts the restored count.
        local.count = local.restored_count = int(state["steps"])
        exchange.counted = int(state["local_steps"])
        exchange.exchanged = int(state["exchanges"])
        outer = exchange.outer
        if outer is not None and "outer" in state:
            outer.load_state_dict(self.run.checkpoints.scatter_optimizer(state["outer"], outer))
            move_optimizers([outer], self.root_device)
        elif outer is not None or "outer" in state:
            rank_zero_warn("The checkpoint is from another outer optimizer; the outer optimizer starts anew.")
        scalers = state["scalers"]
        scaler = getattr(self.precision_plugin, "scaler", None)
        # A new replica has no saved scale. It keeps the scale of the first replica, which Lightning has restored.
        if scaler is not None and replica < len(scalers) and scalers[replica] is not None:
            scaler.load_state_dict(scalers[replica])
        self._replica_optimizers.restore(state, found)

    @property
    def _replica_optimizers(self) -> ReplicaOptimizers:
        return ReplicaOptimizers(self.module, self.groups, self.run.rules, self.optimizers, self.root_device)


def _check_steps(every_n_steps: Any, counts: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Check the numbers of steps.

    Args:
        every_n_steps: Steps between two exchanges.
        counts: Numbers of steps or exchanges, by argument.
        parts: Numbers that `every_n_steps` limits, by argument.

    Raises:
        TypeError, ValueError: If one is no integer or out of range.
    """
    check_integer("every_n_steps", every_n_steps, least=1)
    for name, value in {**counts, **parts}.items():
        check_integer(name, value, least=1 if name == "fragments" else 0)
    for name, value in parts.items():
        if value > every_n_steps:
            raise ValueError(f"`{name}` must be at most `every_n_steps` ({every_n_steps}); got {value}")


def _check_outer(outer_optimizer: Any) -> None:
    """Check the outer optimizer.

    Raises:
        TypeError: If it is neither a name nor a function.
        ValueError: If there is no such name.
    """
    if isinstance(outer_optimizer, str):
        if outer_optimizer not in _OUTER:
            names = " or ".join(map(repr, _OUTER))
            raise ValueError(f"`outer_optimizer` must be {names} or a function; got {outer_optimizer!r}")
    elif isinstance(outer_optimizer, Optimizer) or not callable(outer_optimizer):
        raise TypeError(
            "`outer_optimizer` must be a function from parameters to an optimizer, such as `lambda parameters:"
            f" SGD(parameters, lr=0.7)`; got {outer_optimizer!r}"
        )


def _averages(trainer: Trainer, callback: StochasticWeightAveraging) -> bool:
    return trainer.current_epoch >= callback.swa_start
