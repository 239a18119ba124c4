"""What the code of a module does with parameters that a division would shrink under it."""

from __future__ import annotations

import inspect
import re

from torch import nn

__all__ = ["computes_with_parameters", "read_elsewhere"]

# Methods that build a module: what they read is whole at that time.
BUILDERS = {"__init__", "configure_model", "tie_weights", "_init_weights", "init_weights", "reset_parameters"}


def computes_with_parameters(module: nn.Module) -> bool:
    """Whether `module` reads one of its own parameters; torch's own modules do, others when their code shows it."""
    if type(module).__module__.startswith("torch."):
        return True
    names = "|".join(re.escape(name) for name in module._parameters)
    return bool(names) and re.search(rf"self\.({names})\b", _code(type(module))) is not None


def read_elsewhere(root: nn.Module, path: str) -> bool:
    """Whether the code of the modules around `path` reads the weight of the module there by itself."""
    parts = path.split(".")
    for depth in range(len(parts)):
        inner = r"(\[[^\]]*\])?\.".join(part for part in parts[depth:] if not part.isdigit())
        owner = root.get_submodule(".".join(parts[:depth]))
        if inner and re.search(rf"self\.{inner}(\[[^\]]*\])?\.(weight|bias)\b", _code(type(owner))):
            return True
    return False


_sources: dict[type, str] = {}


def _code(kind: type) -> str:
    """The source of the methods of a user's module class, without construction."""
    if kind not in _sources:
        _sources[kind] = "\n".join(_bodies(kind))
    return _sources[kind]


def _bodies(kind: type) -> list[str]:
    bodies = []
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.", "lightning.", "builtins")):
            continue
        for name, method in vars(base).items():
            if name in BUILDERS or not inspect.isfunction(method):
                continue
            try:
                bodies.append(inspect.getsource(method))
            except (OSError, TypeError):  # code without a file
                continue
    return bodies
