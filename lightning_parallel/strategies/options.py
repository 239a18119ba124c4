"""Checks the arguments of the public strategies, and turns them into options for the rooms."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, Literal, Optional, ParamSpec, TypeVar, Union, get_args

import torch

from lightning_parallel.compression.compressor import check_flag
from lightning_parallel.compression.quantizers import DTYPES
from lightning_parallel.pipeline.microbatch import SplitBatch, num_samples
from lightning_parallel.pipeline.microbatch import split_batch as split_samples
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.schedule import SCHEDULES, build_schedule
from lightning_parallel.pipeline.search import BALANCES, Balance
from lightning_parallel.tensor.plan import UserPlan, style_named
from lightning_parallel.tracing.units import parse_bytes

__all__ = [
    "ActivationCheckpointing",
    "CheckpointFormat",
    "ContextMethod",
    "ContextOptions",
    "GradientSumDtype",
    "OffloadedPart",
    "PipelineOptions",
    "TensorOptions",
    "Tiled",
    "check_activation_checkpointing",
    "check_checkpoint_format",
    "check_choice",
    "check_compile_layers",
    "check_cpu_offload",
    "check_launch",
    "dtype_of_sums",
    "memory_limit",
    "named",
    "spelled",
]

P = ParamSpec("P")
T = TypeVar("T")

ActivationCheckpointing = Union[Literal["off", "full", "selective", "auto"], int]
"""The activations that backward recomputes: of no layer, all, only cheap ones, or of every n-th layer."""

CheckpointFormat = Literal["full", "sharded"]
"""One ordinary Lightning checkpoint, or a folder with a file of each rank."""

ContextMethod = Literal["auto", "ulysses", "ring", "gather"]
"""How attention gets keys and values of other ranks' positions."""

OffloadedPart = Literal["optimizer", "activations"]
"""The tensors that wait in host memory."""

Tiled = Literal["off", "auto"]
"""Whether the loss and MLPs run in tiles of positions."""

GradientSumDtype = Union[Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"], torch.dtype]
"""The dtype in which gradients of 16-bit parameters are added."""


def named(
    arguments: Mapping[str, Any], function: Callable[..., Any], given_to: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return the arguments that a function takes under the same names, for a call by keyword.

    Args:
        arguments: Values, by name.
        function: The function to call.
        given_to: Leave out arguments with the default of this function: defaults of `function` may differ by version.
    """
    names = inspect.signature(function).parameters
    defaults = {} if given_to is None else inspect.signature(given_to).parameters
    return {
        name: value
        for name, value in arguments.items()
        if name in names and name != "self" and not (name in defaults and value is defaults[name].default)
    }


def spelled(**reasons: str) -> Callable[[Callable[Concatenate[T, P], None]], Callable[Concatenate[T, P], None]]:
    """Let a constructor suggest the name of a misspelt argument, and name the class that the user wrote.

    Args:
        reasons: Why an argument of the base class is not supported, by its name.

    Raises:
        TypeError: From the constructor, for an argument that it does not have.
    """

    def decorate(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
        known = list(inspect.signature(init).parameters)[1:]

        # LightningCLI and editors read the arguments from the signature.
        @functools.wraps(init)
        def checked(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    hint = f"did you mean `{close[0]}`?" if close else f"the arguments are {', '.join(known)}."
                    raise TypeError(
                        f"`{type(self).__name__}` has no argument `{name}`; {reasons.get(name, hint)} [LP005]"
                    )
            init(self, *args, **kwargs)

        return checked

    return decorate


# ------------------------------------------------------------------------------------------------ values and options


def check_plan_argument(plan: Any) -> None:
    """Check the form of a plan.

    Raises:
        TypeError: If it is neither `auto` nor a dict from globs to styles.
    """
    if plan != "auto" and not isinstance(plan, Mapping):
        raise TypeError(f"`tensor_plan` must be 'auto' or a dict from globs over module paths to styles; got {plan!r}")
    for pattern, style in ({} if plan == "auto" else plan).items():
        if not isinstance(pattern, str) or not (isinstance(style, str) or hasattr(style, "rules")):
            raise TypeError(f"`tensor_plan` must map globs over module paths to styles; got {{{pattern!r}: {style!r}}}")
        if isinstance(style, str):
            style_named(style)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Check an argument that takes one of a few values.

    Args:
        name: Name of the argument.
        value: Its value.
        choices: The `Literal` with the values.

    Raises:
        ValueError: If the value is no such choice.
    """
    *others, last = map(repr, get_args(choices))
    if value not in get_args(choices):
        raise ValueError(f"`{name}` must be {', '.join(others)} or {last}; got {value!r}")


def check_activation_checkpointing(value: Any) -> None:
    """Check which layers are recomputed.

    Raises:
        ValueError: If the value is no choice and no positive integer.
    """
    *names, _ = get_args(ActivationCheckpointing)
    choices = [choice for name in names for choice in get_args(name)]
    if value not in choices if isinstance(value, str) else not _is_int(value) or value < 1:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`activation_checkpointing` must be {listed} or a positive integer; got {value!r}")


def check_cpu_offload(parts: Any, activation_checkpointing: Any) -> tuple[str, ...]:
    """Return `cpu_offload` as a tuple.

    Raises:
        ValueError: If a name is unknown or repeated, or `activations` is given without recomputation.
    """
    names = get_args(OffloadedPart)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or any(part not in names for part in parts):
        hint = f"; write ({parts!r},)" if isinstance(parts, str) and parts in names else ""
        raise ValueError(f"`cpu_offload` must be a tuple of {' and '.join(map(repr, names))}; got {parts!r}{hint}")
    if len(set(parts)) < len(parts):
        raise ValueError(f"`cpu_offload` must name each part once; got {parts!r}; write {tuple(dict.fromkeys(parts))}")
    if "activations" in parts and activation_checkpointing == "off":
        raise ValueError(
            "`cpu_offload=('activations',)` needs `activation_checkpointing`; got 'off'. It keeps the inputs of"
            " recomputed layers in host memory until backward. Set activation_checkpointing='full'"
        )
    return tuple(parts)


def check_checkpoint_format(checkpoint_format: Any, async_save: Any) -> None:
    """Check how a strategy writes checkpoints.

    Raises:
        TypeError: If `async_save` is no bool.
        ValueError: If there is no such format, or it cannot be written in the background.
    """
    check_choice("checkpoint_format", checkpoint_format, CheckpointFormat)
    check_flag("async_save", async_save)
    if async_save and checkpoint_format == "full":
        raise ValueError(
            "`async_save` writes only sharded checkpoints; set `checkpoint_format='sharded'` as well, or give"
            " Lightning's `AsyncCheckpointIO` as a plugin of the Trainer"
        )


def check_launch(process_group_backend: Any, timeout: Any, start_method: Any, methods: Any) -> None:
    """Check the arguments for the start and connection of processes.

    Raises:
        TypeError: If the timeout is no `timedelta`.
        ValueError: If torch has no such backend, or Lightning no such way to start processes.
    """
    known = torch.distributed.Backend.backend_list
    for part in [] if process_group_backend is None else str(process_group_backend).split(","):
        if (name := part.rpartition(":")[2].lower()) not in known:
            raise ValueError(f"`process_group_backend` must be one of {', '.join(known)}; got {name!r}")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"`timeout` must be a `datetime.timedelta`, such as timedelta(minutes=5); got {timeout!r}")
    check_choice("start_method", start_method, methods)


def dtype_of_sums(dtype: Any) -> torch.dtype | None:
    """Return `gradient_sum_dtype` as a torch dtype.

    Raises:
        ValueError: If gradients cannot be added in this dtype.
    """
    found: Any = DTYPES.get(dtype, getattr(torch, dtype, dtype)) if isinstance(dtype, str) else dtype
    if not (found is None or (isinstance(found, torch.dtype) and found in DTYPES.values())):
        raise ValueError(
            f"`gradient_sum_dtype` must be None, 'fp32', 'bf16', 'fp16' or such a torch dtype; got {dtype!r}"
        )
    chosen: torch.dtype | None = found
    return chosen


def memory_limit(limit: Any) -> Optional[float]:
    """Return `memory_limit_bytes` as a number; a text has a unit, such as "80GiB".

    Raises:
        ValueError: If it is not a positive number of bytes.
    """
    amount = limit
    if isinstance(limit, str):
        with suppress(ValueError):
            amount = parse_bytes(limit)
    if amount is not None and (isinstance(amount, bool) or not isinstance(amount, (int, float)) or not amount > 0):
        raise ValueError(f"`memory_limit_bytes` must be a positive number of bytes, or such as '80GiB'; got {limit!r}")
    return amount


def check_pipeline_arguments(
    layers: Any, schedule: Any, num_microbatches: Any, virtual_stages: Any, warmup: Any, balance: Any
) -> None:
    """Check the arguments of a pipeline strategy, before any process is started.

    Raises:
        ValueError: If the schedule or the way to balance is unknown, or an argument is of another kind than expected.
    """
    if schedule != "auto" and schedule not in SCHEDULES:
        raise ValueError(f"`schedule` must be one of {', '.join(SCHEDULES)} or 'auto'; got {schedule!r}")
    for name, value in (("num_microbatches", num_microbatches), ("virtual_stages", virtual_stages)):
        if value != "auto" and (not _is_int(value) or value < 1):
            raise ValueError(f"`{name}` must be a positive integer or 'auto'; got {value!r}")
    if warmup is not None and (schedule == "auto" or isinstance(warmup, bool) or not isinstance(warmup, (int, float))):
        raise ValueError(f"`warmup` must be a number, and None with schedule='auto'; got {warmup!r}")
    if schedule != "auto":
        # The error names the numbers that this schedule takes.
        build_schedule(schedule, 2, 2, None if virtual_stages == "auto" else virtual_stages, warmup)
    if not isinstance(layers, str) or not layers:
        raise ValueError(f"`layers` must be the dotted name of a container, several joined by commas; got {layers!r}")
    is_known = balance in BALANCES if isinstance(balance, str) else isinstance(balance, Sequence)
    if not is_known or not (isinstance(balance, str) or all(_is_int(part) and part > 0 for part in balance)):
        raise ValueError(f"`balance` must be {', '.join(BALANCES)} or the layers per stage; got {balance!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_compile_layers(value: bool, tiled: Tiled, sequence_parallel: bool, context_size: Any) -> None:
    """Check that no other argument forbids `compile_layers`: some need eager layers.

    Args:
        value: The argument.
        tiled, sequence_parallel: The arguments of these names.
        context_size: The size of the context axis, as given.

    Raises:
        ValueError: If the layers cannot be compiled together with them.
    """
    check_flag("compile_layers", value)
    beside = {"tiled='auto'": tiled == "auto", "sequence_parallel=True": sequence_parallel}
    beside[f"context_parallel_size={context_size}"] = context_size != 1
    found = next((name for name, is_given in beside.items() if value and is_given), None)
    if found is not None:
        raise ValueError(
            f"`compile_layers=True` must stand without `{found}`, whose tensors are parts of a sequence that compiled"
            " code does not know. Use one of both"
        )


@dataclass(frozen=True)
class TensorOptions:
    """Holds the options of sharded layers: see the arguments of `TensorParallelStrategy`."""

    plan: UserPlan = "auto"
    sequence_parallel: bool = False
    gather_logits: bool = False

    def __post_init__(self) -> None:
        check_plan_argument(self.plan)
        check_flag("sequence_parallel", self.sequence_parallel)
        check_flag("gather_logits", self.gather_logits)


@dataclass(frozen=True)
class ContextOptions:
    """Holds the options of split positions: see the arguments of `ContextParallelStrategy`."""

    method: ContextMethod = "auto"

    def __post_init__(self) -> None:
        check_choice("context_parallel_method", self.method, ContextMethod)


@dataclass(frozen=True)
class PipelineOptions:
    """Holds the options of a module in stages: see the arguments of `PipelineParallelStrategy`."""

    layers: str
    schedule: str
    num_microbatches: int | Literal["auto"]
    virtual_stages: int | Literal["auto"]
    warmup: float | None
    balance: Balance
    memory_limit_bytes: float | None
    split_batch: SplitBatch
    microbatch_weight: Callable[[Any], float]
    plan: PipelinePlan | None

    @classmethod
    def of(
        cls,
        layers: str,
        schedule: str,
        num_microbatches: int | Literal["auto"],
        virtual_stages: int | Literal["auto"],
        warmup: Optional[float],
        balance: str | Sequence[int],
        memory_limit_bytes: Optional[Union[float, str]],
        split_batch: Optional[Union[Callable[[Any, int], list[Any]], str]],
        microbatch_weight: Optional[Union[Callable[[Any], float], str]],
        pipeline_plan: Optional[Union[PipelinePlan, str, Path]],
    ) -> PipelineOptions:
        """Check and read the arguments of a strategy; functions may be dotted paths, a plan may be a file.

        Raises:
            ValueError: If a value is out of range, or a path leads nowhere.
        """
        check_pipeline_arguments(layers, schedule, num_microbatches, virtual_stages, warmup, balance)
        if pipeline_plan is not None and not isinstance(pipeline_plan, (PipelinePlan, str, Path)):
            raise ValueError(f"`pipeline_plan` must be a `PipelinePlan` or a file with one; got {pipeline_plan!r}")
        return cls(
            layers=layers,
            schedule=schedule,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            warmup=warmup,
            balance=balance if isinstance(balance, str) else tuple(balance),  # type: ignore[arg-type]
            memory_limit_bytes=memory_limit(memory_limit_bytes),
            split_batch=_function(split_batch, "split_batch") or split_samples,
            microbatch_weight=_function(microbatch_weight, "microbatch_weight") or num_samples,
            plan=PipelinePlan.load(pipeline_plan) if isinstance(pipeline_plan, (str, Path)) else pipeline_plan,
        )

    @property
    def stages_per_rank(self) -> int | None:
        """Number of virtual stages; None for the smallest number that the schedule supports."""
        return None if self.virtual_stages == "auto" else self.virtual_stages


def _function(given: Any, argument: str) -> Any:
    """Return the function at a dotted path; return any other value unchanged.

    Raises:
        ValueError: If there is no function.
    """
    found = given
    reason = ""
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            reason = f": {error}"
    if found is not None and (reason or not callable(found)):
        raise ValueError(f"`{argument}` must be a function or its dotted path; got {given!r}{reason}")
    return found
