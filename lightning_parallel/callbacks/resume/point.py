"""The place of a run in its data: saved as plain values, and restored even with another number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_parallel.callbacks.monitors.data_order import ResumableBatches, ResumableSampler
from lightning_parallel.callbacks.monitors.global_batch import GlobalBatch, adapt_trainer
from lightning_parallel.callbacks.monitors.learning_rate import LearningRateScaling, StepRates
from lightning_parallel.compat import Patches
from lightning_parallel.compat.interrupted import (
    batches_done,
    fetch_again,
    go_on_training,
    loaders_of,
    set_batches_done,
)

__all__ = ["LoaderKind", "ResumePoint", "TrainingData", "TrainingLoader"]


LoaderKind = Literal["samples", "local", "batches", "read", "stateful"]
"""Way to continue a loader.

By samples of all replicas, by samples of this rank, by batches, by another read from the start, or by its `state_dict`.
"""


@dataclass
class TrainingLoader:
    """A training loader, and the sampler that decides its order."""

    loader: Any
    kind: LoaderKind
    order: ResumableSampler | ResumableBatches | None
    undo: Callable[[], None]

    @property
    def batch_size(self) -> int:
        """Samples of a batch; 1 if the loader has no batch size, as with a batch sampler of the user."""
        return getattr(self.loader, "batch_size", None) or 1

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share the samples of the loader."""
        return self.order.num_replicas if isinstance(self.order, ResumableSampler) else 1

    @property
    def digest(self) -> str:
        """Identifies the order of the samples; empty if the order is unknown."""
        return "" if self.order is None else self.order.digest


class TrainingData:
    """The training loaders of a run, with resumable samplers in place of the user's.

    Args:
        seed: Seed of the run, equal on all ranks.
        replicas: Number of replicas, and the index of this replica.
    """

    def __init__(self, seed: int, replicas: tuple[int, int]) -> None:
        self.seed = seed
        self.num_replicas, self.replica = replicas
        self.loaders: list[TrainingLoader] = []

    def add(self, loader: Any, divides: bool, default: Callable[[], Any]) -> TrainingLoader:
        """Give a loader a sampler that can resume within an epoch.

        Args:
            loader: The user's loader.
            divides: Whether the replicas share its samples.
            default: Prepares the loader as Lightning does.
        """
        known = next((added for added in self.loaders if added.loader is loader), None)
        if known is not None:
            return known  # Lightning prepares it again for another epoch
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            added = TrainingLoader(default(), "stateful", None, _nothing)
        elif not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            added = TrainingLoader(default(), "read", None, _nothing)
        elif type(loader.batch_sampler) not in (BatchSampler, type(None)):
            loader = default()
            added = self._replace(loader, "batches", ResumableBatches(loader.batch_sampler, self.seed))
        else:
            added = self._by_samples(loader, divides, default)
        self.loaders.append(added)
        return added

    def _by_samples(self, loader: DataLoader, divides: bool, default: Callable[[], Any]) -> TrainingLoader:
        source: Any = loader.sampler
        # The exact class, since a subclass may choose its samples in another way.
        if type(source) is DistributedSampler:
            order = ResumableSampler(source, self.seed, source.num_replicas, source.rank, source.drop_last)
            return self._replace(loader, "samples", order)
        if not hasattr(source, "__len__"):
            return TrainingLoader(default(), "read", None, _nothing)
        if isinstance(source, DistributedSampler) or (self.num_replicas > 1 and not divides):
            return self._replace(loader, "local", ResumableSampler(source, self.seed))
        place = (self.num_replicas, self.replica) if divides else (1, 0)
        return self._replace(loader, "samples", ResumableSampler(source, self.seed, *place))

    def _replace(self, loader: Any, kind: LoaderKind, order: ResumableSampler | ResumableBatches) -> TrainingLoader:
        # Change the loader itself, as a class of the user may not be constructible again. Through `vars`: `DataLoader`
        # forbids to assign these attributes.
        own = vars(loader)
        name = "batch_sampler" if kind == "batches" else "sampler"
        before = own[name]
        batches = None if kind == "batches" else own.get("batch_sampler")
        own[name] = order
        if batches is not None:
            batches.sampler = order

        def undo() -> None:
            own[name] = before
            if batches is not None:
                batches.sampler = before

        return TrainingLoader(loader, kind, order, undo)

    def begin_epoch(self, epoch: int, loaders: list[Any]) -> None:
        """Begin an epoch at its first batch in the loaders in use; restore and drop all other loaders."""
        in_use = {id(loader) for loader in loaders}
        for loader in [added for added in self.loaders if id(added.loader) not in in_use]:
            self.loaders.remove(loader)
            loader.undo()
        for loader in self.loaders:
            if loader.order is not None and loader.order.epoch != epoch:
                loader.order.begin(epoch)

    def of(self, loaders: list[Any]) -> list[TrainingLoader]:
        """Return the training loaders of the loaders in use."""
        known = {id(added.loader): added for added in self.loaders}
        return [known.get(id(loader)) or TrainingLoader(loader, "read", None, _nothing) for loader in loaders]

    def release(self) -> None:
        """Restore the original samplers of all loaders."""
        while self.loaders:
            self.loaders.pop().undo()


class ResumePoint:
    """Place of a run in its data, and the way back to it.

    Args:
        trainer: The trainer.
        data: Its training loaders.
        rescale: If the number of replicas changes, scale learning rates instead of keeping the samples of a step.
    """

    def __init__(self, trainer: Trainer, data: TrainingData, rescale: bool) -> None:
        self.trainer = trainer
        self._data = data
        self._rescale = rescale
        self._patches = Patches()
        self._given_accumulate = trainer.accumulate_grad_batches
        self._first: GlobalBatch | None = None
        self._rates: StepRates | None = None
        self._saved: dict[str, Any] | None = None
        # Samples that the resumed epoch skipped, and the count of batches at that place.
        self._skipped = self._skipped_batches = 0

    # -------------------------------------------------------------------------------------------------------- save

    @property
    def _epoch(self) -> int:
        return self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]

    @property
    def is_between_steps(self) -> bool:
        """Whether the run holds no accumulated gradients."""
        return batches_done(self.trainer) % self.trainer.accumulate_grad_batches == 0

    def _loaders(self) -> list[TrainingLoader]:
        return self._data.of(loaders_of(self.trainer)[0])

    def _now(self, loader: TrainingLoader | None) -> GlobalBatch:
        batch_size = 1 if loader is None else loader.batch_size
        replicas = self._data.num_replicas
        if loader is not None and loader.kind == "samples":
            replicas = loader.num_replicas
        return GlobalBatch(replicas, batch_size, self.trainer.accumulate_grad_batches)

    def state(self) -> dict[str, Any]:
        """Return the place as plain values."""
        loaders, batches = self._loaders(), batches_done(self.trainer)
        # Batches since the resume have the present size. Earlier batches may have had another size.
        now = self._now(loaders[0] if loaders else None)
        first = self._first or now
        return {
            "epoch": self._epoch,
            "batches": batches,
            "samples": self._skipped + (batches - self._skipped_batches) * now.at_once,
            "batch": asdict(now),
            "first": asdict(first),
            "given_accumulate": self._given_accumulate,
            "seed": self._data.seed,
            "should_stop": bool(self.trainer.should_stop),
            "loaders": [
                {"kind": loader.kind, "batch_size": loader.batch_size, "order": loader.digest if batches else ""}
                for loader in loaders
            ],
        }

    # ------------------------------------------------------------------------------------------------------ resume

    def restore(self, saved: dict[str, Any]) -> None:
        """Keep a saved place after Lightning has restored its loops, and before it creates the loaders."""
        self._saved = saved
        self._data.seed = saved["seed"]
        self._first = GlobalBatch(**saved["first"])
        if saved["should_stop"]:  # by a callback such as `EarlyStopping`
            self.trainer.should_stop = True

    def prepare(self, loader: Any, divides: bool, default: Callable[[], Any]) -> Any:
        """Prepare a training loader so that it begins at the saved place."""
        added = self._data.add(loader, divides, default)
        saved = self._saved
        if saved is None:
            if added.order is not None:
                added.order.begin(self._epoch)
            return added.loader
        if len(saved["loaders"]) == 1 and added.kind == saved["loaders"][0]["kind"] == "samples":
            self._begin_at_sample(added, saved)
        elif isinstance(added.order, ResumableSampler):
            # In a `CombinedLoader`, an epoch reads shorter loaders several times.
            repetition, batches = divmod(saved["batches"], max(1, len(added.loader)))
            # Count only replicas that share the samples. A replica that reads all samples skips its own batches.
            added.order.begin(saved["epoch"], batches * added.batch_size * added.num_replicas, repetition)
        elif added.order is not None:
            added.order.begin(saved["epoch"], saved["batches"])
        return added.loader

    def _begin_at_sample(self, added: TrainingLoader, saved: dict[str, Any]) -> None:
        order, then, first = added.order, GlobalBatch(**saved["batch"]), GlobalBatch(**saved["first"])
        assert order is not None
        now = self._now(added)
        if self._given_accumulate == saved["given_accumulate"]:
            now = GlobalBatch(now.replicas, now.batch_size, then.accumulate)
            if then.samples != now.samples and not self._rescale:
                now = then.kept_by(now.replicas, now.batch_size)
        adapt_trainer(self.trainer, first, now, self._patches)
        # Checkpoints hold the unscaled rates of the first start, so scale relative to the first start.
        if now.samples != first.samples:
            self._scale(now.samples / first.samples)
        samples = saved["samples"]
        if now.at_once != then.at_once:
            # Count from the end of the epoch, so that the remaining batches fit exactly.
            left = _num_batches(len(order) * now.replicas - samples, now.at_once, added.loader.drop_last)
            done = len(added.loader) - left if samples else 0
            set_batches_done(self.trainer, done, then.at_once / now.at_once)
        self._skipped = samples
        self._skipped_batches = batches_done(self.trainer)
        order.begin(saved["epoch"], samples)

    def _scale(self, factor: float) -> None:
        # `LearningRateScaling` multiplies already, by a rule of the user.
        if any(isinstance(callback, LearningRateScaling) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        rank_zero_warn(
            f"AutoResume: learning rates are multiplied by {factor:g}, because optimizer steps have {factor:g} times as"
            " many samples"
        )
        # Lightning may prepare a loader twice before the first batch. The factor must apply only once.
        if self._rates is not None:
            self._rates.close()
        self._rates = StepRates(self.trainer, lambda: factor, "AutoResume")

    def go_on(self, fetcher: Any, saved: dict[str, Any]) -> None:
        """Continue the prepared loaders at the first unread batch.

        Raises:
            ValueError: If the interrupted run had other data, or if the data cannot be continued.
        """
        loaders, self._saved = self._loaders(), None
        self._check(loaders, saved)
        if [loader.kind for loader in loaders] == ["read"] and saved["batches"]:
            fetch_again(fetcher, saved["batches"])
        go_on_training(self.trainer)

    def _check(self, loaders: list[TrainingLoader], saved: dict[str, Any]) -> None:
        before = saved["loaders"]
        kinds = [loader.kind for loader in loaders]
        if kinds != [entry["kind"] for entry in before]:
            raise ValueError(
                f"The training data must be read by {[entry['kind'] for entry in before]}, as in the interrupted run;"
                f" got {kinds}. Give this run the same loaders and samplers"
            )
        then = saved["batch"]["replicas"]
        now = self._now(loaders[0] if loaders else None).replicas
        if now != then and kinds != ["samples"] and kinds != ["stateful"] * len(kinds):
            raise ValueError(
                f"The interrupted run had {then} replicas, and this run has {now}: `AutoResume` cannot distribute the"
                " data over another number of replicas. Several loaders, a batch sampler of your own, a sampler that"
                " shards by itself, or an iterable data set tell only the next batch of each replica. Start the run"
                f" with {then} replicas, or use one loader with a sampler of samples"
            )
        if not saved["batches"]:
            return
        if len(kinds) > 1 and "read" in kinds:
            raise ValueError(
                "Several loaders must all be `DataLoader`s without iterable data sets, to resume within an epoch; got"
                " another one. Give it a `state_dict` (torchdata), or use it alone"
            )
        mode = loaders_of(self.trainer)[1]
        is_over = any(
            len(loader.loader) <= saved["batches"] for loader in loaders if loader.kind in ("samples", "local")
        )
        # In this mode, a loader that has ended gives None until the longest loader ends.
        if mode == "max_size" and len(kinds) > 1 and is_over:
            raise ValueError(
                "All loaders of a `CombinedLoader` of mode `max_size` must have batches left, to resume within an"
                " epoch; got one that ended. Use mode `max_size_cycle`, or resume from the end of an epoch"
            )
        for loader, entry in zip(loaders, before):
            if loader.digest != entry["order"] and loader.kind != "stateful":
                raise ValueError(
                    "The order of the training data must be that of the interrupted run, or samples would be read twice"
                    " or never; got another order. Restore the data set, and give the generator of the sampler a seed"
                )
            if len(kinds) > 1 and loader.batch_size != entry["batch_size"]:
                raise ValueError(
                    f"The batch size must stay {entry['batch_size']} with several loaders; got {loader.batch_size}"
                )

    def begin_epoch(self) -> None:
        """Begin an epoch at its first sample."""
        self._skipped = self._skipped_batches = 0
        self._data.begin_epoch(self._epoch, loaders_of(self.trainer)[0])

    def release(self) -> None:
        """Restore the samplers of the loaders, and the batch counts of the trainer."""
        if self._rates is not None:
            self._rates.close()
        self._patches.undo()
        self._data.release()


def _num_batches(samples: int, batch_size: int, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _nothing() -> None:
    pass
