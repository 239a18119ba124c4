"""The layers of the package: imports point down only, never sideways, and files stay small."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_parallel"
LAYERS = {
    "compat": 0,
    "mesh": 0,
    "tracing": 0,
    "weight_gradients": 0,
    "comm": 1,
    "tensor": 2,
    "pipeline": 2,
    "compression": 2,
    "data_parallel": 2,
    "optim": 2,
    "gradients": 3,
    "checkpoint": 3,
    "planner": 3,
    "strategies": 4,
    "callbacks": 4,
    "cli": 5,
    "__main__": 6,
    "__init__": 6,
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
PURE = {"mesh.py", "pipeline/schedule.py", "pipeline/simulate.py"}
PURE |= {f"tracing/{name}.py" for name in ("__init__", "recorder", "spans", "text")}
MAX_LINES = 500
MAX_FUNCTION_LINES = 60


def _imports(path):
    """Every module that the file imports, also inside functions, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import"
            yield node.module, node.lineno
            if node.module == "lightning_parallel":
                yield from ((f"lightning_parallel.{alias.name}", node.lineno) for alias in node.names)


def _violations(root):
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        unit = relative.parts[0].removesuffix(".py")
        if unit not in LAYERS:
            yield f"{relative}: no layer is known for `{unit}`; add it to LAYERS"
            continue
        for module, line in _imports(path):
            top, *rest = module.split(".")
            if top == root.name and rest:
                target = rest[0]
                if LAYERS.get(target, 0) >= LAYERS[unit] and target != unit:
                    yield f"{relative}:{line} imports `{module}`, which is not below it"
            if top in LIGHTNING and LAYERS[unit] < LAYERS["strategies"] and unit != "compat":
                yield f"{relative}:{line} imports `{module}`; only strategies, callbacks and cli may"
            if top == "torch" and str(relative) in PURE:
                yield f"{relative}:{line} imports torch into a pure module"


def test_imports_point_down():
    assert not list(_violations(PACKAGE))


def test_the_check_sees_each_kind_of_violation(tmp_path):
    root = tmp_path / "lightning_parallel"
    (root / "tensor").mkdir(parents=True)
    (root / "mesh.py").write_text("def f():\n    import torch\n")
    (root / "comm.py").write_text("import lightning\n")
    (root / "tensor" / "layers.py").write_text("from lightning_parallel.pipeline import cut\n")
    (root / "stray.py").write_text("")
    found = list(_violations(root))
    assert len(found) == 4, found
    assert all(any(word in line for line in found) for word in ("torch", "lightning`", "pipeline", "stray"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, "two ideas in one file?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"
