"""The classes of this library for both packages of Lightning: `lightning.pytorch` and `pytorch_lightning`.

The two are copies of one source under two names, and neither accepts the other's classes. The library is written
against the first. If `pytorch_lightning` 2.x is installed as well:

* A strategy becomes its twin at the door of a `pytorch_lightning.Trainer`: its class in place, so that the user's
  reference stays the same object. Twins are made of the same source files, which are loaded a second time with other
  imports, and can be imported (and so pickled) as `lightning_parallel.compat.pytorch_lightning.strategies...`. What
  does not derive from Lightning's classes is not loaded again: communication, engines, state are one.
* Callbacks derive from both `Callback` classes, which have no state.

Before the door `pytorch_lightning` takes strategies for its own, being registered as its virtual subclasses; behind it
`isinstance(trainer.strategy, TensorParallelStrategy)` holds, since twins are registered likewise.
"""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import reduce, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import lightning.pytorch
import lightning_utilities.core.rank_zero as rank_zero_module
from torch import nn

__all__ = ["Callback", "is_a", "kinds_of", "share_strategies"]

T = TypeVar("T")

_LIGHTNING = "lightning.pytorch"
_PYTORCH_LIGHTNING = "pytorch_lightning"
_TWINS = "lightning_parallel.compat.pytorch_lightning"
_TO_PYTORCH_LIGHTNING = {
    _LIGHTNING: _PYTORCH_LIGHTNING,
    "lightning.fabric": "lightning_fabric",
    "lightning_parallel.strategies": f"{_TWINS}.strategies",
    "lightning_parallel.compat.lightning": f"{_TWINS}.lightning",
}
_TO_LIGHTNING = {theirs: ours for ours, theirs in _TO_PYTORCH_LIGHTNING.items()}
_OURS = ("lightning_parallel.strategies.", f"{_TWINS}.strategies.")


def _import_other() -> ModuleType | None:
    """Import `pytorch_lightning` if it is there and is 2.x; the library must work without it."""
    try:
        # Before the import: one of 1.x fails in the middle, with whatever it has changed until then.
        if version("pytorch-lightning").split(".")[0] != "2":
            return None
    except PackageNotFoundError:
        pass  # perhaps a folder that was never installed
    try:
        module = importlib.import_module(_PYTORCH_LIGHTNING)
        return module if module.__version__.split(".")[0] == "2" else None
    except Exception:
        return None


_other = _import_other()

# -- class by class ----------------------------------------------------------------------------------------------------


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the dotted name with its beginning replaced as in `names`; itself where nothing in them begins it."""
    for before, after in names.items():
        if name == before or name.startswith(f"{before}."):
            return after + name[len(before) :]
    return name


def _counterpart(kind: type, names: Mapping[str, str]) -> type | None:
    """Return the class of the same name in the other package, or of a twin module; None where it has none."""
    module = _renamed(kind.__module__, names)
    if module == kind.__module__:
        return None
    found: Any = reduce(getattr, kind.__qualname__.split("."), importlib.import_module(module))
    return found


def kinds_of(kind: type) -> tuple[type, ...]:
    """Return a class of `lightning`, and with it the one of `pytorch_lightning`, if that is there."""
    other = None if _other is None else _counterpart(kind, _TO_PYTORCH_LIGHTNING)
    return (kind,) if other is None else (kind, other)


def is_a(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Tell whether `value` is an instance of a class of `lightning`, or of the same class of `pytorch_lightning`."""
    return isinstance(value, kinds_of(kind))


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    _kinds = kinds_of(lightning.pytorch.Callback)
    # LightningCLI of either package asks `issubclass`, which a registered class could not answer here: no ABC.
    Callback = _kinds[0] if len(_kinds) == 1 else type("Callback", _kinds, {"__module__": __name__})


def _moved(kind: type, names: Mapping[str, str]) -> type:
    """Return the class for objects of `kind` in the other package: the counterpart, if it has one.

    A class of the user's stays, as its methods name it in `super()`; what it derives from is exchanged.
    """
    other = _counterpart(kind, names)
    if other is not None:
        return other
    bases = tuple(_moved(base, names) for base in kind.__bases__)
    if bases != kind.__bases__:
        kind.__bases__ = bases
    return kind


class _ExchangedBases:
    """Exchanges the bases of a user's class in the process, too, in which an object of it is unpickled."""

    def __init__(self, kind: type, names: Mapping[str, str]) -> None:
        self.kind = kind
        self.names = names
        _moved(kind, names)

    def __reduce__(self) -> Any:
        return _ExchangedBases, (self.kind, self.names)


def _is_of(kind: type, names: Mapping[str, str]) -> bool:
    return any(_renamed(base.__module__, names) != base.__module__ for base in kind.__mro__)


def _is_ours(value: Any) -> bool:
    return any(base.__module__.startswith(_OURS) for base in type(value).__mro__)


def _move(value: Any, names: Mapping[str, str]) -> None:
    """Turn an object into one of the other package in place, with its plugins, environment and options."""
    for base in type(value).__mro__:
        other = _counterpart(base, names) if base.__module__.startswith(_OURS[0]) else None
        if other is not None and isinstance(base, ABCMeta):
            base.register(other)
    kind = type(value)
    moved = _moved(kind, names)
    if moved is not kind:
        # Not by assignment, which frozen dataclasses refuse.
        object.__setattr__(value, "__class__", moved)
    elif _is_ours(value):
        value.__dict__["_bases"] = _ExchangedBases(kind, names)
    for held in list(getattr(value, "__dict__", {}).values()):
        # The module of an earlier run stays with its Trainer; members of enumerations are everybody's.
        if not isinstance(held, (nn.Module, Enum, type)) and _is_of(type(held), names):
            _move(held, names)


# -- twin modules ------------------------------------------------------------------------------------------------------


class _Redirect(ast.NodeTransformer):
    """Lets a module import from the other package, and from twins."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            name = _renamed(alias.name, _TO_PYTORCH_LIGHTNING)
            # `import lightning.pytorch` binds `lightning`, by which the other package cannot be reached.
            assert name == alias.name or alias.asname, f"`import {alias.name}` needs `as`: the module gets a twin"
            alias.name = name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        assert node.module is not None
        node.module = _renamed(node.module, _TO_PYTORCH_LIGHTNING)
        return node


class _TwinLoader(Loader):
    """Runs the source of a module with redirected imports; file and lines stay those of the source."""

    def __init__(self, source: ModuleSpec) -> None:
        self.source = source

    def exec_module(self, module: ModuleType) -> None:
        loader = self.source.loader
        tree = ast.parse(loader.get_source(self.source.name))  # type: ignore[union-attr]
        code = compile(_Redirect().visit(tree), str(self.source.origin), "exec", dont_inherit=True)
        exec(code, module.__dict__)
        original = importlib.import_module(self.source.name)
        for name, value in list(vars(module).items()):
            # Errors are the same, since users catch them; so are groups, which live as long as the process.
            if (isinstance(value, type) and issubclass(value, Exception)) or name == "_cached_groups":
                setattr(module, name, getattr(original, name))


class _EmptyPackage(Loader):
    """A package that only holds twins: what `strategies/__init__.py` does is done once, for both packages."""

    def exec_module(self, module: ModuleType) -> None:
        pass


class _TwinFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in (_TWINS, f"{_TWINS}.strategies"):
            return spec_from_loader(fullname, _EmptyPackage(), is_package=True)
        if not fullname.startswith(f"{_TWINS}."):
            return None
        name = _renamed(fullname, _TO_LIGHTNING)
        # Without another name it is the twin of nothing, and would be looked for here again.
        source = None if name == fullname else find_spec(name)
        if source is None:
            return None
        is_package = source.submodule_search_locations is not None
        spec = spec_from_loader(fullname, _TwinLoader(source), origin=source.origin, is_package=is_package)
        assert spec is not None
        # Gives the module its `__file__`.
        spec.has_location = True
        return spec


# -- doors -------------------------------------------------------------------------------------------------------------


def _report_as(package: str, fabric: str) -> None:
    """Let messages come from the logger of `package` and be of its categories.

    Both are attributes of one module that the packages share, where the last import wins: also that of this library.
    """
    rank_zero_module.log = logging.getLogger(f"{package}.utilities.rank_zero")
    categories = importlib.import_module(f"{fabric}.utilities.rank_zero")
    rank_zero_module.rank_zero_deprecation_category = categories.LightningDeprecationWarning


def _enter(strategy: Any) -> None:
    """Make a strategy one of `pytorch_lightning`.

    Raises:
        ImportError: If that is not of the version that the library is written for.
    """
    assert _other is not None
    mine, theirs = lightning.pytorch.__version__, _other.__version__
    if mine.split(".")[:2] != theirs.split(".")[:2]:
        raise ImportError(
            f"pytorch_lightning must have the version {'.'.join(mine.split('.')[:2])} of the installed `lightning`;"
            f" got {theirs}. Install it with `pip install pytorch-lightning=={mine}`, or use `lightning.pytorch`"
        )
    _move(strategy, _TO_PYTORCH_LIGHTNING)


def _return(strategy: Any) -> None:
    """Make a strategy one of `lightning.pytorch` again."""
    _move(strategy, _TO_LIGHTNING)


def _open_door(package: str, fabric: str, enter: Callable[[Any], None]) -> None:
    """Let the Trainer of `package` move strategies of this library to it, before it looks at them.

    No hook of a strategy comes early enough: from its class the connector derives precision plugin and launcher.
    """
    connector = importlib.import_module(f"{package}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    init = connector.__init__

    @wraps(init)
    def init_after_move(self: Any, *args: Any, **kwargs: Any) -> None:
        _report_as(package, fabric)
        for value in filter(_is_ours, (*args, *kwargs.values())):
            _forget_trainer(value)
            enter(value)
        init(self, *args, **kwargs)

    connector.__init__ = init_after_move


_SET_BY_TRAINERS = ("_accelerator", "_precision_plugin", "_checkpoint_io", "cluster_environment", "parallel_devices")


def _forget_trainer(strategy: Any) -> None:
    """Let another Trainer take a strategy whose last one has ended: with what the user gave to its constructor.

    What that Trainer has set would be taken for the user's, and be refused beside the same arguments.
    """
    own, trainer = vars(strategy), None
    with suppress(RuntimeError):  # of a module that no Trainer has any more
        trainer = getattr(strategy.lightning_module, "trainer", None)
    if "given_by_user" not in own:
        own["given_by_user"] = {n: getattr(strategy, n) for n in _SET_BY_TRAINERS if hasattr(strategy, n)}
    elif trainer is None or trainer.state.status != "running":
        for name, value in own["given_by_user"].items():
            setattr(strategy, name, value)
        getattr(strategy, "forget_processes", lambda: None)()


def share_strategies(strategies: Iterable[type], names: Mapping[str, Callable[[], Any]]) -> None:
    """Let `pytorch_lightning`, if it is there, accept `strategies`, and build them by `names`."""
    if _other is None:
        return
    theirs = importlib.import_module(f"{_PYTORCH_LIGHTNING}.strategies")
    for strategy in strategies:
        theirs.Strategy.register(strategy)

    def building(build: Callable[[], Any]) -> Callable[..., Any]:
        def built(**kwargs: Any) -> Any:
            strategy = build(**kwargs)
            # Built by name it has not come through the door.
            _enter(strategy)
            return strategy

        return built

    for name, build in names.items():
        if name not in theirs.StrategyRegistry:
            entry = lightning.pytorch.strategies.StrategyRegistry[name]
            theirs.StrategyRegistry.register(name, building(build), description=entry["description"])


_open_door(_LIGHTNING, "lightning.fabric", (lambda strategy: None) if _other is None else _return)
if _other is not None:
    sys.meta_path.append(_TwinFinder())
    _open_door(_PYTORCH_LIGHTNING, "lightning_fabric", _enter)
    # Until a Trainer says which: that of the package that was imported first, and so by the user.
    if next(name for name in sys.modules if name in (_LIGHTNING, _PYTORCH_LIGHTNING)) == _LIGHTNING:
        _report_as(_LIGHTNING, "lightning.fabric")
    else:
        _report_as(_PYTORCH_LIGHTNING, "lightning_fabric")
