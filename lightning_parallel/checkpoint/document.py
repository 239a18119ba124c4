"""A checkpoint's dict as JSON, with names in place of tensors: reading it runs no code.

A value without a form in JSON is an object with one key, a tag that begins with `$`:

    {"$tensor": "state_dict/layers.0.weight"}     {"$tuple": [...]}     {"$dict": [[key, value], ...]}     ...

A tensor's name is its path in the dict; its first path if it has several. Keys such as `1` and `"1"` may give two
tensors one path. Then the second name ends with an apostrophe.
"""

from __future__ import annotations

import base64
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.compat.torch import DisableTorchFunctionSubclass

__all__ = ["decode", "encode"]

_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str)}
"""Factories of a `defaultdict` that have a form."""
_OPTIONAL = {"hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type"}
"""Entries that a resumed run does not need, and in which users keep objects of any kind."""
_NUMPY_KINDS = "biufcMm"
"""Kinds of numpy's scalars that have a form; numpy's text and bytes are subclasses of Python's."""

_LEFT_OUT = object()


def encode(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Return a checkpoint as JSON data, its tensors by name, and the paths of hyperparameters that were left out.

    Raises:
        TypeError: If values have no form in JSON; names the path of each value.
    """
    encoder = _Encoder()
    # Facts of a tensor need no code of its subclass, which would take most of the time, or read a stored tensor.
    with DisableTorchFunctionSubclass():
        document = encoder.encode(checkpoint, "")
    if encoder.problems:
        listed = "\n".join(f"  {problem}" for problem in encoder.problems)
        raise TypeError(
            "Values of a sharded checkpoint must be tensors, numbers, text, or lists, tuples, sets and dicts of them."
            f" Loading such a checkpoint runs no code. Got other values:\n{listed}\n"
            "Save their numbers and names instead (in `state_dict` of the callback, or `on_save_checkpoint`), or use"
            " `checkpoint_format='full'`"
        )
    return document, encoder.tensors, encoder.left_out


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.left_out: list[str] = []
        self._names: dict[int, str] = {}
        self._parents: list[int] = []

    def encode(self, value: Any, path: str) -> Any:
        # The exact types: a subclass, such as an enumeration, has its own form.
        if value is None or isinstance(value, bool) or type(value) in (int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._name(value, path)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= _widest(value):
            # In the byte order of this machine, because torch knows no other.
            copy = torch.from_numpy(np.array(value, order="C", dtype=value.dtype.newbyteorder("=")))
            return {"$array": self._name(copy, path)}
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque, Namespace)):
            return self._encode_container(value, path)
        packed = self._encode_scalar(value)
        if packed is not None:
            return packed
        if path.split("/")[0] in _OPTIONAL:
            self.left_out.append(path)
            return _LEFT_OUT
        self.problems.append(f"{path}: {type(value).__module__}.{type(value).__qualname__}")
        return None

    def _encode_scalar(self, value: Any) -> Any:
        """Return the form of a single value; None if there is none."""
        if isinstance(value, Enum):
            try:
                plain, tensors, _ = encode({"value": value.value})
            except TypeError:
                return None
            return None if tensors else {"$enum": [type(value).__module__, type(value).__qualname__, plain["value"]]}
        # Text and bytes of numpy are subclasses of Python's, and are packed as Python's.
        is_numpy = isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS
        for form in _FORMS:
            if form.pack is not None and isinstance(value, form.kind) and (is_numpy or form.tag != "$numpy"):
                return {form.tag: form.pack(value)}
        return None

    def _name(self, tensor: Tensor, path: str) -> str:
        # By identity: `tensors` keeps the tensor alive, so no other tensor gets its id.
        if id(tensor) not in self._names:
            if tensor.layout != torch.strided or tensor.is_quantized:
                self.problems.append(f"{path}: a tensor of layout {tensor.layout} and dtype {tensor.dtype}")
                return path
            while path in self.tensors:
                path += "'"
            self._names[id(tensor)] = path
            self.tensors[path] = tensor
        return self._names[id(tensor)]

    def _encode_container(self, value: Any, path: str) -> Any:
        if id(value) in self._parents:
            self.problems.append(f"{path}: a {type(value).__qualname__} that contains itself")
            return None
        # Only the containers around the value: one container may stand at several places, but not in itself.
        self._parents.append(id(value))
        try:
            return self._encode_entries(value, path)
        finally:
            self._parents.pop()

    def _encode_entries(self, value: Any, path: str) -> Any:
        if isinstance(value, Namespace):
            return {"$namespace": self._encode_entries(vars(value), path)}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        # A value that is left out keeps its place in a list.
        entries = [_none_if_left_out(self.encode(entry, _join(path, index))) for index, entry in enumerate(value)]
        tag = next((form.tag for form in _FORMS if form.pack is None and isinstance(value, form.kind)), None)
        return entries if tag is None else {tag: entries}

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        # JSON has only text as keys, and a key with `$` would count as a tag.
        if all(type(key) is str and not key.startswith("$") for key in value):
            entries = {key: self.encode(entry, _join(path, key)) for key, entry in value.items()}
            encoded: Any = {key: entry for key, entry in entries.items() if entry is not _LEFT_OUT}
        else:
            pairs = [
                [self.encode(key, _join(path, "(key)")), self.encode(entry, _join(path, key))]
                for key, entry in value.items()
            ]
            pairs = [pair for pair in pairs if not any(one is _LEFT_OUT for one in pair)]
            encoded = {"$dict": pairs}
        if isinstance(value, Counter):
            return {"$counter": encoded}
        if isinstance(value, defaultdict) and getattr(value.default_factory, "__name__", "") in _FACTORIES:
            return {"$defaultdict": [getattr(value.default_factory, "__name__", ""), encoded]}
        return {"$ordered": encoded} if isinstance(value, OrderedDict) else encoded


def _none_if_left_out(entry: Any) -> Any:
    return None if entry is _LEFT_OUT else entry


def _widest(array: np.ndarray[Any, Any]) -> int:
    """Return the largest element size in bytes for which torch has a dtype of this kind."""
    return 16 if array.dtype.kind == "c" else 8


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the checkpoint from the result of `encode`.

    Args:
        document: JSON data.
        tensor: Returns the tensor of a name.

    Raises:
        ValueError: If the data have a form that `encode` does not make.
    """
    try:
        return _decode(document, tensor)
    except RecursionError as error:
        raise ValueError("The checkpoint must be finite; got values nested without end") from error


def _decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(document, list):
        return [_decode(entry, tensor) for entry in document]
    if not isinstance(document, dict):
        return document
    tag = next(iter(document), "")
    if len(document) != 1 or not tag.startswith("$"):
        return {key: _decode(entry, tensor) for key, entry in document.items()}
    value = document[tag]
    if tag in ("$tensor", "$array"):
        if not isinstance(value, str):
            raise ValueError(f"The name of a tensor must be text; got {value!r}")
        return tensor(value) if tag == "$tensor" else tensor(value).numpy()
    if tag == "$enum":
        return _enum(value)
    if tag not in _BY_TAG:
        raise ValueError(
            f"The kind of a value must be one of {', '.join(_BY_TAG)}; got {tag!r}. The file is damaged, or a newer"
            " version wrote it"
        )
    inner = _decode(value, tensor)
    try:
        # A small file must not fill the memory: a range as the content of a tuple would expand to numbers that were
        # never in the file.
        if not isinstance(inner, _BY_TAG[tag].content):
            raise TypeError(type(inner))
        return _BY_TAG[tag].unpack(inner)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"The value must be of kind {tag}; got {str(value)[:100]!r}") from error


def _enum(value: Any) -> Any:
    """Return a member of an enumeration if its class is already imported; otherwise return its value."""
    if not isinstance(value, list) or [type(part) for part in value[:2]] != [str, str] or len(value) != 3:
        raise ValueError(f"The value must be of kind $enum; got {str(value)[:100]!r}")
    module, name, plain = value
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not `getattr`: a module's `__getattr__` may import other modules.
        kind = getattr(kind, "__dict__", {}).get(part)
    plain = _decode(plain, _no_tensor)
    if not isinstance(kind, type) or not issubclass(kind, Enum):
        return plain
    try:
        return kind(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The value must be a member of `{module}.{name}`; got {str(plain)[:100]!r}") from error


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"The value of an enumeration must not be a tensor; got {name!r}")


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


def _numpy_scalar(value: np.generic) -> list[str]:
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def _read_numpy_scalar(value: list[str]) -> Any:
    dtype = np.dtype(value[0])
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(value[0])
    return np.frombuffer(base64.b64decode(value[1]), dtype)[0]


class _Form(NamedTuple):
    """The form of values of a kind.

    Attributes:
        tag: The key of the JSON object.
        kind: The class, or classes, of the values.
        content: The class of the content of the object.
        unpack: Makes a value from its content.
        pack: Makes the content of a value; None for a container, whose content is its entries.
    """

    tag: str
    kind: type | tuple[type, ...]
    content: type
    unpack: Callable[[Any], Any]
    pack: Callable[[Any], Any] | None = None


# The first match counts: `torch.Size` is a tuple, and numpy's float64 is a float.
_FORMS = [
    _Form("$size", torch.Size, list, torch.Size),
    _Form("$tuple", tuple, list, tuple),
    _Form("$set", set, list, set),
    _Form("$frozenset", frozenset, list, frozenset),
    _Form("$deque", deque, list, deque),
    _Form("$numpy", np.generic, list, _read_numpy_scalar, _numpy_scalar),
    _Form("$int", int, object, int, int),
    _Form("$float", float, object, float, repr),
    _Form("$str", str, object, str, str),
    _Form(
        "$complex", complex, list, lambda v: complex(float(v[0]), float(v[1])), lambda v: [repr(v.real), repr(v.imag)]
    ),
    _Form("$bytes", (bytes, bytearray), object, base64.b64decode, lambda v: base64.b64encode(bytes(v)).decode()),
    _Form("$path", PurePath, object, Path, str),
    _Form("$dtype", torch.dtype, object, _dtype, lambda value: str(value).removeprefix("torch.")),
    _Form("$device", torch.device, object, torch.device, str),
    _Form("$datetime", datetime, object, datetime.fromisoformat, datetime.isoformat),
    _Form("$date", date, object, date.fromisoformat, date.isoformat),
    _Form("$timedelta", timedelta, list, lambda v: timedelta(*v), lambda v: [v.days, v.seconds, v.microseconds]),
    _Form("$range", range, list, lambda v: range(*v), lambda v: [v.start, v.stop, v.step]),
    _Form("$slice", slice, list, lambda v: slice(*v), lambda v: [v.start, v.stop, v.step]),
    # Mappings, which `_encode_mapping` packs.
    _Form("$dict", (), list, lambda v: {key: entry for key, entry in v}),  # noqa: C416 `dict` would make a list of a range
    _Form("$counter", (), dict, Counter),
    _Form("$ordered", (), dict, OrderedDict),
    _Form("$defaultdict", (), list, lambda v: defaultdict(_FACTORIES[v[0]], {**v[1]})),
    _Form("$namespace", (), dict, lambda v: Namespace(**v)),
]
_BY_TAG = {form.tag: form for form in _FORMS}
