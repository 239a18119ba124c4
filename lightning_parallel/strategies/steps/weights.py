"""Find the weights of microbatches with which the mean of their losses and gradients is exact.

A mean over samples needs the numbers of samples. A mean over tokens, as with `ignore_index=-100` or a mask, needs the
numbers of tokens. The search tries each of these counts on a few microbatches together and one by one. If no count
fits, the self-check raises an error that names `microbatch_weight`.

    f(whole) = (n1 f(part 1) + n2 f(part 2)) / (n1 + n2)

holds for the loss `f`, and for its gradients after the layers. An untrained model has nearly equal losses for all
samples, which fit any weights; its gradients do not.

A loss over some samples only, such as the worst half, may fit by chance: each part may have one of these samples. On
copies of two samples such a loss never fits. The self-check compares the step on these copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import pytree, seed_torch
from lightning_parallel.pipeline.layer_stack import LayerStack
from lightning_parallel.pipeline.measure import TruncatedModel, is_large
from lightning_parallel.pipeline.microbatch import (
    UNCOUNTED,
    SplitBatch,
    chosen_samples,
    count_samples,
    few_samples,
    loss_of,
    map_tensors,
    num_samples,
    split_batch,
    split_by,
    tensors_inside,
)
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.random_streams import DrawRecorder, OwnGenerators, ReplayedDraws
from lightning_parallel.step_trace.interception import Call
from lightning_parallel.strategies.steps.metrics import MetricCalls, learn_numbers
from lightning_parallel.strategies.whole.pinned import doubled, in_double

__all__ = ["FEW_COPIES", "RowCount", "TokenCount", "copies_of_two", "find_microbatch_weight"]

_IGNORED_LABEL = -100
"""The label that `cross_entropy` leaves out by default."""

_SINGLE = 1e-5
"""Tolerance in double precision: many models compute norms and their loss in single precision all the same."""
_LOOSE = 5e-3
"""Tolerance where layers may compute in half precision."""
_CERTAIN = 1e-2
"""Difference that is no rounding in single precision."""
FEW_COPIES = 4
"""The fewest copies of each sample, if memory allows: a loss selects all or none of fewer copies."""
_COPIES_BYTES = 64 << 20
"""The most bytes of module outputs for copies beyond two microbatches."""
_OF_EACH_SIZE = 4
"""Batches of copies that the self-check runs: the full model may differ in another batch than the truncated model."""
_MOST_SINGLE = 64
"""The most samples whose weights are computed."""
_MOST_PAIRS = 16
"""Further pairs of microbatches on which weights other than samples are tried."""

_DOUBT = (
    "The loss must be a mean over samples; got {1:.6g} for {0} microbatches together, but {2:.6g} as the mean of"
    " their losses. A pipeline therefore trains on another loss than a single-process run. Count tokens with"
    " `microbatch_weight` for a mean over tokens; divide a sum by the number of samples. If the samples of a batch"
    " depend on each other, set `num_microbatches=1`. [LP023]"
)


@dataclass(frozen=True)
class TokenCount:
    """A weight of microbatches: the number of entries of a tensor of labels, or of a mask, that count.

    Attributes:
        key: The place of the tensor in the batch.
        ignored: The entry that does not count: -100 in labels, 0 in a mask.
        is_shifted: Whether the first column does not count, as in a causal loss that shifts its labels by one.
    """

    key: str
    ignored: int
    is_shifted: bool = False

    def __call__(self, microbatch: Any) -> float:
        """Count; a microbatch without the tensor, as in evaluation, counts its samples."""
        value = _entry(microbatch, self.key)
        if value is None:
            return float(num_samples(microbatch))
        value = value[:, 1:] if self.is_shifted else value
        return float((value != self.ignored).sum())

    def __str__(self) -> str:
        columns = "[:, 1:]" if self.is_shifted else ""
        return f"the entries of `{self.key or 'batch'}{columns}` other than {self.ignored}"


@dataclass(frozen=True)
class RowCount:
    """A weight of microbatches of an unknown class: the rows of a tensor in the batch, as of graphs or nodes."""

    key: str

    def __call__(self, microbatch: Any) -> float:
        """Count.

        Raises:
            ValueError: If the microbatch has no such tensor.
        """
        value = _entry(microbatch, self.key)
        if value is None:
            raise ValueError(f"Each batch must have the tensor `{self.key}`, which weights its microbatches; got none")
        return float(len(value))

    def __str__(self) -> str:
        return f"the rows of `{self.key}`"


def _entry(microbatch: Any, key: str) -> Tensor | None:
    return next((value for name, value in _tensors(microbatch) if name == key), None)


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors and arrays of numbers in a batch, by key."""
    found = []
    for key, value in tensors_inside(batch):
        if isinstance(value, Tensor) or value.dtype.kind in "biuf":
            found.append((key, torch.as_tensor(value)))
    return found


def _row_counts(batch: Any) -> list[RowCount]:
    """Return the counts of rows in a batch, small counts first: samples are fewer than their nodes."""
    rows: dict[int, str] = {}
    for key, value in _tensors(batch):
        if value.dim():
            rows.setdefault(len(value), key)
    return [RowCount(rows[count]) for count in sorted(rows) if count > 1]


def _candidates(batch: Any) -> Iterator[TokenCount]:
    """Yield the counts of tokens that a batch offers: by labels of -100, and by masks of zeros and ones."""
    tensors = [(key, value) for key, value in _tensors(batch) if value.dim()]
    # Leave out 8-bit tensors: in uint8, -100 would be compared as 156.
    labels = [(key, value) for key, value in tensors if value.dtype in (torch.int64, torch.int32, torch.int16)]
    masks = [(key, value) for key, value in tensors if bool(((value == 0) | (value == 1)).all())]
    for ignored, found in ((_IGNORED_LABEL, labels), (0, masks)):
        for key, value in found:
            if bool((value == ignored).any()):
                yield TokenCount(key, ignored)
                if value.dim() > 1:
                    yield TokenCount(key, ignored, is_shifted=True)


# -------------------------------------------------------------------------------------------------------- comparison


class _Probe(TruncatedModel):
    """Runs a step on a truncated model, and differentiates its loss by factors of the last layer's output."""

    def run_loss(
        self, step: Callable[[Any], Any], batch: Any, draws: DrawRecorder | ReplayedDraws | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and its gradient by a factor for each feature."""
        self.factors: list[Tensor] = []
        with (
            isolate_rng(include_cuda=torch.cuda.is_initialized()),
            OwnGenerators(self._module.modules()).preserved(),
            torch.enable_grad(),
        ):
            seed_torch(0)
            if draws is not None:
                draws.enter("step", draws.microbatch)
            with draws or nullcontext():
                loss = loss_of(self.run(step, batch, seed=None))
            found: Sequence[Tensor | None] = []
            if loss.requires_grad and self.factors:
                # A loss that does not use the last layer has no gradient by its factors.
                found = torch.autograd.grad(loss.sum(), self.factors, allow_unused=True)
        parts = [value.double().flatten() for value in found if value is not None]
        # The empty tensor is there for `cat`, which refuses an empty list.
        return loss.detach(), torch.cat([*parts, loss.new_zeros(0, dtype=torch.float64)]).detach()

    def layer(self, call: Call) -> Any:
        """Multiply the output of the last layer by factors of one, by which the loss is differentiated."""
        output = super().layer(call)
        if call.layer_index < len(self.stack.layers) - 1:
            return output

        def scaled(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or not tensor.dim():
                return tensor
            # One factor per feature: no usual layout has samples in the last dimension.
            self.factors.append(torch.ones_like(tensor[(0,) * (tensor.dim() - 1)]).detach().requires_grad_())
            return tensor * self.factors[-1]

        return pytree.tree_map_only(Tensor, scaled, output)


@dataclass
class _Seen:
    """The results of a step for several microbatches together, and for each of them.

    Attributes:
        parts: The microbatches.
        values: Loss and gradients of all together, then of each.
        tolerance: The largest difference that rounding explains, relative to the largest value.
        logged: The logged values, for all together and for each.
        numbers: The numbers that metrics were given, for all together and for each.
    """

    parts: Sequence[Any]
    values: list[tuple[Tensor, Tensor]]
    tolerance: float
    logged: list[_Logged]
    numbers: list[dict[str, Tensor]]

    def fits(self, weight: Callable[[Any], float]) -> bool:
        """Tell whether the mean by `weight` over the parts is the whole."""
        return self.error(weight) <= self.tolerance

    def is_certain(self, weights: Iterable[Callable[[Any], float]]) -> bool:
        """Tell whether rounding in single precision cannot decide which of `weights` fit."""
        return self.tolerance == _SINGLE and not any(_SINGLE < self.error(weight) < _CERTAIN for weight in weights)

    def error(self, weight: Callable[[Any], float]) -> float:
        """Return the largest difference of the mean by `weight` to the whole, relative to the largest value."""
        try:
            shares = torch.tensor([float(weight(part)) for part in self.parts], dtype=torch.float64)
        except ValueError:
            return float("inf")  # the samples of this class of batches cannot be counted
        if not bool((shares >= 0).all()) or not 0 < float(shares.sum()) < float("inf"):
            return float("inf")
        shares, error = shares / shares.sum(), 0.0
        for index in (0, 1):
            whole, *parts = (pair[index].double().cpu().flatten() for pair in self.values)
            if any(part.shape != whole.shape for part in parts):
                continue  # features that depend on the samples, such as a length
            # A part without weight may have given 0 / 0.
            mean = sum(share * part for share, part in zip(shares, parts) if share > 0)
            largest = max([float(value.abs().max()) for value in (whole, *parts) if value.numel()], default=0.0)
            difference = float((mean - whole).abs().max()) if whole.numel() else 0.0
            if math.isnan(difference) or difference > 0 == largest:
                return float("inf")
            error = max(error, difference / largest if difference else 0.0)
        return error


_Way = Literal["single", "double", "loose"]
_WAYS: tuple[_Way, ...] = ("single", "double", "loose")
"""The precision of a run and of its comparison, in the order of the tries."""


class _MeanCheck:
    """Runs steps of a truncated model on a few microbatches.

    The model is in evaluation mode. It computes in double precision if it can, since half precision hides differences;
    a large model in single precision where that is certain.

    Attributes:
        num_bytes: The size of all outputs of modules in the first run on two microbatches together.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        device: torch.device,
        step: Callable[[Any], Any],
        split: SplitBatch,
        tries_single: bool,
    ) -> None:
        self.module = module
        self.step = step
        self.split = split
        self.num_bytes = 0
        self._ways = _WAYS if tries_single else _WAYS[1:]
        # A single probe: a new one would take over the calls of the model's layers.
        self._probe = _Probe(module, LayerStack.at(module, plan.container), device)

    def see(self, pair: Any, rules: Sequence[Callable[[Any], float]], world: Group) -> _Seen | None:
        """Run the step on microbatches together and one by one; None if there is no loss to compare.

        Args:
            pair: The microbatches.
            rules: The weights among which the result decides.
            world: The ranks that call this.
        """
        parts = split_by(self.split, pair, 2)
        for way in self._ways:
            seen, failure, is_certain = None, None, True
            try:
                seen = self._see(pair, parts, way)
                is_certain = seen is None or way != "single" or seen.is_certain(rules)
            except Exception as error:
                failure = error
            # All ranks go on to the next precision together: the step may communicate.
            everyone = comm.all_gather_object((failure is None, is_certain), world)
            if not all(certain for _, certain in everyone):
                self._ways = _WAYS[1:]  # its rounding is too large
            elif all(ran for ran, _ in everyone):
                return seen
        return None  # the analysis, or the first step, raises the error of the step

    def _see(self, pair: Any, parts: Sequence[Any], way: _Way) -> _Seen | None:
        double = way == "double"
        recorder = DrawRecorder()
        with self._counted():
            runs = [self._run(pair, double, recorder)]
        # Each microbatch replays the random numbers that the run on both drew for its samples. A replay sees every
        # operator in Python, so it is left out if there are none.
        sizes = [count_samples(part) for part in parts]
        replayed = ReplayedDraws(recorder.found, sizes if min(sizes) > 0 else ()) if recorder.found.values else None
        for number, part in enumerate(parts):
            if replayed is not None:
                replayed.microbatch = number
            runs.append(self._run(part, double, replayed))
        loss = runs[0][0][0]
        if loss.dim() or not loss.is_floating_point():
            return None  # no loss, as in `predict_step`
        is_exact = way != "loose" and loss.dtype in (torch.float64, torch.float32)
        tolerance = _SINGLE if is_exact else _LOOSE
        return _Seen(parts, [run[0] for run in runs], tolerance, [run[1] for run in runs], [run[2] for run in runs])

    @contextmanager
    def _counted(self) -> Iterator[None]:
        found = 0

        def count(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal found
            found += sum(leaf.nbytes for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))

        handle = register_module_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()
        self.num_bytes = self.num_bytes or found

    def _run(
        self, batch: Any, double: bool, draws: DrawRecorder | ReplayedDraws | None
    ) -> tuple[tuple[Tensor, Tensor], _Logged, dict[str, Tensor]]:
        logged: _Logged = {}
        metrics = MetricCalls(self.module)

        def run() -> tuple[tuple[Tensor, Tensor], _Logged, dict[str, Tensor]]:
            with metrics.recording():
                values = self._probe.run_loss(self.step, batch, draws)
            return values, logged, metrics.numbers()

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
            if isinstance(value, (int, float, Tensor)) and kwargs.get("reduce_fx", "mean") == "mean":
                logged[name] = (torch.as_tensor(value).detach().double().cpu(), batch_size)

        # By module: `train()` on the root would also set the submodules that the user has frozen in evaluation mode.
        modes = {child: child.training for child in self.module.modules()}
        with ExitStack() as stack:
            stack.enter_context(patched(self.module, "log", log))
            # Torch leaves code uncompiled where draws are seen. The microbatches must compute as all together do.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if double:
                stack.enter_context(in_double(self.module, with_parameters=False))
                batch = map_tensors(batch, doubled)
            # Dropout and batch statistics would make the mean over the parts inexact.
            self.module.eval()
            self._probe.dtype = torch.float64 if double else None
            self._probe.runs_all = False
            try:
                try:
                    return run()
                except Exception:
                    self._probe.runs_all = True
                    return run()
            finally:
                for child, mode in modes.items():
                    child.training = mode


def find_microbatch_weight(
    module: nn.Module,
    plan: PipelinePlan,
    device: torch.device,
    step: Callable[[Any], Any],
    batch: Any,
    split: SplitBatch,
    weight: Callable[[Any], float],
    world: Group,
    tries_copies: bool,
) -> Callable[[Any], float]:
    """Return the weight by which the loss of a batch is the mean of the losses of its microbatches.

    Returns `weight` if it is right or comes from the user, else a `TokenCount` or `RowCount`. If no weight is right,
    returns `weight` and sets `ParallelState.doubt`.

    Args:
        module: The user's module, before it is split.
        plan: The plan of the split.
        device: The device for the runs.
        step: Runs a step.
        batch: The first batch.
        split: Splits a batch into a given number of parts.
        weight: Gives the weight of a part.
        world: The ranks that call this.
        tries_copies: Whether to look for copies of samples on which the self-check compares the step.

    Raises:
        ValueError: If no weight counts the samples of a microbatch.
    """
    ParallelState.of(module).copies_in_doubt = None
    check, given = _MeanCheck(module, plan, device, step, split, is_large(module, world)), weight
    # Run two microbatches at a time: a device that trains on one may have no room for the whole batch.
    pairs = split_by(split, batch, plan.schedule.num_microbatches // 2)
    rules = _rules(weight, batch, pairs[0], world)
    found = _seen_pairs(check, pairs, batch, [weight, *rules], world)
    weight = rules[0]
    found += _seen_apart(check, batch, pairs[0], rules, found, world)
    known = [(pair, seen) for pair, seen in found if seen is not None]
    if len(known) < len(found):
        return weight
    # By name: the ranks compare their weights, and a function of the user may not be picklable.
    names = ["samples" if rule is num_samples else "given" if rule is given else str(rule) for rule in rules]
    fitting = [name for name, rule in zip(names, rules) if all(seen.fits(rule) for _, seen in known)]
    # Replicas have different samples, but must choose the same weight: a weight counts if it fits on all ranks.
    everyone = comm.all_gather_object(fitting, world)
    chosen = next((rule for name, rule in zip(names, rules) if all(name in theirs for theirs in everyone)), None)
    _learn_effects(module, [seen for _, seen in known], chosen or weight)
    if tries_copies:
        ParallelState.of(module).copies_in_doubt = _copies_in_doubt(check, batch, pairs[0], chosen or weight, world)
    if chosen is None:
        pair, seen = next(((pair, seen) for pair, seen in known if not seen.fits(weight)), known[0])
        ParallelState.of(module).doubt = (pair, _DOUBT.format(len(seen.parts), seen.values[0][0], _mean(seen, weight)))
        return weight
    if chosen is not weight:
        tell(f"The loss is a mean over tokens, so microbatches are weighted by {chosen}.")
    return chosen


def _rules(weight: Callable[[Any], float], batch: Any, pair: Any, world: Group) -> list[Callable[[Any], float]]:
    """Return the weights to try; the first is the default.

    Raises:
        ValueError: If no weight counts the samples of a microbatch.
    """
    if weight is not num_samples:
        return [weight]
    rules: list[Callable[[Any], float]] = [weight, *_candidates(batch)]
    if all(comm.all_gather_object(_is_counted(pair), world)):
        return rules
    rules = [*_row_counts(pair), *rules[1:]]
    if not all(comm.all_gather_object(bool(rules), world)):
        raise ValueError(UNCOUNTED.format(type(pair).__name__))
    return rules


def _seen_pairs(
    check: _MeanCheck, pairs: Sequence[Any], batch: Any, rules: Sequence[Callable[[Any], float]], world: Group
) -> list[tuple[Any, _Seen | None]]:
    """Run the step on the first pair of microbatches, the last, and a mixed pair; on more if `rules[0]` is wrong."""
    tried = [pairs[0], *pairs[1:][-1:]]
    if check.split is split_batch and len(pairs) > 1:
        tried.append(few_samples(batch, num_samples(pairs[0])))  # with the sample least like the first
    found = [(pair, check.see(pair, rules, world)) for pair in tried]
    if not all(comm.all_gather_object(all(seen is None or seen.fits(rules[0]) for _, seen in found), world)):
        # Another count may fit a few samples by chance.
        # Each run of a pair communicates, so all ranks run equally many pairs.
        more = min(comm.all_gather_object(len(pairs) - 2, world))
        found += [(pair, check.see(pair, rules, world)) for pair in pairs[1 : 1 + max(0, min(more, _MOST_PAIRS))]]
    return found


def _seen_apart(
    check: _MeanCheck,
    batch: Any,
    pair: Any,
    rules: Sequence[Callable[[Any], float]],
    found: Sequence[tuple[Any, _Seen | None]],
    world: Group,
) -> list[tuple[Any, _Seen | None]]:
    """Run the step on a pair in which tokens weigh other than samples, if they weigh the same in all pairs so far."""
    apart = None
    if check.split is split_batch and rules[0] is num_samples:
        parts = [seen.parts for _, seen in found if seen is not None]
        alike = [rule for rule in rules[1:] if all(_weigh_alike(each, rule) for each in parts)]
        apart = next((other for rule in alike if (other := _with_other_counts(batch, pair, rule)) is not None), None)
    # The step may communicate, so all replicas run it.
    if not any(comm.all_gather_object(apart is not None, world)):
        return []
    seen = check.see(pair if apart is None else apart, rules, world)
    # A step that has no mean on labels that were changed here tells nothing about the user's labels.
    return [(apart, seen)] if seen is not None and any(map(seen.fits, rules)) else []


def _weigh_alike(parts: Sequence[Any], rule: Callable[[Any], float]) -> bool:
    """Tell whether a count gives the parts the same shares as their numbers of samples."""
    tokens, samples = ([float(count(part)) for part in parts] for count in (rule, num_samples))
    return all(abs(one * sum(samples) - two * sum(tokens)) < 0.5 for one, two in zip(tokens, samples))


def _with_other_counts(batch: Any, pair: Any, rule: Callable[[Any], float]) -> Any | None:
    """Return as many samples as `pair` has, in halves with other counts; None if there are none."""
    count, size = num_samples(pair), num_samples(batch)
    positions = range(0, size, max(1, size // max(_MOST_SINGLE, count)))
    counts = {position: rule(chosen_samples(batch, [position])) for position in positions}
    order = sorted(positions, key=lambda position: counts[position])
    half = count // 2
    chosen = chosen_samples(batch, [*order[: count - half], *order[len(order) - half :]])
    if isinstance(rule, TokenCount) and counts[order[0]] == counts[order[-1]] > 1 and rule.ignored == _IGNORED_LABEL:
        # All samples have equally many tokens, so ignore one more of them.
        labels = _entry(chosen, rule.key)
        assert labels is not None
        changed = labels.clone()
        # The last one: a causal loss ignores the first label in any case.
        changed[0].view(-1)[(changed[0].view(-1) != _IGNORED_LABEL).nonzero()[-1]] = _IGNORED_LABEL
        chosen = map_tensors(chosen, lambda tensor: changed if tensor is labels else tensor)
    return None if _weigh_alike(split_batch(chosen, 2), rule) else chosen


def copies_of_two(batch: Any, half: int, weight: Callable[[Any], float], with_few: bool = False) -> list[Any]:
    """Return batches of copies of two samples, on which a loss of some samples differs from the mean of the halves.

    The worst half of (a, a, b, b) is (b, b), while the mean over (a, a) and (b, b) has both samples. A median, or a
    mean without extremes, is wrong only on (a, a, a, b). An outlier must be one of many.

    Args:
        batch: The source of the samples.
        half: The size of a half.
        weight: Gives the weight of samples; a sample without weight is not chosen.
        with_few: Whether to return batches with a single copy of a sample as well.

    Raises:
        ValueError: As `split_batch`.
    """
    positions = range(0, num_samples(batch), -(-num_samples(batch) // _MOST_SINGLE))
    samples = [index for index in positions if weight(chosen_samples(batch, [index])) > 0]
    if len(samples) < 2:
        return []
    one, other = samples[0], samples[len(samples) // 2]
    counts = [half, half // 2] if half > 1 else [half]
    counts += [1, 2 * half - 1] if with_few else []
    return [chosen_samples(batch, [one] * (2 * half - count) + [other] * count) for count in counts]


def _copies_in_doubt(
    check: _MeanCheck, batch: Any, pair: Any, weight: Callable[[Any], float], world: Group
) -> list[Any] | None:
    """Return copies of samples on which the mean by `weight` is not exact; None if the sketch cannot run.

    Some batches have as many copies as the batch has samples: a loss of the worst sixteen is exact on fewer.
    """
    tried: list[Any] = []
    if all(comm.all_gather_object(check.split is split_batch, world)):
        part = num_samples(split_batch(pair, 2)[0])
        room = _COPIES_BYTES * num_samples(pair) // max(1, 2 * check.num_bytes)
        few, many = (part * -(-count // part) for count in (FEW_COPIES, num_samples(batch) // 2))
        for half in (few, many) if many > few else (few,):
            is_small = half <= room
            copies = copies_of_two(batch, half if is_small else part, weight, with_few=is_small)
            tried += copies if is_small else copies[:1]
    # Replicas have different samples, but run their steps together, so all run equally many.
    most = min(comm.all_gather_object(len(tried), world))
    for number in range(most):
        seen = check.see(tried[number], [weight], world)
        fits = comm.all_gather_object(None if seen is None else seen.fits(weight), world)
        if None in fits:
            return None
        if not all(fits):
            return tried[number : number + _OF_EACH_SIZE]
    return [] if most else None


def _is_counted(batch: Any) -> bool:
    try:
        return num_samples(batch) > 0
    except ValueError:
        return False


def _mean(seen: _Seen, weight: Callable[[Any], float]) -> float:
    shares = [float(weight(part)) for part in seen.parts]
    return sum(share * float(loss) for share, (loss, _) in zip(shares, seen.values[1:])) / (sum(shares) or 1.0)


# ------------------------------------------------------------------------------------------------------ logged values


_Logged = dict[str, tuple[Tensor, int | None]]
"""Value and `batch_size` by name."""


def _learn_effects(module: nn.Module, known: Sequence[_Seen], weight: Callable[[Any], float]) -> None:
    """Learn how logged values and numbers for metrics of microbatches combine to the value of the batch."""
    for seen in known:
        shares = [float(weight(part)) for part in seen.parts]
        _learn_logged(module, seen.logged[0], seen.logged[1:], shares, seen.parts)
        learn_numbers(module, seen.numbers[0], seen.numbers[1:], shares)


def _learn_logged(
    module: nn.Module, whole: _Logged, parts: Sequence[_Logged], shares: Sequence[float], microbatches: Sequence[Any]
) -> None:
    """Learn how the logged values of microbatches give the logged value of the batch: see `ParallelState.logged`."""
    try:
        samples = [float(num_samples(part)) for part in microbatches]
    except ValueError:  # a `split_batch` may share tensors between its parts
        samples = list(shares)
    for name, (value, size) in whole.items():
        found = [part[name] for part in parts if name in part]
        is_constant = size is not None and {size} == {other for _, other in found}
        if len(found) < len(parts) or (size is not None and not is_constant):
            continue  # `batch_size` gives the weights
        values = torch.stack([part for part, _ in found])

        def error(weights: Sequence[float], value: Tensor = value, values: Tensor = values) -> Tensor:
            return (torch.tensor(weights).to(values) @ values / sum(weights) - value).abs()

        # With equal parts both weights are right; if neither is right, the value is no mean.
        is_by_samples = bool(100 * error(samples) < error(shares))
        if is_constant or is_by_samples:
            ParallelState.of(module).logged[name] = (is_by_samples, is_constant)
