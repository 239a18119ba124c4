"""Layouts of more ranks than there are cores: 8, 16 and 64 ranks, and one rank of 64 or 1,024."""

import copy
import math
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.checkpoint import PartialTensor, SavedCheckpoint, ShardedWriter, as_parts
from lightning_parallel.checkpoint.writer import TensorPart
from lightning_parallel.comm import Group, MeshGroups, host, presence
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.default_group import default_group_kept
from lightning_parallel.data_parallel import GradientReducer, ParameterSlices, ScatteringReducer
from lightning_parallel.data_parallel.parameter_shards import ParameterShards
from lightning_parallel.mesh import AXES, DATA, PIPELINE, TENSOR, Coordinate, Mesh
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.planner import Cluster, device_named
from lightning_parallel.planner.rehearsal import Rehearsal
from lightning_parallel.tensor.attention import Attention
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.context import PositionSplit
from lightning_parallel.tensor.context_methods import balanced_rows
from lightning_parallel.tensor.experts import Experts
from lightning_parallel.tensor.layers import Column, Replicate, Row, Vocab
from lightning_parallel.tensor.pieces import Piece
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tensor.sequence_plan import sequence_parallel_styles
from lightning_parallel.tensor.sequence_regions import divide_sequence
from lightning_parallel.tensor.sharding import Shard, ShardPart, reduce_partial_
from tests.compression.test_conformance import COMPRESSORS, LINEAR, SHAPES, gradients
from tests.harness import run
from tests.lockstep import Ranks, in_lockstep
from tests.pretended import pretended_world
from tests.strategies.models import trainer_for
from tests.tensor import test_loss, test_sequence
from tests.tensor.oracle import check, divide, finish_gradients, same_by_name, same_gradients
from tests.tensor.test_attention import Call
from tests.tensor.test_context import FUNCTIONS
from tests.tensor.test_context_attention import equals
from tests.tensor.test_experts import Dense, Language, Loop
from tests.tensor.test_layers import MLP, Gated, Grouped, Tied
from tests.test_golden import STEP, TOKENS, Model, Witnesses

# The cases of few ranks are left to `make test-more`.
SWEEP, FEWER, MANY = pytest.mark.sweep(kept=2), pytest.mark.sweep(kept=1), pytest.mark.parametrize("ranks", [8, 16, 64])


def double(*shape):
    return torch.randn(*shape, dtype=torch.double)


@SWEEP
@MANY
def test_layers(ranks):
    in_lockstep(layers, ranks)


def layers(group):
    n = group.size
    x = double(2, 3, 6)
    uneven = Gated(hidden=n + n // 2 + 1).double()
    check(uneven, MLP, [x], group, steps=1)
    by_units = Gated(hidden=3 * (n + 1)).double()
    check(by_units, {"gate": Column(unit=3), "up": Column(unit=3), "down": Row(unit=3)}, [x], group, steps=1)
    loose = {"gate": Column(gather_output=True), "up": Column(gather_output=True), "down": Row(split_input=True)}
    check(Gated(hidden=n + 1).double(), loose, [x], group, steps=1)
    # Fewer heads of keys than ranks: several ranks hold one head.
    heads, keys = 2 * n, n // 2
    parts = (ShardPart.queries(heads, 2, keys), ShardPart.keys(keys, 2), ShardPart.keys(keys, 2))
    styles = {"qkv": Column(parts=parts), "norm": Replicate(partial_gradient=True), "out": Row(parts=parts[:1])}

    def adapt(model):
        model.sizes = [Shard.packed(0, [part], n).local_size(group.rank) for part in parts]

    rules = check(Grouped(heads, keys, 2).double(), styles, [double(1, 2, 8)], group, steps=1, adapt=adapt)
    assert rules["qkv.weight"].replicated
    attention = Call(nn.MultiheadAttention(2 * (n + 1), n + 1, batch_first=True).double(), need_weights=False)
    check(attention, {"attention": Attention()}, [double(1, 3, 2 * (n + 1))], group, steps=1)
    with pytest.raises(ValueError, match=rf"{n - 1} heads \(units of 2 features\) cannot be sharded over {n} ranks"):
        Column(unit=2).apply(nn.Linear(4, 2 * (n - 1)), group)


@SWEEP
@MANY
def test_vocabularies_and_losses(ranks):
    in_lockstep(vocabularies, ranks)


def vocabularies(group):
    classes = group.size + group.size // 2 + 1
    tokens = torch.arange(2 * classes).view(2, -1) % classes
    styles = {"embedding": Vocab(), "head": Column(gather_output=True)}
    check(Tied(classes, padding=1).double(), styles, [tokens], group, steps=1)
    logits, target = double(2, 3, classes), torch.randint(classes, (2, 3))
    target[0, 1] = -100
    for reduction in ("mean", "none"):
        weight = torch.rand(classes, dtype=torch.double)
        test_loss.compare(group, logits, target, classes, weight=weight, label_smoothing=0.1, reduction=reduction)


@FEWER
@MANY
def test_sequence_regions(ranks):
    in_lockstep(sequences, ranks)


def sequences(group):
    n = group.size
    width, hidden = 2 * (n + 1), n + 3
    torch.manual_seed(0)
    block = test_sequence.Block(width, size=2)
    block.up, block.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
    model = nn.Sequential(nn.Embedding(9, width), nn.Sequential(block), nn.Linear(width, 9)).double()
    whole = copy.deepcopy(model)
    heads = (ShardPart(width, 2),)
    styles = {"qkv": Column(parts=heads * 3), "out": Row(parts=heads), "up": Column(), "down": Row()}
    found = sequence_parallel_styles(block, styles)
    rules, partial = divide(model, {f"1.0.{path}".rstrip("."): style for path, style in found.items()}, group)
    divide_sequence(model, list(model[1]), group)
    for length in (n + n // 2 + 1, 5)[n == 64 :]:  # in the second, not every rank has a position
        tokens = torch.randint(9, (1, length))
        for each in (model, whole):
            each.zero_grad()
            y = each(tokens)
            y.pow(2).sum().backward()
        finish_gradients(model, rules, partial, group)
        same_by_name(model, whole, rules, group, "grad")


@SWEEP
@MANY
def test_context_attention(ranks):
    in_lockstep(context_attention, ranks)


def context_attention(group):
    n = group.size
    rules = [balanced_rows(n + n // 2 + 1, n)] * 2
    equals(group, rules, "bool", 4, 4, "gather", "gather")
    equals(group, [balanced_rows(n + 1, n)] * 2, "causal", n + 1, n + 1, "ulysses", "ulysses")
    short = [balanced_rows(length, n) for length in (5, n + 1)]
    equals(group, short, "", 2, 1, "ring", "ring with ranks without positions")
    if n < 64:  # 63 turns of each of 64 ranks take seconds
        equals(group, rules, "causal", 2, 1, "ring", "ring")


CONTEXT = ("causal attention", "mean", "shift left", "cumulative sum", "shifted cross entropy", "convolution")


@FEWER
@MANY
def test_context_regions(ranks):
    length = ranks + ranks // 2 + 1

    def inputs():
        generator = torch.Generator().manual_seed(length)
        tensors = (torch.randn(*shape, dtype=torch.double, generator=generator) for shape in ((2, length, 6), (6, 6)))
        return [tensor.requires_grad_() for tensor in tensors]

    def function(group):
        split = PositionSplit(group, "auto", is_causal=False)
        for name in CONTEXT:
            x, w = inputs()
            y = FUNCTIONS[name](split.split(x * 1.0, 1), w)
            y = y.whole() if isinstance(y, Piece) else y
            y.sin().sum().backward()
            expected = inputs()
            result = FUNCTIONS[name](*expected)
            result.sin().sum().backward()
            torch.testing.assert_close(y, result, rtol=1e-10, atol=1e-10, msg=name)
            for mine, other in zip((x, w), expected):
                mean = comm.all_reduce(mine.grad, group) / group.size
                torch.testing.assert_close(mean, other.grad, rtol=1e-10, atol=1e-10, msg=name)

    in_lockstep(function, ranks)


@FEWER
@MANY
def test_experts(ranks):
    hidden = ranks + 3
    builds = [lambda kind=kind: Language(lambda: kind(12, hidden, 3), 12) for kind in (Loop, Dense)]
    # Planned once: each rank would search, and all ranks share a core here.
    plans = [make_plan(build(), "auto", Group.pretended(TENSOR, ranks)) for build in builds]

    def function(group):
        for build, plan in zip(builds, plans):
            model, whole = build(), build()
            tokens = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(1))
            sharding = apply_plan(model, plan, group)
            assert any(isinstance(style, Experts) for style in sharding.plan.styles.values())
            losses = [each.loss(tokens) for each in (model, whole)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
            found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, whole))
            reduce_partial_({name: found[name] for name in sharding.partial}, sharding.shards, group)
            same_gradients(found, expected, sharding.shards, group, 1e-10)

    in_lockstep(function, ranks)


COMPRESSED = ("dense", "topk_int8", "randomk", "blocktopk", "int8", "int4", "sign", "powersgd", "alternating")
STEPS = 2


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 8) for name in COMPRESSED), ("int4", 16), ("topk_int8", 64), ("sign", 64), ("dense", 64)],
)
def test_compressors(name, ranks):
    """Replicas stay bitwise equal, nothing is lost, and the bytes are those foretold."""
    inputs = [[gradients(step, rank, torch.double) for rank in range(ranks)] for step in range(STEPS)]
    run, reducers = Ranks(ranks), [COMPRESSORS[name]() for _ in range(ranks)]

    def function(rank):
        found = []
        for step in range(STEPS):
            grads = {key: value.clone() for key, value in inputs[step][rank].items()}
            begun = len(run.begun[rank])
            reducers[rank].reduce_(grads, run.group(rank))
            found.append((grads, reducers[rank].state_dict(), run.begun[rank][begun:]))
        return found

    alone, held = COMPRESSORS[name](), {key: torch.zeros(shape, dtype=torch.double) for key, shape in SHAPES.items()}
    for step, results in enumerate(zip(*run.run(function))):
        means = {key: sum(each[key] for each in inputs[step]) / ranks for key in SHAPES}
        told = alone.wire_bytes(SHAPES, ranks, step, torch.double)
        before, held = held, memory([state for _, state, _ in results])
        whole = {key: value.clone() for key, value in means.items()}
        alone.reduce_(whole, comm.Group.alone("alone"))
        for key, mean in results[0][0].items():
            assert all(torch.equal(grads[key], mean) for grads, _, _ in results), key
            torch.testing.assert_close(means[key] + before[key], mean + held[key], rtol=1e-10, atol=1e-10, msg=key)
            if name in LINEAR:
                torch.testing.assert_close(mean, whole[key], rtol=1e-10, atol=1e-10, msg=key)
        # Without the agreement on the compressor and on the gradients: two numbers, digests, small objects.
        begun = [call for call in results[0][2] if call.elements not in (2, 16, 1032)]
        assert told == sum(map(sent_bytes, begun))


def memory(states):
    """Return the mean of what the ranks keep for later steps."""
    found = {}
    for key, shape in SHAPES.items():
        parts = [state.get("residual", {}).get(key) for state in states]
        found[key] = torch.zeros(shape, dtype=torch.double)
        found[key] += sum(part for part in parts if part is not None) / len(states)
        servers = [state["server_residual"][key] for state in states if key in state.get("server_residual", {})]
        if servers:
            found[key] += torch.cat([part.flatten() for part in servers])[: found[key].numel()].view(shape)
    return found


def sent_bytes(call):
    """Return the bytes that a rank sends in a ring."""
    share = (len(call.members) - 1) / len(call.members)
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": len(call.members), "all_to_all": 1}
    return round(passes[call.op] * call.elements * call.dtype.itemsize * share)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 8), (2, 8), (3, 8), (2, 16), (3, 64)])
def test_zero(stage, ranks):
    """Steps of SGD with momentum equal those of one process on all samples."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.LayerNorm(7)).double()

    def loss_of(model, rank, step):
        draws = torch.Generator().manual_seed(1000 * step + rank)
        return model(torch.randn(2, 5, dtype=torch.double, generator=draws)).pow(3).mean()

    whole = build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(2):
        optimizer.zero_grad()
        sum(loss_of(whole, rank, step) / ranks for rank in range(ranks)).backward()
        optimizer.step()
        expected.append({name: parameter.detach().clone() for name, parameter in whole.named_parameters()})

    def function(group):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parameters, patches = dict(model.named_parameters()), Patches()
        slices = ParameterShards(group, lambda name: None) if stage == 3 else ParameterSlices(parameters, group)
        for name, layer in model.named_children() if stage == 3 else ():
            slices.adopt({f"{name}.{key}": value for key, value in layer.named_parameters()})
        kind = GradientReducer if stage == 1 else ScatteringReducer
        reducer = kind(parameters, *([group] if stage == 1 else [slices]))
        slices.divide(optimizer, patches)
        for step in range(2):
            optimizer.zero_grad()
            with slices.in_pass():
                loss_of(model, group.rank, step).backward()
            reducer.reduce()
            optimizer.step()
            slices.settle()
            with slices.held():
                found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            for name, value in found.items():
                torch.testing.assert_close(value, expected[step][name], rtol=1e-10, atol=1e-10, msg=name)
        state = [value for each in optimizer.state.values() for value in each.values()]
        assert sum(value.numel() for value in state) < 0.5 * sum(p.numel() for p in whole.parameters())
        patches.undo()
        reducer.remove()

    in_lockstep(function, ranks)


# --------------------------------------------------------------------------------------- what grows with the ranks


def test_ranks_that_agree_do_not_gather_what_they_agree_on():
    ranks, large = Ranks(64), {f"layer {number}": (number, 7 * number) for number in range(100)}

    def function(rank):
        group = ranks.group(rank)
        comm.agree("the plan", dict(large), group)
        comm.agree("the names", {f"name {(3 * number + rank) % 5}" for number in range(5)}, group)
        with pytest.raises(
            ValueError, match=r"The plan must be the same on all ranks of the world group; got\n(.*\n){9}"
        ):
            comm.agree("the plan", large | ({"layer 7": 0} if rank == 9 else {}), group)

    ranks.run(function)
    assert ranks.begun[5][0][2:] == (torch.uint8, 16)
    assert max(call.elements for call in ranks.begun[5][1:3]) <= 1032


class CountingStore:
    """Counts the requests to a store."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


def test_a_rank_looks_for_failures_of_1024_ranks_with_a_few_requests():
    store = dist.HashStore()
    heart = presence._Heartbeat(store, 1000, 1024, watches=False)
    heart.stop()
    heart.name = "run"
    others = [rank for rank in range(1024) if rank != 1000]
    for rank in others:
        process = comm.Process("elsewhere" if rank < 1016 else host.host_id(), 1, "1")
        for key, value in (("error", "no samples" if rank in (3, 900) else ""), ("process", str(process))):
            heart.store.set(f"{key}/{rank}", value)
        heart.store.add(f"beat/{rank}", rank)
    heart.store.set("order/900", "1")
    heart.store.set("order/3", "2")
    counting = heart.store = CountingStore(heart.store)
    with patched(presence, "BEAT_S", 0.001):
        assert list(heart.errors(others)) == [900, 3]
        assert heart.ended(others) == list(range(1016, 1024))
        assert heart.silent(others) == others
        first = counting.requests
        for _ in range(10):
            assert heart.num_over(others) == 8
        polled = counting.requests - first
    world = SimpleNamespace(size=lambda: 1024)
    with (
        patched(presence, "_heartbeat", heart),
        patched(presence, "all_processes", lambda: world),
        patched(dist, "is_initialized", lambda: True),
    ):
        text = presence.describe_failure("`all_reduce`", range(1024), RuntimeError("closed"))
    assert first <= 10
    assert polled <= 10 * (1 + 8)  # those that have ended on this machine
    assert text.splitlines() == [
        "[rank 1000] `all_reduce` between ranks [0, 1, 2, 3 and 1020 others] failed",
        "rank 900 stopped with: no samples",
        "rank 3 stopped with: no samples",
    ]


def test_64_ranks_write_a_checkpoint(tmp_path):
    """Each part is in one file of one rank, as the manifest of the first rank says; only that rank has all entries."""
    full = {name: double(*shape) for name, shape in (("heads", (67, 3)), ("columns", (4, 64)), ("alike", (5,)))}
    rules = {"heads": Shard.even(0, 67, 64), "columns": Shard.even(1, 64, 64)}
    ranks = Ranks(64)

    def function(rank):
        state = as_parts({"alike": full["alike"]}, rank == 0)
        for name, rule in rules.items():
            part = TensorPart(rule.split(full[name], rank), rule.dim, rule.ranges[rank])
            state[name] = PartialTensor.of(full[name].shape, torch.double, part)
        ShardedWriter(ranks.group(rank), {"tensor_parallel": 64}).save({"state_dict": state}, str(tmp_path / "saved"))

    ranks.run(function)
    assert {call.op for call in ranks.begun[63] if call.elements > 1100} <= {"gather"}
    checkpoint = SavedCheckpoint.open(str(tmp_path / "saved"))
    assert {name: len(saved.parts) for name, saved in checkpoint.manifest.tensors.items()} == {
        "state_dict/alike": 1,
        "state_dict/columns": 64,
        "state_dict/heads": 64,
    }
    for name, value in full.items():
        assert torch.equal(checkpoint.read(f"state_dict/{name}"), value)
    checkpoint.close()


# ------------------------------------------------------------------------------------------------------ whole runs


BATCH, MICROBATCHES = 4, 4
LINK = Link(1e-5, 1e9)


def trained(sizes, real, path, layers, options):
    """Train as one of the ranks `real` of a mesh; return the calls of a step."""
    index, mesh = dist.get_rank(), Mesh(*sizes)
    dist.destroy_process_group()
    os.environ.update(LOCAL_RANK=str(real[index]), WORLD_SIZE=str(mesh.world_size))
    axes = {f"{axis}_size": size for axis, size in zip(AXES, sizes) if axis != DATA}
    with pretended_world(mesh, real, index, dist.FileStore(path, len(real))):
        witnesses = Witnesses()
        strategy = HybridParallelStrategy(**axes, **options)
        trainer = trainer_for(
            strategy, mesh.world_size, max_epochs=1, callbacks=[witnesses], limit_train_batches=STEP + 2
        )
        samples = torch.zeros(BATCH * (STEP + 2) * mesh.data_parallel, TOKENS, dtype=torch.long)
        trainer.fit(Model(layers=layers), DataLoader(samples, batch_size=BATCH))
    return witnesses.seen()[0]


def planned(mesh, layers, microbatches, rank=0):
    """Return the planner's figures of the parts of the model: `embed`, the layers, and `head`.

    They are the numbers and bytes of the calls of the tensor axis in a step, and the elements of the parameters on a
    rank of this axis.
    """
    batch = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    cluster = Cluster(device_named("h100"), mesh.world_size, 8, LINK, LINK)
    rehearsal = Rehearsal(Model(layers=layers), batch, cluster, precision="64-true")
    figures = [
        [microbatches * part.total_s for part in rehearsal.count(quantity, mesh.tensor_parallel, microbatches).parts]
        for quantity in ("messages", "message_bytes")
    ]
    sharding = rehearsal.divided(mesh.tensor_parallel).sharding
    shards = {} if sharding is None else sharding.shards
    elements = Counter()
    for name, parameter in Model(layers=layers).named_parameters():
        shape = shards[name].local_shape(parameter.shape, rank) if name in shards else parameter.shape
        path = name.split(".")
        elements[path[0] if path[0] != "blocks" else int(path[1])] += math.prod(shape)
    return *figures, [elements[part] for part in ("embed", *range(layers), "head")]


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize("sizes", [(2, 4, 1, 8), (4, 2, 1, 8)], ids=["2 x 4 x 8", "4 x 2 x 8"])
def test_stages_of_64_ranks_send_what_the_schedule_and_the_planner_say(sizes, tmp_path):
    mesh, layers = Mesh(*sizes), 4
    stages = mesh.pipeline_parallel
    real = [mesh.rank(Coordinate(0, stage, 0, 0)) for stage in range(stages)]
    options = {"num_microbatches": MICROBATCHES, "schedule": "1f1b", "balance": [layers // stages] * stages}
    everyone = run(
        trained, stages, sizes=sizes, real=real, path=str(tmp_path / "store"), layers=layers, options=options
    )
    numbers, num_bytes, elements = planned(mesh, layers, MICROBATCHES)
    for stage, calls in enumerate(everyone):
        of_axis = {axis: [call for call in calls if call.axis == axis] for axis in AXES}
        messages = Counter((call.op, call.peer) for call in of_axis[PIPELINE] if call.peer is not None)
        peers = [real[other] for other in (stage - 1, stage + 1) if 0 <= other < stages]
        assert messages == {(op, peer): MICROBATCHES for op in ("send", "recv") for peer in peers}
        share = layers // stages
        mine = [*([0] if stage == 0 else []), *range(1 + stage * share, 1 + (stage + 1) * share)]
        mine += [layers + 1] if stage == stages - 1 else []
        assert len(of_axis[TENSOR]) == sum(numbers[part] for part in mine)
        assert sum(call.bytes for call in of_axis[TENSOR]) == sum(num_bytes[part] for part in mine)
        held = sum(elements[part] for part in mine)
        assert sum(call.bytes for call in of_axis[DATA] if call.dtype == "float64") == 8 * held


@pytest.mark.sweep(kept=1)
@pytest.mark.parametrize(
    ("sizes", "rank", "zero_stage"),
    [((8, 1, 1, 8), 3, 0), ((128, 1, 1, 8), 1000, 0), ((1024, 1, 1, 1), 1000, 2), ((1024, 1, 1, 1), 1000, 3)],
)
def test_one_rank_of_many_trains(sizes, rank, zero_stage, tmp_path):
    mesh = Mesh(*sizes)
    arguments = {"layers": 2, "options": {"zero_stage": zero_stage}}
    (calls,) = run(trained, 1, sizes=sizes, real=[rank], path=str(tmp_path / "store"), **arguments)
    tensor = [call for call in calls if call.axis == TENSOR]
    numbers, num_bytes, elements = planned(mesh, 2, 1, mesh.coordinate(rank).tensor_parallel)
    assert (len(tensor), sum(call.bytes for call in tensor)) == (sum(numbers), sum(num_bytes))
    data = Counter()
    for call in calls:
        if call.axis == DATA and call.dtype == "float64":
            data[call.op] += call.bytes // 8
    # Slices are as long on all ranks: each parameter is filled up to a multiple of their number.
    filled = sum(-(-p.numel() // mesh.data_parallel) * mesh.data_parallel for p in Model().parameters())
    if zero_stage == 0:
        assert data == {"all_reduce": sum(elements)}
    elif zero_stage == 2:
        assert data == {"reduce_scatter": filled, "all_gather": filled}
    else:
        assert data["reduce_scatter"] == filled
        assert filled < data["all_gather"]  # in forward and in backward


def test_groups_of_rank_1000_of_1024():
    mesh = Mesh(4, 16, 2, 8)
    with pretended_world(mesh, [1000]), default_group_kept():
        groups = MeshGroups(mesh)
        assert groups.coordinate == Coordinate(3, 14, 1, 0)
        assert groups.tensor_parallel.ranks == tuple(range(1000, 1008))
        assert groups.context_parallel.ranks == (992, 1000)
        assert groups.pipeline_parallel.ranks == tuple(range(776, 1024, 16))
        assert groups.data_parallel.ranks == (232, 488, 744, 1000)
        assert groups.gradients.size == 8
        assert groups.replica.ranks == tuple(range(768, 1024))
        assert groups.model.size == 128
        nodes = groups.nodes({rank: str(rank // 8) for rank in range(1024)}, None, "test")
        assert (nodes.inside.size, nodes.across.size) == (1, 8)
        pairs = {(stage, stage + 1) for stage in range(15)}
        assert groups.between(PIPELINE, sorted(pairs), "test").keys() == {(13, 14), (14, 15)}
        assert comm.all_gather_object("alike", groups.between_hosts("test")) == ["alike"] * 1024
        groups.make_data_default()
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
