"""The code of the guides runs as it is written, on as many processes as its Trainers ask for."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import lightning.pytorch
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_parallel
from lightning_parallel.cli import main
from lightning_parallel.compat import patched
from tests.harness import run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIXES = ROOT / "docs" / "troubleshooting.md"  # its blocks are lines of 30 different projects


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


class MyModule(LightningModule):
    """What stands for the reader's own module: layers that repeat, with plain names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(LightningDataModule):
    def train_dataloader(self):
        samples = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(2, (32,)))
        return torch.utils.data.DataLoader(samples, batch_size=8)


class MySequences(LightningModule):
    """Blocks with attention over positions, for guides on sequences."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def training_step(self, batch, _):
        x = self.embedding(batch[0])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    configure_optimizers = MyModule.configure_optimizers


class MyTokens(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randint(7, (32, 6))), batch_size=8)


class SmallTrainer(Trainer):
    """Takes two steps on processors, and leaves nothing in the reader's folder."""

    folder = "."

    def __init__(self, **kwargs):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        super().__init__(accelerator="cpu", max_steps=2, default_root_dir=self.folder, **{**quiet, **kwargs})


def run_blocks(group, page, folder):
    namespace = {"MyModule": MyModule, "MyData": MyData}
    if Path(page).stem == "long_sequences":
        namespace = {"MyModule": MySequences, "MyData": MyTokens}
    SmallTrainer.folder = folder
    with patched(lightning.pytorch, "Trainer", SmallTrainer):
        for block in blocks(Path(page), "python"):
            exec(compile(block, page, "exec"), namespace)
    trainer = namespace.get("trainer")
    return trainer is None or trainer.global_step


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != FIXES and blocks(page, "python")], ids=lambda page: page.stem
)
def test_python_runs(page, tmp_path):
    devices = {int(count) for block in blocks(page, "python") for count in re.findall(r"devices=(\d+)", block)}
    assert len(devices) <= 1, "a guide starts its processes once"
    steps = run(run_blocks, max(devices, default=1), page=str(page), folder=str(tmp_path))
    assert all(steps)


def test_fixes_give_arguments_that_exist():
    calls = [
        node for block in blocks(FIXES, "python") for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)
    ]
    known = [(call, vars(lightning_parallel).get(getattr(call.func, "id", ""))) for call in calls]
    assert sum(kind is not None for _, kind in known) > 10
    for call, kind in known:
        if kind is not None:
            missing = {keyword.arg for keyword in call.keywords} - {None, *inspect.signature(kind).parameters}
            assert not missing, f"{ast.unparse(call)}: {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.stem)
def test_yaml_is_what_lightning_reads(page, tmp_path):
    for index, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{index}.yaml"
        file.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", **yaml.safe_load(block)["trainer"]}}))
        LightningCLI(BoringModel, run=False, save_config_callback=None, args=["--config", str(file)])


def test_commands_that_need_no_run_run(capsys):
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("lightning-parallel simulate")]
    assert commands
    for command in commands:
        assert main(shlex.split(command, comments=True)[1:]) == 0
    assert "rank 3" in capsys.readouterr().out


def test_links_lead_to_pages_and_pictures():
    made = (
        "images/attention/",
        "images/collectives/",
        "images/schedules/",
        "reference/",
        "command_line.md",
        "changelog.md",
        "contributing.md",
    )
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            # `make docs` checks those that it makes itself.
            if "://" not in target and not any(name in target for name in made):
                broken += [] if (page.parent / target).exists() else [f"{page.name}: {target}"]
    assert not broken
