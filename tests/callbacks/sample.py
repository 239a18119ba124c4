"""A report with every part, as `ProfileReport` would write it: four ranks, tensor x pipeline, made-up times."""

import math

from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Cost, Link, simulate

MESH = {"data_parallel": 1, "pipeline_parallel": 2, "tensor_parallel": 2}


def sample_report(num_ranks=4, steps=200):
    schedule = build_schedule("1f1b", 2, 4)
    planned = simulate(schedule, [Cost(0.004, 0.004, 0.004), Cost(0.005, 0.005, 0.005)])
    measured = simulate(schedule, [Cost(0.004, 0.004, 0.0045), Cost(0.0052, 0.005, 0.0052)], Link(0.0006))
    return {
        "version": 1,
        "run": {
            "model": "ByteGPT",
            "strategy": "HybridParallelStrategy",
            "world_size": num_ranks,
            "mesh": MESH,
            "schedule": "1f1b",
            "num_microbatches": 4,
            "global_batch": 16,
            "replicas": 1,
            "precision": "32-true",
            "device": "cpu",
            "steps": steps,
            "seconds": steps * 0.084,
            "started": "2026-01-02 10:11",
            "versions": {"lightning_parallel": "0.1.0", "torch": "2.13.0"},
        },
        "reports": {
            "StepBreakdown": {
                "version": 1,
                "steps": steps,
                "ranks": [_rank(rank) for rank in range(num_ranks)],
                "communication_least": [0.0041, 0.0039],
            },
            "PipelineTimeline": {
                "bubble": {"ideal": 0.2, "simulated": 0.264, "measured": 0.303},
                "seconds": {"predicted": 0.061, "simulated": planned.makespan_s, "measured": measured.makespan_s},
                "ranks": [],
                "timeline": {"step": steps - 1, "planned": planned.to_dict(), "measured": measured.to_dict()},
            },
            "CommunicationProfiler": {"records": _records()},
            "MemoryProfiler": {"ranks": [_memory(rank) for rank in range(num_ranks)]},
            "Throughput": {"samples_per_second": 190.4, "tokens_per_second": 24_371.0},
            "StragglerMonitor": {"stragglers": [{"rank": 3, "cause": "forward", "excess": 0.0061}]},
            "ReplicaDriftMonitor": {"findings": []},
        },
        "series": {
            "loss": [[step, 2 + 3 * math.exp(-step / 40)] for step in range(steps)],
            "samples_per_second": [[step, 190 + 6 * math.sin(step)] for step in range(steps)],
            "step_seconds": [[step, 0.084 + 0.002 * math.sin(step)] for step in range(steps)],
        },
        "trace": {"file": "trace.json.gz", "steps": 20, "ranks": list(range(num_ranks)), "uncertainty": 0.0},
    }


def _rank(rank):
    stage, tensor = rank // 2 % 2, rank % 2
    parts = {
        "data_wait": 0.0042,
        "forward": 0.0165 + 0.003 * stage,
        "backward": 0.0331 + 0.004 * stage,
        "communication_exposed": 0.0043,
        "pipeline_wait": 0.019 - 0.008 * stage,
        "optimizer": 0.0035,
        "checkpoint": 0.0004,
        "other": 0.0019,
    }
    return {
        "rank": rank,
        "coordinate": {"data_parallel": 0, "pipeline_parallel": stage, "tensor_parallel": tensor},
        "wall": sum(parts.values()),
        "communication_hidden": 0.0021,
        **parts,
    }


def _records():
    def record(axis, op, count, size, latency, exposed):
        return {
            "axis": axis,
            "op": op,
            "group_size": 2,
            "dtype": "float32",
            "count": count,
            "payload_bytes": size,
            "wire_bytes": size,
            "latency": latency,
            "skew": latency / 5,
            "exposed": exposed,
            "algorithm_bandwidth": size / latency,
            "bus_bandwidth": size / latency,
        }

    return [
        record("tensor_parallel", "all_reduce", 32, 2**19, 0.00016, 0.00013),
        record("pipeline_parallel", "send", 4, 2**18, 0.0003, 0.0),
        record("pipeline_parallel", "recv", 4, 2**18, 0.0003, 0.0002),
    ]


def _memory(rank):
    stage = rank // 2 % 2
    parameters = 1_600_000 + 400_000 * stage
    return {
        "rank": rank,
        "coordinate": {"data_parallel": 0, "pipeline_parallel": stage, "tensor_parallel": rank % 2},
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "compression": 0,
        "activations_peak": 9_000_000 - 4_000_000 * stage,
        "resident_peak": 410_000_000,
    }
