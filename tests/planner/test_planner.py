"""The planner: units and closed forms, what a rehearsal counts against a real division, layouts and why not."""

import io
import json
import os
import re
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from xml.etree.ElementTree import fromstring

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import AutoParallelStrategy, HybridParallelStrategy, MemoryProfiler
from lightning_parallel.cli import main
from lightning_parallel.cli.projects import parsed_batch
from lightning_parallel.comm import Group, all_gather, all_gather_object, all_reduce
from lightning_parallel.compat import patched
from lightning_parallel.mesh import AXES, TENSOR, Mesh
from lightning_parallel.pipeline import analysis
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.search import Costs, Workload, choose_schedule, microbatch_counts
from lightning_parallel.pipeline.simulate import Cost, Link, simulate
from lightning_parallel.planner import Cluster, RankMemory, device_named, layouts, plan, plans
from lightning_parallel.planner.collective_costs import collective_s, flat_collective_s
from lightning_parallel.planner.hardware import Device
from lightning_parallel.planner.layouts import LayoutSearch
from lightning_parallel.planner.plan_picture import draw_plan
from lightning_parallel.planner.plan_report import layout_yaml, plan_text, strategy_arguments
from lightning_parallel.planner.plans import optimizers_of, state_copies
from lightning_parallel.planner.rank_memory import Held, copies_held, optimizer_copies, planned_memory, state_variants
from lightning_parallel.planner.rehearsal import PartCosts, Rehearsal, training_step
from lightning_parallel.planner.shared_cores import shared_makespan_s
from lightning_parallel.strategies.auto_parallel import accumulated_batches, first_of_loaders
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from lightning_parallel.tracing.spans import seconds_text
from lightning_parallel.tracing.units import parse_bandwidth, parse_bytes
from tests.examples.test_gpt import GPT, on_every_rank
from tests.harness import distributed, recorded_communication, run
from tests.strategies.models import trainer_for

WIDTH, HEADS, TOKENS, SAMPLES, CLASSES = 32, 4, 6, 8, 16
SMALL = Device("small", {"float32": 1e9}, 1e6, 1e9, launch_s=1e-6, efficiency=1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Model(LightningModule):
    def __init__(self, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, index):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens():
    return torch.zeros(SAMPLES, TOKENS, dtype=torch.long)


def cluster(ranks=4, per_node=4, **options):
    return Cluster(SMALL, ranks, per_node, Link(1e-5, 1e9), Link(1e-4, 1e8), **options)


class Cache:
    def __init__(self):
        self.seen = []


class Cached(nn.Module):
    """Two kinds of layers: each attends to what those before it have put into the cache."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=kind == 0)

    def forward(self, x, cache):
        cache.seen.append(self.linear(x))
        return x + sum(cache.seen)


class AsksForValues(Model):
    """What it asks for has no value in a plan; its layers change what they are given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Cached(index % 2) for index in range(4))

    def training_step(self, batch, index):
        x, cache = self.embed(batch), Cache()
        for block in self.blocks:
            x = block(x, cache)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        assert not loss.isnan().any(), "the loss is no number"
        return loss / (batch + 1).max().item()


def test_steps_that_ask_for_values_and_layers_that_change_their_arguments():
    found = plan(AsksForValues(), tokens(), cluster(2, 2), measured=False)
    assert not any(layout.refusal for layout in found.layouts)
    assert "reads values of tensors" in found.notes[0]
    assert not plan(Model(), tokens(), cluster(2, 2), measured=False).notes


def test_layers_that_do_not_run_by_themselves_leave_the_other_layouts():
    running = []

    class InStep(Block):
        def forward(self, x):
            assert running, "no step is running"
            return super().forward(x)

    class Whole(Model):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(InStep() for _ in range(4))

        def training_step(self, batch, index):
            running.append(index)
            loss = super().training_step(batch, index)
            running.clear()
            return loss

    found = plan(Whole(), tokens(), cluster(2, 2), measured=False)
    refusals = {layout.name: layout.refusal for layout in found.layouts}
    assert "no step is running" in refusals.pop("pipeline 2")
    assert not any(refusals.values())


# -- units, links, closed forms ----------------------------------------------------------------------------------------


def test_units_tell_bits_from_bytes_and_powers_of_two_from_those_of_ten():
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 GB") == 1.5e9
    assert parse_bandwidth("400Gbit/s") == 50e9
    assert parse_bandwidth("400Gbps") == 50e9
    assert parse_bandwidth("900GB/s") == 900e9
    for wrong in ("80", "80Gb", "-1GiB", "80 Gbit"):
        with pytest.raises(ValueError, match="in bytes, such as 80GiB"):
            parse_bytes(wrong)
    for wrong in ("400", "400Gb/s", "50GB", "50GB/min"):
        with pytest.raises(ValueError, match="in bits or bytes per second"):
            parse_bandwidth(wrong)
    with pytest.raises(ValueError, match="must be one of H200, .*; got `H1000`"):
        device_named("H1000")
    with pytest.raises(ValueError, match="All nodes must have the same number of devices"):
        cluster(12, 8)


def test_collectives_take_what_the_model_says_on_the_link_that_they_cross():
    link = Link(1e-3, 1e6)
    assert flat_collective_s("all_gather", 1e6, 4, link) == pytest.approx(3e-3 + 0.75)
    assert flat_collective_s("all_reduce", 1e6, 4, link) == pytest.approx(2 * (3e-3 + 0.75))
    # A short message takes the fewer steps of a tree.
    assert flat_collective_s("all_reduce", 1, 64, link) == pytest.approx(2 * (6e-3 + 1e-6))
    assert flat_collective_s("send", 1e6, 2, link) == pytest.approx(1.001)
    two = Cluster(SMALL, 16, 8, Link(0.0, 1e9), Link(0.0, 1e8))
    inside, across = collective_s("all_reduce", 1e6, 1, 8, two), collective_s("all_reduce", 1e6, 8, 2, two)
    assert inside == pytest.approx(2 * 7 / 8 * 1e-3)
    assert across == pytest.approx(1e-2)
    # All ranks of both nodes: inside of each first, then an eighth of it between nodes.
    assert collective_s("all_reduce", 1e6, 1, 16, two) == pytest.approx(2 * 7 / 8 * 1e-3 + 1e-2 / 8)


def test_ranks_that_share_cores_take_all_their_work_over_the_cores():
    cost = Cost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, boundary_bytes=1)
    schedule, link = build_schedule("1f1b", 4, 8), Link(0.1, 10)
    alone = simulate(schedule, [cost] * 4, link).makespan_s
    assert shared_makespan_s(schedule, [cost] * 4, link, cores=4) == pytest.approx(alone)
    assert shared_makespan_s(schedule, [cost] * 4, link, cores=1) == pytest.approx(4 * 8 * 3.0, rel=0.01)
    on_two = shared_makespan_s(schedule, [cost] * 4, link, cores=2)
    assert 4 * 8 * 3.0 / 2 <= on_two < 4 * 8 * 3.0 / 2 * 1.1


def test_a_pretended_group_answers_at_once_in_the_right_shapes_and_notes_what_it_was_asked():
    notes = []
    group = Group.pretended(TENSOR, 4, lambda op, num_bytes: notes.append((op, num_bytes)))
    assert all_reduce(torch.ones(3), group).shape == (3,)
    assert all_gather(torch.ones(2, 3), group, 1).shape == (2, 12)
    assert all_gather_object("same", group) == ["same"] * 4
    assert notes == [("all_reduce", 12), ("all_gather", 96)]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_adam_holds_sixteen_bytes_for_each_parameter_and_none_of_them_for_frozen_ones():
    model = Model()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert RankMemory.of(Held.of(model.parameters())).total == 16 * count
    # ZeRO's paper: 16 bytes a parameter, of which 8 are the optimizer's and 4 the gradient's.
    variants = state_variants(RankMemory.of(Held.of(model.parameters())), 4, 4)
    assert list(variants.values()) == [16 * count, 8 * count, 10 * count, 7 * count, 4 * count]
    assert RankMemory.of(Held.of(model.bfloat16().parameters())).total == 8 * count
    # Added in fp32: 4 bytes more, and the newest gradient.
    several = RankMemory.of(Held.of(model.parameters()), accumulates=True)
    assert several.total == 12 * count + max(parameter.nbytes for parameter in model.parameters())
    model.float().requires_grad_(False)
    model.head.requires_grad_(True)
    trained = sum(parameter.numel() for parameter in model.head.parameters())
    assert RankMemory.of(Held.of(model.parameters())).total == 4 * count + 12 * trained


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_the_state_of_optimizers_counts_by_the_bytes_of_their_parameters(kind):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        few, many = (nn.Parameter(torch.zeros(size, 8, dtype=kind)) for size in (2, 6))
        adam, sgd = torch.optim.Adam([few]), torch.optim.SGD([many], lr=0.1)
        assert (optimizer_copies([adam]), optimizer_copies([sgd])) == (4, 2)
        assert optimizer_copies([adam, sgd]) == 2.5
    finally:
        torch.set_default_dtype(before)


def test_memory_is_what_the_table_of_stages_says(monkeypatch):
    model = Model()
    rehearsal = Rehearsal(model, tokens(), cluster())
    search = LayoutSearch(rehearsal, copies=4.0, schedules=["1f1b"], microbatches=[4])
    layout = search.best(Mesh(1, 2, 1))
    model.log = lambda *_, **__: None
    example = (partial(training_step, model), rehearsal.microbatch(4))
    # Measured seconds would decide the cut of the one, the roofline model that of the other.
    monkeypatch.setattr(analysis, "cut_layers", lambda *_, **__: layout.layers_per_stage)
    run = analyze(model, 2, "1f1b", num_microbatches=4, example=example)
    # What the strategy measures on real data is what is counted without.
    for stage, memory in enumerate(layout.memories):
        held = planned_memory(run, [stage], 4.0)
        assert (held.parameters, held.gradients, held.optimizer) == (
            memory.parameters,
            memory.gradients,
            memory.optimizer,
        )
        assert held.activations == pytest.approx(memory.activations + memory.logits, rel=1e-3)


def test_stages_are_planned_with_the_state_of_the_users_optimizer():
    class Broken(Model):
        def configure_optimizers(self):
            raise RuntimeError("not before the run")

    assert [state_copies(model) for model in (Model(), Momentum(), Broken())] == [2, 3, 4]
    model = Model()
    model.log = lambda *_, **__: None
    # Two replicas: gradients are in a bucket, too, and ZeRO 1 leaves half of the momentum.
    copies = copies_held(state_copies(Momentum()), replicas=2, zero_stage=1)
    assert copies == pytest.approx(1 + 1 + 1 + 0.5)
    planned = analyze(model, 2, "1f1b", copies=copies, example=(partial(training_step, model), tokens()))
    size = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert [cost.resident_bytes for cost in planned.costs.layers] == pytest.approx([copies * size] * 4)


# -- rehearsal ---------------------------------------------------------------------------------------------------------


def test_flops_and_messages_of_a_block_are_those_of_its_shards():
    rehearsal = Rehearsal(Model(), tokens(), cluster())
    whole = 2 * SAMPLES * TOKENS * 12 * WIDTH**2 + 4 * SAMPLES * TOKENS**2 * WIDTH
    for ranks in (1, 2, 4):
        flops, messages = (rehearsal.count(quantity, ranks).layers[0] for quantity in ("flops", "messages"))
        assert flops.forward_s == whole / ranks
        # Two products for each of forward's; fused attention takes the scores a second time.
        assert 2 * whole / ranks <= flops.input_gradient_s + flops.weight_gradient_s <= 2.3 * whole / ranks
        backward = messages.input_gradient_s + messages.weight_gradient_s
        assert (messages.forward_s, backward) == ((2, 2) if ranks > 1 else (0, 0))
        num_bytes = rehearsal.count("message_bytes", ranks).layers[0].forward_s
        assert num_bytes == (2 * 4 * SAMPLES * TOKENS * WIDTH if ranks > 1 else 0)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_rehearsal_counts_the_messages_of_a_real_division(group):
    rehearsal = Rehearsal(Model(), tokens(), cluster())
    costs = rehearsal.count("messages", 2)
    counted = sum(part.total_s for part in costs.parts)
    model = Model()
    model.log = lambda *_, **__: None
    apply_plan(model, make_plan(model, "auto", group), group)
    with recorded_communication() as calls:
        model.training_step(tokens(), 0).backward()
    assert counted == len(list(calls))


@pytest.mark.sweep(kept=None)
def test_layers_of_a_large_model_cost_no_memory_to_plan():
    transformers = pytest.importorskip("transformers")

    class Llama(LightningModule):
        def __init__(self):
            super().__init__()
            config = transformers.LlamaConfig(
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=4,
                num_attention_heads=64,
                num_key_value_heads=8,
                vocab_size=128256,
            )
            self.model = transformers.LlamaForCausalLM(config)

        def training_step(self, batch, index):
            return self.model(input_ids=batch, labels=batch).loss

    with torch.device("meta"):
        model = Llama()
    batch = torch.zeros(1, 128, dtype=torch.long)
    rehearsal = Rehearsal(model, batch, Cluster(device_named("h100"), 16, 8), precision="bf16-mixed")
    whole, divided = (rehearsal.count("flops", ranks).layers[0].forward_s for ranks in (1, 8))
    assert whole == 8 * divided
    search = LayoutSearch(rehearsal, copies=4.0, zero_stages=(0,))
    layout = search.best(Mesh(16, 1, 1))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert layout.memory.parameters + layout.memory.gradients + layout.memory.optimizer == 16 * count
    assert re.search(r"GiB on a rank, .* more than there is; the largest part is optimizer", layout.refusal)


@distributed(world_size=2)
def test_auto_parallel_divides_the_state_of_optimizers_where_nothing_else_fits(group):
    class Convolution(LightningModule):
        """What neither pipelines nor the tensor axis divide."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def training_step(self, batch, index):
            return (batch @ self.weight).square().mean() / (1 + self.trainer.current_epoch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    # With both moments, and a bucket, 5 times the parameter; more than a slice of both needs.
    strategy = AutoParallelStrategy(memory_limit_bytes=4.9 * 4 * 64 * 64)
    trainer = trainer_for(strategy, 2, max_epochs=1)
    trainer.fit(Convolution(), DataLoader(torch.ones(8, 64), 4))
    assert (strategy.layout.name, strategy.layout.zero_stage, strategy.zero_stage) == ("data 2", 1, 1)


@distributed(world_size=2)
def test_auto_parallel_takes_the_layout_that_fits_and_trains_as_one_process(group):
    one = Model()
    trainer_for("auto", 1, max_epochs=1).fit(one, loader())
    # Room for half of the model, not for a replica each.
    whole = 4 * sum(4 * parameter.numel() for parameter in one.parameters())
    strategy = AutoParallelStrategy(memory_limit_bytes=0.9 * whole)
    model = Model()
    trainer_for(strategy, 2, max_epochs=1).fit(model, loader())
    assert strategy.layout is not None
    assert strategy.mesh == strategy.layout.mesh
    assert strategy.mesh.data_parallel == 1
    assert all_gather_object(strategy.layout.name, group) == [strategy.layout.name] * 2
    for name, value in one.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    with pytest.raises((ValueError, RuntimeError), match="No layout of 2 x CPU can run `Model`"):
        trainer_for(AutoParallelStrategy(memory_limit_bytes=1e3), 2).fit(Model(), loader())


@pytest.mark.sweep(kept=None)
def test_auto_parallel_resumes_what_another_layout_has_saved(tmp_path):
    run(resumes, 2, folder=str(tmp_path))


def resumes(folder):
    def fit(strategy, devices, epochs, saved=None):
        model = Model()
        if saved is not None:
            nn.init.zeros_(model.head.weight)  # the checkpoint's values are found in the end, or others
        trainer = trainer_for(strategy, devices, max_epochs=epochs)
        trainer.fit(model, loader(), ckpt_path=saved)
        return trainer, model

    _, one = fit("auto", 1, 2)
    divided, _ = fit(HybridParallelStrategy(tensor_parallel_size=2), 2, 1)
    divided.save_checkpoint(f"{folder}/saved.ckpt")
    alone, _ = fit("auto", 1, 1)
    alone.save_checkpoint(f"{folder}/one.ckpt")
    for path in (f"{folder}/saved.ckpt", f"{folder}/one.ckpt"):
        strategy = AutoParallelStrategy()
        with patched(plans, "meshes", lambda _: iter([Mesh(1, 2, 1)])):  # as if it were the fastest
            resumed, model = fit(strategy, 2, 2, path)
        assert strategy.mesh == Mesh(1, 2, 1)
        assert resumed.global_step == 4, "it went on from the second epoch"
        for name, value in one.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
@distributed(world_size=2)
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1)])
def test_a_run_holds_what_was_planned(group, shape):
    torch.set_default_dtype(torch.float32)
    mesh = Mesh(*shape)
    search = LayoutSearch(Rehearsal(Model(), tokens(), cluster()), copies=3.0, schedules=["1f1b"], microbatches=[4])
    layout = search.best(mesh)
    profiler = MemoryProfiler(show_table=False)
    strategy = HybridParallelStrategy(**strategy_arguments(layout))
    trainer_for(strategy, 2, max_epochs=1, callbacks=[profiler]).fit(Momentum(), loader())
    found = all_gather_object(profiler.report(), group)[0]["ranks"]
    for rank, sizes in enumerate(found):
        planned = layout.memories[mesh.coordinate(rank).pipeline_parallel]
        # Slices are padded, and each unit ends with marks.
        padding = 0.05 if layout.zero_stage == 3 else 0
        assert sizes["parameters"] == pytest.approx(planned.parameters, rel=padding), (sizes, planned)
        assert sizes["optimizer"] == planned.optimizer
        assert sizes["gradients"] <= planned.gradients <= 1.3 * sizes["gradients"]
        assert planned.activations + planned.logits == pytest.approx(sizes["activations_peak"], rel=0.15)


class Momentum(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randint(CLASSES, (2 * SAMPLES, TOKENS), generator=generator), SAMPLES)


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_every_layout_is_predicted_or_says_why_not():
    found = plan(Model(layers=3), tokens(), cluster(8, 4, memory_bytes=2e6), measured=False)
    by_mesh = {layout.mesh.shape: layout for layout in found.layouts}
    assert by_mesh.keys() == {(8 // t // p, p, 1, t) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8}
    assert by_mesh[1, 8, 1, 1].refusal == "3 layers are too few for 8 stages"
    assert "heads" in by_mesh[1, 1, 1, 8].refusal or "spans nodes" in by_mesh[1, 1, 1, 8].warnings[0]
    assert by_mesh[8, 1, 1, 1].step.reduction > 0
    assert any(layout.step.pipeline > 0 for layout in found.possible)
    assert by_mesh[4, 1, 1, 2].step.tensor > 0
    rates = [layout.samples_per_s for layout in found.possible]
    assert rates == sorted(rates, reverse=True)
    shares = plan(Model(), tokens(), cluster(8, 8), measured=False, global_batch=12)
    refused = {
        layout.mesh.data_parallel for layout in shares.layouts if "12 samples cannot be shared" in layout.refusal
    }
    assert refused == {8}
    assert {layout.samples for layout in shares.possible} == {12}
    assert "<svg" in draw_plan(found)
    assert json.loads(json.dumps(found.to_dict()))["devices"] == 8


def test_what_is_pasted_is_what_was_planned():
    found = plan(Model(), tokens(), cluster(), measured=False)
    layout = next(layout for layout in found.possible if layout.mesh.pipeline_parallel > 1)
    trainer = yaml.safe_load(layout_yaml(found, layout))["trainer"]
    assert (trainer["devices"], trainer["num_nodes"], trainer["precision"]) == (4, 1, "32-true")
    assert trainer["strategy"]["class_path"] == "lightning_parallel.HybridParallelStrategy"
    assert trainer["strategy"]["init_args"] == strategy_arguments(layout)
    strategy = HybridParallelStrategy(**trainer["strategy"]["init_args"])
    assert strategy.pipeline_options.balance == layout.layers_per_stage
    assert strategy.pipeline_options.num_microbatches == layout.microbatches


def test_what_does_not_fit_on_each_replica_is_divided_over_them():
    whole = plan(Momentum(), tokens(), cluster(), measured=False, zero_stages=(0,)).layouts
    replicas = next(layout for layout in whole if layout.mesh.shape == (4, 1, 1, 1))
    limit = replicas.memory.total - 1
    found = plan(Momentum(), tokens(), cluster(memory_bytes=limit), measured=False)
    layout = next(layout for layout in found.layouts if layout.mesh.shape == (4, 1, 1, 1))
    assert (layout.zero_stage, layout.refusal) == (1, "")
    assert layout.memory.optimizer == replicas.memory.optimizer / 4
    assert layout.step.optimizer < replicas.step.optimizer
    assert layout.step.reduction > replicas.step.reduction
    assert strategy_arguments(layout)["zero_stage"] == 1
    assert "zero_stage: 1" in layout_yaml(found, layout)
    assert "ZeRO 1 · " in draw_plan(found)


class GivenCosts(Rehearsal):
    """A rehearsal in which a sample takes given costs in each layer."""

    layer, head = Cost(), Cost()

    def costs(self, tensor, microbatches, recomputation):
        layers = tuple(self.layer.scaled(SAMPLES / microbatches) for _ in range(16))
        compute = Costs(layers, Cost(), self.head.scaled(SAMPLES / microbatches))
        return PartCosts(compute, Costs((Cost(),) * 16))


SPLIT, WHOLE = Cost(1e-4, 1e-4, 1e-4, 1e5, 1e3), Cost(1e-4, 2e-4, 0.0, 1e5, 1e3)


@pytest.mark.parametrize(
    ("layer", "head", "ranks", "latency_s", "action_s", "room"),
    [
        (SPLIT, Cost(), 4, 0.0, 0.0, None),
        (SPLIT, Cost(4e-4, 4e-4, 4e-4), 4, 1e-5, 1e-5, None),
        (WHOLE, Cost(1e-4, 2e-4, 0.0, 9e3), 2, 1e-3, 1e-4, None),
        (WHOLE, Cost(), 4, 1e-4, 0.0, 0.8),
        (SPLIT, Cost(1e-4, 2e-4, 0.0, 9e3), 4, 1e-5, 1e-4, 0.7),
        (SPLIT, Cost(), 2, 1e-6, 1e-6, 0.85),
    ],
)
def test_both_searches_for_a_schedule_give_one_answer(layer, head, ranks, latency_s, action_s, room):
    model, link = Model(layers=16), Link(latency_s, 1e9)
    given = Cluster(SMALL, ranks, ranks, link)
    rehearsal = GivenCosts(model, tokens(), given)
    rehearsal.layer, rehearsal.head = layer, head

    def planned(memory_bytes):
        rehearsal.cluster = replace(given, memory_bytes=memory_bytes)
        return LayoutSearch(rehearsal, copies=4.0, action_s=action_s).best(Mesh(1, ranks, 1))

    # As `cut_stages` does it: bytes from the parameters, costs of the first number of microbatches.
    blocks, ends = list(model.blocks), (model.embed, model.head)
    held = [Held.of(part.parameters()) for part in (*blocks, *ends)]
    sizes = [copies_held(4.0, 1, 0) * one.trained_bytes for one in held]
    counts = microbatch_counts(ranks, SAMPLES)
    factor = SAMPLES / counts[0]
    workload = Workload(
        [replace(layer.scaled(factor), resident_bytes=size) for size in sizes[:-2]],
        Cost(resident_bytes=sizes[-2]),
        replace(head.scaled(factor), resident_bytes=sizes[-1]),
        measured_microbatches=counts[0],
        overhead_s=action_s,
        link=link,
        spare_bytes=max(one.largest_bytes for one in held),
    )
    limit = None if room is None else room * planned(1e12).memory.total
    chosen = choose_schedule(workload, ranks, counts, memory_limit_bytes=limit).best
    layout = planned(limit or 1e12)
    schedule = chosen.schedule
    assert not layout.refusal
    assert (layout.schedule, layout.microbatches, layout.virtual_stages, layout.warmup, layout.layers_per_stage) == (
        schedule.name,
        schedule.num_microbatches,
        schedule.virtual_stages,
        schedule.warmup,
        chosen.layers_per_stage,
    )
    assert layout.step.compute + layout.step.pipeline == pytest.approx(chosen.timeline.makespan_s)
    assert layout.memory.total == pytest.approx(chosen.peak_bytes)


class Siamese(Model):
    def training_step(self, batch, index):
        first, second = (self.run(part) for part in (batch, batch.flip(0)))
        return F.mse_loss(first, second.detach()) + second.square().mean()

    def run(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def test_layers_that_are_called_twice_have_a_stage_on_every_rank_in_each_pass():
    model = Siamese()
    found = plan(model, tokens(), cluster(), measured=False)
    layout = next(layout for layout in found.possible if layout.mesh.shape == (1, 4, 1, 1))
    assert layout.virtual_stages == 2
    assert layout.layers_per_stage == (1,) * 8
    largest = sum(value.nbytes for part in (model.blocks[0], model.embed, model.head) for value in part.parameters())
    assert layout.memory.parameters <= largest
    strategy = HybridParallelStrategy(**strategy_arguments(layout))
    options = strategy.pipeline_options
    schedule = build_schedule(options.schedule, 4, 2, options.stages_per_rank)
    example = (lambda batch: model.training_step(batch, 0), tokens())
    assert analyze(model, 4, schedule, example=example, balance=options.balance).layers_per_stage == (1,) * 8


@pytest.mark.sweep(kept=None)
def test_yaml_that_was_printed_runs_in_the_project_as_planned(tmp_path, capsys):
    base = str(GPT / "base.yaml")
    sizes = ["--model.width=32", "--model.layers=4", "--data.training_bytes=100000"]
    words = ["plan", "--script", str(GPT / "main.py"), "--config", base, "--device", "cpu", "--devices", "2"]
    assert main([*words, "--intra-node-bandwidth", "1GB/s", "--width", "80", "--script-args", *sizes]) == 0
    printed = re.findall(r"^trainer:\n(?:[ #].*\n)+", capsys.readouterr().out, re.MULTILINE)
    pasted = next(text for text in printed if "schedule" in text)
    (tmp_path / "plan.yaml").write_text(pasted)
    short = [f"--trainer.{name}=2" for name in ("limit_train_batches", "limit_val_batches", "val_check_interval")]
    command = ["fit", "--config", base, "--config", str(tmp_path / "plan.yaml"), *sizes, *short, "--report.length=2"]
    options = yaml.safe_load(pasted)["trainer"]["strategy"]["init_args"]
    for layout, balance, steps in run(fitted, 2, command=command, folder=str(tmp_path)):
        assert layout == {"context_parallel_size": 1} | {name: options[name] for name in layout if name in options}
        assert balance == options["balance"]
        assert steps == 2


def fitted(command, folder):
    """Run the example by its own command line; returns what its strategy has run, and the steps."""
    trainers, fit = [], Trainer.fit

    @wraps(fit)
    def noted(trainer, *args, **kwargs):
        trainers.append(trainer)
        fit(trainer, *args, **kwargs)

    with patched(Trainer, "fit", noted):
        on_every_rank(command, folder)
    (trainer,) = trainers
    ran = trainer.strategy.run.engine.plan
    layout = {f"{axis}_size": size for axis, size in zip(AXES, trainer.strategy.mesh.shape)}
    layout |= {"schedule": ran.schedule.name, "num_microbatches": ran.schedule.num_microbatches}
    return layout, list(ran.layers_per_stage), trainer.global_step


def test_an_optimizer_whose_schedule_asks_the_trainer_is_known():
    class Scheduled(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    found, note = optimizers_of(Scheduled())
    assert [type(one) for one in found] == [torch.optim.SGD]
    assert not note


def test_a_batch_that_cannot_be_planned_by_is_refused():
    assert [part.shape for part in parsed_batch(["2x3", "2:int64"])] == [(2, 3), (2,)]
    for texts in (["x=2", "x=3"], ["x=2", "3"]):
        with pytest.raises(ValueError, match="Each tensor must have its own name"):
            parsed_batch(texts)
    assert first_of_loaders([[1, 2], [3, 4]]) == [1, 3]
    with pytest.raises(ValueError, match="an empty training loader"):
        first_of_loaders(DataLoader([]))
    for batch, message in (
        (torch.zeros(2, 3, 4, 5), "The step of `Model` must run on the batch"),
        (tokens()[:0], "must hold at least 1 sample"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(Model(), batch, cluster(), measured=False)
    for limit in (0, "80"):
        with pytest.raises(ValueError, match="`memory_limit_bytes` must"):
            AutoParallelStrategy(memory_limit_bytes=limit)


@pytest.mark.sweep(kept=None)
def test_the_command_plans_a_project_from_its_script(tmp_path, capsys):
    files = [f"examples/gpt/{name}.yaml" for name in ("base", "pipeline")]  # of four devices on one node
    words = ["plan", "--script", "examples/gpt/main.py", "--config", *files, "--device", "H100"]
    outputs = [f"--output={tmp_path / name}" for name in ("plan.html", "plan.json")]
    given = ["--device-mtbf", "50000h", "--restart", "1min", "--site-bandwidth", "10Gbit/s"]
    given += ["--script-args", "--trainer.accumulate_grad_batches", "2"]
    status = main([*words, "--devices", "8", "--inter-node-bandwidth", "400Gbit/s", "--width", "140", *outputs, *given])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "ByteGPT fits one H100" in shown.out
    assert "class_path: lightning_parallel.HybridParallelStrategy" in shown.out
    assert re.search(r"one every 6,250 h. With a checkpoint every 5.89 h .*, 99.9% of the time is", shown.out)
    assert len(re.findall(r"average of drifts of (?:32|4) bits takes .* local steps, averages take", shown.out)) == 2
    assert re.search(r"devices: 8\n +num_nodes: 1", shown.out)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert len(written["layouts"]) == 10
    assert written["accumulate_grad_batches"] == 2
    accumulated = {tuple(each["mesh"]): each["accumulated"] for each in written["layouts"] if not each["refusal"]}
    assert accumulated[8, 1, 1, 1] == 2
    # A pipeline takes the batches of a step as one, in more microbatches.
    assert accumulated[2, 4, 1, 1] == 1
    assert "<svg" in (tmp_path / "plan.html").read_text()
    for wrong, message in (
        (["--inter-node-bandwidth", "400"], "in bits or bytes per second"),
        (["--device", "X"], "The device must be one of"),
        (["--device-mtbf", "50000"], "must have a unit"),
        (["--rows", "0"], "`--rows` must be at least 1"),
        (["--output", "plan.txt"], "must end in .svg, .html or .json"),
        (["--model", "a:B"], "got both"),
    ):
        assert main([*words, "--devices", "4", *wrong]) == 2
        assert message in capsys.readouterr().err
    words = ["plan", "--model", "tests.planner.test_planner:Model", "--devices", "2", "--device", "T4"]
    assert main(words) == 2
    assert "A batch must be given" in capsys.readouterr().err
    words += ["--batch", "8x6:int64"]
    assert main([*words, "--layers", "nope"]) == 2
    assert "`layers` must name a module; got `nope`" in (error := capsys.readouterr().err)
    assert "Containers: `blocks`" in error
    assert main([*words, "--memory", "1GiB"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"No layout of 2 x T4 .*\(4 layouts tried\). `.* 2` comes closest.*Use more", shown.err)
    assert "class_path" not in shown.out


def test_the_plan_is_read_on_eighty_columns_and_names_what_was_assumed():
    found = plan(Model(layers=16), tokens(), Cluster(device_named("T4"), 16, 8), measured=False)
    shown = text_of(found, 80)
    rows = [line for line in shown.splitlines() if re.match(r" *\d+ x \d+ x \d+  ?", line)]
    assert len(rows) == len(found.possible) > 5
    for row, layout in zip(rows, found.possible):
        cells = row.split()
        data, pipeline, _, tensor = layout.mesh.shape
        assert cells[:5] == f"{data} x {pipeline} x {tensor}".split()
        assert cells[-1].replace(",", "") == f"{layout.samples_per_s:.0f}"
        assert not layout.schedule or layout.mesh.pipeline_parallel == 1 or layout.schedule in row
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("schedule", "memory", "step", "bubble", "comm", "samples/s"):
        assert word in shown
    assumed = "100 GB/s and 5 us within a node (`--intra-node-bandwidth`), 12.5 GB/s and 15 us between nodes"
    assert assumed in one_line(shown)
    given = plan(Model(layers=2), tokens(), cluster(8, 4, memory_bytes=2e6), measured=False)
    shown = one_line(text_of(given, 80))
    assert "assumed" not in shown
    assert "1 x 4 x 2: 2 layers are too few for 4 stages" in shown
    assert re.search(r"warnings: .*1 x 1 x 8: .*tensor parallelism spans nodes", shown)


def test_the_legend_stays_in_its_half_of_the_picture():
    # All kinds of both: replicas, pipelines and tensor axes that share two cores.
    found = plan(Model(), tokens()[:, :1], cluster(8, 8, cores=2, memory_bytes=1e9), measured=False)
    texts = fromstring(draw_plan(found)).iter("{http://www.w3.org/2000/svg}text")
    small = [text for text in texts if text.get("font-size") == "11"]
    places = [(float(text.get("x")), float(text.get("y")), text.text) for text in small]
    legend = [(x, y, name) for x, y, name in places if 95 < y < 140]
    assert {name for _, _, name in legend} >= {"parameters", "buckets", "gradient reduction", "waiting for cores"}
    halves = [[entry for entry in legend if (entry[0] > 905) == right] for right in (False, True)]
    for half, end in zip(halves, (905, 1440 - 28)):
        for (x, y, name), (x2, y2, _) in pairwise([*half, (end, half[-1][1], "")]):
            assert x + 6.6 * len(name) <= (x2 if y2 == y else end), name
    assert len({y for _, y, _ in halves[1]}) == 2


@pytest.mark.sweep(kept=None)
def test_replicas_hold_slices_where_they_divide_state():
    plans = [plan(Model(), tokens(), cluster(), measured=False, zero_stages=(stage,)) for stage in (0, 1, 2)]
    names = {layout.name for layout in plans[0].layouts if not layout.refusal and layout.mesh.data_parallel > 1}
    assert names
    for name in names:
        whole, first, second = (
            next(layout for layout in found.layouts if layout.name == name).memory for found in plans
        )
        replicas = next(layout for layout in plans[0].layouts if layout.name == name).mesh.data_parallel
        assert first.optimizer == second.optimizer == whole.optimizer / replicas
        assert first.gradients == whole.gradients >= second.gradients


def test_accumulated_batches_share_one_reduction_and_one_update():
    alone, four = (plan(Model(), tokens(), cluster(), measured=False, accumulated=count) for count in (1, 4))
    once = {layout.mesh: layout for layout in alone.possible}
    for layout in four.possible:
        single = once[layout.mesh]
        if layout.schedule == single.schedule and layout.microbatches == single.microbatches:
            assert layout.samples == 4 * single.samples
            for kind, seconds in layout.step.by_kind().items():
                times = 1 if kind in ("reduction", "optimizer") else 4
                assert seconds == pytest.approx(times * single.step.by_kind()[kind]), kind
    data = next(layout for layout in four.possible if layout.mesh == Mesh(4, 1, 1))
    assert data.step.reduction > 0
    assert data.samples == 4 * 4 * SAMPLES
    assert "accumulate_grad_batches" not in layout_yaml(four, data), "the project has it"
    # As large a step: fewer batches of each replica than the project accumulates.
    equal = plan(Model(), tokens(), cluster(), measured=False, accumulated=4, global_batch=4 * SAMPLES)
    data = next(layout for layout in equal.possible if layout.mesh == Mesh(4, 1, 1))
    assert yaml.safe_load(layout_yaml(equal, data))["trainer"]["accumulate_grad_batches"] == data.accumulated == 1
    assert accumulated_batches(None, None) == 1
    assert accumulated_batches(3, [object()]) == 3
    assert accumulated_batches(None, GradientAccumulationScheduler({0: 2, 5: 8})) == 2
    with pytest.raises(ValueError, match="at least 1 batch in an optimizer step"):
        plan(Model(), tokens(), cluster(), accumulated=0)


@pytest.mark.sweep(kept=None)
def test_the_plan_says_whether_compression_pays():
    said = {}
    for name, (node_link, options) in {
        "slow": (Link(1e-6, 1e5), {}),
        "fast": (Link(1e-9, 1e12), {}),
        "sliced": (Link(1e-6, 1e5), {"zero_stages": (2,)}),
    }.items():
        small = Cluster(SMALL, 2, 2, node_link, memory_bytes=1e9)
        found = plan(Model(), tokens(), small, measured=False, **options)
        data = next(layout for layout in found.possible if layout.mesh == Mesh(2, 1, 1))
        # Only replicas are compared: at such a link another layout is faster.
        found = replace(found, layouts=(data,))
        said[name] = data, one_line(text_of(found, 80))
    data, text = said["slow"]
    gradients = 4 * sum(parameter.numel() for parameter in Model().parameters())
    kernels_s = layouts.COMPRESSION_PASSES * gradients / 1e9
    # Two ranks, a ring: each sends half of the bytes twice.
    assert data.step.reduction == pytest.approx(gradients / 1e5, rel=0.02)
    assert data.compressed_reduction_s == pytest.approx(gradients / 4e5 + kernels_s, rel=0.02)
    step_s = data.step.total - data.step.reduction + data.compressed_reduction_s
    assert (
        "Gradient compression pays in layout 1, over 0.0001 GB/s between replicas: a step takes"
        f" {seconds_text(step_s)} with `Quantize(8)` and {seconds_text(data.step.total)} without it." in text
    )
    assert "Gradient compression does not pay in layout 1, over 1,000 GB/s" in said["fast"][1]
    data, text = said["sliced"]
    assert data.compressed_reduction_s is None
    assert "compression" not in text


def text_of(found, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(plan_text(found))
    return console.file.getvalue()


def one_line(text):
    return " ".join(text.split())
