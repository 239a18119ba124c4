"""Refuses settings that would give wrong numbers, on every rank before a run, and reads the first batch."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import IO, Any

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lightning_parallel import comm
from lightning_parallel.comm import Group, fingerprint
from lightning_parallel.compat import patched
from lightning_parallel.compat.lightning import is_compiled, prepared_batch, take_first_entry
from lightning_parallel.compat.torch import has_compiled_calls, pytree, uses_cuda_graphs, workers_of
from lightning_parallel.pipeline.layer_stack import find_layer_stacks
from lightning_parallel.pipeline.random_streams import OwnGenerators

__all__ = [
    "STEPS",
    "check_agreement",
    "check_callbacks",
    "check_pipeline_module",
    "check_parameters",
    "check_same_batch",
    "first_batch",
    "output_is_read",
    "positional_arguments",
    "steps_of_run",
]


def check_same_batch(batch: Any, group: Group) -> None:
    """Check that the ranks of a replica have read the same batch.

    Raises:
        ValueError: On every rank of `group`, if the batches differ.
    """
    if group.size == 1:
        return
    # Send fingerprints instead of the batches, which may be large. The shapes are for the message.
    seen = _contents(batch)
    everyone = comm.all_gather_object(seen, group)
    different = [rank for rank, other in zip(group.ranks, everyone) if other != everyone[0]]
    if different:
        shapes = {rank: [shape for shape, *_ in other] for rank, other in zip(group.ranks, everyone)}
        raise ValueError(
            f"The ranks {list(group.ranks)} hold one replica and must get the same batch; got another first batch on"
            f" rank {', '.join(map(str, different))} than on rank {group.ranks[0]} (shapes: {shapes}). Shard data by"
            " the data-parallel coordinate (`trainer.strategy.distributed_sampler_kwargs`), not by the global rank,"
            " and use the same seed on every rank [LP007]"
        )


def _contents(batch: Any) -> list[tuple[Any, ...]]:
    """Return shape, dtype and fingerprint of each tensor of a batch, and a hash of every other value."""
    found: list[tuple[Any, ...]] = []
    known: dict[int, Any] = {}

    def add(value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            file = io.BytesIO()
            pickler = _ContentPickler(file)
            try:
                pickler.dump(leaf)
            except Exception:
                # The value has no pickle: it refers to itself, or to an object such as a lock.
                found.append(((), type(leaf).__qualname__, None))
                if hasattr(leaf, "__dict__") and id(leaf) not in known:
                    known[id(leaf)] = leaf
                    add(dict(vars(leaf)))
                continue
            found.extend(pickler.tensors)
            found.append(((), type(leaf).__qualname__, hashlib.blake2b(file.getvalue(), digest_size=8).hexdigest()))

    add(batch)
    return found


class _ContentPickler(pickle.Pickler):
    """Makes equal pickles of equal values on all ranks: by value rather than identity, and floats by their bits.

    Attributes:
        tensors: Shape, dtype and fingerprint of the tensors, which the pickle leaves out.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=4)
        # `fast` writes no references to earlier values: equal strings are one object on some ranks only.
        self.fast = True
        self.tensors: list[tuple[Any, ...]] = []

    def persistent_id(self, value: Any) -> Any:
        """Return a replacement for a value in the pickle; None for the value itself."""
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested and not value.is_meta:
            self.tensors.append((tuple(value.shape), str(value.dtype), fingerprint(value)))
            return "tensor"
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            digest = hashlib.blake2b(numpy.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
            self.tensors.append((value.shape, str(value.dtype), digest))
            return "array"
        if isinstance(value, (set, frozenset)):
            # The order of a set differs by process, and the text of other objects contains an address.
            return sorted(repr(each) for each in value if isinstance(each, (str, bytes, int, float, tuple)))
        if isinstance(value, torch.device):
            return value.type  # each rank has another index
        if callable(value) and hasattr(value, "__qualname__"):
            return value.__qualname__  # functions and classes are no data, and some have no pickle
        return None


def check_callbacks(trainer: Trainer, ranks_per_replica: int) -> None:
    """Refuse callbacks that cannot work with a part of the model.

    Raises:
        ValueError: If a callback searches for the largest batch, or prunes a sharded or split model. In such a search,
            a rank without memory would leave its peers waiting.
    """
    if ranks_per_replica > 1 and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "`ModelPruning` is not supported: it compares weights of the full model, but each rank holds only a"
            " part. Train without it and prune a checkpoint on one process (`torch.nn.utils.prune`), or use"
            " `DDPStrategy`"
        )
    if trainer.world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "The batch size finder is not supported on several ranks; set the batch size, or search on one device"
        )


def check_agreement(module: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[int, str], group: Group) -> None:
    """Check that the ranks of `group` train the same parameters with the same settings.

    Raises:
        ValueError: On every rank, if frozen parameters or settings of an optimizer differ.
    """
    # If only some ranks train a parameter, only they reduce its gradient, and all ranks wait in different messages.
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    comm.agree("the set of trained parameters", trained, group)
    settings = {}
    for index, optimizer in enumerate(optimizers):
        for number, options in enumerate(optimizer.param_groups):
            # Leave out tensors, whose comparison gives no single truth value.
            plain = {key: value for key, value in options.items() if isinstance(value, (bool, int, float, str, tuple))}
            parameters = [names.get(id(parameter)) for parameter in options["params"]]
            settings[f"{type(optimizer).__name__} {index}.{number}"] = (plain, parameters)
    comm.agree("the optimizers", settings, group)


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that a division would change.

    Raises:
        ValueError: If one is lazy, belongs to TorchScript, or shares memory with another parameter.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ValueError(
                f"`{path}` is TorchScript, whose parameters cannot be sharded; use the module without `torch.jit`"
            )
    ranges: list[tuple[int, int, str, nn.Parameter]] = []
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"`{name}` is lazy and has no shape yet; call the module once before the run")
        start = 0 if parameter.is_meta or not parameter.numel() else parameter.data_ptr()
        if start:
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
            ranges.append((start, start + (last + 1) * parameter.element_size(), name, parameter))
    ranges.sort(key=lambda entry: entry[:3])
    for (first, end, name, one), (start, _, other, two) in pairwise(ranges):
        if start < end and _share_elements(one, two, start - first):
            # One process updates the memory through both parameters. Shards or stages would update two memories.
            raise ValueError(
                f"`{name}` and `{other}` are two parameters in the same memory, which is not supported: shards have"
                " memory of their own. Tie them as one parameter (`b.weight = a.weight`), or make one a copy"
            )


def _share_elements(one: Tensor, two: Tensor, distance: int) -> bool:
    """Tell whether two tensors share elements, of which the second begins `distance` bytes after the first."""
    if distance % one.element_size() or one.element_size() != two.element_size():
        return True
    # The ranges of two columns of a matrix overlap, but the columns share no element.
    offset = distance // one.element_size()
    ends = [sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) for x in (one, two)]
    # Mark the elements of the first tensor in its memory, and look for a mark in the second.
    marks = torch.zeros(max(ends[0], offset + ends[1]) + 1, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride()).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), offset).any())


def check_pipeline_module(module: LightningModule, layers: str) -> None:
    """Refuse modules that cannot run in stages on parts of a batch.

    Args:
        module: The user's module.
        layers: Dotted name of the container of its layers, or `auto`.

    Raises:
        ValueError: With the reason and a way out.
    """
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"`{kind}` optimizes manually, which a pipeline does not support: it computes the gradients inside the"
            " training step. Set `automatic_optimization = True`, or use TensorParallelStrategy [LP019]"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"`{kind}` overrides `backward`, which a pipeline never calls: each stage differentiates its own part."
            " Remove it, or use TensorParallelStrategy"
        )
    compiled = kind if is_compiled(module) else _compiled_around_layers(module, layers)
    if compiled:
        raise ValueError(
            f"`{compiled}` was compiled as a whole, but a stage runs only a part of it. Use `compile_layers=True`, or"
            " compile its layers, in `configure_model` or `__init__` [LP020]"
        )
    graphed = next((name for name, part in module.named_modules() if uses_cuda_graphs(part)), None)
    if graphed is not None:
        raise ValueError(
            f"`{graphed}` was compiled to CUDA graphs (`reduce-overhead`, `max-autotune`), which write each result"
            " to the same memory. A pipeline holds the results of several microbatches. Compile it with `mode=None`"
            " or `mode='max-autotune-no-cudagraphs'`"
        )
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, name)
        if callable(method) and "dataloader_iter" in inspect.signature(method).parameters:
            raise ValueError(f"`{kind}.{name}` takes a `dataloader_iter`; a pipeline needs the batch, to split it")


def _compiled_around_layers(module: nn.Module, layers: str) -> str:
    """Return the path of a compiled module that holds all repeated layers; empty if there is none."""
    compiled = [path for path, part in module.named_modules() if path and has_compiled_calls(part)]
    if not compiled:
        return ""
    with suppress(ValueError):  # the analysis says which layers it needs
        names = find_layer_stacks(module, 1, layers)[0].names
        return next((path for path in compiled if all(name.startswith(f"{path}.") for name in names)), "")
    return ""


def output_is_read(module: LightningModule, step: str) -> bool:
    """Tell whether a hook of the user may read the output of a step, such as `on_train_batch_end` of a callback."""
    if step == "predict_step":
        return True
    hook = f"on_{step.removesuffix('_step').replace('training', 'train')}_batch_end"
    methods = [getattr(holder, hook) for holder in (module, *module.trainer.callbacks)]  # type: ignore[attr-defined]
    functions = [inspect.unwrap(getattr(method, "__func__", method)) for method in methods]
    # Hooks of Lightning and of this package do not read outputs.
    ours = {"lightning", "pytorch_lightning", "lightning_parallel"}
    return any(str(getattr(each, "__module__", "")).partition(".")[0] not in ours for each in functions)


def positional_arguments(method: Callable[..., Any]) -> int:
    """Return the most positional arguments that `method` takes."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return sys.maxsize
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


# ------------------------------------------------------------------------------------------------- the first batch


STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
"""The name of the step method, by the kind of run."""


def steps_of_run(trainer: Trainer) -> list[str]:
    """Return the names of the steps that the run will call, its main step first."""
    assert trainer.state.fn is not None
    step = STEPS[trainer.state.fn]
    validates_too = trainer.state.fn == TrainerFn.FITTING and trainer.enable_validation
    return [step, "validation_step"] if validates_too else [step]


def first_batch(trainer: Trainer, step: str) -> Any | None:
    """Return the first batch of `step` in the run that is about to begin, on the device; the run will read it again.

    Returns:
        The batch; None if there is none, or if the data can be read only once.
    """
    is_fit = trainer.state.fn == TrainerFn.FITTING
    loops: dict[str, Any] = {
        "training_step": trainer.fit_loop,
        "validation_step": trainer.fit_loop.epoch_loop.val_loop if is_fit else trainer.validate_loop,
        "test_step": trainer.test_loop,
        "predict_step": trainer.predict_loop,
    }
    loop = loops[step]
    kept = [trainer, trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    # Reading draws random numbers for the order and for augmentation. The run must draw the same numbers again.
    own = OwnGenerators([*trainer.lightning_module.modules(), trainer.datamodule])  # type: ignore[attr-defined]
    with isolate_rng(include_cuda=torch.cuda.is_initialized()), own.preserved(), ExitStack() as undo:
        for owner in kept[1:]:
            undo.enter_context(_unchanged(owner))

        def copied(loaders: Any) -> Any | None:
            each = pytree.tree_leaves(getattr(loaders, "iterables", loaders))
            # The copy shares indexed data sets with the run, so their counters go back at the end of the block.
            undo.enter_context(_rewound(each))
            return _copied(loaders, each, kept)

        # Turn the barrier of the loop off: other ranks would wait there for a rank whose loader fails.
        with patched(trainer.strategy, "barrier", lambda *_, **__: None):
            entry = take_first_entry(loop, copied)
        if entry is None or entry[0] is None:
            return None
        return prepared_batch(trainer, entry[0])


@contextmanager
def _unchanged(owner: Any) -> Iterator[None]:
    """Restore the attributes of an object after the block: its methods that make loaders will run again."""
    attributes = vars(owner) if hasattr(owner, "__dict__") else {}
    before = dict(attributes)
    containers = [(value, copy.copy(value)) for value in before.values() if type(value) in (list, dict, set)]
    try:
        yield
    finally:
        # In place, since other objects may refer to the same container.
        for value, items in containers:
            if not _holds_the_same(value, items):
                value.clear()
                value.extend(items) if isinstance(value, list) else value.update(items)
        for name in attributes.keys() - before.keys() - {"_parallel_state"}:
            del attributes[name]
        attributes.update({name: value for name, value in before.items() if attributes.get(name) is not value})


def _holds_the_same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return _holds_the_same([*one, *one.values()], [*two, *two.values()])
    return len(one) == len(two) and all(map(operator.is_, one, two))


def _copied(loaders: Any, each: Sequence[Any], kept: Sequence[Any]) -> Any | None:
    """Return a copy of loaders to read from, so that the run gets the first batch again; None if there is no copy.

    Some streams, samplers and custom loaders continue at their last position when they are iterated again.

    Args:
        loaders: A loader, or a collection of them.
        each: The loaders in it.
        kept: Objects that the copy shares with the loaders.
    """
    memo = {id(value): value for value in kept}
    for loader in each:
        if hasattr(loader, "__next__"):
            return None
        # A function may be a method of an object that must not be copied.
        values = [getattr(loader, name, None) for name in ("collate_fn", "worker_init_fn", "multiprocessing_context")]
        dataset = getattr(loader, "dataset", None)
        if not isinstance(dataset, IterableDataset):
            values.append(dataset)  # may be large, and is read by index; `_rewound` restores its counters
        memo.update({id(value): value for value in values})
        memo[id(workers_of(loader))] = None
    try:
        return copy.deepcopy(loaders, memo)
    except Exception:
        return None  # generators, files, connections


@contextmanager
def _rewound(loaders: list[Any]) -> Iterator[None]:
    """Restore numbers and random generators in the attributes of data sets after the block."""
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    before = [(data, dict(vars(data))) for data in datasets if hasattr(data, "__dict__")]
    undo: list[Callable[[], Any]] = []
    for value in (value for _, attributes in before for value in attributes.values()):
        if isinstance(value, torch.Generator):
            undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, numpy.random.Generator):
            undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, numpy.random.RandomState):
            undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            undo.append(partial(value.setstate, value.getstate()))
    try:
        yield
    finally:
        for restore in undo:
            restore()
        for data, attributes in before:
            counters = {name: value for name, value in attributes.items() if isinstance(value, (bool, int, float))}
            vars(data).update(counters)
