"""Parameters that replicas gather while the next forward runs: no code sees them before they have arrived."""

import copy
import functools
import io
import os
import signal
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.torch import DisableTorchFunctionSubclass, parameters_of
from lightning_parallel.data_parallel import AbsentParameter, ParameterSlices, parameter_slices
from lightning_parallel.data_parallel.absent_parameters import Arrivals
from lightning_parallel.strategies.optimizers.zero import settle_before_graphs
from lightning_parallel.tensor import sharded
from tests.harness import distributed
from tests.strategies.test_pipeline import Block, fit
from tests.strict_order import strict_order


def copied(module):
    return copy.deepcopy(module.head).weight


def saved(module):
    torch.save(module.head, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False).weight


def on_a_thread(module):
    found = []
    thread = threading.Thread(target=lambda: found.append(module.head.weight.detach().clone()))
    thread.start()
    thread.join()
    return found[0]


def transformed(module):
    def norm(given):
        return torch.func.functional_call(module.head, given, torch.ones(8, dtype=torch.float64)).norm()

    return torch.func.grad(norm)({name: p.detach() for name, p in module.head.named_parameters()})["weight"]


def transformed_inside(module):
    # The parameter itself is first read inside the transform.
    return torch.func.vmap(lambda x: module.head.weight @ x)(torch.ones(3, 8, dtype=torch.float64))


def changed(module):
    with torch.no_grad():
        module.head.weight.mul_(0.9)
        module.blocks[0].up.weight.data.clamp_(-0.2, 0.2)
    module.blocks[1].up.weight.data = module.blocks[1].up.weight.data * 0.9
    return module.head.weight


def on_one_rank(module):
    # The replicas wait for parameters in another order. Their messages do not depend on it.
    return (module.head.weight if module.trainer.global_rank else module.embed.weight).sum() * 0


@torch.jit.script
def scripted(weight):
    return weight * 2


def transformed_module(module):
    return torch.func.vmap(torch.func.grad(lambda x: module.head(x).sum()))(torch.ones(3, 8, dtype=torch.float64))


def forked(module):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for a message would never end
        os._exit(int(not module.head.weight.isfinite().all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return module.head.weight


def written_anew(module):
    with torch.no_grad():
        module.head.bias.set_(module.head.bias * 0.9)
    return module.head.bias


READS = {
    "norms": lambda module: torch.stack([p.norm() for p in module.parameters()]),
    "foreach": lambda module: torch.stack(torch._foreach_norm(list(module.parameters()))),
    "data": lambda module: module.head.weight.data,
    "numpy": lambda module: torch.from_numpy(module.head.weight.detach().numpy()),
    "numbers": lambda module: torch.tensor(module.head.weight.tolist()),
    "state dict": lambda module: module.state_dict()["head.weight"],
    "vector": lambda module: nn.utils.parameters_to_vector(module.parameters()),
    "copied": copied,
    "saved": saved,
    "thread": on_a_thread,
    "transformed": transformed,
    "transformed inside": transformed_inside,
    "transformed rows": lambda module: torch.func.vmap(lambda row: row.square().sum())(module.head.weight),
    "transformed module": transformed_module,
    "scripted": lambda module: scripted(module.head.weight),
    "copied as numbers": lambda module: torch.tensor(module.head.weight),
    "forked": forked,
    "written anew": written_anew,
    "changed": changed,
    "alias": lambda module: module.alias,
    "one rank": on_one_rank,
}


def absent_in(module):
    """Return the names of absent parameters, without a read that waits for them."""
    own = {
        f"{path}.{key}".lstrip("."): p
        for path, child in module.named_modules()
        for key, p in parameters_of(child).items()
    }
    return {name for name, p in own.items() if isinstance(p, AbsentParameter)}


class Kernel(nn.Module):
    """Computes as an extension in C++ does: no function of torch sees its parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.9))

    def forward(self, x):
        with DisableTorchFunctionSubclass():
            return x * self.weight


class Reads(LightningModule):
    """Reads weights outside of its layers, before the layers run; notes which are absent when a step begins.

    Has no hook between two steps.
    """

    def __init__(self, how="layers"):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.kernel = Kernel()
        self.head = nn.Linear(8, 5)
        self.double()
        self.how, self.absent = how, []

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.kernel(x))

    def on_fit_start(self):
        if self.how == "alias":
            self.alias = self.head.weight.detach()

    def training_step(self, batch, index):
        x, y = batch
        self.absent.append(absent_in(self))
        factor = READS[self.how](self).double().square().mean() if self.how in READS else 1.0
        return F.cross_entropy(self(x), y) * (1 + factor)

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1, momentum=0.5)


def assert_equal(module, expected, name=""):
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")


@functools.cache
def alone(how):
    module = Reads(how)
    fit(module, "auto", 1, limit_val_batches=0)
    return module


@contextmanager
def one_message_each():
    """Let each parameter travel alone, some of them in their own memory."""
    own = parameter_slices.fill_buckets
    with (
        patched(parameter_slices, "fill_buckets", lambda sizes, _, kind: own(sizes, 1, kind)),
        patched(parameter_slices, "_DIRECT_BYTES", 150),
        patched(parameter_slices, "MOST_LATE", 99),
    ):
        yield


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_code_that_reads_weights_waits_for_them(group, stage):
    for how in ["layers", *READS] if stage == 1 else ["layers", "norms"]:
        module = Reads(how)
        with one_message_each(), strict_order(how == "one rank"):
            fit(module, HybridParallelStrategy(zero_stage=stage), 2, 2, limit_val_batches=0)
        assert_equal(module, alone(how), how)
        everything = {name for name, _ in module.named_parameters()}
        assert module.absent[0] == set(), how
        assert module.absent[1] == everything - ({"head.weight"} if how == "alias" else set()), how
        assert not absent_in(module), how


class InStages(Reads):
    """Has blocks for two stages, whose features tensor parallelism shards."""

    def __init__(self, how="layers"):
        super().__init__(how)
        self.kernel = nn.Identity()


class Replaces(SGD):
    """Puts new tensors into the places of parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad
        return loss


class Manual(InStages):
    """Takes two steps on each batch, of two optimizers, and reads a weight between them."""

    def __init__(self, how="layers"):
        super().__init__(how)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss * (1 + self.head.weight.detach().norm()))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [SGD(self.blocks.parameters(), lr=0.1, momentum=0.5), Replaces(self.head.parameters(), lr=0.1)]


CASES = {
    "tensor": (InStages, "norms", {"tensor_parallel_size": 2}),
    "pipeline": (InStages, "layers", {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "compiled layers": (InStages, "norms", {"compile_layers": True}),
    "tensor, manual": (Manual, "norms", {"tensor_parallel_size": 2}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
@distributed(world_size=4)
def test_it_goes_with_shards_and_stages(group, case):
    kind, how, options = CASES[case]
    expected, module = kind(how), kind(how)
    fit(expected, "auto", 1, limit_val_batches=0)
    torch._dynamo.utils.counters.clear()
    with one_message_each(), strict_order(), patched(sharded, "compiler_backend", lambda device: "aot_eager"):
        replicas = 4 if "compile_layers" in options else 2
        fit(module, HybridParallelStrategy(zero_stage=1, **options), 4, replicas, limit_val_batches=0)
    assert_equal(module, expected)
    assert max(map(len, module.absent)) > 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == ("compile_layers" in options)


@distributed(world_size=2)
def test_optimizers_that_step_in_turn_and_replace_tensors(group):
    expected, module = Manual(), Manual()
    fit(expected, "auto", 1, limit_val_batches=0)
    with one_message_each():
        fit(module, HybridParallelStrategy(zero_stage=1), 2, 2, limit_val_batches=0)
    assert_equal(module, expected)
    assert {len(each) for each in module.absent} == {0, len(list(module.blocks.parameters())), 2}


class Backwards(Reads):
    """Has registered its layers in another order than its forward runs them, another one on each replica."""

    def __init__(self, how="layers"):
        super().__init__(how)
        for name in ("blocks", "embed"):
            layers = getattr(self, name)
            delattr(self, name)
            setattr(self, name, layers)

    def training_step(self, batch, index):
        if self.trainer.global_rank == 1:
            self.head.weight.sum()
        return super().training_step(batch, index)


@distributed(world_size=2)
def test_messages_travel_in_the_order_of_the_forward(group):
    expected, module = Backwards(), Backwards()
    fit(expected, "auto", 1, limit_val_batches=0)
    sent, own = [], parameter_slices.ParameterSlices._messages_of

    def messages_of(slices, parameters):
        sent.append(own(slices, parameters))
        return sent[-1]

    with one_message_each(), strict_order(), patched(parameter_slices.ParameterSlices, "_messages_of", messages_of):
        fit(module, HybridParallelStrategy(zero_stage=1), 2, 2, limit_val_batches=0)
    assert_equal(module, expected)
    names = {parameter: name.partition(".")[0] for name, parameter in module.named_parameters()}
    orders = [list(dict.fromkeys(names[parameter] for (parameter,) in messages)) for messages in sent]
    assert orders == [["kernel", "head", "blocks", "embed"]] + 3 * [["embed", "blocks", "kernel", "head"]]


def test_parameters_are_there_before_a_graph_runs():
    order = []

    class Graph:
        def replay(self):
            order.append("replay")

        def capture_begin(self, pool):
            order.append(pool)

    patches = Patches()
    with patched(torch.cuda, "CUDAGraph", Graph):
        settle_before_graphs(SimpleNamespace(settle=lambda: order.append("settled")), patches)
        Graph().capture_begin(pool="pool")
        Graph().replay()
        patches.undo()
        Graph().replay()
    assert order == ["settled", "pool", "settled", "replay", "replay"]


class Looks(Callback):
    """Reads weights in each of its hooks between two steps; they are there, and equal on both replicas."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        assert not absent_in(module)
        with DisableTorchFunctionSubclass():
            self.seen.append(sum(p.detach().square().sum() for p in module.parameters()))

    on_before_zero_grad = on_validation_start = on_train_batch_end

    def on_train_epoch_end(self, trainer, module):
        self.on_train_batch_end(trainer, module)
        with torch.no_grad():
            module.embed.weight.mul_(0.9)


class Stops(Reads):
    """Is evaluated after each step, saves itself, and ends with an error in the middle."""

    def __init__(self, how="layers", last=99):
        super().__init__(how)
        self.last = last

    def training_step(self, batch, index):
        if self.global_step == self.last:
            raise KeyError("the end")
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_hooks_evaluation_files_and_errors_wait(group, stage):
    expected, looks = Stops(), Looks()
    fit(expected, "auto", 1, val_check_interval=1, callbacks=[looks])
    module, found = Stops(), Looks()
    fit(module, HybridParallelStrategy(zero_stage=stage), 2, 2, val_check_interval=1, callbacks=[found])
    assert_equal(module, expected)
    torch.testing.assert_close(found.seen, looks.seen, rtol=1e-10, atol=1e-12)
    assert len(module.absent[1]) == 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(comm.broadcast_object(folder, group))
        for strategy, devices in (("auto", 1), (HybridParallelStrategy(zero_stage=stage), 2)):
            # Without another hook: only the save itself waits.
            name = f"{devices} on {group.rank}" if devices == 1 else "2"
            saves = ModelCheckpoint(folder, name, every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
            fit(Reads(), strategy, devices, devices, limit_val_batches=0, callbacks=[saves], enable_checkpointing=True)
        comm.barrier(group)  # rank 0 writes the file
        files = [torch.load(folder / f"{name}.ckpt")["state_dict"] for name in (f"1 on {group.rank}", "2")]
        torch.testing.assert_close(files[0], files[1], rtol=1e-10, atol=1e-12)
        comm.barrier(group)  # rank 0 removes it
    ended = []
    for strategy, devices in (("auto", 1), (HybridParallelStrategy(zero_stage=stage), 2)):
        ended.append(Stops(last=3))
        with pytest.raises(KeyError):
            fit(ended[-1], strategy, devices, devices, limit_val_batches=0)
    assert len(ended[1].absent) == 3
    assert_equal(ended[1], ended[0])


def test_a_message_is_awaited_once_and_its_error_stays():
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    arrivals, waits = Arrivals(), []

    def fail():
        raise RuntimeError("the connection is closed")

    arrivals.expect([first, second], lambda: waits.append(len(waits)))
    arrivals.expect([third], fail)
    assert first.shape == (3,)
    assert not waits
    assert (first + second).sum() == 6
    assert (waits, type(second)) == ([0], nn.Parameter)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the connection is closed"):
            third.sum()
    with DisableTorchFunctionSubclass():
        assert third.isnan().all()  # not the values of before
        with pytest.raises(RuntimeError, match="data pointer"):
            third.data_ptr()


@pytest.mark.parametrize("is_late", [False, True])
@distributed(world_size=2)
def test_each_bucket_is_awaited_once_and_few_are_under_way(group, is_late):
    module = nn.ParameterList(torch.ones(3) for _ in range(6))
    slices = ParameterSlices(dict(module.named_parameters()), group, bucket_bytes=1)
    optimizer, awaited, own = SGD(module.parameters(), lr=0.5), [], slices._land
    slices.divide(optimizer, Patches())
    if is_late:
        slices.gather_late(module)
    slices._land = lambda members, pending: awaited.append(len(members)) or own(members, pending)
    for parameter in module:
        parameter.grad = torch.ones(3)
    with patched(parameter_slices, "MOST_LATE", 2):
        optimizer.step()
    assert [isinstance(p, AbsentParameter) for p in parameters_of(module).values()] == 4 * [False] + 2 * [is_late]
    assert sum(module).tolist() == [3.0, 3.0, 3.0]
    assert awaited == 6 * [1]
