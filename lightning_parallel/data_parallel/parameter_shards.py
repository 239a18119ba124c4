"""Parameters of which each replica keeps only its slice, and gathers the full data while code uses them (ZeRO 3).

    absent     no data but the slice, which is apart; the first function of the parameter gathers its unit
    present    an ordinary parameter, until another unit is gathered
    narrow     its data and gradient are the slice: in the optimizer's step, and in hooks

    forward    [ gather 0 ][ layer 0 ][ layer 1 ]...[ layer n ]     gather 1 runs beside layer 0, and so on
    backward   ...[ layer n ][ layer n-1 ]...[ layer 0 ]            autograd asks for its saved parameters again

A unit is a layer, or other parameters that travel together. No module is wrapped: the tensor itself knows that it is
absent. So weights that code reads outside their layer are full as well. Autograd saves parameters by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    base_of,
    is_backward_running,
    pytree,
    saved_tensors_hooks_now,
    version_of,
)
from lightning_parallel.data_parallel.absent_parameters import hollow_data, mark_absent, mark_present
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.data_parallel.host_steps import put_data
from lightning_parallel.data_parallel.parameter_slices import ParameterSlices, padded_to, write_columns

__all__ = ["ParameterShards"]


class _Unit:
    """Parameters that are gathered together.

    Attributes:
        parameters: The parameters.
        name: Name of its first parameter.
        mark: The last element of each row, by which the replicas see whether all of them have sent this unit.
        rows: The slices of this replica, padded and joined, for each dtype; with the positions of their parameters.
        slices: This replica's slice of each parameter, flat; a view of a row.
        widths: Elements of the slices of each parameter, with padding.
        hollow: The data of each parameter while it is absent: one element, expanded to its shape.
        is_present: Whether the parameters have their full data.
        versions: The versions of the parameters since they are present.
        addresses: The addresses of their full data.
        pending: The gathering that is under way.
    """

    def __init__(
        self,
        name: str,
        mark: int,
        parameters: Sequence[nn.Parameter],
        cut: Callable[[Tensor], Tensor],
        widths: list[int],
    ) -> None:
        self.name = name
        self.mark = mark
        self.parameters = list(parameters)
        self.hollow = [hollow_data(parameter) for parameter in parameters]
        self.widths = widths
        kinds: dict[Any, list[int]] = {}
        for index, parameter in enumerate(parameters):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        self.rows: list[tuple[list[int], Tensor]] = []
        self.slices = [torch.empty(0)] * len(self.parameters)
        for indices in kinds.values():
            mine = {index: cut(parameters[index].data).reshape(-1) for index in indices}
            marks = mine[indices[0]].new_full((_MARKS,), mark)
            row = torch.cat([*(padded_to(widths[index], mine[index]) for index in indices), marks])
            self.rows.append((indices, row))
            for index, part in zip(indices, row.split([*(widths[index] for index in indices), _MARKS])):
                self.slices[index] = part[: mine[index].numel()]
        self.is_present = False
        self.versions: list[int] = []
        self.addresses: list[int] = []
        self.pending: list[tuple[list[int], Pending]] | None = None


class _ViewOfParameter(NamedTuple):
    """A view of a parameter that autograd saves; `dtype` differs for a cast."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class ParameterShards(ParameterSlices):
    """Keeps of each parameter only this replica's slice between its uses.

    Each call of `adopt` takes a unit, so that the caller may make the parameters unit by unit.

    Args:
        group: The data-parallel group.
        gate: Called before each message that gathers a unit, with its name.
        bucket_bytes: See `ParameterSlices`.

    Source: ZeRO, https://arxiv.org/abs/1910.02054
    """

    keeps_slices = True

    def __init__(self, group: Group, gate: Callable[[str], None], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._units: list[_Unit] = []
        self._place: dict[int, tuple[_Unit, int]] = {}
        self._dtypes: set[torch.dtype] = set()
        self._owner: dict[int, nn.Parameter] = {}  # by the address of the full data
        self._last: tuple[_Unit | None, _Unit | None] = (None, None)
        # The unit that came after a unit and its predecessor: forward and backward go in other directions.
        self._follower: dict[tuple[_Unit | None, _Unit | None], _Unit] = {}
        self._holds_all = False
        self._shown: dict[nn.Parameter, None] = {}  # narrow for a hook
        self._is_over = False
        self._are_slices_wanted = False
        # Narrow parameters that are whole for a state dict: their slices, and slices of gradients.
        self._loaded: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        super().__init__({}, group, bucket_bytes)
        self._gate = gate
        self._marks: list[tuple[_Unit, Tensor]] = []

    @override
    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep slices of further parameters, which are gathered together.

        Raises:
            ValueError: If a parameter is complex.
        """
        new = {name: p for name, p in parameters.items() if id(p) not in self._place}
        super().adopt(new)
        found = [p for p in new.values() if type(p) is nn.Parameter and p.dim() > 0]
        if found:
            self._take(next(iter(new)), found)
        self._parameters = {key: unit.parameters[index] for key, (unit, index) in self._place.items()}

    def _take(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            # Small, so that it is exact in all dtypes.
            mark = len(self._units) % 100 + 1
            unit = _Unit(name, mark, parameters, self.cut, [self.width(p.numel()) for p in parameters])
        self._units.append(unit)
        self._dtypes.update(parameter.dtype for parameter in parameters)
        for index, parameter in enumerate(parameters):
            self._place[id(parameter)] = unit, index
            self._set_absent(unit, index, parameter.grad)

    @override
    def kept(self, parameter: Tensor) -> Tensor:
        unit, index = self._place.get(id(parameter), (None, 0))
        return parameter if unit is None else unit.slices[index]

    @property
    @override
    def gathered_together(self) -> Sequence[Sequence[nn.Parameter]]:
        return [unit.parameters for unit in self._units]

    # ----------------------------------------------------------------------------------------- absent and present

    def _set_absent(self, unit: _Unit, index: int, gradient: Tensor | None) -> None:
        mark_absent(unit.parameters[index], self.gather)
        put_data(unit.parameters[index], unit.hollow[index], gradient)

    def _set_data(self, parameter: Any, data: Tensor, gradient: Tensor | None) -> None:
        put_data(parameter, data, gradient)
        mark_present(parameter)

    def gather(self, arguments: Any) -> None:
        """Make the absent parameters among arguments present; every replica must call it.

        Raises:
            RuntimeError: After a run that has left the parameters sharded.
        """
        found = [self._place[id(leaf)][0] for leaf in pytree.tree_leaves(arguments) if id(leaf) in self._place]
        self._make_present(list(dict.fromkeys(found)))

    def _make_present(self, units: Sequence[_Unit]) -> None:
        if self._is_over:
            raise RuntimeError(
                "The parameters are sharded over the replicas since the last run (`zero_stage=3`); got a read outside"
                " a run. Load a checkpoint into a new module, or set `gather_after_fit='all'`"
            )
        missing = [unit for unit in units if not unit.is_present]
        if not missing:
            return
        with torch.no_grad(), torch.inference_mode(False), DisableTorchFunctionSubclass():
            for unit in missing:
                self._begin(unit)
            # First, so that no more than the new units and the unit ahead are in memory.
            if not (self.stays_for_step or self._holds_all):
                self._drop([unit for unit in self._units if unit.is_present and unit not in units])
            for unit in missing:
                self._end(unit)
            self._look_ahead(missing[-1])

    def _begin(self, unit: _Unit) -> None:
        if unit.pending is None:
            unit.pending = []
            # Outside `held`, a replica may read alone.
            if not self._holds_all:
                self._gate(unit.name)
            for indices, row in unit.rows:
                self.traffic.add(row.nbytes * self.group.size)
                unit.pending.append((indices, comm.all_gather(row, self.group, async_op=True)))

    def _end(self, unit: _Unit) -> None:
        assert unit.pending is not None
        for indices, pending in unit.pending:
            rows = pending.wait().view(self.group.size, -1)
            # A clone: a view would keep the rows. Compared at the end of the pass, since the host waits for the device.
            self._marks.append((unit, rows[:, -1].clone()))
            for index, columns in zip(indices, rows.split([*(unit.widths[index] for index in indices), _MARKS], 1)):
                parameter = unit.parameters[index]
                if parameter in self._whole:
                    continue
                full = torch.empty(unit.hollow[index].shape, dtype=columns.dtype, device=columns.device)
                write_columns(full, columns)
                self.traffic.add(full.nbytes)
                self._set_data(parameter, full, parameter.grad)
                # All empty tensors have the address 0.
                if address := full.untyped_storage().data_ptr():
                    self._owner[address] = parameter
                    unit.addresses.append(address)
            self.traffic.remove(rows.nbytes)
        unit.pending = None
        unit.is_present = True
        unit.versions = list(map(version_of, unit.parameters))

    def _look_ahead(self, unit: _Unit) -> None:
        before = self._last
        self._follower[before] = unit
        self._last = before[1], unit
        coming = self._follower.get(self._last)
        # All replicas have the same history, so all of them begin the same unit.
        if coming is not None and not coming.is_present and not self._holds_all:
            self._begin(coming)

    def _drop(self, units: Iterable[_Unit]) -> None:
        """Make units absent, and keep what code has written into this replica's slice."""
        is_backward = is_backward_running()
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                if parameter in self._whole:
                    continue  # narrow
                data = parameter.data
                # Outside backward without a look at versions: code may write through `.data`, with other versions.
                if not is_backward or version_of(parameter) != unit.versions[index]:
                    mine = self.cut(data).reshape(-1)
                    if mine.dtype == unit.slices[index].dtype:
                        unit.slices[index].copy_(mine)
                self.traffic.remove(data.nbytes)
                self._set_absent(unit, index, parameter.grad)
            # Not by the data of now, which code may have replaced: another tensor may get the memory.
            for address in unit.addresses:
                self._owner.pop(address, None)
            unit.addresses.clear()
            unit.is_present = False
        if torch.is_autocast_enabled(self._device_type):
            # It keeps casts of full parameters.
            torch.clear_autocast_cache()

    @property
    def _device_type(self) -> str:
        return self._units[0].slices[0].device.type if self._units else "cpu"

    @override
    @contextmanager
    def in_pass(self, is_last: bool = True) -> Iterator[None]:
        # Only the innermost hooks see a tensor. Tensors that are no parameters go on to the others, as of a profiler.
        keep, give = saved_tensors_hooks_now() or (_same, _same)

        def pack(tensor: Tensor) -> Any:
            owned = self._pack(tensor)
            return (keep(tensor), None) if owned is None else (None, owned)

        def unpack(saved: tuple[Any, _ViewOfParameter | None]) -> Tensor:
            return give(saved[0]) if saved[1] is None else self._unpack(saved[1])

        with saved_tensors_hooks(pack, unpack):
            yield
        if is_last:
            self.end_pass()

    def end_pass(self) -> None:
        """Make all parameters absent that are present."""
        with torch.no_grad(), torch.inference_mode(False), DisableTorchFunctionSubclass():
            for unit in self._units:
                if unit.pending is not None:
                    self._end(unit)  # foreseen, but not used
            self._drop([unit for unit in self._units if unit.is_present])
            self._last = (None, None)
            self._check_marks()

    def _check_marks(self) -> None:
        """Compare the units that the replicas have sent.

        Raises:
            RuntimeError: On every rank, if the replicas have read parameters in another order.
        """
        marks, self._marks = self._marks, []
        kinds: dict[Any, list[tuple[_Unit, Tensor]]] = {}
        for unit, found in marks:
            kinds.setdefault((found.dtype, found.device), []).append((unit, found))
        for pairs in kinds.values():
            table = torch.stack([found for _, found in pairs]).tolist()
            for (unit, _), row in zip(pairs, table):
                if any(mark != unit.mark for mark in row):
                    raise RuntimeError(
                        f"All replicas must read parameters in the same order with `zero_stage=3`; got `{unit.name}`"
                        f" here, and other parameters on replica {[m == unit.mark for m in row].index(False)}. Call the"
                        " same layers on all replicas, or use `zero_stage=2` [LP013]"
                    )

    @override
    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all parameters present inside the block; every replica must call it."""
        if self._holds_all:
            yield
            return
        self._holds_all = True
        try:
            # Without the gate: one replica may be in a step, another one at the end of its batches.
            self._make_present(self._units)
            yield
        finally:
            self._holds_all = False
            self.end_pass()

    # ------------------------------------------------------------------------------------------------ saved tensors

    def _pack(self, tensor: Tensor) -> _ViewOfParameter | None:
        """Return the description of a view of a parameter, or of its cast; None for another tensor."""
        is_parameter = id(tensor) in self._place
        # A piece has no memory of its own.
        if not is_parameter and type(tensor) is not Tensor:
            return None
        with DisableTorchFunctionSubclass():
            if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
                return None
            owner: Any = self._owner.get(tensor.untyped_storage().data_ptr())
            if owner is not None and owner.dtype != tensor.dtype:
                return None  # a view of its bytes
            if owner is None:
                owner = tensor if is_parameter else self._cast_of(tensor)
            if owner is None:
                return None
            if id(tensor) == id(owner):
                unit, index = self._place[id(owner)]
                shape = unit.hollow[index].shape
                return _ViewOfParameter(owner, shape, _contiguous_stride(shape), 0, tensor.dtype)
            return _ViewOfParameter(owner, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _cast_of(self, tensor: Tensor) -> Any:
        """Return the parameter of which a tensor is a cast, or a view of a cast, as made by autocast; else None."""
        # A cast has another dtype. Most tensors are no casts, and the question to the graph takes longer than a copy.
        if self._dtypes == {tensor.dtype}:
            return None
        base = base_of(tensor)
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or not base.is_contiguous():
            return None
        found = getattr(node.next_functions[0][0], "variable", None)
        is_ours = found is not None and id(found) in self._place and found.shape == base.shape
        return found if is_ours else None

    def _unpack(self, saved: _ViewOfParameter) -> Tensor:
        self.gather(saved.parameter)
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return saved.parameter.data.to(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    # ------------------------------------------------------------------------------------------------------- narrow

    @override
    def whole_data(self, parameter: Tensor) -> Tensor | None:
        return None

    @override
    @torch.no_grad()
    def narrow(self, parameter: nn.Parameter, gradient: Tensor | None = None) -> None:
        unit, index = self._place[id(parameter)]
        with DisableTorchFunctionSubclass():
            self._absent(unit)
            kept = None
            if gradient is None and parameter.grad is not None:
                kept, gradient = parameter.grad, self.cut(parameter.grad)
            self._whole[parameter] = unit.hollow[index], kept
            mine = unit.slices[index].view(-1, *[1] * (unit.hollow[index].dim() - 1))
            self._set_data(parameter, mine, None if gradient is None else gradient.view(mine.shape))

    def _absent(self, unit: _Unit) -> None:
        if unit.is_present:
            with torch.inference_mode(False):
                self._drop([unit])

    @override
    @torch.no_grad()
    def widen(self, gathered: Iterable[nn.Parameter] = ()) -> None:
        """Make narrow parameters absent again, except in a hook; this changes no slice."""
        for parameter in [each for each in self._whole if each not in self._shown]:
            self._end_narrow(parameter)
        self.holds_gradients = False
        self.end_pass()

    def _end_narrow(self, parameter: Any) -> None:
        unit, index = self._place[id(parameter)]
        with DisableTorchFunctionSubclass():
            # A hook may have gathered other parameters of the unit. All of them are present, or none.
            self._absent(unit)
            kept = self._whole.pop(parameter)[1]
            if kept is None and parameter.grad is not None:
                self._freed.add(id(parameter))
            if parameter.data_ptr() != unit.slices[index].data_ptr():
                # An optimizer has put another tensor into its place.
                unit.slices[index].copy_(parameter.data.reshape(-1))
            self._set_absent(unit, index, kept)

    @override
    @contextmanager
    def shown(self) -> Iterator[None]:
        before = dict(self._shown)
        self._are_slices_wanted = True
        self._show(self._place)
        try:
            yield
        finally:
            self._are_slices_wanted = False
            self._hide([parameter for parameter in self._shown if parameter not in before])

    @override
    def show(self) -> None:
        """Make parameters narrow for hooks, until `hide`; no message."""
        # Not in backward, whose hooks may read full gradients; nor while batches add up in full gradients. Then a
        # parameter is gathered if a hook reads it.
        if not is_backward_running():
            with DisableTorchFunctionSubclass():
                found = [key for key, (unit, index) in self._place.items() if unit.parameters[index].grad is None]
            self._show(found)

    def _show(self, keys: Iterable[int]) -> None:
        for key in keys:
            unit, index = self._place[key]
            parameter = unit.parameters[index]
            if parameter not in self._whole:
                with DisableTorchFunctionSubclass():
                    kept, parameter.grad = parameter.grad, None
                self.narrow(parameter)
                self._whole[parameter] = self._whole[parameter][0], kept
                self._shown[parameter] = None

    @override
    def hide(self) -> None:
        """Make the parameters absent again that `show` has made narrow."""
        self._hide(list(self._shown))

    @torch.no_grad()
    def _hide(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            del self._shown[parameter]
            if parameter in self._whole:
                self._end_narrow(parameter)

    @override
    def keep_states_whole(self, module: nn.Module) -> None:
        """Let state dicts hold and load full parameters in hooks, until `close`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for owner in module.modules():
            if any(id(parameter) in self._place for parameter in owner.parameters(recurse=False)):
                # Functions instead of methods, because torch sets an attribute on its hooks.
                self._hooks.append(owner.register_state_dict_pre_hook(lambda *given: self._begin_state(*given)))
                self._hooks.append(owner.register_state_dict_post_hook(lambda *given: self._end_state(*given)))
                self._hooks.append(owner.register_load_state_dict_pre_hook(lambda *given: self._begin_state(*given)))
                self._hooks.append(owner.register_load_state_dict_post_hook(lambda *given: self._end_state(*given)))

    def _begin_state(self, owner: nn.Module, *_: Any) -> None:
        for parameter in owner.parameters(recurse=False):
            # Library code wants slices in state dicts; see `shown`.
            if parameter in self._whole and not self._are_slices_wanted:
                hollow, kept = self._whole[parameter]
                with torch.no_grad(), DisableTorchFunctionSubclass():
                    self._loaded[parameter] = parameter.data, parameter.grad
                    self._gate("a_state_dict")
                    whole = comm.all_gather(padded_to(self.width(hollow.numel()), parameter.data), self.group)
                    put_data(parameter, whole[: hollow.numel()].view(hollow.shape), None)

    def _end_state(self, owner: nn.Module, *_: Any) -> None:
        for parameter in owner.parameters(recurse=False):
            if parameter in self._loaded:
                mine, gradient = self._loaded.pop(parameter)
                with torch.no_grad(), DisableTorchFunctionSubclass():
                    mine.copy_(self.cut(parameter.data).view(mine.shape))
                    put_data(parameter, mine, gradient)

    # ------------------------------------------------------------------------------------------------------ the end

    def reopen(self, group: Group, gate: Callable[[str], None]) -> None:
        """Use these slices in another run.

        Args:
            group: The data-parallel group of the run.
            gate: Called before each message that gathers parameters, with its name.

        Raises:
            ValueError: If the run has other replicas.
        """
        if group.ranks != self.group.ranks:
            raise ValueError(
                f"An earlier run sharded the parameters of this module over the replicas {self.group.ranks}, so it"
                f" cannot run on {group.ranks}. Build the module anew and load a checkpoint"
            )
        self.group = group
        self._gate = gate
        self._is_over = False

    @override
    def restore(self) -> None:
        self.widen()
        with torch.no_grad(), torch.inference_mode(False), DisableTorchFunctionSubclass():
            for unit in self._units:
                if not unit.is_present:
                    self._begin(unit)
                    self._end(unit)
                self.traffic.clear()
        self._owner.clear()
        self._units.clear()
        self._place.clear()
        # The state of optimizers stays sliced.
        self.keeps_slices = False

    @override
    def close(self) -> None:
        # After an error other replicas may be gone, so nothing waits for them. The messages keep their memory.
        self._left = [unit.pending for unit in self._units]
        for unit in self._units:
            unit.pending = None
        self._marks.clear()
        super().close()
        self._is_over = True


_MARKS = 16
"""Elements at the end of a row, as many as keep the rows aligned."""


def _same(saved: Any) -> Any:
    return saved


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides)) if shape else ()
