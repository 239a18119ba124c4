"""Initial weights from a file, for a module of any size: a rank reads only the weights that it owns.

`load_weights` gives each tensor of the file to the module by `load_state_dict`. Under the mesh strategies, parameters
from `configure_model` have no data yet. They remember the place of their data, and a rank later reads the part that it
owns. Elsewhere the tensors are read at once, one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lightning_parallel.checkpoint.distributed import DistributedCheckpoint, is_distributed_checkpoint, load_safely
from lightning_parallel.checkpoint.folder import is_sharded_checkpoint
from lightning_parallel.checkpoint.manifest import checked_shape, is_file_name
from lightning_parallel.checkpoint.reader import Box, SavedCheckpoint, StoredTensor, assemble
from lightning_parallel.checkpoint.writer import SAFETENSORS_DTYPES
from lightning_parallel.comm import Group
from lightning_parallel.tensor.sharding import Shard

__all__ = ["WeightFiles", "load_weights", "stored_weights"]

_SAFETENSORS, _INDEX, _BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items() if not dtype.is_complex} | {
    "C64": torch.complex64,
    "C128": torch.complex128,
}


def load_weights(module: nn.Module, path: str | os.PathLike[str], *, prefix: str = "", strict: bool = True) -> None:
    """Load the weights of a file into `module`, in `configure_model`, in `__init__`, or before a run.

    Under the mesh strategies, a call in `configure_model` reads nothing at first. Each rank reads only its own weights
    later. Values are converted to the dtype of the module's tensors.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import TensorParallelStrategy, load_weights

        class MyPretrainedModule(MyModule):
            def configure_model(self):
                load_weights(self, "model.safetensors")

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        trainer.fit(MyPretrainedModule(), MyData())
        ```

    Args:
        module: The module, such as `self` or `self.model`.
        path: A `safetensors` file, a folder of Hugging Face with such files, a sharded checkpoint, a folder of
            `torch.distributed.checkpoint`, or a file of `torch.save` (`.ckpt`, `.pt`, `.bin`).
        prefix: Use only names in the file with this prefix, and remove the prefix. `"model."` selects the weights of
            `self.model` in a checkpoint of a LightningModule.
        strict: Raise an error for missing and unexpected names. A tied parameter needs only one of its names.

    Raises:
        FileNotFoundError: If there is no such file or folder at `path`.
        ValueError: If names or shapes do not fit; the message lists all of them. If the file is damaged or unsafe.
    """
    # The tensors themselves: a tied parameter must be one object, and deferred tensors keep their class.
    state = module.state_dict(keep_vars=True)
    found = {name[len(prefix) :]: value for name, value in stored_weights(path).items() if name.startswith(prefix)}
    if not found:
        raise ValueError(f"`prefix` must begin the name of a tensor in {path}; got `{prefix}`, which begins none")
    _check_shapes(module, state, found, path)
    values = {name: _deferred(value, state.get(name)) for name, value in found.items()}
    try:
        # Names are judged below, where a tied parameter needs only one of its names.
        result = module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit `{type(module).__name__}`: {error}") from error
    loaded = {id(state[name]) for name in values if name in state}
    missing = [name for name in result.missing_keys if id(state.get(name)) not in loaded]
    if strict and (missing or result.unexpected_keys):
        raise ValueError(_misfit(module, path, [], missing, result.unexpected_keys))


def _deferred(value: Any, target: Any) -> Any:
    """Return `value`, or a deferred tensor for it if the class of `target` has `read_later`."""
    make = getattr(type(target), "read_later", None)
    return make(value) if make is not None and isinstance(value, StoredTensor) else value


def _check_shapes(module: nn.Module, state: Mapping[str, Any], found: Mapping[str, Any], path: Any) -> None:
    shapes, meta = [], []
    for name, value in found.items():
        target = state.get(name)
        if not isinstance(target, Tensor) or not isinstance(value, Tensor):
            continue
        if target.shape != value.shape and not nn.parameter.is_lazy(target):
            shapes.append(f"{name} must be {list(target.shape)}; got {list(value.shape)}")
        if target.is_meta and not hasattr(type(target), "read_later"):
            meta.append(name)
    if shapes:
        missing = [name for name in state if name not in found]
        raise ValueError(_misfit(module, path, shapes, missing, [name for name in found if name not in state]))
    if meta:
        raise ValueError(
            f"The parameters must not be on the meta device, because they have no memory there; got {len(meta)}"
            f" (`{meta[0]}`, ...). Build the model without `torch.device('meta')`. In `configure_model` a model takes"
            " no memory"
        )


def _misfit(
    module: nn.Module, path: Any, shapes: Sequence[str], missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    parts = [f"The weights in {path} do not fit `{type(module).__name__}`"]
    kinds = (("other shapes", shapes), ("missing in the file", missing), ("unexpected in the file", unexpected))
    parts += [f"  {kind}:\n" + "\n".join(f"    {name}" for name in names) for kind, names in kinds if names]
    return "\n".join([*parts, "`prefix=` selects names of the file. `strict=False` skips names that only one side has"])


# --------------------------------------------------------------------------------------------------------------- files


def stored_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the weights at `path` by name, as tensors that are read at their first use.

    Raises:
        FileNotFoundError, ValueError: See `load_weights`.
    """
    text = os.fspath(path)
    if is_sharded_checkpoint(text):
        saved = SavedCheckpoint.open(text)
        content = saved.decoded(lambda name: StoredTensor.of(saved, name))
        return _state_in(content, text)
    if is_distributed_checkpoint(text):
        return _state_in(DistributedCheckpoint.open(text, Group.alone("weights")).checkpoint(), text)
    files = _files_at(Path(text))
    if files[0].suffix != ".safetensors":
        return _loaded(files[0])
    source = WeightFiles(files)
    return {name: StoredTensor.of(source, name) for name in source.entries}


def _state_in(content: Any, source: str) -> dict[str, Any]:
    state = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        raise ValueError(f"The checkpoint {source} must hold a `state_dict`; got none")
    return {str(name): value for name, value in state.items()}


def _files_at(path: Path) -> list[Path]:
    if path.is_file() and path.name.endswith(".index.json"):
        path = path.parent
    if path.is_file():
        return [path]
    if (path / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / _INDEX).read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path / _INDEX} must be an index of `safetensors` files; got {error!r}") from error
        there = {one.name for one in path.iterdir() if one.is_file()}
        wrong = [str(name)[:100] for name in names if not is_file_name(name) or name not in there]
        if wrong or not names:
            raise ValueError(f"The files that {path / _INDEX} names must exist; got no {', '.join(wrong) or 'names'}")
        return [path / name for name in names]
    for name in (_SAFETENSORS, _BIN):
        if (path / name).is_file():
            return [path / name]
    what = f"a folder without `{_SAFETENSORS}`" if path.is_dir() else "nothing"
    raise FileNotFoundError(
        f"The path of weights must be a file, a folder of Hugging Face or a checkpoint; got {path}, which is {what}"
        + ("" if path.is_dir() else ". `huggingface_hub.snapshot_download(name)` gives the folder of a model")
    )


class WeightFiles:
    """Files of `safetensors`.

    Args:
        files: The files.

    Attributes:
        entries: File, dtype, shape and first byte of each tensor.
        bytes_read: Bytes of tensors that were read so far.

    Raises:
        ValueError: If a file is damaged, or has a dtype that torch does not know.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.entries: dict[str, tuple[IO[bytes], torch.dtype, tuple[int, ...], int]] = {}
        self.bytes_read = 0
        for file in files:
            # Kept open: the file may be removed or replaced before its tensors are read.
            stream = open(file, "rb")  # noqa: SIM115
            try:
                with safe_open(file, "pt") as opened:
                    # A file begins with the length of its header in eight bytes.
                    begin = 8 + int.from_bytes(stream.read(8), "little")
                    # The library has checked that the tensors lie without gaps, up to the end of the file.
                    for name in opened.offset_keys():
                        entry = opened.get_slice(name)
                        dtype, shape = _DTYPES[entry.get_dtype()], checked_shape(entry.get_shape())
                        self.entries[name] = stream, dtype, shape, begin
                        begin += math.prod(shape) * dtype.itemsize
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} must be a `safetensors` file; got {type(error).__name__}: {error}") from error

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the dtype of a tensor."""
        _, dtype, shape, _ = self.entries[name]
        return shape, dtype

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        """Read a tensor, or the part of it that `rank` has by `rule`."""
        stream, dtype, shape, begin = self.entries[name]
        if math.prod(shape) == 0:
            return torch.empty(shape if rule is None else rule.local_shape(shape, rank), dtype=dtype, device="cpu")
        # Mapped for this tensor alone: its pages leave the memory with the map. Mode "c" (copy on write), although no
        # code writes: torch warns of memory that it cannot write.
        mapped = np.memmap(stream, np.uint8, "c", begin, (math.prod(shape) * dtype.itemsize,))
        part = _part_of(torch.from_numpy(mapped).view(dtype).view(shape), rule, rank)
        self.bytes_read += part.nbytes
        return part


class _LoadedWeights:
    """Tensors that `torch.load` has mapped."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def facts(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        return self.tensors[name].shape, self.tensors[name].dtype

    def read(self, name: str, rule: Shard | None = None, rank: int = 0) -> Tensor:
        return _part_of(self.tensors[name], rule, rank)


def _part_of(mapped: Tensor, rule: Shard | None, rank: int) -> Tensor:
    return assemble(mapped.shape, mapped.dtype, rule, rank, [Box.of(mapped)])


def _loaded(file: Path) -> dict[str, Any]:
    content = load_safely(file, str(file), is_mapped=True)
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} must hold a state dict, or a checkpoint with one; got {type(content).__name__}")
    source = _LoadedWeights({name: value for name, value in state.items() if isinstance(value, Tensor)})
    stored = {name: StoredTensor.of(source, name) for name in source.tensors}
    return {str(name): stored.get(name, value) for name, value in state.items()}
