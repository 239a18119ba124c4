"""Lets the classes of this library work with both packages of Lightning: `lightning.pytorch` and `pytorch_lightning`.

The packages are copies of one source under two names, and neither accepts classes of the other. The library is written
against `lightning.pytorch`. If `pytorch_lightning` 2.x is imported as well, before or after it:

* The constructor of a `pytorch_lightning.Trainer` turns a strategy into its twin. It exchanges the class in place, so
  that the user's reference stays the same object. A twin comes from the same source file, which is loaded a second time
  with other imports. Twins can be imported and pickled as `lightning_parallel.compat.pytorch_lightning.strategies...`.
  Code below the strategies exists once: communication, engines and state.
* Callbacks derive from both `Callback` classes, which have no state.

`pytorch_lightning` accepts strategies before that, because they are registered as its virtual subclasses. Twins are
registered likewise, so that `isinstance(trainer.strategy, TensorParallelStrategy)` holds.
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


_other: ModuleType | None = None  # `pytorch_lightning` 2.x, once something has imported it

# -- class by class ----------------------------------------------------------------------------------------------------


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a dotted name with its first part replaced by `names`; the name itself if no first part fits."""
    for before, after in names.items():
        if name == before or name.startswith(f"{before}."):
            return after + name[len(before) :]
    return name


def _counterpart(kind: type, names: Mapping[str, str]) -> type | None:
    """Return the class of the same name in the other package, or in a twin module; None without one."""
    module = _renamed(kind.__module__, names)
    if module == kind.__module__:
        return None
    found: Any = reduce(getattr, kind.__qualname__.split("."), importlib.import_module(module))
    return found


def kinds_of(kind: type) -> tuple[type, ...]:
    """Return a class of `lightning`, and the class of `pytorch_lightning` if that package is imported."""
    other = None if _other is None else _counterpart(kind, _TO_PYTORCH_LIGHTNING)
    return (kind,) if other is None else (kind, other)


def is_a(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Tell whether `value` is an instance of a class of `lightning`, or of the same class of `pytorch_lightning`."""
    return isinstance(value, kinds_of(kind))


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # A class in between, since it gets a second base with the other package. A real base: LightningCLI of both packages
    # calls `issubclass`, and `Callback` is no ABC with `register`.
    Callback = type("Callback", (lightning.pytorch.Callback,), {"__module__": __name__})


def _moved(kind: type, names: Mapping[str, str]) -> type:
    """Return the class for objects of `kind` in the other package.

    A class of the user stays, because its methods name it in `super()`. Its bases are exchanged.
    """
    other = _counterpart(kind, names)
    if other is not None:
        return other
    bases = tuple(_moved(base, names) for base in kind.__bases__)
    if bases != kind.__bases__:
        kind.__bases__ = bases
    return kind


class _ExchangedBases:
    """Exchanges the bases of a user's class also in another process, when an object is unpickled there."""

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
    """Turn an object into an object of the other package in place, with its plugins, environment and options."""
    for base in type(value).__mro__:
        other = _counterpart(base, names) if base.__module__.startswith(_OURS[0]) else None
        if other is not None and isinstance(base, ABCMeta):
            base.register(other)
    kind = type(value)
    moved = _moved(kind, names)
    if moved is not kind:
        # Not by plain assignment, which frozen dataclasses refuse.
        object.__setattr__(value, "__class__", moved)
    elif _is_ours(value):
        value.__dict__["_bases"] = _ExchangedBases(kind, names)
    for held in list(getattr(value, "__dict__", {}).values()):
        # Not moved: the module of an earlier run belongs to its Trainer, and all objects share members of enumerations.
        if not isinstance(held, (nn.Module, Enum, type)) and _is_of(type(held), names):
            _move(held, names)


# -- twin modules ------------------------------------------------------------------------------------------------------


class _Redirect(ast.NodeTransformer):
    """Lets a module import from the other package, and from twins."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            name = _renamed(alias.name, _TO_PYTORCH_LIGHTNING)
            # `import lightning.pytorch` binds `lightning`, which has no attribute for the other package.
            assert name == alias.name or alias.asname, f"`import {alias.name}` needs `as`: the module gets a twin"
            alias.name = name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        assert node.module is not None
        node.module = _renamed(node.module, _TO_PYTORCH_LIGHTNING)
        return node


class _TwinLoader(Loader):
    """Runs the source of a module with redirected imports; tracebacks show the file and lines of the source."""

    def __init__(self, source: ModuleSpec) -> None:
        self.source = source

    def exec_module(self, module: ModuleType) -> None:
        loader = self.source.loader
        tree = ast.parse(loader.get_source(self.source.name))  # type: ignore[union-attr]
        code = compile(_Redirect().visit(tree), str(self.source.origin), "exec", dont_inherit=True)
        exec(code, module.__dict__)
        original = importlib.import_module(self.source.name)
        for name, value in list(vars(module).items()):
            # Errors are shared, since users catch them. So are groups, which live as long as the process.
            if (isinstance(value, type) and issubclass(value, Exception)) or name == "_cached_groups":
                setattr(module, name, getattr(original, name))


class _EmptyPackage(Loader):
    """Makes an empty package for twins: `strategies/__init__.py` runs only once, for both packages."""

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
        # With the same name, the module has no original, and `find_spec` would call this finder again.
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
    """Let messages come from the logger of `package`, in its categories.

    The packages share the module with both attributes, and the last import sets them, also an import by this library.
    """
    rank_zero_module.log = logging.getLogger(f"{package}.utilities.rank_zero")
    categories = importlib.import_module(f"{fabric}.utilities.rank_zero")
    rank_zero_module.rank_zero_deprecation_category = categories.LightningDeprecationWarning


def _enter(strategy: Any) -> None:
    """Turn a strategy into a strategy of `pytorch_lightning`.

    Raises:
        ImportError: If the two packages have different versions.
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
    """Turn a strategy into a strategy of `lightning.pytorch` again."""
    _move(strategy, _TO_LIGHTNING)


def _open_door(package: str, fabric: str, enter: Callable[[Any], None]) -> None:
    """Let the Trainer of `package` turn strategies of this library into its own.

    No hook of a strategy comes early enough: the connector chooses precision plugin and launcher by its class.
    """
    connector = importlib.import_module(f"{package}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    init = connector.__init__

    @wraps(init)
    def init_after_move(self: Any, *args: Any, **kwargs: Any) -> None:
        _report_as(package, fabric)
        # Before `init`, which chooses plugins and the launcher by the class of the strategy.
        for value in filter(_is_ours, (*args, *kwargs.values())):
            _forget_trainer(value)
            enter(value)
        init(self, *args, **kwargs)

    # Not one of `Patches`: the constructor stays replaced for the process.
    connector.__init__ = init_after_move


_SET_BY_TRAINERS = ("_accelerator", "_precision_plugin", "_checkpoint_io", "cluster_environment", "parallel_devices")


def _forget_trainer(strategy: Any) -> None:
    """Restore the arguments of a strategy's constructor for the next Trainer, when the last Trainer has ended.

    The next Trainer would mistake attributes of the last Trainer for arguments of the user, and refuse them together
    with its own arguments.
    """
    own = vars(strategy)
    trainer = None
    with suppress(RuntimeError):  # raised by a module without a Trainer
        trainer = getattr(strategy.lightning_module, "trainer", None)
    if "given_by_user" not in own:
        own["given_by_user"] = {n: getattr(strategy, n) for n in _SET_BY_TRAINERS if hasattr(strategy, n)}
    elif trainer is None or trainer.state.status != "running":
        for name, value in own["given_by_user"].items():
            setattr(strategy, name, value)
        getattr(strategy, "forget_processes", lambda: None)()


def share_strategies(strategies: Iterable[type], names: Mapping[str, Callable[[], Any]]) -> None:
    """Let `pytorch_lightning` accept `strategies`, and build them by `names`, from the time of its import on."""
    if _other is None:
        _shared.append((strategies, names))
        return
    theirs = importlib.import_module(f"{_PYTORCH_LIGHTNING}.strategies")
    for strategy in strategies:
        theirs.Strategy.register(strategy)

    def building(build: Callable[[], Any]) -> Callable[..., Any]:
        def built(**kwargs: Any) -> Any:
            strategy = build(**kwargs)
            # The constructor of the Trainer saw only the name.
            _enter(strategy)
            return strategy

        return built

    for name, build in names.items():
        if name not in theirs.StrategyRegistry:
            entry = lightning.pytorch.strategies.StrategyRegistry[name]
            theirs.StrategyRegistry.register(name, building(build), description=entry["description"])


_shared: list[tuple[Iterable[type], Mapping[str, Callable[[], Any]]]] = []


def _join(module: ModuleType) -> None:
    """Let the classes of this library work with `pytorch_lightning`, which was just imported."""
    global _other
    if _other is not None or module.__version__.split(".")[0] != "2":
        return
    _other = module
    Callback.__bases__ = kinds_of(lightning.pytorch.Callback)
    for strategies, names in _shared:
        share_strategies(strategies, names)
    _open_door(_PYTORCH_LIGHTNING, "lightning_fabric", _enter)
    # Until the first Trainer, messages follow the first imported package, which is probably the user's.
    if next(name for name in sys.modules if name in (_LIGHTNING, _PYTORCH_LIGHTNING)) == _LIGHTNING:
        _report_as(_LIGHTNING, "lightning.fabric")
    else:
        _report_as(_PYTORCH_LIGHTNING, "lightning_fabric")


class _Expecting(MetaPathFinder):
    """Finds `pytorch_lightning` as other finders do, and calls `_join` at the end of its import.

    Most installations have the package and never use it; its import takes as long as that of this library.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PYTORCH_LIGHTNING:
            return None
        # Other finders only, and then again: code may ask for a package that it does not import.
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_join(module: ModuleType) -> None:
                run(module)
                _join(module)

            spec.loader.exec_module = run_and_join  # type: ignore[method-assign]
        return spec


_open_door(_LIGHTNING, "lightning.fabric", lambda strategy: None if _other is None else _return(strategy))
sys.meta_path.append(_TwinFinder())
if (_found := sys.modules.get(_PYTORCH_LIGHTNING)) is None:
    sys.meta_path.insert(0, _Expecting())
else:
    _join(_found)
