# SPDX-License-Identifier: Apache-2.0
"""Signals to a run of several processes: script, launcher and ranks end together, and the run goes on exactly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from cli_runs import STEPS, TIMEOUT, arguments, built_once, environment
from closeness import FORMULA, assert_near
from fault_runs import MOMENTS, RESUME, expect_same, flags_of, outcome
from launches import free_port
from script_runs import GEMMA, VARIABLES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launcher")]
SAID = "to continue, add --resume_from_checkpoint to the command"
HALVES = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 2, "global_batch_size": 4}


class Started:
    """A process that is being run, and everything that it started."""

    def __init__(self, command: list[str], place: Path, **variables: str | None) -> None:
        place.mkdir(exist_ok=True)
        self.log = place / "stderr.txt"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment(**variables), cwd=place, stdout=log, stderr=log)
        self.mark = variables.get("FAULT", "").partition("|/")[2]

    def signal(self, sent: signal.Signals, patience: float = 5) -> tuple[int, float]:
        """Sends a signal once the mark is there; the status, and the seconds until all processes are gone."""
        end = time.monotonic() + TIMEOUT
        while not Path("/", self.mark).exists() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert self.process.poll() is None, self.log.read_text()
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(sent)
        start = time.monotonic()
        status = self.process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=patience)
        assert not alive, "a process was left behind"
        return status, time.monotonic() - start

    def end(self) -> None:
        """Waits for the end, which must be a good one."""
        assert self.process.wait(TIMEOUT) == 0, self.log.read_text()


def script(inputs: Path, place: Path, fault: str = "", **more: object) -> Started:
    """The script of step 3 on two processes."""
    flags = flags_of("ppo", inputs) | HALVES | {"output_dir": place / "out", "dtype": "fp32"} | more
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PROJ_PATH": str(place), "NUM_GPUS": "2", "MASTER_PORT": free_port(), "PATH": path}
    variables |= {"MODEL": str(inputs / "model"), "DS_ACCELERATOR": "cpu", "FAULT": fault}
    return Started(["bash", str(GEMMA["ppo"]), *arguments(flags)], place, **(dict.fromkeys(VARIABLES) | variables))


@pytest.fixture(scope="session")
def whole_of_two(shared: Path, inputs: Path) -> Path:
    """The output of two processes that nothing happened to."""

    def build(folder: Path) -> None:
        script(inputs, folder).end()

    return built_once(shared, "fault-two", build) / "out"


CASES = [
    ("generation", signal.SIGTERM, 143),
    ("training", signal.SIGINT, 130),
    ("saving", signal.SIGTERM, 143),
    ("training", signal.SIGHUP, 129),
]


@pytest.mark.parametrize(("moment", "sent", "status"), CASES, ids=[f"{case[0]}-{case[1].name}" for case in CASES])
def test_a_signal_to_the_script(moment, sent, status, inputs, whole_of_two, tmp_path):
    stopped = script(inputs, tmp_path, f"{MOMENTS[moment]}|{tmp_path}/mark")
    found, seconds = stopped.signal(sent)
    said = stopped.log.read_text()
    assert found == status, said
    assert seconds < 30, said
    assert said.count(SAID) == 1 and f"stopped by {sent.name}" in said, said
    assert "Traceback" not in said, said
    check_going_on(inputs, whole_of_two, tmp_path)


def check_going_on(inputs: Path, whole_of_two: Path, tmp_path: Path) -> None:
    script(inputs, tmp_path, **RESUME).end()
    for file in whole_of_two.glob("*/model.safetensors"):
        expected, weights = load_file(file), load_file(tmp_path / "out" / file.relative_to(whole_of_two))
        for name, tensor in expected.items():
            assert_near(weights[name], tensor, FORMULA)


def test_a_script_that_is_killed_takes_its_processes_along(inputs, whole_of_two, tmp_path):
    """They stop as by SIGTERM, with a checkpoint, though nothing has told them."""
    stopped = script(inputs, tmp_path, f"{MOMENTS['training']}|{tmp_path}/mark")
    found, _ = stopped.signal(signal.SIGKILL, patience=30)
    said = stopped.log.read_text()
    assert found == -signal.SIGKILL and said.count(SAID) == 1 and "stopped by SIGTERM" in said, said
    check_going_on(inputs, whole_of_two, tmp_path)


def test_a_signal_to_one_process(inputs, whole, tmp_path):
    """`python main.py`, without a launcher."""
    flags = flags_of("ppo", inputs) | {"output_dir": tmp_path / "out"}
    command = [sys.executable, str(STEPS["ppo"] / "main.py")]
    stopped = Started([*command, *arguments(flags)], tmp_path, FAULT=f"{MOMENTS['scoring']}|{tmp_path}/mark")
    found, seconds = stopped.signal(signal.SIGINT)
    said = stopped.log.read_text()
    assert found == 130 and seconds < 30 and said.count(SAID) == 1, said
    Started([*command, *arguments(flags | RESUME)], tmp_path).end()
    expect_same(whole("ppo"), outcome(tmp_path / "out"))
