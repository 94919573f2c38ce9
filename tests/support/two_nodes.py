# SPDX-License-Identifier: Apache-2.0
"""Two machines in one: each with a network, a hostname and a shared memory of its own, joined by a cable.

They are namespaces of the kernel, which end with the process that holds them. The disk is shared.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from cli_runs import TIMEOUT, warm_programs
from launches import launch_environment
from warm_python import PROGRAM_OF_CHILDREN

NAMES = ("ma-rlhf-0", "ma-rlhf-1")
ADDRESSES = ("10.0.0.1", "10.0.0.2")
NAMESPACES = ("--net", "--uts", "--mount")
# Holds a machine until it is ended. $1: hostname, $2: file of names.
MACHINE = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs shm /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


@cache
def why_not() -> str:
    """Why this machine cannot be two; "" if it can."""
    probe = [
        "unshare",
        *NAMESPACES,
        "sh",
        "-c",
        "mount -t tmpfs shm /dev/shm && ip link add v1 type veth peer name v2",
    ]
    try:
        done = subprocess.run(probe, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


class Node:
    """One of the machines."""

    def __init__(self, number: int, folder: Path) -> None:
        """Starts it, without a cable; see `two_nodes`."""
        self.name, self.address = NAMES[number], ADDRESSES[number]
        hosts = folder / f"hosts-{number}"
        lines = [f"{address} {name}\n" for name, address in zip(NAMES, ADDRESSES, strict=True)]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        words = ["unshare", *NAMESPACES, "sh", "-c", MACHINE, "sh", self.name, str(hosts)]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"
        self._network = os.readlink(f"/proc/{self.holder.pid}/ns/net")

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """The command line that runs a command on this machine, in a folder."""
        return ["nsenter", f"--target={self.holder.pid}", *NAMESPACES, f"--wd={folder}", *words]

    def run(self, *words: str) -> None:
        """Runs a command here to its end, which must be a good one."""
        subprocess.run(self.command(words, Path("/")), check=True)

    def cut_off(self) -> None:
        """Pulls the cable: nothing that is sent arrives, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def processes(self) -> list[psutil.Process]:
        """Whatever runs here."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):  # it has just ended
                if os.readlink(f"/proc/{process.pid}/ns/net") == self._network and process.pid != self.holder.pid:
                    found.append(process)
        return found

    def signal(self, sent: signal.Signals) -> None:
        """Sends a signal to every process at once, as Slurm does."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(sent)

    def close(self) -> None:
        """Ends it, and all that runs here."""
        self.signal(signal.SIGKILL)
        self.holder.kill()
        self.holder.communicate()


@contextmanager
def two_nodes(folder: Path) -> Iterator[list[Node]]:
    """Both machines, with a cable between them; their files of names are in the folder."""
    with ExitStack() as stack:
        nodes = []
        for number in range(len(NAMES)):
            nodes.append(Node(number, folder))
            stack.callback(nodes[-1].close)
        ends = [str(node.holder.pid) for node in nodes]
        cable = ["ip", "link", "add", "eth0", "netns", ends[0], "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*cable, "netns", ends[1]], check=True)
        for node in nodes:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")
        yield nodes


class Started:
    """A command that runs on a machine."""

    def __init__(self, node: Node, words: Sequence[str], log: Path, **variables: str) -> None:
        """Starts it in the log's folder; the Python programs that it starts do without the seconds of imports."""
        self.log = log
        programs = warm_programs()
        environment = launch_environment(**{PROGRAM_OF_CHILDREN: str(programs / "python")}, **variables)
        environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                node.command(words, log.parent), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def end(self, seconds: float = TIMEOUT) -> int:
        """Its status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds} s:\n{self.said}") from None

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")
