# SPDX-License-Identifier: Apache-2.0
"""examples/launch: with the variables that each cluster sets, every rank of 16 is started once."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from cli_runs import ROOT
from dschat.cluster import WORKER_VARIABLES
from dschat.settings.flags import flags_of
from dschat.settings.processes import LaunchFlags

EXAMPLES = ROOT / "examples" / "launch"
# In the place of dschat: prints the ranks that it would start here, how many the run has, and where rank 0 is.
DSCHAT = """#!{python}
import json, os, sys
sys.path[:0] = {path!r}
words = sys.argv[1:]
if words[:2] == ["-m", "dschat"]:
    words = words[2:]
from dschat.cli import _read_launch_flags
from dschat.cluster import Rank, is_worker, process_of
from dschat.launch import check_against_rank, plan_launch, variables_of_ranks
flags = _read_launch_flags(words[0], words[1:])
assert "--resume_from_checkpoint" in words and "--save_steps" in words
process = process_of(os.environ)
if is_worker(os.environ):
    found = [[int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]]]
elif isinstance(process, Rank):
    check_against_rank(flags, process)
    found = [[process.rank, process.world_size, flags.master_addr or process.master_addr]]
else:
    plan = plan_launch(flags, process)
    found = [[int(v["RANK"]), plan.world_size, plan.master_addr] for v in variables_of_ranks(plan)]
with open(os.environ["FOUND"], "a") as file:
    file.write("".join(json.dumps(line) + "\\n" for line in found))
"""
# In the place of srun: two machines with eight tasks each, of which $TASKS are started.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
export SLURM_STEP_NUM_TASKS=16 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST='gpu[1-2]' SLURM_STEP_TASKS_PER_NODE='8(x2)'
for task in $(seq 0 $((TASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 8)) SLURM_NODEID=$((task / 8)) "$@" || exit
done
exit ${STATUS:-0}
"""
TORCHRUN = """#!{python}
import os, subprocess, sys
words = dict(zip(sys.argv[1:11:2], sys.argv[2:12:2]))
assert sys.argv[11:13] == ["-m", "dschat"], sys.argv
size = int(words["--nproc_per_node"])
for local in range(size):
    rank = int(words["--node_rank"]) * size + local
    place = dict(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(size * int(words["--nnodes"])))
    place["MASTER_ADDR"] = words["--master_addr"]
    subprocess.run(["dschat", *sys.argv[13:]], env=os.environ | place, check=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command with stand-ins first on the PATH; returns the ranks that were started."""
    names = {"path": [entry for entry in sys.path if entry], "python": sys.executable}
    programs = {"dschat": DSCHAT.format(**names), "torchrun": TORCHRUN.format(**names), "srun": SRUN}
    programs["scontrol"] = '#!/bin/bash\n[ "$1" = requeue ] && echo "requeued $2" >> "$FOUND.requeued"; exit 0\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FOUND", str(tmp_path / "found"))
    variables = {flag.environment for flag in flags_of(LaunchFlags).values() if flag.environment is not None}
    for name in variables.union(WORKER_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def start(command, status=0, **variables):
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == status, done.stderr

    return start


def expect_sixteen(tmp_path, master):
    lines = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert sorted(line[0] for line in lines) == list(range(16))
    assert {(line[1], line[2]) for line in lines} == {(16, master)}


def test_slurm(run, tmp_path):
    """A stopped run is queued again, a finished one is not."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    text = (EXAMPLES / "slurm.sbatch").read_text()
    for option in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=TERM@600", "--requeue"):
        assert f"#SBATCH {option}\n" in text
    run(["bash", str(EXAMPLES / "slurm.sbatch")], 0, TASKS="0", STATUS="0", **variables)
    assert not (tmp_path / "found.requeued").exists()
    run(["bash", str(EXAMPLES / "slurm.sbatch")], 143, TASKS="16", STATUS="143", **variables)
    expect_sixteen(tmp_path, "gpu1")
    assert (tmp_path / "found.requeued").exists()


@pytest.mark.slow
def test_torchrun(run, tmp_path):
    for node in ("0", "1"):
        run(["bash", str(EXAMPLES / "torchrun.sh")], NNODES="2", NODE_RANK=node, MASTER_ADDR="first")
    expect_sixteen(tmp_path, "first")


def test_pytorchjob(run, tmp_path):
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = [replicas["Master"]["template"], replicas["Worker"]["template"]]
    for number, pod in enumerate(pods):
        container = pod["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        # As the operator sets them.
        place = {"PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
        place |= {"WORLD_SIZE": "16", "RANK": str(number), "MASTER_ADDR": "ma-rlhf-master-0", "MASTER_PORT": "23456"}
        run(container["command"], **place)
    expect_sixteen(tmp_path, "ma-rlhf-master-0")


def test_statefulset(run, tmp_path):
    service, pods = yaml.safe_load_all((EXAMPLES / "statefulset.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None" and pods["spec"]["podManagementPolicy"] == "Parallel"
    name = pods["metadata"]["name"]
    for number in range(pods["spec"]["replicas"]):
        container = pods["spec"]["template"]["spec"]["containers"][0]
        run(container["command"], HOSTNAME=f"{name}-{number}")
    expect_sixteen(tmp_path, f"{name}-0.{service['metadata']['name']}")


def test_skypilot(run, tmp_path):
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    for number in range(task["num_nodes"]):
        variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(number), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
        run(["bash", "-c", task["run"]], SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", **variables)
    expect_sixteen(tmp_path, "10.0.0.1")
