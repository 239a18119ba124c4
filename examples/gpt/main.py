"""Train the byte-level GPT: `python examples/gpt/main.py fit --config examples/gpt/base.yaml --config ...`."""

import sys
import time
import warnings

import torch
from data import StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import ByteGPT

# A batch is a few slices of one tensor: worker processes would only take cores from training.
warnings.filterwarnings("ignore", ".*does not have many workers.*")
# Lightning 2.6 asks torch 2.13 in a way that is going out of use; each process would say so.
warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)


class Progress(Callback):
    """Says after a few steps how long training takes here and, where no bar can move, how far it has come.

    Args:
        measured_steps: Steps to time, after the first, which is slower.
        every_s: Seconds between two lines where the output is no terminal.
    """

    def __init__(self, measured_steps: int = 5, every_s: float = 10.0) -> None:
        self.measured_steps = measured_steps
        self.every_s = every_s

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        step, steps, now = trainer.global_step, trainer.estimated_stepping_batches, time.perf_counter()
        if step == self.first_step:
            self.began = self.printed = now
            return
        mean = (now - self.began) / (step - self.first_step)
        if step == self.first_step + self.measured_steps:
            trainer.print(f"{steps} steps of {mean:.2f} s: about {steps * mean:.0f} s on this machine")
        elif now - self.printed > self.every_s and not sys.stdout.isatty():
            loss = trainer.progress_bar_metrics["train_loss"]
            trainer.print(f"step {step} of {steps}: train_loss {loss:.3f}, about {(steps - step) * mean:.0f} s left")
            self.printed = now


class Report(Callback):
    """When training ends, compares the model with pair counts and lets it write.

    Args:
        prompt: Beginning of the text.
        length: Bytes to generate.
        temperature: Below 1 the likelier bytes are preferred.
        seed: Of the generated text.
    """

    def __init__(self, prompt: str = "def ", length: int = 300, temperature: float = 0.7, seed: int = 0) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("bigram_entropy", trainer.datamodule.bigram_entropy)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lines = [f"{trainer.global_step} steps in {time.perf_counter() - self.started:.0f} s"]
        lines += [f"{name} {value:.3f}" for name, value in sorted(trainer.callback_metrics.items())]
        if trainer.checkpoint_callback is not None:
            lines.append(f"checkpoint {trainer.checkpoint_callback.best_model_path}")
        text = self.generate(trainer, pl_module)
        trainer.print("", *lines, "-" * 40, text, "-" * 40, sep="\n")

    @torch.no_grad()
    def generate(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Sample text byte by byte; every rank has to call it, as each may hold only a part of the model."""
        generator = torch.Generator().manual_seed(self.seed)
        text = list(self.prompt.encode())
        pl_module.eval()
        for _ in range(self.length):
            window = torch.tensor([text[-pl_module.context :]], device=pl_module.device)
            logits = trainer.strategy.predict_step(window, 0)[0]
            probabilities = (logits.float().cpu() / self.temperature).softmax(dim=-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text).decode(errors="replace")


class CommandLine(LightningCLI):
    """Lightning's, with the report's settings under `--report`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Report, "report")


if __name__ == "__main__":
    CommandLine(
        ByteGPT,
        StandardLibrary,
        auto_configure_optimizers=False,
        trainer_defaults={"callbacks": Progress()},
    )
