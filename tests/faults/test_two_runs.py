# SPDX-License-Identifier: Apache-2.0
"""Two runs in one output folder: the one that comes second is refused in one line, and nothing is lost."""

import random
import runpy
import signal
import time
from functools import partial

import psutil
import pytest
from safetensors.torch import load_file

from cli_runs import arguments, message_of, read_jsonl, result_of, sft_flags_of, start_forked
from dschat.base.lock import Lock
from fault_runs import MOMENTS, RESUME, contents, expect_same, outcome, wait_for
from launches import run_ranks

OVERWRITE = {"overwrite_output_dir": True}
STOPPED = f"{MOMENTS['learning']}|{signal.SIGSTOP.value}"
# The least that a run can be: folder, lock, rows and checkpoints are real, its weight is a number that grows with each
# update. One that begins anew begins with a number of its own. Each has a child that may outlive it by half a minute.
LIGHT = """
import os, signal, sys
import torch
from dschat.settings.supervised import SFTConfig
from dschat.settings.parse import parse
from dschat.main import run_main
from dschat.run.checkpoint import Checkpoints
from dschat.run.state import Progress
from dschat.run.state import random_states

def train(config, run):
    run.begin()
    checkpoints = Checkpoints({}, config, run, {})
    progress = checkpoints.load()
    if progress is None:
        weight = torch.tensor([float(os.getpid() if config.output.overwrite_output_dir else 0)], dtype=torch.float64)
        progress = Progress(0, {}, random_states(), {"weight": weight})
    if os.fork() == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        signal.pause()
    for update in range(progress.update + 1, config.optimisation.num_train_epochs + 1):
        weight = progress.tensors["weight"] + update
        run.metrics.log(update, update, {"weight": float(weight)})
        progress = Progress(update, {}, random_states(), {"weight": weight})
        checkpoints.save(progress)

sys.exit(run_main("sft", lambda: parse(SFTConfig), lambda: train))
"""


def expect_refused(result, out):
    """One line, with the flag, the folder and what to do."""
    message_of(result, f"--output_dir {out}: another process is writing it.", "Wait for its end")


def test_a_second_run_is_refused_and_the_first_one_finishes(trial, whole, inputs, monkeypatch):
    expected, first, second = whole("sft"), trial("sft"), trial("sft", "-second")
    second.flags["output_dir"] = first.out
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", STOPPED)
        process = first.start(partial(runpy.run_path, str(inputs / "own.py")))
    running = psutil.Process(process.pid)
    assert wait_for(lambda: running.status() == psutil.STATUS_STOPPED, process), "it waits in its third update"
    before = contents(first.out)
    for flags in (RESUME, OVERWRITE):
        expect_refused(second.run(**flags), first.out)
        assert contents(first.out) == before
    running.send_signal(signal.SIGCONT)
    first.ended(process).expect(0)
    expect_same(expected, outcome(first.out))
    assert not list(first.out.glob("**/.*")), "nothing is left behind"


@pytest.mark.xdist_group("launcher")
def test_all_ranks_of_a_second_run_are_refused_together_and_one_says_why(inputs, tmp_path):
    out = tmp_path / "out"
    lock = Lock(out / ".lock", "another run")
    flags = sft_flags_of(inputs) | OVERWRITE | {"output_dir": out, "global_batch_size": 8}
    flags["per_device_train_batch_size"] = 4
    first, second = run_ranks("sft", arguments(flags), tmp_path)
    assert (first.status, second.status) == (2, 2), first.stderr + second.stderr
    (said,) = [line for line in (first.stderr + second.stderr).splitlines() if "error" in line]
    assert said.startswith(f"error: [rank 0] --output_dir {out}: another process is writing it.")
    assert "Traceback" not in first.stderr + second.stderr and [file.name for file in out.iterdir()] == [".lock"]
    lock.close()


def expect_whole(checkpoint, start=None):
    """Rows 1 … N of the checkpoint after N updates, and its weight, of one run, which began with `start`."""
    rows = read_jsonl(checkpoint / "metrics.jsonl")
    start = rows[0]["weight"] - 1 if start is None else start
    weights = [start + number * (number + 1) / 2 for number in range(1, int(checkpoint.name[5:]) + 1)]
    assert [(row["update"], row["weight"]) for row in rows] == list(enumerate(weights, start=1))
    assert load_file(checkpoint / "rank-0.safetensors")["weight"].item() == weights[-1]


class Fight:
    """Runs that want one folder, two at a time, and are killed."""

    def __init__(self, inputs, place, flags, draw):
        self.place, self.out, self.draw, self.script = place, place / "out", draw, place / "light.py"
        self.script.write_text(LIGHT)
        self.flags = sft_flags_of(inputs) | {"save_total_limit": 2, "output_dir": self.out} | flags
        self.goes_on = flags is RESUME
        self.running, self.reached = {}, 0
        self.counts = {"started": 0, "killed": 0, "refused": 0, "finished": 0}

    def start(self, number, updates):
        """Starts runs of so many updates until there are that many."""
        while len(self.running) < number:
            self.counts["started"] += 1
            place = self.place / str(self.counts["started"])
            self.running[start_forked(self.script, self.flags | {"num_train_epochs": updates}, place)] = place

    def kill(self):
        """Kills one of the runs at an instant that is drawn, every second time after the other one was refused."""
        if self.draw.random() < 0.5 or not self.counts["refused"]:
            wait_for(lambda: not all(process.is_alive() for process in self.running), next(iter(self.running)))
        time.sleep(self.draw.uniform(0.0, 0.3))
        self._kill(self.draw.choice([process for process in self.running if process.is_alive()]))
        if self.draw.random() < 0.3:  # the other one as well
            for process in [process for process in self.running if process.is_alive()]:
                self._kill(process)
        self.settle()

    def _kill(self, process):
        process.kill()
        process.join()

    def settle(self):
        """What became of the runs that have ended, and of the folder if nobody is in it."""
        for process, place in [pair for pair in self.running.items() if not pair[0].is_alive()]:
            result = result_of(process, place)
            del self.running[process]
            assert "is not used" not in result.stderr, "a kill leaves every checkpoint whole that can be seen"
            how = {-signal.SIGKILL: "killed", 2: "refused", 0: "finished"}[result.status]
            self.counts[how] += 1
            if how == "refused":
                expect_refused(result, self.out)
        if not self.running:
            self.look()

    def look(self):
        """Checks what the folder holds; an older checkpoint may be half deleted."""
        folders = sorted(self.out.glob("checkpoints/step-*"), key=lambda folder: int(folder.name[5:]))
        for folder in folders[-1:]:
            expect_whole(folder, 0 if self.goes_on else None)
        if self.goes_on and folders:
            assert int(folders[-1].name[5:]) >= self.reached, "a checkpoint is lost"
            self.reached = int(folders[-1].name[5:])
        elif folders:
            firsts = [(place / "metrics.jsonl").read_text().splitlines()[0] for place in (self.out, folders[-1])]
            assert firsts[0] == firsts[1], "rows of one run stand beside the checkpoint of another"

    def end(self):
        """Lets the runs come to their end."""
        for process in list(self.running):
            process.join(60)
        self.settle()


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        pytest.param(RESUME, 6, id="resume-6"),
        pytest.param(RESUME, 100, id="resume-100", marks=pytest.mark.slow),
        pytest.param(OVERWRITE, 100, id="overwrite-100", marks=pytest.mark.slow),
    ],
)
def test_two_runs_that_fight_for_a_folder(flags, kills, inputs, tmp_path, capsys):
    fight = Fight(inputs, tmp_path, flags, random.Random(kills))
    try:
        while fight.counts["killed"] < kills:
            fight.start(2, updates=10**6)
            fight.kill()
        for process in list(fight.running):
            fight._kill(process)
        fight.settle()
        fight.start(1, updates=fight.reached + 3)
    finally:
        fight.end()
    assert fight.counts["finished"] == 1 and fight.counts["refused"] > 0
    assert fight.reached > 0 or flags is OVERWRITE, "no kill came after a checkpoint"
    last = fight.out / "checkpoints" / f"step-{fight.reached if flags is RESUME else 3}"
    assert last.exists() and len(read_jsonl(fight.out / "metrics.jsonl")) == int(last.name[5:])
    with capsys.disabled():
        print(f"\n{', '.join(f'{number} {what}' for what, number in fight.counts.items())}, {last.name} at the end")
