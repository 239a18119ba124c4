"""`lightning-parallel plan`: the layouts that fit a model, their speed, and YAML for the best layout."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_parallel.cli.projects import batch_of, precision_of, project_of
from lightning_parallel.pipeline.simulate import Link
from lightning_parallel.planner.failures import Failures, SiteLink
from lightning_parallel.planner.hardware import (
    Cluster,
    Device,
    available_cores,
    device_here,
    device_named,
    measured_cpu,
)
from lightning_parallel.planner.links import measured_links
from lightning_parallel.planner.plan_picture import draw_plan, plan_page
from lightning_parallel.planner.plan_report import plan_text
from lightning_parallel.planner.plans import LayoutPlan, plan
from lightning_parallel.strategies.auto_parallel import accumulated_batches
from lightning_parallel.tracing.spans import duration_text
from lightning_parallel.tracing.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds

__all__ = ["run_plan"]


def run_plan(options: argparse.Namespace) -> int:
    """Plan, print, and write the requested files; return the exit status, 1 if no layout can run."""
    _check(options)
    project = project_of(options)
    cluster = _cluster(options, project.trainer)
    batch, precision = batch_of(project, options), precision_of(project, options)
    # Layers are timed with the threads that a rank of the cluster would have.
    before = torch.get_num_threads()
    torch.set_num_threads(cluster.threads)
    try:
        found = plan(
            project.module,
            batch,
            cluster,
            precision=precision,
            global_batch=options.global_batch,
            accumulated=accumulated_batches(
                project.trainer.get("accumulate_grad_batches"), project.trainer.get("callbacks")
            ),
            sequence_parallel=options.sequence_parallel,
            layers=options.layers,
            tiled=options.tiled,
            larger_batches=True,
        )
    finally:
        torch.set_num_threads(before)
    _show(found, options)
    for line in _outlook(found, options, sum(p.numel() for p in project.module.parameters() if p.requires_grad)):
        print(line)
    if found.obstacle:
        print(f"lightning-parallel plan: {found.obstacle}", file=sys.stderr)
    return 1 if found.obstacle else 0


def _check(options: argparse.Namespace) -> None:
    """Reject mistakes early: a plan may take minutes."""
    for name in ("devices", "per_node", "cores", "rows", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least 1; got {value}")
    for text in filter(None, (options.device_mtbf, options.save_stall, options.restart)):
        parse_seconds(text)
    if options.site_bandwidth:
        parse_bandwidth(options.site_bandwidth)
    for path in options.output:
        if path.suffix not in (".svg", ".html", ".json"):
            raise ValueError(f"`--output` must end in .svg, .html or .json; got `{path.name}`")
        if not path.parent.is_dir():
            raise ValueError(f"The folder of `--output` must exist; got `{path}`; create the folder first")


def _cluster(options: argparse.Namespace, given: Mapping[str, Any]) -> Cluster:
    nodes = int(given.get("num_nodes") or 1)
    asked = given.get("devices")
    per_node = options.per_node
    # In a project on one node, `devices` is the total. It says nothing about the nodes of the planned cluster.
    if per_node is None and (options.devices is None or nodes > 1):
        per_node = asked if isinstance(asked, int) and asked > 0 else None
    devices = options.devices or (per_node * nodes if per_node else None)
    if devices is None:
        raise ValueError("`--devices` must be given, because the project names no number of devices")
    per_node = min(per_node or devices, devices)
    device = _device(options, given)
    memory = parse_bytes(options.memory) if options.memory else 0.0
    if device is not None:
        cluster = Cluster(device, devices, per_node, memory_bytes=memory)
        return _with_links(cluster, options)
    cores = options.cores or available_cores()
    threads = max(1, cores // per_node)
    cluster = Cluster(measured_cpu(threads), devices, per_node, memory_bytes=memory, cores=cores, threads=threads)
    if per_node > 1 and not options.intra_node_bandwidth:
        links = measured_links(per_node, cores)
        cluster = replace(cluster, node_link=links[min(links)], group_links=links)
    return _with_links(cluster, options)


def _device(options: argparse.Namespace, given: Mapping[str, Any]) -> Device | None:
    """Return a device of the table, or the device that the options describe; None for the cores of this machine."""
    name = options.device
    described = [options.peak, options.memory_bandwidth]
    if any(described):
        if name is None or not all(described) or not options.memory:
            raise ValueError(
                "`--peak` and `--memory-bandwidth` describe a device that is not in the table. Give both of them,"
                " `--device` with a name of your choice, and `--memory`"
            )
        peak, memory = parse_flops(options.peak), parse_bytes(options.memory)
        flops = dict.fromkeys(("float32", "float16", "bfloat16"), peak)
        return Device(name, flops, memory, parse_bandwidth(options.memory_bandwidth), source="command line")
    if name is None and torch.cuda.is_available() and given.get("accelerator") != "cpu":
        return device_here(torch.device("cuda", torch.cuda.current_device()))
    return None if name is None or name.lower() == "cpu" else device_named(name)


def _with_links(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    node_link, link = cluster.node_link, cluster.link
    if options.intra_node_bandwidth:
        node_link = Link(node_link.latency_s, parse_bandwidth(options.intra_node_bandwidth))
    if options.inter_node_bandwidth:
        link = Link(link.latency_s, parse_bandwidth(options.inter_node_bandwidth))
    if options.latency is not None:
        link = replace(link, latency_s=parse_seconds(options.latency))
    return replace(cluster, node_link=node_link, link=link)


def _outlook(found: LayoutPlan, options: argparse.Namespace, parameters: int) -> Iterator[str]:
    """Yield what failures, and the link to a second site, cost a long run of the best layout."""
    if options.device_mtbf:
        mtbf_s, stall_s, restart_s = map(parse_seconds, (options.device_mtbf, options.save_stall, options.restart))
        failures = Failures(found.cluster.num_devices, mtbf_s, stall_s, restart_s)
        yield (
            f"Failures: one every {duration_text(failures.mtbf_s)}. With a checkpoint every"
            f" {duration_text(failures.interval_s)} (Daly's interval), {failures.productive_share():.1%} of the time is"
            " productive (ETTR)."
        )
    if options.site_bandwidth and found.best:
        step_s, bandwidth = found.best[0].step.total, parse_bandwidth(options.site_bandwidth)
        for bits in (32, 4):
            link = SiteLink(parameters, bits, bandwidth)
            steps = link.local_steps(step_s)
            yield (
                f"Two sites: an average of drifts of {bits} bits takes {duration_text(link.average_s)}. With {steps:,}"
                f" local steps, averages take {link.share(step_s, steps):.1%} of the time."
            )


def _show(found: LayoutPlan, options: argparse.Namespace) -> None:
    console = Console(width=options.width, highlight=False)
    console.print(plan_text(found, options.rows))
    for path in options.output:
        path.write_text(_written(found, path, options.rows), encoding="utf-8")
        console.print(f"wrote {path}")


def _written(found: LayoutPlan, path: Path, rows: int) -> str:
    if path.suffix == ".svg":
        return draw_plan(found)
    if path.suffix == ".json":
        return json.dumps(found.to_dict(), indent=1)
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(plan_text(found, rows))
    return plan_page(found, console.export_text())
