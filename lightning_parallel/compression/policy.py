"""Reducers that choose a compressor: by parameter name (`Policy`), or by measurement (`Auto`)."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Optional

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.compressor import Compressor, Dense, check_fraction, check_integer
from lightning_parallel.compression.compressor_state import Memory
from lightning_parallel.compression.feedback import Method
from lightning_parallel.compression.powersgd import PowerSGD
from lightning_parallel.compression.quantizers import Quantize
from lightning_parallel.compression.reducer import GroupLike, Reducer, ReductionStep
from lightning_parallel.tracing.spans import show

__all__ = ["Auto", "Policy", "bind_to_module", "warn_of_unmatched"]


class Policy(Reducer):
    """Chooses a compressor by parameter name: the first pattern that matches decides.

        Policy({"*.bias": None, "embed*": Quantize(8), "*": PowerSGD(4)})

    Parameters that no pattern matches, that are small, or that the chosen compressor does not accept (vectors) are
    averaged as they are.

    Args:
        rules: Shell pattern over parameter names (`*`, `?`, `[...]`) -> compressor; None for plain means.
        min_numel: Tensors with fewer elements are averaged as they are, whatever the pattern says.

    Raises:
        TypeError: If `rules` is no mapping, a pattern no string, or a rule neither a compressor nor None.
    """

    def __init__(self, rules: Mapping[str, Optional[Compressor]], *, min_numel: int = 0) -> None:
        super().__init__()
        if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
            raise TypeError(f"`rules` must map patterns of names to compressors, {{'*': PowerSGD(4)}}, got {rules!r}")
        wrong = {pattern: rule for pattern, rule in rules.items() if not isinstance(rule, (Compressor, type(None)))}
        if wrong:
            raise TypeError(f"the rules of a policy are compressors or None, got {wrong}")
        check_integer("min_numel", min_numel, least=0)
        self.rules = dict(rules)
        self.min_numel = min_numel
        self._dense = Dense()

    @property
    def linear(self) -> bool:
        """True if all rules are linear."""
        return all(rule.linear for rule in self._compressors)

    @property
    def unbiased(self) -> bool:
        """True if all rules are unbiased."""
        return all(rule.unbiased for rule in self._compressors)

    @property
    def collective(self) -> str:
        """The collective of all rules, or `mixed`."""
        found = {rule.collective for rule in self._compressors}
        if not found:
            return "all_reduce"
        return found.pop() if len(found) == 1 else "mixed"

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that any rule uses."""
        return frozenset().union(*(rule.slots for rule in self._compressors))

    @property
    def _compressors(self) -> list[Compressor]:
        return [rule for rule in self.rules.values() if rule is not None]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that are not the first to match any of `names`."""
        found = {self._pattern(name) for name in names}
        return [pattern for pattern in self.rules if pattern not in found]

    def _pattern(self, name: str) -> Optional[str]:
        # `fnmatch` would ignore case on some systems.
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def phase(self, step: int) -> Optional[Hashable]:
        """Return the phases of all rules; None if one is unknown."""
        phases = tuple(rule.phase(step) for rule in self._compressors)
        return None if None in phases else phases

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return the method of the first rule that matches, or the plain mean."""
        pattern = self._pattern(name)
        rule = None if pattern is None else self.rules[pattern]
        if rule is None or math.prod(shape) < self.min_numel:
            return self._dense
        return rule.method(name, shape, step)

    def __repr__(self) -> str:
        return f"Policy({self.rules}{f', min_numel={self.min_numel}' if self.min_numel else ''})"


_WARM_UP = 1  # steps whose times are not counted: the first ones allocate


class Auto(Reducer):
    """Measures plain means and the candidates on the first gradients, then keeps the fastest for good.

    While it measures, gradients are averaged as they are; the candidates work on copies. The time of the slowest rank
    counts, so all ranks choose the same. Times on a busy host vary, so the slowest step of a candidate is compared with
    the fastest of plain means. Rank 0 prints the times and the gains; `verdict` keeps them in words.

    If plain means win, DDP's own all-reduce takes over.

    Args:
        candidates: Compressors to try; 8-bit quantization and PowerSGD of rank 4 when omitted.
        min_gain: Stay with plain means unless the fastest candidate saves this share of their time.
        steps: Steps to measure, after one that is not counted.
    """

    def __init__(
        self, candidates: Optional[list[Compressor]] = None, *, min_gain: float = 0.05, steps: int = 3
    ) -> None:
        super().__init__()
        check_integer("steps", steps, least=1)
        check_fraction("min_gain", min_gain)
        self.candidates = [Quantize(8), PowerSGD(4)] if candidates is None else list(candidates)
        if not all(isinstance(candidate, Compressor) for candidate in self.candidates):
            raise TypeError(f"`candidates` must be compressors such as [Quantize(8), PowerSGD(4)], got {candidates!r}")
        self.min_gain = min_gain
        self.steps = steps
        self.choice: Optional[Reducer] = None
        self.verdict = "still measuring"
        self._dense = Dense()
        self._seconds: list[list[float]] = []  # by step, of plain means and of each candidate

    @property
    def linear(self) -> bool:
        """True if the choice is linear; plain means, before it is made, are."""
        return self._chosen.linear

    @property
    def unbiased(self) -> bool:
        """True if the choice is unbiased."""
        return self._chosen.unbiased

    @property
    def collective(self) -> str:
        """The collective of the choice."""
        return self._chosen.collective

    @property
    def is_plain(self) -> bool:
        """True once plain means have won."""
        return self.choice is self._dense

    @property
    def _chosen(self) -> Reducer:
        return self._dense if self.choice is None else self.choice

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that any candidate uses."""
        return frozenset().union(*(candidate.slots for candidate in self.candidates))

    def leave_device(self) -> None:
        """Keep the memory on the CPU until the next step, also that of the candidates."""
        super().leave_device()
        for candidate in self.candidates:
            candidate.leave_device()

    def reset(self) -> None:
        """Return to the state before the first step, and measure again."""
        super().reset()
        self.choice = None
        self.verdict = "still measuring"
        self._seconds = []

    def phase(self, step: int) -> Optional[Hashable]:
        """Return the choice and its phase."""
        phase = self._chosen.phase(step)
        return None if phase is None else (id(self._chosen), phase)

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return the method of the choice."""
        return self._chosen.method(name, shape, step)

    def begin(self, group: GroupLike = None) -> ReductionStep:
        """Start a step, which measures until the choice is made."""
        if self.choice is not None:
            return super().begin(group)
        return _MeasuringStep(self, group if isinstance(group, Group) else Group.of(group, axis="data_parallel"))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state, with the choice."""
        return {**super().state_dict(), **self._verdict_state()}

    def gather_state(self, group: GroupLike = None, exact: bool = True) -> dict[str, Any]:
        """Return the state of all ranks on the first, with the choice."""
        state = super().gather_state(group, exact)
        return {**state, **self._verdict_state()} if state else state

    def load_state_dict(self, state: Mapping[str, Any], group: GroupLike = None) -> None:
        """Continue with the saved choice; measure again if it is not among the candidates any more."""
        super().load_state_dict(state, group)
        known = {repr(one): one for one in (self._dense, *self.candidates)}
        saved = state.get("choice", "").replace("Schedule(", "StepValue(")  # its name in older checkpoints
        self.choice = known.get(saved)
        self.verdict = state.get("verdict", self.verdict) if self.choice is not None else "still measuring"

    def _verdict_state(self) -> dict[str, Any]:
        return {"choice": "" if self.choice is None else repr(self.choice), "verdict": self.verdict}

    def _decide(self, group: Group, device: torch.device) -> None:
        # The slowest rank decides what a step costs, and an all-reduce gives all ranks the same numbers to choose by.
        # On the gradients' device, since NCCL takes no tensors of the CPU.
        seconds = torch.tensor(self._seconds[_WARM_UP:], dtype=torch.float64, device=device)
        fastest, slowest = comm.all_reduce_(seconds, group, "max").aminmax(dim=0)
        dense = fastest[0].item()
        others = slowest[1:].tolist()
        self.choice = self._dense
        gain = 0.0
        if others:
            best = min(range(len(others)), key=others.__getitem__)
            gain = 1 - others[best] / dense
            if gain >= self.min_gain:
                self.choice = self.candidates[best]
        times = ", ".join(f"{c!r} {s * 1e3:.2f} ms" for c, s in zip(self.candidates, others))
        self.verdict = (
            f"plain means take at least {dense * 1e3:.2f} ms a step, at most {times}: the best gains {gain:.0%}, "
            f"{self.min_gain:.0%} is asked for; using {self.choice!r}"
        )
        if group.rank == 0:
            show(self._table(dense, others))
        for candidate in self.candidates:
            # What the candidates remember is of gradients that were then averaged as they are: nothing of it is owed.
            candidate.memory = Memory()
        self._seconds = []

    def _table(self, dense: float, others: Sequence[float]) -> Table:
        table = Table(title="Gradient compression", title_justify="left", box=box.SIMPLE_HEAD)
        for header in ("compressor", "ms per step", "saves", ""):
            table.add_column(header, justify="right" if header in ("ms per step", "saves") else "left")
        table.add_row("plain means", f"at least {dense * 1e3:.2f}", "", "chosen" if self.choice is self._dense else "")
        for candidate, seconds in zip(self.candidates, others):
            chosen = "chosen" if candidate is self.choice else ""
            table.add_row(repr(candidate), f"at most {seconds * 1e3:.2f}", f"{1 - seconds / dense:.0%}", chosen)
        table.caption = f"Compression is chosen where it saves {self.min_gain:.0%} of the time of the reduction."
        return table

    def __repr__(self) -> str:
        gain = "" if self.min_gain == 0.05 else f", min_gain={self.min_gain}"
        steps = "" if self.steps == 3 else f", steps={self.steps}"
        return f"Auto({self.candidates}{gain}{steps})" if self.choice is None else repr(self.choice)


class _MeasuringStep(ReductionStep):
    """A step of plain means during which the candidates reduce copies, each timed."""

    reducer: Auto

    def __init__(self, reducer: Auto, group: Group) -> None:
        super().__init__(reducer, group)
        self._device = torch.device("cpu")
        self._taken = [0.0] * (1 + len(reducer.candidates))

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Take the plain means, and time everything on copies."""
        if not named_gradients:
            return
        # Before anything is timed: ranks with different gradients would meet in the wrong collectives.
        self._agree(named_gradients, self._plan(named_gradients, {}))
        # Before the first clock starts: on CUDA it stops when the device is done, not when the host is.
        self._device = next(gradient.device for gradient in named_gradients.values())
        # Plain means are measured as DDP takes them: one all-reduce of a flat bucket, which it fills anyway.
        flat = torch.cat([gradient.detach().flatten() for gradient in named_gradients.values()])
        self._time(0, lambda: comm.all_reduce_(flat, self.group).div_(self.group.size))
        for index, candidate in enumerate(self.reducer.candidates):
            # New copies for each candidate, as it overwrites them; made before its clock starts.
            copies = {name: gradient.detach().clone() for name, gradient in named_gradients.items()}
            self._time(1 + index, partial(self._try, candidate, copies))
        super().reduce_(named_gradients, shards)

    def _try(self, candidate: Reducer, copies: Mapping[str, Tensor]) -> None:
        with candidate.begin(self.group) as step:
            step.reduce_(copies)
            step.commit()

    def commit(self, finite: Optional[bool] = None) -> bool:
        """End the step; decide after the last one that measures."""
        finite = super().commit(finite)
        if finite:
            self.reducer._seconds.append(self._taken)
            # All ranks get here in the same step, as `finite` is the same on all: `_decide` communicates.
            if len(self.reducer._seconds) == _WARM_UP + self.reducer.steps:
                self.reducer._decide(self.group, self._device)
        return finite

    def _time(self, index: int, call: Callable[[], object]) -> None:
        # All ranks start together: otherwise each would be charged the wait for the slowest one.
        comm.barrier(self.group)
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        self._taken[index] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


# Weak on both sides: this must keep neither a compressor nor a model alive.
_OWNERS: weakref.WeakKeyDictionary[Reducer, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def bind_to_module(module: nn.Module, reducer: Reducer) -> None:
    """Bind `reducer` to `module`: its memory is of no use to another one, so it is reset then, with a warning."""
    owner = _OWNERS.get(reducer)
    if owner is not None and owner() is not module and reducer.step > 0:
        warnings.warn(
            f"{reducer!r} has taken {reducer.step} steps for another model; it forgets them and starts anew.",
            stacklevel=2,
        )
        reducer.reset()
    _OWNERS[reducer] = weakref.ref(module)


def warn_of_unmatched(module: nn.Module, reducer: Reducer) -> None:
    """Warn of the patterns of a policy that match no parameter of `module` first: a name may be misspelt."""
    names = [name for name, _ in module.named_parameters()]
    unmatched = reducer.unmatched(names) if isinstance(reducer, Policy) else []
    if unmatched:
        warnings.warn(
            f"The patterns {unmatched} of the policy are not the first to match any parameter of "
            f"{type(module).__name__}, whose names look like {names[:3]}.",
            stacklevel=2,
        )
