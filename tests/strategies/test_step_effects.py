"""What steps collect in containers, count and average, in a pipeline as in one process."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_parallel import PipelineParallelStrategy
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, fit

ONE_EPOCH = {"max_epochs": 1, "num_sanity_val_steps": 0}


@dataclass
class Record:
    losses: list = field(default_factory=list)
    samples: int = 0


class Collecting(Deep):
    """Collects as Lightning's tutorials do, and reads it at the end of the epoch, on every rank."""

    def __init__(self):
        super().__init__()
        self.outputs = defaultdict(list)
        self.nested = {"train": {"logits": []}}
        self.latest = deque(maxlen=3)
        self.classes = set()
        self.confusion = np.zeros((5, 5), dtype=np.int64)
        self.record = Record()
        self.labels = Counter()
        self._private = []
        self.found = []

    def keep(self, logits, y, loss, loader_index):
        best = logits.argmax(-1)
        self.outputs[loader_index].append({"loss": loss.detach(), "preds": best, "labels": y})
        self.nested["train"]["logits"].append(logits.detach().numpy())
        self.latest.append(loss.item())
        self.classes.update(best.tolist())
        self.labels.update(y.tolist())
        self._private.append(loss.item())
        np.add.at(self.confusion, (y.numpy(), best.numpy()), 1)
        self.record.losses.append(loss.item())
        self.record.samples += len(y)
        self.last_logits = logits.detach()

    def training_step(self, batch, index):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.keep(logits, batch[1], loss, "train")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, index, dataloader_idx=0):
        logits = self(batch[0])
        self.keep(logits, batch[1], F.cross_entropy(logits, batch[1]), dataloader_idx)

    def on_validation_epoch_end(self):
        self.found.append(self.read())

    def read(self):
        found = {}
        for key, entries in self.outputs.items():
            assert len(entries) == 2
            found[f"{key} loss"] = torch.stack([entry["loss"] for entry in entries])
            for name in ("preds", "labels"):
                found[f"{key} {name}"] = torch.cat([entry[name] for entry in entries])
        self.outputs.clear()
        found["logits"] = torch.tensor(np.stack(self.nested["train"]["logits"]))
        found["latest"] = torch.tensor(list(self.latest), dtype=torch.float64)
        found["private"] = torch.tensor(self._private, dtype=torch.float64)
        found["classes"] = torch.tensor(sorted(self.classes))
        found["labels"] = torch.tensor(sorted(self.labels.items()))
        found["confusion"] = torch.tensor(self.confusion)
        found["record"] = torch.tensor([*self.record.losses, self.record.samples], dtype=torch.float64)
        found["last_logits"] = self.last_logits
        return found


@pytest.mark.parametrize(("verify", "schedule"), [("off", "zbv")])
@distributed(world_size=2)
def test_results_in_containers(verify, schedule):
    expected, module = Collecting(), Collecting()
    fit(expected, "auto", 1, **ONE_EPOCH)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=3, schedule=schedule, verify=verify)
    fit(module, strategy, 2, **ONE_EPOCH)
    assert len(module.found) == len(expected.found) == 1
    for mine, theirs in zip(module.found, expected.found, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=f"{name} differs")
