# SPDX-License-Identifier: Apache-2.0
"""Two machines whose hostnames resolve to 127.0.1.1, as Debian's /etc/hosts says, form a process group.

The machines are network namespaces with hostnames and /etc/hosts of their own, which root alone may make.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launches import free_port, launch_environment

RANK = """
import os, torch
from dschat.engine.process_group import process_group
with process_group(60):
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print("sum", int(total), os.environ.get("GLOO_SOCKET_IFNAME"))
"""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("ma-rlhf-node0", "ma-rlhf-node1")
# The first machine's default route leads elsewhere, by an interface that the second machine does not reach.
NETWORK = """
ip link add node0 netns ma-rlhf-node0 type veth peer name node1 netns ma-rlhf-node1
ip -n ma-rlhf-node0 link add other0 type veth peer name other1
ip -n ma-rlhf-node0 addr add 10.77.0.1/24 dev node0
ip -n ma-rlhf-node1 addr add 10.77.0.2/24 dev node1
ip -n ma-rlhf-node0 addr add 10.99.0.1/24 dev other0
ip -n ma-rlhf-node0 link set node0 up
ip -n ma-rlhf-node1 link set node1 up
ip -n ma-rlhf-node0 link set other0 up
ip -n ma-rlhf-node0 link set other1 up
ip -n ma-rlhf-node0 link set lo up
ip -n ma-rlhf-node1 link set lo up
ip -n ma-rlhf-node0 route add default via 10.99.0.2
"""


def run(line):
    subprocess.run(line.split(), check=True, capture_output=True)


@pytest.fixture
def machines():
    """Namespaces of the names, between which only `ADDRESSES` connect."""
    folders = [Path("/etc/netns") / name for name in NAMES]
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        run(f"ip netns add {NAMES[0]}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs network namespaces: {error.stderr.decode()}")
    try:
        run(f"ip netns add {NAMES[1]}")
        for line in NETWORK.strip().splitlines():
            run(line)
        for number, folder in enumerate(folders):
            folder.mkdir(parents=True)
            peer = 1 - number
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {NAMES[number]}", f"{ADDRESSES[peer]} {NAMES[peer]}"]
            (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
        yield
    finally:
        for name, folder in zip(NAMES, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("master_addr", [NAMES[0], ADDRESSES[0]])
def test_hostnames_that_other_machines_cannot_reach(master_addr, machines):
    port = free_port()
    ranks = []
    for number, name in enumerate(NAMES):
        variables = {"RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        environment = launch_environment(**variables, MASTER_ADDR=master_addr, MASTER_PORT=port)
        environment.pop("GLOO_SOCKET_IFNAME", None)
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", sys.executable, "-c", RANK]
        command = ["ip", "netns", "exec", name, *inside]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for number, (output, errors) in enumerate(outputs):
        assert output.decode().splitlines()[-1] == f"sum 2 node{number}", errors.decode()
        assert f"GLOO_SOCKET_IFNAME=node{number} is used, since the hostname" in errors.decode()
