"""The files for clusters: what they start is a command that the example takes, with as many processes as expected."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.harness import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
GPT = FOLDER.parent / "gpt"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_compose():
    (worker, other) = documents("compose.yaml")[0]["services"].values()
    assert worker["command"] == other["command"]
    text = worker["command"][-1]
    return shlex.split(text[text.index("torchrun") :])[1:], 2, "worker-0"


def of_kubernetes():
    service, claim, job = documents("kubernetes.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    # The Job controller labels its pods so, and calls the first one by the job's name and its index.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert claim["metadata"]["name"] in [
        one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["volumes"]
    ]
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert container["command"][0] == "torchrun"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    return container["command"][1:], spec["completions"], f"{job['metadata']['name']}-0.{pod['subdomain']}"


def of_slurm():
    text = (FOLDER / "train.sbatch").read_text()
    # It would kill processes that are about to end with 75, and srun then returns another status.
    assert "--kill-on-bad-exit=1" not in text
    subprocess.run(["bash", "-n", FOLDER / "train.sbatch"], check=True)
    nodes, tasks = (re.search(rf"#SBATCH --{name}=(\d+)", text).group(1) for name in ("nodes", "ntasks-per-node"))
    command = re.search(r"python (main\.py.*?) \|\|", text.replace("\\\n", ""), re.DOTALL).group(1)
    command = command.replace("$SLURM_NNODES", nodes).replace("$SLURM_NTASKS_PER_NODE", tasks)
    return shlex.split(command), int(nodes), int(tasks)


def configuration_of(arguments):
    # There may be no GPU where this runs.
    words = ["cpu" if word == "gpu" else word.replace("=gpu", "=cpu") for word in arguments]
    ended = run_script(GPT / "main.py", *words[1:], "--print_config", cwd=GPT)
    assert ended.returncode == 0, ended.stderr
    trainer = yaml.safe_load(ended.stdout)["trainer"]
    assert trainer["callbacks"][-1]["class_path"] == "lightning_parallel.AutoResume"
    assert trainer["strategy"]["class_path"] == "lightning_parallel.HybridParallelStrategy"
    return trainer


@pytest.mark.parametrize("read", [of_compose, of_kubernetes])
def test_torchrun_starts_what_the_trainer_expects(read):
    arguments, hosts, first = read()
    options = get_args_parser().parse_args(arguments)
    assert (int(options.nnodes), options.rdzv_backend) == (hosts, "c10d")
    assert options.rdzv_endpoint.split(":")[0] == first
    trainer = configuration_of([options.training_script, *options.training_script_args])
    assert (trainer["num_nodes"], int(trainer["devices"])) == (hosts, int(options.nproc_per_node))


def test_srun_starts_what_the_trainer_expects():
    arguments, nodes, tasks = of_slurm()
    trainer = configuration_of(arguments)
    assert (trainer["num_nodes"], int(trainer["devices"])) == (nodes, tasks)
