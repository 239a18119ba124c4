"""Every reference page has an example that runs: `Example:` of the docstring, with the names that guides use."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import lightning.pytorch
import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from safetensors.torch import save_file
from torch import nn

import lightning_parallel
from lightning_parallel.compat import patched
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.schedule import build_schedule
from tests.examples.test_guides import MyData, MyModule

NAMES = sorted(lightning_parallel.__all__)
NEEDS = {"CompressedDeepSpeedStrategy": "deepspeed"}


def example(name):
    text = inspect.getdoc(getattr(lightning_parallel, name))
    found = re.search(r"^Example:\n    ```py\n(.*?)^    ```", text, re.DOTALL | re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


class ReadersTrainer(Trainer):
    """Takes two steps if one process is asked for; otherwise ends where processes would start.

    `error` is raised there, as the strategy would raise it.
    """

    error = None

    def __init__(self, **kwargs):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        steps = {} if "max_epochs" in kwargs else {"max_steps": 2}
        super().__init__(accelerator="cpu", limit_train_batches=4, **{"devices": 1, **quiet, **steps, **kwargs})

    def fit(self, model, datamodule):
        if self.error is not None:
            raise self.error
        if self.num_devices == 1:
            super().fit(model, datamodule=datamodule)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the examples read."""
    monkeypatch.chdir(tmp_path)
    save_file(MyModule().state_dict(), "model.safetensors")
    analyze(MyModule(), 2, build_schedule("1f1b", 2, 4)).save("pipeline_plan.json")


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(name):
    code = example(name)
    assert f"import {name}\n" in code or re.search(rf"import .*\b{name}\b", code), "the example imports the name"
    namespace = {"MyModule": MyModule, "MyData": MyData, "MyModel": lambda: nn.Linear(4, 4)}
    with patched(lightning.pytorch, "Trainer", ReadersTrainer):
        exec(compile(code, f"example of {name}", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("Error")])
def test_the_example_of_each_name_runs(name, folder, request):
    assert example(name), f"the docstring of {name} lacks `Example:` with a ```py block"
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if "DistributedDataParallel" in example(name):
        request.getfixturevalue("process_group")
    namespace = run(name)
    trainer = namespace.get("trainer")
    assert trainer is None or trainer.num_devices > 1 or trainer.global_step


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Error")])
def test_the_example_of_each_error_catches_it(name, folder, capsys, monkeypatch):
    error = getattr(lightning_parallel, name)("this went wrong")
    monkeypatch.setattr(ReadersTrainer, "error", error)
    with pytest.raises(type(error)):
        run(name)
    assert "this went wrong" in capsys.readouterr().out


def test_an_example_is_short():
    long = {name: len(lines) for name in NAMES if len(lines := [x for x in example(name).splitlines() if x]) > 9}
    assert not long


def test_each_docstring_says_what_is_raised_and_describes_all_arguments_itself():
    texts = {name: inspect.getdoc(getattr(lightning_parallel, name)) for name in NAMES if not name.endswith("Error")}
    # These two check nothing.
    assert {name for name, text in texts.items() if "\nRaises:\n" not in text} == {"PipelinePlan", "compression_hook"}
    assert not [name for name, text in texts.items() if re.search(r": See `\w+`\.$", text, re.MULTILINE)]


def test_the_page_of_types_finds_them():
    """The site names types by their modules; it is not built here."""
    text = (Path(__file__).parents[1] / "docs" / "site.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    (types,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPES"
    )
    for package, paths in ast.literal_eval(types).items():
        for module, name in (path.rsplit(".", 1) for path in paths):
            assert hasattr(importlib.import_module(f"lightning_parallel.{package}.{module}"), name)
