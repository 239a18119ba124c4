"""The layout of the package: layers, circles of imports, long functions, unique names, private names of dependencies.

Each rule is a function from the root of a package to the lines that violate it, so that the tests can also show that
each of them sees what it forbids.
"""

import ast
import re
import runpy
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.harness import run_script

PACKAGE = Path(__file__).parents[1] / "lightning_parallel"
LAYERS = {
    "compat": 0,
    "mesh": 0,
    "tracing": -1,
    "comm": 1,
    "step_trace": 2,
    "tensor": 3,
    "pipeline": 3,
    "compression": 3,
    "data_parallel": 3,
    "optim": 3,
    "checkpoint": 4,
    "planner": 4,
    "strategies": 5,
    "callbacks": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
# Rooms of a package, and the files at its ground that all rooms may import. The other files are doors: what the Trainer
# calls; a room imports no door.
ROOMS = {
    "strategies": {
        "checks": 0,
        "options": 0,
        "deferred": 0,
        "checkpoints": 0,
        "ranks": 1,
        "hooks": 1,
        "whole": 2,
        "steps": 3,
        "optimizers": 3,
        "setup": 4,
        "self_check": 4,
        "compressed": 4,
    },
    "callbacks": {"recording": 0, "monitors": 1, "resume": 2, "report": 2},
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
PURE = {"mesh.py", *(f"pipeline/{name}.py" for name in ("plot", "schedule", "search", "simulate"))}
PURE |= {f"tracing/{name}.py" for name in ("__init__", "recorder", "spans")}
MAX_FUNCTION_LINES = 60
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}

# Names of Python and its standard library with an underscore. All are documented but the last, the class of threads
# that were not started by `threading`, such as autograd's.
STANDARD_LIBRARY = {"_asdict", "_replace", "_fields", "_exit", "_getframe", "_current_frames", "_DummyThread"}


@cache
def parsed(root):
    """Return the path below `root`, the text, and the syntax tree, of every module."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        found.append((path.relative_to(root), text, ast.parse(text)))
    return found


def imports(tree):
    """Yield what is imported, also inside functions and for type checking, as a dotted name, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} has a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def module_name(root, path):
    return ".".join((root.name, *path.with_suffix("").parts)).removesuffix(".__init__")


def imported_modules(root):
    """Return, for each module of the package, those of the package that it imports."""
    trees = {module_name(root, path): tree for path, _, tree in parsed(root)}
    graph = {}
    for name, tree in trees.items():
        found = {imported if imported in trees else imported.rpartition(".")[0] for imported, _ in imports(tree)}
        graph[name] = found & trees.keys() - {name}
    return graph


# -- rules -------------------------------------------------------------------------------------------------------------


def upward_imports(root):
    for path, _, tree in parsed(root):
        unit = path.parts[0].removesuffix(".py")
        if unit not in LAYERS:
            yield f"{path}: no layer is known for `{unit}`; add it to LAYERS"
            continue
        for module, line in imports(tree):
            top, *rest = module.split(".")
            if top == root.name and rest:
                target = rest[0] if rest[0] in LAYERS else "__init__"
                if LAYERS[target] >= LAYERS[unit] and target != unit:
                    yield f"{path}:{line} imports `{module}`, which is not below it"
            if top in LIGHTNING and LAYERS[unit] < LAYERS["strategies"] and unit != "compat":
                yield f"{path}:{line} imports `{module}`; only strategies, callbacks and cli may"
            if top == "torch" and str(path) in PURE:
                yield f"{path}:{line} imports torch into a pure module"
            if module.startswith("unittest"):
                yield f"{path}:{line} imports `{module}`; replace attributes with `compat.patched`"


def rooms(root):
    for path, _, tree in parsed(root):
        order = ROOMS.get(path.parts[0], {})
        room = path.parts[1].removesuffix(".py") if order else ""
        if len(path.parts) > 2 and order and room not in order:
            yield f"{path}: no place is known for the room `{room}`; add it to ROOMS"
        for module, line in imports(tree) if room in order else ():
            package, *target = module.removeprefix(f"{root.name}.").split(".")
            is_other = package == path.parts[0] and target[:1] not in ([], [room])
            if is_other and order.get(target[0], 9) >= order[room]:
                yield f"{path}:{line} imports `{module}`, which is not below the room `{room}`"


def circles(root):
    graph = imported_modules(root)
    done = set()

    def walk(name, path):
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(graph[name]):
                yield from walk(other, [*path, name])
            done.add(name)

    for name in graph:
        yield from walk(name, [])


def long_functions(root):
    for path, _, tree in parsed(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.body[0].lineno + 1  # arguments spelled out are no steps to follow
                if length > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno} `{node.name}` has {length} lines"


def repeated_names(root):
    places = defaultdict(list)
    for path, _, tree in parsed(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[f"the class {node.name}"].append(f"{path}:{node.lineno}")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                places[f"the function {node.name}"].append(f"{path}:{node.lineno}")
    return [f"{name} is in {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def private_names(root):
    """Find private names of dependencies outside of `compat`.

    Three kinds: a private import; an attribute, or its name in a string, that `compat` gives a public name; a private
    attribute that nothing in the package defines. An attribute of `self` that the same file assigns is its own.
    """
    trees = {path: tree for path, _, tree in parsed(root)}
    outside = {path: tree for path, tree in trees.items() if path.parts[0] != "compat"}
    declared = set()
    for path, tree in trees.items():
        if path not in outside and path.stem != "__init__":
            declared |= _declared(tree)
    defined = set().union(*map(_defined, outside.values()))
    for path, tree in outside.items():
        own = _defined(tree)
        yield from (f"{path}:{line} {what}" for line, what in _private_uses(root.name, tree, own, declared, defined))


def _is_private(name):
    return name.startswith("_") and name.isidentifier() and not name.endswith("__") and name.strip("_") != ""


def _declared(tree):
    """Return the private names that a module of `compat` names: in attributes, imports and strings."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return set(filter(_is_private, names))


def _defined(tree):
    """Return the private attributes that a module defines: methods, classes, fields, assigned attributes, globals."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return set(filter(_is_private, names))


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private_uses(package, tree, own, declared, defined):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.module.startswith(package):
            names = [part for part in node.module.split(".") if part != "__future__"]
            names += [alias.name for alias in node.names]
            if any(map(_is_private, names)):
                yield node.lineno, f"imports a private name: `{ast.unparse(node)}`"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in STANDARD_LIBRARY:
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            is_own = is_super or (_is_self(node.value) and node.attr in own)
            if not is_own and (node.attr in declared or node.attr not in defined):
                yield node.lineno, f"uses a private name: `{ast.unparse(node)}`"
        elif isinstance(node, ast.Constant) and node.value in declared - own:
            yield node.lineno, f"uses a private name: '{node.value}'"


def imports_of_one_system(root):
    """Modules that some systems lack, such as Windows, are imported inside of `try`: the others work without them."""
    for path, _, tree in parsed(root):
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
        tried = {line for node in tries for child in node.body for _, line in imports(child)}
        for module, line in imports(tree):
            if module.split(".")[0] in POSIX_ONLY and line not in tried:
                yield f"{path}:{line} imports {module}, which Windows lacks, outside of `try`"


RULES = [imports_of_one_system, upward_imports, rooms, circles, long_functions, repeated_names, private_names]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert list(rule(PACKAGE)) == []


def test_the_list_of_exceptions_names_files():
    assert {path for path in PURE if not (PACKAGE / path).exists()} == set()


VIOLATIONS = [
    (imports_of_one_system, "mesh.py", "import fcntl", "outside of `try`"),
    (upward_imports, "mesh.py", "def f():\n    import torch", "pure module"),
    (upward_imports, "comm/groups.py", "import lightning", "only strategies"),
    (upward_imports, "tensor/layers.py", "from lightning_parallel.pipeline import stage", "not below it"),
    (upward_imports, "tensor/layers.py", "from lightning_parallel import TopK", "not below it"),
    (rooms, "strategies/hooks/watch.py", "from lightning_parallel.strategies.steps import state", "not below the room"),
    (rooms, "strategies/hooks/watch.py", "from lightning_parallel.strategies.parallel import f", "not below the room"),
    (rooms, "strategies/attic/box.py", "", "add it to ROOMS"),
    (upward_imports, "stray.py", "", "add it to LAYERS"),
    (upward_imports, "comm/groups.py", "from unittest import mock", "`compat.patched`"),
    (
        circles,
        "mesh.py",
        "if TYPE_CHECKING:\n    from lightning_parallel.cli import main",
        "mesh -> lightning_parallel",
    ),
    (circles, "comm/groups.py", "from lightning_parallel.comm import Group", "comm -> lightning_parallel.comm.groups"),
    (long_functions, "mesh.py", "def f():" + "\n    pass" * 61, "`f` has 61 lines"),
    (repeated_names, "cli.py", "class _Outer:\n    class Group: ...", "Group is in cli.py:4, comm/groups.py:2"),
    (repeated_names, "cli.py", "def buffers_of(module): ...", "buffers_of is in cli.py:3, compat/torch.py:1"),
    (private_names, "mesh.py", "def f(module):\n    return module._buffers", "module._buffers"),
    (private_names, "mesh.py", "def f(module):\n    return getattr(module, '_buffers')", "'_buffers'"),
    (private_names, "mesh.py", "def f(module):\n    return module._unheard_of", "module._unheard_of"),
    (private_names, "mesh.py", "from torch._six import inf", "torch._six"),
    (private_names, "mesh.py", "from torch import _C", "import _C"),
]


@pytest.mark.parametrize(("rule", "path", "text", "message"), VIOLATIONS)
def test_each_rule_sees_what_it_forbids(rule, path, text, message, tmp_path):
    root = tmp_path / "lightning_parallel"
    files = {
        "__init__.py": "from lightning_parallel.cli import main",
        "cli.py": "import lightning_parallel.comm\nfrom lightning_parallel import mesh",
        "mesh.py": "",
        "compat/torch.py": "def buffers_of(module):\n    return module._buffers",
        "comm/__init__.py": "from lightning_parallel.comm.groups import Group",
        "comm/groups.py": "from lightning_parallel.comm import work\nclass Group: ...",
        "comm/work.py": "class Work:\n    def __init__(self):\n        self._buffers = []",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    before = {other: list(other(root)) for other in RULES}
    assert not any(before.values()), before
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{files.get(path, '')}\n{text}\n")
    parsed.cache_clear()
    found = list(rule(root))
    assert len(found) == 1, found
    assert message in found[0]


# -- pages about the code ----------------------------------------------------------------------------------------------

ROOT = PACKAGE.parent
PAGES = [ROOT / "docs/architecture.md", *sorted((ROOT / "docs/internals").glob("*.md"))]


def missing_files(text):
    """Return the paths in a page that name no file or folder of the package or the repository."""
    names = re.findall(r"[\w/]+/(?:[\w/]+\.(?:py|svg|md))?(?![\w{])|[\w/]+\.py\b", text.replace("](", "] ("))
    names = {name for name in names if "/" in name.strip("/") or name.endswith((".py", "/"))}
    places = [PACKAGE, ROOT, ROOT / "docs", ROOT / "docs/internals"]
    return sorted(name for name in names if not any((place / name.lstrip("/")).exists() for place in places))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_about_the_code_name_files_that_exist(page):
    assert missing_files(page.read_text()) == []


def test_a_file_that_moved_is_found_in_a_page():
    page = "`strategies/steps/` and `strategies/attic/`; pipeline/stage.py and `pipeline/stages.py`"
    assert missing_files(page) == ["pipeline/stages.py", "strategies/attic/"]


def test_the_picture_shows_the_house():
    drawing = runpy.run_path(str(ROOT / "docs/images/house.py"))
    assert (ROOT / "docs/images/house.svg").read_text() == drawing["picture"](), "run: python docs/images/house.py"


WITHOUT_POSIX = """
import sys

for name in [name for name in sys.modules if name.split(".")[0] == "lightning_parallel"]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(sys.argv[1:]))

import lightning_parallel.callbacks
import lightning_parallel.cli

assert not [name for name in sys.argv[1:] if sys.modules[name]]
"""


def test_the_package_is_imported_where_modules_of_one_system_are_missing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_POSIX)
    ended = run_script(script, *sorted(POSIX_ONLY - {"posix"}))
    assert ended.returncode == 0, ended.stderr
