# SPDX-License-Identifier: Apache-2.0
"""Two machines whose hostnames resolve to 127.0.1.1, as Debian's /etc/hosts says, form a process group."""

import subprocess
import sys

import pytest

from launches import free_port, launch_environment
from two_nodes import ADDRESSES, two_nodes, why_not

RANK = """
import os, torch
from dschat.engine.process_group import process_group
with process_group(60):
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print("sum", int(total), os.environ.get("GLOO_SOCKET_IFNAME"))
"""
# The first machine's default route leads elsewhere, by an interface that the second machine does not reach.
ELSEWHERE = """
ip link add other0 type veth peer name other1
ip address add 10.99.0.1/24 dev other0
ip link set other0 up
ip link set other1 up
ip route add default via 10.99.0.2
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"this machine cannot be two: {why_not()}")
def test_hostnames_that_other_machines_cannot_reach(tmp_path):
    port = free_port()
    ranks = []
    with two_nodes(tmp_path, own_address="127.0.1.1") as nodes:
        for line in ELSEWHERE.strip().splitlines():
            nodes[0].run(*line.split())
        for number, node in enumerate(nodes):
            variables = {"RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            environment = launch_environment(**variables, MASTER_ADDR=ADDRESSES[0], MASTER_PORT=port)
            environment.pop("GLOO_SOCKET_IFNAME", None)
            command = node.command([sys.executable, "-c", RANK], tmp_path)
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    for output, errors in outputs:
        assert output.decode().splitlines()[-1] == "sum 2 eth0", errors.decode()
        assert "GLOO_SOCKET_IFNAME=eth0 is used, since the hostname" in errors.decode()
