import contextlib
import csv
import functools
import importlib.util
import io
import math
import runpy
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import run, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = EXAMPLES / "gpt"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_gpt_{name}", GPT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data, model = load("data"), load("model")
split_sources = data.split_sources
data.split_sources = functools.cache(split_sources)  # walks over thousands of files


def corpus(batch_size: int, replica: dict[str, int] | None, **caps: int):
    module = data.StandardLibrary(batch_size=batch_size, context=32, **caps)
    module.trainer = SimpleNamespace(distributed_sampler_kwargs=replica)
    module.setup("fit")
    return module


def rows(loader: DataLoader, epoch: int) -> list[set[tuple[int, ...]]]:
    loader.sampler.set_epoch(epoch)
    return [{tuple(window.tolist()) for window in batch} for batch in loader]


def test_the_examples_do_not_import_the_library():
    for path in [*GPT.glob("*.py"), *(EXAMPLES / "huggingface").glob("*.py")]:
        assert "lightning_parallel" not in path.read_text()


def test_files_are_split_once_and_the_same_way_each_time():
    root = Path(sysconfig.get_paths()["stdlib"])
    training, validation = data.split_sources(root, 0.1)
    assert (training, validation) == split_sources(root, 0.1)
    assert not set(training) & set(validation)
    assert 0.03 < len(validation) / (len(training) + len(validation)) < 0.2


def test_tests_and_installed_packages_are_left_out(tmp_path):
    for name in ("kept.py", "pkg/kept.py", "test/no.py", "pkg/tests/no.py", "site-packages/no.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    training, validation = data.split_sources(tmp_path, 0.5)
    assert {path.name for path in training + validation} == {"kept.py"}
    assert len(training + validation) == 2


def test_text_is_capped_and_what_is_not_utf8_is_skipped(tmp_path):
    contents = {"a.py": b"first", "b.py": b"\xff\xfe", "c.py": b"second"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    assert bytes(data.read_bytes(paths, 100).tolist()) == b"firstsecond"
    assert bytes(data.read_bytes(paths, 7).tolist()) == b"firstse"


def test_bigram_entropy_equals_a_count_by_hand():
    training, validation = b"to be or not to be", b"not to be"
    pairs, firsts = Counter(zip(training, training[1:])), Counter(training[:-1])
    costs = [-math.log((pairs[a, b] + 0.1) / (firsts[a] + 25.6)) for a, b in zip(validation, validation[1:])]
    tensors = (torch.tensor(list(text), dtype=torch.uint8) for text in (training, validation))
    assert data.bigram_entropy(*tensors) == pytest.approx(sum(costs) / len(costs), rel=1e-6)


def test_bigrams_predict_the_library_better_than_single_bytes():
    module = corpus(4, None)
    shares = torch.bincount(module.training.text.long(), minlength=256) / len(module.training.text)
    unigram_entropy = -(shares * shares.clamp_min(1e-12).log()).sum().item()
    assert 1.5 < module.bigram_entropy < unigram_entropy < math.log(256)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_draw_together_what_one_device_draws(replicas):
    caps = {"training_bytes": 32 * 103 + 1, "validation_bytes": 32 * 70 + 1}
    whole = corpus(8, None, **caps)
    parts = [corpus(8 // replicas, {"num_replicas": replicas, "rank": rank}, **caps) for rank in range(replicas)]
    for name in ("train_dataloader", "val_dataloader"):
        for epoch in (0, 1):
            expected = rows(getattr(whole, name)(), epoch)
            found = [rows(getattr(part, name)(), epoch) for part in parts]
            assert [set().union(*step) for step in zip(*found)] == expected
    assert rows(whole.train_dataloader(), 0) != rows(whole.train_dataloader(), 1)


def test_a_byte_does_not_change_the_prediction_of_earlier_ones():
    torch.manual_seed(0)
    gpt = model.ByteGPT(layers=2, width=32, context=16).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    with torch.no_grad():
        before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_weight_decay_reaches_the_matrices_of_the_blocks_only():
    gpt = model.ByteGPT(layers=2, width=32)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    groups = gpt.configure_optimizers()["optimizer"].param_groups
    decayed, plain = ({names[id(parameter)] for parameter in group["params"]} for group in groups)
    matrices = ("attention.qkv", "attention.project", "mlp.up", "mlp.down")
    assert decayed == {f"blocks.{block}.{name}.weight" for block in range(2) for name in matrices}
    assert decayed | plain == set(names.values())
    assert gpt.head.weight is gpt.embedding.weight


def fit(folder: Path, layout: str, *arguments: str) -> str:
    configs = (argument for name in ("base", layout) for argument in ("--config", str(GPT / f"{name}.yaml")))
    sizes = ("--model.width=32", "--model.layers=4", "--data.training_bytes=100000", "--report.length=5")
    command = ["fit", *configs, *sizes, *arguments]
    if layout == "single":
        ended = run_script(GPT / "main.py", *command, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout
    return run(on_every_rank, 4, command=command, folder=str(folder))[0]


def on_every_rank(command: list[str], folder: str) -> str:
    """What one of several processes prints that the Trainer need not start."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.syspath_prepend(GPT)
        patch.setattr(sys, "argv", [str(GPT / "main.py"), *command])
        runpy.run_path(str(GPT / "main.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.sweep(kept=None)
def test_the_same_command_line_gives_the_same_losses_and_text_on_one_process_and_on_four(tmp_path):
    expected, single = losses_and_output(tmp_path / "single", "single")
    losses, hybrid = losses_and_output(tmp_path / "hybrid", "hybrid")
    assert len(expected) == 2 + 1
    assert losses == pytest.approx(expected, rel=1e-5)
    assert {"bigram_entropy", "train_loss", "val_loss"} <= set(single.split())
    text = single.split("-" * 40)[1]
    assert "\ndef " in text
    assert hybrid.split("-" * 40)[1] == text


def losses_and_output(folder: Path, layout: str) -> tuple[list[float], str]:
    short = ("limit_train_batches=2", "limit_val_batches=1", "val_check_interval=2", "log_every_n_steps=1")
    folder.mkdir()
    printed = fit(folder, layout, "--model.dropout=0", *(f"--trainer.{setting}" for setting in short))
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        logged = list(csv.DictReader(lines))
    losses = [float(row[name]) for name in ("train_loss", "val_loss") for row in logged if row[name]]
    return losses, printed
