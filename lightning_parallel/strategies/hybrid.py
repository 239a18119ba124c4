"""Tensor x pipeline x data parallelism for an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel import stage_checkpoint as stages
from lightning_parallel.compat import ParallelState
from lightning_parallel.compression import Reducer
from lightning_parallel.mesh import DATA, PIPELINE, TENSOR
from lightning_parallel.pipeline.actions import Kind
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.microbatch import merge_outputs, num_samples, split_batch
from lightning_parallel.pipeline.runtime import StepResult, loss_of
from lightning_parallel.strategies import checks
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.example import STEPS, first_batch
from lightning_parallel.strategies.microbatches import StepEffects, share_metrics, side_effects_discarded, to_device
from lightning_parallel.strategies.optimizers import empty_allowed, require_parameters
from lightning_parallel.strategies.parallelize import Pipelining, cut_stages
from lightning_parallel.strategies.tensor import TensorParallelStrategy

__all__ = ["HybridParallelStrategy", "ScheduleName"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "auto"]


class HybridParallelStrategy(TensorParallelStrategy):
    """Divides each layer over ranks, the layers over stages, and the data over replicas, of any LightningModule.

    The module stays as it is written. Its repeated layers are cut into runs, one per pipeline stage; each stage runs
    the module's own steps on one microbatch after the other, from the first of its layers to the last. Loss, gradients,
    logged values, what steps return, and checkpoints are those of one process.

    Args:
        data_parallel_size: Number of replicas. `"auto"`: what the other axes leave.
        pipeline_parallel_size: Number of ranks that share the layers of one replica.
        tensor_parallel_size: Number of ranks that share each layer.
        plan, sequence_parallel: See `TensorParallelStrategy`.
        layers: Dotted name of the repeated layers, or `"auto"`; names of several containers that follow each other are
            joined by commas.
        schedule: `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1`, `interleaved_zb`, `zbv`, or `auto`: the fastest by
            simulation with measured costs, under `memory_limit_bytes`.
        num_microbatches: Into how many parts each batch is split. `"auto"`: four per stage, if the batch has as many
            samples; with `schedule="auto"` chosen together with it.
        virtual_stages: Stages per rank, for the schedules that have several.
        balance: How the layers are divided: `auto` evens out their measured time, `parameters` their parameters,
            `uniform` their number; or the layers of each stage.
        memory_limit_bytes: Most bytes that a stage may hold, for measured cuts and schedules.
        split: `(batch, parts) -> microbatches`, for batches whose tensors do not all have their samples in dimension 0.
        weigh: Weight of a microbatch in the loss; by default its number of samples. Where the step returns a mean over
            tokens, count them here.
        compression: Compresses the gradients between replicas.
        checkpoint_format, process_group_backend, timeout, start_method: See `TensorParallelStrategy`.

    Raises:
        ValueError: When the Trainer starts, on every rank, if the sizes do not multiply to the number of processes, the
            model cannot be cut, or the module does what has no meaning in a pipeline, such as manual optimization.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473
    """

    def __init__(
        self,
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        pipeline_parallel_size: Union[Literal["auto"], int] = 1,
        tensor_parallel_size: Union[Literal["auto"], int] = 1,
        plan: Union[Literal["auto"], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        layers: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: Union[Literal["auto"], int] = "auto",
        virtual_stages: int = 1,
        balance: Union[Literal["auto", "parameters", "uniform"], list[int]] = "auto",
        memory_limit_bytes: Optional[float] = None,
        split: Optional[Callable[[Any, int], list[Any]]] = None,
        weigh: Optional[Callable[[Any], float]] = None,
        compression: Optional[Reducer] = None,
        checkpoint_format: Literal["full"] = "full",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            plan=plan,
            sequence_parallel=sequence_parallel,
            compression=compression,
            checkpoint_format=checkpoint_format,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        checks.check_pipeline_arguments(schedule, num_microbatches, virtual_stages)
        self._sizes = {TENSOR: tensor_parallel_size, PIPELINE: pipeline_parallel_size, DATA: data_parallel_size}
        self.pipelining = Pipelining(
            layers=layers,
            schedule=schedule,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages if virtual_stages > 1 else None,
            balance=balance if isinstance(balance, str) else tuple(balance),
            memory_limit_bytes=memory_limit_bytes,
            split_batch=split or split_batch,
            microbatch_weight=weigh or num_samples,
        )
        self.engine: PipelineEngine | None = None
        self.last_step: StepResult | None = None
        self._order: tuple[str, ...] = ()
        self._fresh: dict[torch.nn.Parameter, Tensor | None] = {}
        self._in_step = False

    # ------------------------------------------------------------------------------------------------- the model

    @override
    def setup_environment(self) -> None:
        if self.mesh.pipeline_parallel > 1:
            assert self.lightning_module is not None
            checks.check_pipeline_module(self.lightning_module)
        super().setup_environment()

    @override
    def parallelize(self, module: LightningModule) -> None:
        super().parallelize(module)
        if self.groups.pipeline_parallel.size == 1:
            return
        trainer = module.trainer
        state = ParallelState.of(module)
        if not state.state_names:
            state.state_names = tuple(module.state_dict())
            state.parameter_names = tuple(dict(module.named_parameters()))
        channels = None
        if self.root_device.type == "cuda":
            ways = [(kind, up) for kind in (Kind.F, Kind.I) for up in (True, False)]
            channels = {(kind, up): self.groups.extra(PIPELINE, f"{kind} {up}") for kind, up in ways}
        example = self._example(trainer) if state.engine is None else None
        with side_effects_discarded(module):
            self.engine = cut_stages(module, self.pipelining, self.groups, self.root_device, example, channels)
        assert self.engine is not None
        share_metrics(module, self.groups.pipeline_parallel, self.engine.last_rank, lambda: self._in_step)

    def _example(self, trainer: Trainer) -> tuple[Callable[[Any], Any], Any] | None:
        batch = first_batch(trainer)
        assert trainer.state.fn is not None
        step = self._step(STEPS[trainer.state.fn], (0,), {})

        def with_loss(microbatch: Any) -> Any:
            output = step(microbatch)
            loss_of(output)
            return output

        return None if batch is None else (with_loss if trainer.training else step, batch)

    def _step(self, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
        """The module's own step, for one microbatch."""
        method = getattr(self.lightning_module, name)
        context = {
            "training_step": self.precision_plugin.train_step_context,
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }[name]
        rest = rest[: checks.positional_arguments(method) - 1]

        def step(microbatch: Any) -> Any:
            with context():
                return method(microbatch, *rest, **kwargs)

        return step

    @property
    @override
    def counted_elsewhere(self) -> frozenset[str]:
        return frozenset() if self.engine is None else self.engine.counted_by_others

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with nullcontext() if self.engine is None else empty_allowed():
            super().setup_optimizers(trainer)

    @override
    def check_optimizers(self) -> None:
        super().check_optimizers()
        if self.engine is not None:
            checks.check_pipeline_optimizers(self.optimizers)
            require_parameters(self.optimizers, self.engine.group)

    # ------------------------------------------------------------------------------------------------- the steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.engine is None:
            return super().training_step(*args, **kwargs)
        self._begin_step((args, kwargs))
        assert self._reducer is not None
        assert self.lightning_module is not None
        parameters = [parameter for parameter in self.lightning_module.parameters() if parameter.requires_grad]
        held = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = None
        with self._reducer.no_sync():
            output = self._run("training_step", args, kwargs)
        # Lightning sets gradients to zero between here and `backward`, which brings the new ones.
        self._fresh = {parameter: parameter.grad for parameter in parameters}
        for parameter, gradient in held.items():
            parameter.grad = gradient
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return (
            super().validation_step(*args, **kwargs)
            if self.engine is None
            else self._run("validation_step", args, kwargs)
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return super().test_step(*args, **kwargs) if self.engine is None else self._run("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs) if self.engine is None else self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step on the microbatches of a batch; its result and its effects are those on the whole batch."""
        engine, module = self.engine, self.lightning_module
        assert engine is not None
        assert module is not None
        batch, *rest = args
        effects, microbatches = StepEffects(module), list[Any]()
        play = self._step(name, tuple(rest), kwargs)

        def step(microbatch: Any) -> Any:
            with effects.step():
                return play(microbatch)

        def split(whole: Any, count: int) -> list[Any]:
            microbatches[:] = self.pipelining.split_batch(whole, count)
            return microbatches

        engine.split_batch, self._in_step = split, True
        try:
            if name == "training_step":
                result = engine.forward_backward(step, batch, scale=self._gradient_scale(), synchronize=False)
            else:
                result = engine.forward(step, batch)
        finally:
            self._in_step = False
        self.last_step = result
        return self._shared(name, result, effects, microbatches)

    def _shared(self, name: str, result: StepResult, effects: StepEffects, microbatches: list[Any]) -> Any:
        """What the last stage found, on every rank of the pipeline."""
        assert self.engine is not None

        def found() -> tuple[Any, Any, Any]:
            samples = [_samples(microbatch) for microbatch in microbatches]
            output: Any = merge_outputs(result.outputs, samples, result.weights)
            if name == "training_step":
                output = {**output, "loss": result.loss} if isinstance(output, Mapping) else result.loss
            return (to_device(output, torch.device("cpu")), *effects.merged(samples, result.weights))

        output, calls, attributes = comm.broadcast_from(found, self.engine.group, self.engine.last_rank)
        effects.repeat(calls, attributes, self.root_device)
        return to_device(output, self.root_device)

    def _gradient_scale(self) -> float | Tensor:
        """What gradients are multiplied by: the share of a batch in an accumulated one, and the loss scale."""
        assert self.lightning_module is not None
        share = 1.0 / self.lightning_module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        return share if scaler is None else scaler.scale(torch.full((), share, device=self.root_device))

    @override
    def differentiate(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> None:
        if self.engine is None:
            return super().differentiate(closure_loss, optimizer, *args, **kwargs)
        assert self._reducer is not None
        for parameter, gradient in self._fresh.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._reducer.mark(parameter for parameter, gradient in self._fresh.items() if gradient is not None)
        self._fresh = {}
        return None

    @override
    def join_gradients(self) -> None:
        # After the means over the replicas: compressed ones differ between the homes of a tied parameter.
        if self.engine is not None and self._reducer is not None and self._reducer.synchronizing:
            self.engine.reduce_tied_gradients()

    # ----------------------------------------------------------------------------------------------- checkpoints

    @property
    def _keeps_values(self) -> bool:
        coordinate = self.mesh.coordinate(self.global_rank)
        return coordinate.data_parallel == 0 and coordinate.tensor_parallel == 0

    @property
    def _orders(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the state and of the parameters of the whole module, in order."""
        assert self.lightning_module is not None
        state = ParallelState.of(self.lightning_module)
        return state.state_names, state.parameter_names

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self.engine is None:
            return state
        return stages.gather_state(state, self._orders[0], self.engine.group, self.root_device, self._keeps_values)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.engine is None:
            return super().load_model_state_dict(checkpoint, strict)
        assert self.lightning_module is not None
        mine = self.lightning_module.state_dict()
        state = stages.local_state(checkpoint["state_dict"], mine, self._orders[0])
        failure: Exception | None = None
        try:
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
        except (RuntimeError, ValueError) as error:
            failure = error
        comm.raise_together(failure, self.groups.world)
        return None

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self.engine is None:
            return state
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return stages.gather_optimizer_state(
            state,
            inner,
            self.parameter_names,
            self._orders[1],
            self.engine.group,
            self.root_device,
            self._keeps_values,
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.engine is None:
            return super().load_optimizer_state_dict(checkpoint)
        names, order, group = self.parameter_names, self._orders[1], self.engine.group
        local = [
            stages.local_optimizer_state(state, optimizer, names, order, group)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"])
        ]
        return super().load_optimizer_state_dict({"optimizer_states": local})


def _samples(microbatch: Any) -> int:
    try:
        return num_samples(microbatch)
    except ValueError:  # a batch that only the user's `split` understands
        return -1
