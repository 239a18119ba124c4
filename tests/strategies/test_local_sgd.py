"""Local SGD against a simulation of its replicas in one process; what is sent, what is saved, what goes wrong."""

import copy
import itertools
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as averages
from torch import nn

from lightning_parallel import (
    AutoResume,
    CompressedDDPStrategy,
    CompressionMonitor,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PowerSGD,
    Quantize,
    ReplicaDriftMonitor,
    TopK,
    comm,
)
from lightning_parallel.tracing import Recorder, activate
from tests.harness import distributed, run
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline_checkpoint import Tied

BATCHES = 4  # of an epoch; training takes two


def simulate(module, replicas, every, outer=None, start=0, overlap=0, fragments=1, epochs=2, average_first=0):
    """Train replicas one after the other as the source of each method has it; returns their parameters at the end.

    Written from the papers, on lists of tensors: an exchange takes the mean of the parameters, not of drifts.
    """
    models = [copy.deepcopy(module) for _ in range(replicas)]
    optimizers = [model.configure_optimizers() for model in models]
    optimizers = [found[0][0] if isinstance(found, tuple) else found for found in optimizers]
    values = [list(model.parameters()) for model in models]
    anchor = [value.detach().clone() for value in values[0]]
    outer_optimizer = None if outer is None else outer(anchor)
    count = len(anchor)
    parts = [range(count * part // fragments, count * (part + 1) // fragments) for part in range(fragments)]
    sent, last, step, taken = {}, {}, 0, [0]

    def send(part):
        last[part] = step
        sent[part] = step, [[values[r][i].detach().clone() for i in parts[part]] for r in range(replicas)]

    def take(part):
        _, snapshots = sent.pop(part)
        averages = outer_optimizer is None or taken[0] < average_first
        for position, i in enumerate(parts[part]):
            mean = torch.stack([snapshot[position] for snapshot in snapshots]).mean(0)
            if averages:
                anchor[i].copy_(mean)
            else:
                anchor[i].grad = anchor[i] - mean
        taken[0] += 1
        if not averages:
            outer_optimizer.step()
            outer_optimizer.zero_grad()
        for r in range(replicas):
            for position, i in enumerate(parts[part]):
                values[r][i].data = anchor[i] + (values[r][i].detach() - snapshots[r][position])

    for _ in range(epochs):
        for batches in zip(*(loader(replicas, replica) for replica in range(replicas))):
            for model, batch in zip(models, batches):
                model.zero_grad()
                F.cross_entropy(model.forward(batch[0]), batch[1]).backward()
            if step < start:
                for gradients in zip(*([value.grad for value in found] for found in values)):
                    mean = torch.stack(gradients).mean(0)
                    for gradient in gradients:
                        gradient.copy_(mean)
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            if step == start:
                for value, new in zip(anchor, values[0]):
                    value.copy_(new.detach())
            if step <= start:
                continue
            for part in [part for part, (begun, _) in sent.items() if step - begun >= overlap]:
                take(part)
            for part in range(fragments):
                if (step - start - part * every // fragments) % every == 0:
                    send(part)
                    if overlap == 0:
                        take(part)
    for part in list(sent):
        take(part)
    for part in range(fragments):  # the end of `fit`
        if last.get(part) != step:
            send(part)
            take(part)
    return dict(zip((name for name, _ in module.named_parameters()), anchor))


class Counting(torch.optim.SGD):
    """Keeps an integer in its state, as optimizers with codes do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                state["count"] = state.get("count", torch.zeros((), dtype=torch.long)) + 1
        return loss


class Plain(Net):
    """Logs nothing: what is sent is that of the strategy."""

    def __init__(self, optimizer="sgd", **kwargs):
        super().__init__(**kwargs)
        self.optimizer = optimizer
        self.double()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.optimizer == "counting":
            return Counting(self.parameters(), lr=self.lr, momentum=self.momentum)
        return super().configure_optimizers()


def fit(module, group, replicas=2, ckpt_path=None, callbacks=(), validates=False, **options):
    trainer_options = {key: options.pop(key) for key in ("max_epochs", "accumulate_grad_batches") if key in options}
    strategy = LocalSGDStrategy(**{"average_first": 0, **options})
    trainer = trainer_for(strategy, group.size, callbacks=list(callbacks), **trainer_options)
    mine = loader(replicas, group.rank * replicas // group.size)
    trainer.fit(module, mine, mine if validates else None, ckpt_path=ckpt_path)
    return trainer


def assert_near(module, expected, message=""):
    found = dict(module.named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=1e-10, atol=1e-12, msg=f"{message} {name}")


def assert_equal_everywhere(module, group):
    mine = [value.detach() for value in module.parameters()]
    for other in comm.all_gather_object(mine, group):
        assert all(torch.equal(a, b) for a, b in zip(mine, other))


def trained_alone(module):
    trainer_for(max_epochs=1).fit(module, loader())
    return dict(module.named_parameters())


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@distributed(world_size=2)
def test_replicas_train_as_their_simulation(group):
    cases = {
        "average": ({}, {}),
        "nesterov": ({"outer_optimizer": "nesterov"}, {"outer": nesterov}),
        "average first": ({"outer_optimizer": "nesterov", "average_first": 1}, {"outer": nesterov, "average_first": 1}),
        "late": ({"overlap_steps": 3, "outer_optimizer": nesterov}, {"overlap": 3, "outer": nesterov}),
        "beside": ({"overlap_steps": 1}, {"overlap": 1}),
        "after dense steps": ({"start_step": 2}, {"start": 2}),
    }
    for name, (options, simulated) in cases.items():
        module = Plain()
        expected = simulate(module, 2, 3, **simulated)
        fit(module, group, every_n_steps=3, **options)
        assert_near(module, expected, name)
        assert_equal_everywhere(module, group)


@distributed(world_size=2)
def test_fragments_are_exchanged_in_turn(group):
    # Ten parameters of equal size, so that fragments divide them as the simulation does.
    def make():
        module = Plain()
        module.net = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(10))).double()
        return module

    for fragments, overlap in ((2, 0), (5, 2)):
        torch.manual_seed(1)
        module = make()
        expected = simulate(module, 2, 5, fragments=fragments, overlap=overlap)
        fit(module, group, every_n_steps=5, fragments=fragments, overlap_steps=overlap)
        assert_near(module, expected, f"{fragments} fragments")


@distributed(world_size=2)
def test_exchanges_at_every_step_are_ddp(group):
    one = Plain()
    trainer_for(max_epochs=2).fit(one, loader())
    module = Plain()
    fit(module, group, every_n_steps=1)
    assert_near(module, dict(one.named_parameters()))


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_replica_may_be_a_mesh(group):
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}):
        module = Tied()
        expected = simulate(module, 2, 3, epochs=1, outer=nesterov)
        fit(module, group, every_n_steps=3, max_epochs=1, outer_optimizer="nesterov", **sizes)
        assert_near(module, expected, f"{sizes}")
    # Tied parameters stay one, whatever their drift is encoded as.
    module = Tied()
    fit(module, group, every_n_steps=3, fragments=2, overlap_steps=1, compression=Quantize(4), **sizes)
    assert_equal_everywhere(module, group)


class Matrices(Tied):
    """Trains its matrices by Muon."""

    def configure_optimizers(self):
        return torch.optim.Muon([value for value in self.parameters() if value.dim() == 2], lr=0.05)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
@distributed(world_size=2)
def test_muon_is_an_inner_optimizer(group):
    for outer in (None, nesterov):
        module = Matrices()
        expected = simulate(module, 2, 3, outer=outer)
        fit(module, group, every_n_steps=3, outer_optimizer=outer or "average")
        assert_near(module, expected, f"{outer}")
        assert_equal_everywhere(module, group)
    path = folder_of(group) / "run"
    runs = [Matrices() for _ in range(2)]
    sparse = TopK(0.5, chunk=64, feedback="fading", min_numel=0) | Quantize(2)
    options = {"every_n_steps": 3, "outer_optimizer": "nesterov", "compression": sparse}
    for module, where in zip(runs, ({"callbacks": [Saves(path, (4,))]}, {"ckpt_path": f"{path}-4"})):
        fit(module, group, **options, **where)
    assert all(map(torch.equal, *(module.parameters() for module in runs)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
@distributed(world_size=4)
def test_muon_has_owners_inside_of_replicas(group):
    module = Matrices()
    expected = simulate(module, 2, 3, epochs=1, outer=nesterov)
    fit(module, group, every_n_steps=3, max_epochs=1, outer_optimizer="nesterov", tensor_parallel_size=2)
    assert_near(module, expected)


class Saves(Callback):
    """Saves after some batches."""

    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step in self.at:
            trainer.save_checkpoint(f"{self.path}-{trainer.global_step}")


def folder_of(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp(), group))


def goes_on_as_it_would_have(group, checkpoint_format, ends=True, **special):
    """Compare a run of two replicas with a run from its middle and, if it `ends`, with a run after its first epoch."""
    path, found = folder_of(group) / "run", []
    options = {"every_n_steps": 3, "outer_optimizer": "nesterov", "checkpoint_format": checkpoint_format, **special}
    runs = (
        {"callbacks": [Saves(path, (4,))]},
        {"ckpt_path": f"{path}-4"},
        {"max_epochs": 1},
        {"ckpt_path": f"{path}-end"},
    )
    for where in runs if ends else runs[:2]:
        found.append(Plain("adam"))
        trainer = fit(found[-1], group, 2, compression=PowerSGD(2, min_numel=0), **options, **where)
        if "max_epochs" in where:
            trainer.save_checkpoint(f"{path}-end")
    expected = list(found[0].parameters())
    for module in found[1::2]:
        assert all(map(torch.equal, module.parameters(), expected))


@pytest.mark.sweep
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@distributed(world_size=2)
def test_a_run_goes_on_as_it_would_have(group, checkpoint_format):
    goes_on_as_it_would_have(group, checkpoint_format, overlap_steps=2, fragments=2)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@distributed(world_size=4)
def test_a_run_of_divided_replicas_goes_on_as_it_would_have(group, checkpoint_format):
    goes_on_as_it_would_have(group, checkpoint_format, ends=False, tensor_parallel_size=2)


@distributed(world_size=2)
def test_without_the_file_of_a_rank_all_replicas_start_with_the_state_of_the_first(group):
    path, momenta = folder_of(group) / "run", []

    class Notes(Callback):
        def on_train_start(self, trainer, module):
            state = trainer.optimizers[0].state
            momenta.append([state[parameter]["exp_avg"].clone() for parameter in module.parameters()])

    fit(Plain("adam"), group, every_n_steps=3, callbacks=[Saves(path, (4,))])
    for is_missing in (False, True):
        comm.barrier(group)
        if group.rank == 1 and is_missing:
            next((path.parent / "rank-state" / "run-4").glob("optimizers-*-1.pt")).unlink()
        comm.barrier(group)
        match = "All replicas start with the optimizer state of the first replica"
        with pytest.warns(UserWarning, match=match) if is_missing and group.rank == 0 else nullcontext():
            fit(Plain("adam"), group, every_n_steps=3, callbacks=[Notes()], ckpt_path=f"{path}-4")
        first, second = comm.all_gather_object(momenta[-1], group)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second)) == is_missing
        if group.rank == 0:
            assert all(torch.equal(now, before) for now, before in zip(momenta[-1], momenta[0]))


class Interrupts(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5:
            raise InterruptedError


@distributed(world_size=2)
def test_an_interrupted_run_goes_on(group):
    folder, found = folder_of(group), []
    for name, interrupted in (("whole", False), ("cut", True), ("cut", False)):
        callbacks = [AutoResume(str(folder / name), every_n_train_steps=2), *([Interrupts()] if interrupted else ())]
        module = Plain("adam")
        with pytest.raises(InterruptedError) if interrupted else nullcontext():
            fit(module, group, every_n_steps=3, compression=TopK(0.1, min_numel=0), callbacks=callbacks)
        found.append(list(module.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], found[2]))


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@distributed(world_size=4)
def test_replicas_join_and_leave_at_an_exchange(group, checkpoint_format):
    path = folder_of(group) / "run"
    options = {"every_n_steps": 2, "outer_optimizer": "nesterov", "checkpoint_format": checkpoint_format}
    fit(Plain(momentum=0.0), group, 2, tensor_parallel_size=2, callbacks=[Saves(path, (4,))], **options)
    made = []

    def outer(parameters):
        optimizer = nesterov(parameters)
        if made:
            optimizer.load_state_dict(made[0].state_dict())
        made.append(optimizer)
        return optimizer

    halfway = simulate(Plain(momentum=0.0), 2, 2, outer, epochs=1)
    sizes_to_replicas = [({"tensor_parallel_size": 1}, 4)]
    if checkpoint_format == "full":
        sizes_to_replicas.insert(0, ({"tensor_parallel_size": 4}, 1))
    for sizes, replicas in sizes_to_replicas:
        module, expected = Plain(momentum=0.0), Plain(momentum=0.0)
        expected.load_state_dict({**expected.state_dict(), **halfway})
        after = simulate(expected, replicas, 2, outer, epochs=1) if replicas > 1 else trained_alone(expected)
        trainer = fit(module, group, replicas, ckpt_path=f"{path}-4", **sizes, **options)
        assert trainer.global_step == 8
        assert_near(module, after, f"{replicas} replicas")
        assert_equal_everywhere(module, group)
    # Stock strategies read it, too, if it is one file.
    if checkpoint_format == "full" and group.rank == 0:
        trainer_for(max_epochs=2).fit(Plain(), loader(), ckpt_path=f"{path}-4")


def fits_counting(group, path, **options):
    callbacks = () if "ckpt_path" in options else [Saves(path, (4,))]
    trainer = fit(Plain("counting"), group, group.size, every_n_steps=2, callbacks=callbacks, **options)
    assert all(entry["count"] == 8 for entry in trainer.optimizers[0].state.values())


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_counts_in_optimizers_have_no_mean(tmp_path, checkpoint_format):
    path = tmp_path / "run"
    run(fits_counting, 2, path=path, checkpoint_format=checkpoint_format)
    run(fits_counting, 4, path=path, checkpoint_format=checkpoint_format, ckpt_path=f"{path}-4")


@distributed(world_size=2)
def test_gradients_that_were_not_sent_are_no_drift(group):
    path = folder_of(group)

    def strategy(kind):
        return kind(compression=TopK(0.1, min_numel=0), **({"every_n_steps": 3} if kind is LocalSGDStrategy else {}))

    kinds = (CompressedDDPStrategy, HybridParallelStrategy, LocalSGDStrategy)
    for kind in kinds:
        saver = trainer_for(strategy(kind), 2, callbacks=[Saves(path / kind.__name__, (4,))], max_epochs=1)
        saver.fit(Plain(), loader(2, group.rank))
    for saves, loads in itertools.permutations(kinds, 2):
        where = path / saves.__name__
        # All steps were taken: what is restored remains as it is.
        trainer = trainer_for(strategy(loads), 2, max_epochs=1)
        trainer.fit(Plain(), loader(2, group.rank), ckpt_path=f"{where}-4")
        is_kept = "residual" in trainer.strategy.compression.state_dict()
        assert is_kept == (LocalSGDStrategy not in (saves, loads)), (saves, loads)


@distributed(world_size=2)
def test_nothing_is_sent_between_exchanges(group):
    class Counts(Callback):
        def on_train_batch_end(self, *_):
            spans = [span for span in recorder.spans if span.category == "communication"]
            counts.append(len(spans))

    for options in ({}, {"compression": TopK(0.1)}):
        counts = [0]
        with activate(Recorder()) as recorder:
            fit(Plain(), group, every_n_steps=4, callbacks=[Counts()], **options)
        sent = [after - before for before, after in itertools.pairwise(counts)]
        # Only the batch after an exchange asks whether a replica got a signal to end; the first ones set up.
        assert [sent[1], sent[2], sent[5], sent[6]] == [0] * 4, sent
        assert min(sent[3], sent[7]) > 0, sent
        assert sent[4] <= 2, sent


class Explodes(Plain):
    """One replica's parameters become infinite at one step."""

    def __init__(self, replica, at):
        super().__init__("adam")
        self.replica, self.at = replica, at

    def on_before_optimizer_step(self, optimizer):
        coordinate = self.trainer.strategy.mesh.coordinate(self.trainer.global_rank)
        if self.trainer.global_step == self.at and coordinate == self.replica:
            next(self.parameters()).grad.fill_(float("inf"))


@distributed(world_size=2)
def test_a_drift_that_is_not_finite_returns_to_the_anchor(group):
    for options in ({}, {"fragments": 2, "overlap_steps": 1, "outer_optimizer": "nesterov"}):
        module = Explodes((1, 0, 0), 2)
        trainer = fit(module, group, every_n_steps=3, **options)
        assert_equal_everywhere(module, group)
        assert all(value.isfinite().all() for value in module.parameters())
        entries = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
        assert all(value.isfinite().all() for value in entries)


@pytest.mark.sweep
@pytest.mark.parametrize("replica", [(0, 0, 0), (1, 0, 0)])
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@distributed(world_size=2)
def test_optimizers_that_began_anew_are_saved_as_such(group, checkpoint_format, replica):
    path, options = folder_of(group) / "run", {"every_n_steps": 3, "checkpoint_format": checkpoint_format}
    expected, resumed = Explodes(replica, 3), Explodes(replica, 3)
    fit(expected, group, callbacks=[Saves(path, (4,))], **options)
    fit(resumed, group, ckpt_path=f"{path}-4", **options)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed.parameters(), expected.parameters()))


@distributed(world_size=4)
def test_a_rank_of_a_replica_takes_the_others_with_it(group):
    module = Explodes((1, 0, 1), 2)
    fit(module, group, every_n_steps=3, tensor_parallel_size=2)
    assert_equal_everywhere(module, group)
    assert all(value.isfinite().all() for value in module.parameters())


@distributed(world_size=2)
def test_validation_sees_one_model_and_monitors_know(group):
    class Sees(Callback):
        found = []

        def on_validation_batch_start(self, trainer, module, *_):
            self.found.append([value.detach().clone() for value in module.parameters()])

    Sees.found = []
    monitor, drift = CompressionMonitor(every_n_steps=1, show_table=False), ReplicaDriftMonitor(every_n_steps=1)
    module = Plain()
    fit(
        module,
        group,
        every_n_steps=3,
        compression=Quantize(8, min_numel=0),
        validates=True,
        callbacks=[Sees(), monitor, drift],
    )
    for mine, other in zip(Sees.found, comm.all_gather_object(Sees.found, group)[1 - group.rank]):
        assert all(torch.equal(a, b) for a, b in zip(mine, other))
    assert (drift.report()["findings"], drift.report()["checks"]) == ([], 9), drift.report()
    if group.rank == 0:
        report = monitor.report()
        # Exchanges after 3, 4 (validation), 7 and 8 steps: a mean of two steps each.
        assert report["dense_bytes"] == pytest.approx(
            2 * 8 * sum(value.numel() for value in module.parameters()), rel=0.4
        )
        assert report["ratio"] > 8


@distributed(world_size=2)
def test_several_optimizers_unfrozen_parameters_and_buffers(group):
    class Adversarial(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double()
            self.net[0].requires_grad_(False)

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net, self.other)]

        def training_step(self, batch, index):
            for part, optimizer in zip((self.net, self.other), self.optimizers()):
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(part(batch[0]), batch[1]))
                optimizer.step()
            if self.global_step > 6:
                self.net[0].requires_grad_(True)

    # The last step may be one of an exchange, which the first of the optimizers begins.
    for every in (3, 4):
        module = Adversarial()
        before = module.net[0].weight.detach().clone()
        fit(module, group, every_n_steps=every)
        assert_equal_everywhere(module, group)
        assert not torch.equal(before, module.net[0].weight)
        means = comm.all_gather_object(module.other[1].running_mean, group)
        assert torch.equal(*means)


class Taught(Explodes):
    """Has a teacher that follows it without being trained, and statistics that one replica loses."""

    def __init__(self, replica=None, at=None):
        super().__init__(replica, at)
        self.norm = nn.BatchNorm1d(12).double()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, index):
        x = self.norm(batch[0])
        return F.cross_entropy(self.net(x), batch[1]) + F.mse_loss(self.net(x), self.teacher(batch[0]))

    def on_train_batch_end(self, *_):
        for mine, followed in zip(self.teacher.parameters(), self.net.parameters()):
            mine.data.lerp_(followed.data, 0.1)


class Averages(Callback):
    """Keeps an average of its own, and exchanges it with the weights for validation and for good."""

    def on_train_batch_end(self, trainer, module, *_):
        self.average = [value.detach().clone() for value in module.parameters()]

    def swap(self, trainer, module):
        for value, average in zip(module.parameters(), self.average):
            value.data, average.data = average.data.clone(), value.data

    on_validation_start = on_validation_end = on_train_end = swap


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_what_follows_the_parameters_is_one_where_they_are(group):
    class Sees(Callback):
        def on_validation_batch_start(self, trainer, module, *_):
            seen.append([value.detach().clone() for value in module.parameters()])

    makes = {
        "teacher": lambda: [],
        "own": lambda: [Averages()],
        "stochastic": lambda: [averages.StochasticWeightAveraging(0.02, 1)],
    }
    if hasattr(averages, "EMAWeightAveraging"):
        makes["moving"] = lambda: [averages.EMAWeightAveraging(decay=0.6)]
    for name, make in makes.items():
        for every in (2, 100):
            # Where there is batch normalisation, the other one steps once more with the last gradients.
            module, seen, callbacks = Plain() if name == "stochastic" else Taught(), [], make()
            options = {"every_n_steps": every, "outer_optimizer": "nesterov", "max_epochs": 4}
            fit(module, group, validates=name != "stochastic", callbacks=[*callbacks, Sees()], **options)
            assert_equal_everywhere(module, group)
            for mine, other in zip(*comm.all_gather_object(seen, group)) if name != "own" else ():
                assert all(torch.equal(a, b) for a, b in zip(mine, other)), f"{name} {every}"
            if name == "stochastic":
                # What the callback has put there is not a drift for the outer optimizer.
                average = callbacks[0]._average_model.net
                assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), average.parameters()))


@distributed(world_size=2)
def test_what_hooks_put_into_the_module_is_no_drift(group):
    class Resets(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                module.net[0].weight.data.fill_(group.rank)

    module = Plain(lr=0.0)
    fit(module, group, every_n_steps=2, outer_optimizer="nesterov", validates=True, callbacks=[Resets()])
    assert torch.equal(module.net[0].weight, torch.full_like(module.net[0].weight, 0.5))


@distributed(world_size=2)
def test_traces_of_a_replica_that_was_not_finite_stay_there(group):
    module = Taught((0, 0, 0), 2)
    fit(module, group, every_n_steps=3)
    assert_equal_everywhere(module, group)
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_arguments_are_checked():
    for options, message in (
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"fragments": 31}, "fragments.*at most"),
        ({"overlap_steps": 31}, "overlap_steps.*at most"),
        ({"outer_optimizer": "adam"}, "'average' or 'nesterov'"),
        ({"start_step": -1}, "start_step"),
    ):
        with pytest.raises(ValueError, match=message):
            LocalSGDStrategy(**options)
    with pytest.raises(TypeError, match="function from parameters"):
        LocalSGDStrategy(outer_optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    with pytest.raises(TypeError, match="did you mean"):
        LocalSGDStrategy(compression=PowerSGD)
    assert isinstance(LocalSGDStrategy(10, Quantize(4), "nesterov"), HybridParallelStrategy)
