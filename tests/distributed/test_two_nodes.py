# SPDX-License-Identifier: Apache-2.0
"""Two machines: every start trains the same or is refused, a slow save is not cut, a lost machine is named."""

import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli_runs import TIMEOUT, arguments, built_once, read_jsonl, sft_flags_of, untimed
from closeness import FORMULA, assert_weights_near, near
from fault_runs import RESUME, expect_same, flags_of, make_inputs, outcome
from launches import LAUNCHER
from two_nodes import NAMES, Node, Started, two_nodes, why_not

pytestmark = [
    pytest.mark.xdist_group("launcher"),
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"this machine cannot be two: {why_not()}"),
]
GLOBAL_BATCH = 8
RATE = 1e-4  # at which WEIGHT_GAP is half of a step


@dataclass(frozen=True)
class Task:
    """One command of a start."""

    node: int
    words: list[str]  # before those of the training step
    more: list[str] = field(default_factory=list)  # flags behind them
    variables: dict[str, str] = field(default_factory=dict)


DSCHAT = ["dschat"]
FIRST = ["--master_addr", NAMES[0]]


def slurm(tasks_per_node: int, more: Sequence[str] = ()) -> list[Task]:
    """The tasks of srun, with what Slurm 22.05 sets in them."""
    total = str(2 * tasks_per_node)
    of_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": total}
    of_step = {
        "SLURM_STEP_NODELIST": "ma-rlhf-[0-1]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x2)",
    }
    tasks = []
    for number in range(2 * tasks_per_node):
        node, local = divmod(number, tasks_per_node)
        own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        tasks.append(Task(node, DSCHAT, list(more), of_job | of_step | own))
    return tasks


def torchrun(*options: str) -> list[str]:
    return ["python", str(LAUNCHER.parent / "torchrun"), *options, "-m", "dschat"]


def pods() -> list[Task]:
    """The pods of a PyTorchJob, of two GPUs each."""
    of_job = {"MASTER_ADDR": NAMES[0], "MASTER_PORT": "23456", "WORLD_SIZE": "4"}
    of_job |= {"PET_MASTER_ADDR": NAMES[0], "PET_MASTER_PORT": "23456", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}
    own = [{"RANK": number, "PET_NODE_RANK": number} for number in ("0", "1")]
    return [Task(number, DSCHAT, variables=of_job | own[number]) for number in (0, 1)]


# Ranks, and the commands that start them. What the variables of each kind of cluster mean: run/test_cluster.py.
STARTS: dict[str, tuple[int, list[Task]]] = {
    "flags": (2, [Task(n, DSCHAT, ["--num_nodes", "2", "--node_rank", str(n), *FIRST]) for n in (0, 1)]),
    "srun, a task per machine": (4, slurm(1, more=["--num_gpus", "2"])),
    "srun, a task per GPU": (4, slurm(2)),
    "torchrun": (2, [Task(n, torchrun("--nnodes", "2", "--node_rank", str(n), *FIRST)) for n in (0, 1)]),
    "PyTorchJob": (4, pods()),
}


@pytest.fixture(scope="session")
def inputs(shared: Path) -> Path:
    """A small corpus, a model, and a reward function beside which the disk can be slow."""

    def build(folder: Path) -> None:
        make_inputs(folder)
        (folder / "slow.py").write_text(SLOW_DISK)

    return built_once(shared, "two-nodes-inputs", build)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """See `two_nodes`."""
    with two_nodes(tmp_path) as machines:
        yield machines


def start(nodes: list[Node], tasks: list[Task], step: list[str], place: Path, **variables: str) -> list[Started]:
    """Starts every command with the words of a training step."""
    place.mkdir(exist_ok=True)
    started = []
    for number, task in enumerate(tasks):
        words = [*task.words, *step, *task.more]
        started.append(Started(nodes[task.node], words, place / f"log-{number}.txt", **variables, **task.variables))
    return started


def said_by(started: list[Started]) -> str:
    return "\n".join(each.said for each in started)


def sft(inputs: Path, out: Path, ranks: int) -> list[str]:
    """Two updates of step 1."""
    sizes = {"per_device_train_batch_size": GLOBAL_BATCH // ranks, "max_steps": 2, "learning_rate": RATE}
    return ["sft", *arguments(sft_flags_of(inputs) | sizes | {"output_dir": out})]


@pytest.fixture(scope="session")
def alone(shared: Path, inputs: Path) -> Path:
    """What one process makes of the same batches."""

    def build(folder: Path) -> None:
        with two_nodes(shared) as machines:
            (started,) = start(machines, [Task(0, DSCHAT)], sft(inputs, folder / "out", 1), folder)
            assert started.end() == 0, started.said

    return built_once(shared, "two-nodes-alone", build) / "out"


@pytest.mark.parametrize("name", STARTS)
def test_every_start_trains_the_same(name, nodes, inputs, alone, tmp_path):
    ranks, tasks = STARTS[name]
    started = start(nodes, tasks, sft(inputs, tmp_path / "out", ranks), tmp_path)
    assert [each.end() for each in started] == [0] * len(tasks), said_by(started)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["hardware"]["processes"] == ranks
    for expected, row in zip(metrics_of(alone), metrics_of(tmp_path / "out"), strict=True):
        assert row == near(expected, FORMULA)
    weights = [load_file(folder / "model.safetensors") for folder in (alone, tmp_path / "out")]
    assert_weights_near(*weights)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [untimed(row) for row in read_jsonl(folder / "metrics.jsonl")]


def test_of_two_torchruns_that_nothing_joins_one_is_refused(nodes, inputs, tmp_path):
    """Nothing but the output folder says that they belong together; the first one may have ended by then."""
    tasks = [Task(n, torchrun("--nproc_per_node", "1")) for n in (0, 1)]
    started = start(nodes, tasks, sft(inputs, tmp_path / "out", 1), tmp_path)
    statuses = sorted(each.end() for each in started)
    said = said_by(started)
    assert statuses == [0, 1], said
    assert "another process is writing it." in said or f"{tmp_path / 'out'} holds a run" in said, said


# -- slow saves, lost machines

# A reward function beside which every flush to the disk takes a while, once there is a file.
SLOW_DISK = """
import os, time

def length(prompts, responses, rows):
    return [float(len(response)) for response in responses]

fsync = os.fsync

def slow(descriptor):
    if os.path.exists(os.environ["SLOW_DISK"]):
        time.sleep(float(os.environ["FLUSH_SECONDS"]))
    fsync(descriptor)

os.fsync = slow
"""
FLUSH_SECONDS = "1.5"
SAVE_TAKES = 6  # seconds, at least
LIMIT = 15  # of --ddp_timeout and --save_timeout, seconds
SAID = "to continue, add --resume_from_checkpoint to the command"
BY_FLAGS = STARTS["flags"][1]


class Run:
    """Step 3 on both machines: eight updates, and a checkpoint after every second one."""

    def __init__(self, nodes: list[Node], inputs: Path, place: Path) -> None:
        """Starts nothing yet."""
        self.nodes, self.place, self.out, self.slow = nodes, place, place / "out", place / "slow"
        self.flags = flags_of("ppo", inputs) | {
            "reward_function": f"{inputs / 'slow.py'}:length",
            "per_device_generation_batch_size": 4,
            "per_device_training_batch_size": 2,
            "max_steps": 8,
            "eval_interval": 4,
            "save_total_limit": 0,
            "output_dir": self.out,
        }

    def start(self, **more: Any) -> list[Started]:
        """Starts the commands of both machines."""
        variables = {"SLOW_DISK": str(self.slow), "FLUSH_SECONDS": FLUSH_SECONDS}
        return start(self.nodes, BY_FLAGS, ["ppo", *arguments(self.flags | more)], self.place, **variables)

    def start_until_a_save(self, **more: Any) -> list[Started]:
        """Returns while the second checkpoint is being written."""
        started = self.start(**more)
        self.wait(lambda: (self.out / "checkpoints" / "step-2").exists(), started)
        self.slow.touch()
        self.wait(lambda: any(self.out.glob(".writing/step-*/*")), started)
        return started

    def wait(self, condition: Callable[[], bool], started: list[Started]) -> None:
        """Waits until something is true, which must happen while all commands run."""
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < end and all(each.process.poll() is None for each in started), said_by(started)
            time.sleep(0.02)

    def check_checkpoints(self) -> None:
        """Every file of every checkpoint has the size and the hash that its manifest says."""
        checkpoints = list(self.out.glob("checkpoints/step-*"))
        assert checkpoints
        for folder in checkpoints:
            for name, file in json.loads((folder / "manifest.json").read_text())["files"].items():
                content = (folder / name).read_bytes()
                assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])


@pytest.fixture(scope="session")
def whole(shared: Path, inputs: Path) -> dict[str, Any]:
    """The outcome of a run that nothing happens to."""

    def build(folder: Path) -> None:
        with two_nodes(shared) as machines:
            started = Run(machines, inputs, folder).start()
            assert [each.end() for each in started] == [0, 0], said_by(started)

    return outcome(built_once(shared, "two-nodes-whole", build) / "out")


def test_a_signal_to_every_process_does_not_cut_a_slow_save(nodes, inputs, whole, tmp_path):
    """As Slurm sends it: to launchers and ranks of both machines, and again."""
    run = Run(nodes, inputs, tmp_path)
    started = run.start_until_a_save()
    begun = time.monotonic()
    for _ in range(2):
        for node in nodes:
            node.signal(signal.SIGTERM)
        time.sleep(0.5)
    assert [each.end() for each in started] == [143, 143], said_by(started)
    assert time.monotonic() - begun > SAVE_TAKES
    assert said_by(started).count(SAID) == 1
    run.check_checkpoints()
    run.slow.unlink()
    again = run.start(**RESUME)
    assert [each.end() for each in again] == [0, 0], said_by(again)
    assert "cut short" not in said_by(again)
    expect_same(whole, outcome(run.out))


def check_end(started: Started, seconds: float, *words: str) -> None:
    """A command whose other machine is lost ends with status 1 in time, and says who is missing and how to go on."""
    assert started.end(seconds) == 1, started.said
    last = started.said.splitlines()[-1]
    assert "add --resume_from_checkpoint" in last and all(word in last for word in words), started.said


def test_a_machine_that_is_lost_during_a_save(nodes, inputs, tmp_path):
    run = Run(nodes, inputs, tmp_path)
    started = run.start_until_a_save(ddp_timeout=LIMIT, save_timeout=LIMIT)
    nodes[0].cut_off()
    nodes[0].signal(signal.SIGKILL)
    check_end(started[1], 3 * LIMIT, "from rank 0")
    run.check_checkpoints()
