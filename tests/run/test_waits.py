# SPDX-License-Identifier: Apache-2.0
"""Processes that wait for one that never comes: the wait ends, and says for whom."""

import os
import signal
import subprocess
import time

import pytest

from cli_runs import warm_programs
from dschat.run import distributed
from launches import free_port, launch_environment

RANK = """
import os, sys, time
import torch.distributed as dist
from dschat.base.errors import is_lost_peer
from dschat.run.distributed import barrier, largest_over_ranks, make_host_groups, missing_ranks
dist.init_process_group("gloo")
make_host_groups(3.0 if sys.argv[1] == "sleeps" else 60.0, 3.0)
barrier()
print("joined", flush=True)
if dist.get_rank() == 1:
    if sys.argv[1] != "ends":
        time.sleep(60)
    os._exit(9)
time.sleep(0.2)
try:
    largest_over_ranks(0) if sys.argv[1] == "sleeps" else barrier()
except RuntimeError as error:
    if sys.argv[1] == "sleeps":
        print(missing_ranks(2), flush=True)
    print("said:", " ".join(str(error).split()), is_lost_peer(error), flush=True)
    os._exit(1)
"""


def run_three(how, tmp_path):
    """Statuses and outputs of ranks 0 and 2, and the seconds that they took after all three had joined."""
    port, script, ranks = free_port(), tmp_path / "rank.py", []
    script.write_text(RANK)
    for number in range(3):
        variables = {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [warm_programs() / "python", script, how]
        environment = launch_environment(**variables)
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    assert ranks[0].stdout.readline() == "joined\n"
    begun = time.monotonic()
    outputs = [ranks[number].communicate(timeout=60)[0] for number in (0, 2)]
    seconds = time.monotonic() - begun
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].communicate()
    return [ranks[0].returncode, ranks[2].returncode], outputs, seconds


def test_a_rank_that_hangs_while_others_save_is_named(tmp_path):
    statuses, outputs, seconds = run_three("hangs", tmp_path)
    assert statuses == [1, 1] and seconds < 40
    assert "waited 3 s (--save_timeout)" in outputs[0] and "Ranks 1 failed" in outputs[0]
    assert "said:" in outputs[1]
    assert all(output.strip().endswith("True") for output in outputs)


def test_a_rank_that_has_gone_is_noticed_at_once(tmp_path):
    statuses, outputs, _ = run_three("ends", tmp_path)
    assert statuses == [1, 1] and "said:" in outputs[0]


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_collective_is_named_afterwards(tmp_path):
    statuses, outputs, seconds = run_three("sleeps", tmp_path)
    assert statuses == [1, 1] and seconds < 40
    assert "Ranks 1 failed to pass monitoredBarrier in 2000 ms" in outputs[0] and "from rank 0" in outputs[1]
    for output in outputs:
        assert "Timed out waiting 3000ms" in output and output.strip().endswith("True")


def test_nobody_is_asked_before_all_have_joined(monkeypatch):
    """NCCL, in which alone they are then, would raise an error of its own in place of the one that is told."""
    monkeypatch.setattr(distributed, "_barrier_group", None)
    assert distributed.missing_ranks(1) == "the processes had not finished joining"
