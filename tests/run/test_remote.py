# SPDX-License-Identifier: Apache-2.0
"""Several machines by ssh: flags and variables arrive as they are, through a shell, and secrets are never shown."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dschat import remote
from dschat.base.errors import UserError
from dschat.launch import LaunchPlan, launch, plan_launch
from dschat.remote import receive, remote_file, remote_variables
from dschat.settings.processes import LaunchFlags

# In the place of ssh and pdsh: they note their own words, as `ps` would show them, and hand the command to a shell.
SSH = """#!/bin/bash
printf '%s\\n' "ssh $*" >> "$NOTES"
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
[ "$host" != unreachable ] || { echo "no route to host" >&2; exit 255; }
[ "$1" != hostname ] || { echo 127.0.0.1; exit 0; }
exec env -i PATH=/usr/bin:/bin HOME="$HOME" bash -c "$*"
"""
PDSH = """#!/bin/bash
printf '%s\\n' "pdsh $*" >> "$NOTES"
while [ "$1" != -w ]; do shift; done
IFS=, read -ra hosts <<< "$2"; shift 2
number=0
for host in "${hosts[@]}"; do
    line=$(printf '%s' "$*" | sed "s/%%/\\x01/g; s/%n/$number/g; s/%h/$host/g; s/%u/nobody/g; s/\\x01/%/g")
    env -i HOME="$HOME" PATH=/usr/bin:/bin bash -c "${line//$PYTHON/$RECORDER}" || exit 3
    number=$((number + 1))
done
"""
RECORDER = """#!{python}
import json, os, sys
sys.path[:0] = {path!r}
from dschat.remote import receive
place = sys.argv.index("dschat")
(rank,) = [word.split("=")[1] for word in sys.argv if word.startswith("--node_rank=")]
receive()
found = dict(words=sys.argv[place + 1:], environment=dict(os.environ), folder=os.getcwd())
file = os.environ.get("MA_RLHF_VARIABLES")
found["mode"] = oct(os.stat(file).st_mode & 0o777) if file else ""
json.dump(found, open({folder!r} + "/rank-" + rank, "w"))
"""
GIVEN = json.dumps({"words": ["ppo", "--a=x & touch evil", "two  words", ""], "flags": {"b": "$(touch evil) 'é\n"}})
SECRETS = {"VLLM_API_KEY": "s3cret one", "HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "s3cret$HOME"}
SECRETS |= {"OPENAI_API_KEY": "s3cret'\"`id`", "https_proxy": "http://me:s3cret@proxy:8080"}
PUBLIC = {"HF_HUB_OFFLINE": "1", "WANDB_NAME": "my run $(id)", "MA_RLHF_DATA": "/data", "HF_HOME": ""}


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """A folder with stand-ins of ssh and pdsh on the PATH, and of Python on the other machines."""
    recorder = tmp_path / "recorder"
    path = [entry for entry in sys.path if entry]
    programs = {"ssh": SSH, "pdsh": PDSH}
    programs["recorder"] = RECORDER.format(python=sys.executable, path=path, folder=str(tmp_path))
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("first slots=1\nsecond slots=1\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    variables = {"NOTES": str(tmp_path / "notes"), "PYTHON": sys.executable, "RECORDER": str(recorder)}
    for name, value in {**variables, **SECRETS, **PUBLIC, "DS_ACCELERATOR": "cpu", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_flags_and_variables_arrive(machines, capfd):
    """DeepSpeed's launcher builds the command lines; a shell reads them."""
    (machines / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n\n# ours\nOWN=a b$HOME\n")
    hosts = machines / "hosts"
    processes = LaunchPlan(2, 1, ssh_options=("--hostfile", str(hosts)), ssh_hosts=("first", "second"))
    assert launch(processes, ["ppo"], given=GIVEN) == 0
    shown = "".join(capfd.readouterr()) + (machines / "notes").read_text()
    for rank in (0, 1):
        found = json.loads((machines / f"rank-{rank}").read_text())
        assert found["words"] == ["ppo"] and found["folder"] == str(machines / "work")
        expected = SECRETS | PUBLIC | {"NCCL_DEBUG": "INFO", "OWN": "a b$HOME", "MA_RLHF_GIVEN": GIVEN}
        assert {name: found["environment"].get(name) for name in expected} == expected
        assert found["mode"] == "0o600"
        assert not Path(found["environment"]["MA_RLHF_VARIABLES"]).exists()
    assert "s3cret" not in shown and "pdsh" in shown and "ssh" in shown
    assert not list(machines.rglob("evil"))


STANDIN = """
import json, os, sys
sys.path.remove({folder!r})
del sys.modules["dschat"]
from dschat.remote import receive
receive()
found = dict(words=sys.argv[1:], environment=dict(os.environ))
json.dump(found, open({folder!r} + "/rank-" + os.environ["RANK"], "w"))
"""


def test_a_list_of_one_machine(machines, monkeypatch):
    """DeepSpeed's launcher starts its processes by itself."""
    (machines / "dschat").mkdir()
    (machines / "dschat" / "__init__.py").touch()
    (machines / "dschat" / "__main__.py").write_text(STANDIN.format(folder=str(machines)))
    monkeypatch.setenv("PYTHONPATH", str(machines))
    hosts = machines / "hosts"
    hosts.write_text("first slots=2\n")
    processes = plan_launch(LaunchFlags(hostfile=str(hosts)), None)
    assert not processes.ssh_hosts and processes.world_size == 2
    assert launch(processes, ["ppo"], given=GIVEN) == 0
    for rank in (0, 1):
        found = json.loads((machines / f"rank-{rank}").read_text())
        assert found["words"] == ["ppo"]
        expected = SECRETS | PUBLIC | {"MA_RLHF_GIVEN": GIVEN}
        assert {name: found["environment"].get(name) for name in expected} == expected


def test_a_machine_that_cannot_be_reached(machines):
    """What it was to be sent is not in the message; what others got is removed."""
    with pytest.raises(UserError, match="variables could not be sent to unreachable by ssh: no route to host") as told:
        with remote_file({"KEY": "s3cret"}, ["first", "unreachable"]):
            raise AssertionError("nothing is started")
    assert "s3cret" not in str(told.value)
    path = re.findall(r"rm -f (\S+)", (machines / "notes").read_text())[0]
    assert not Path(path).exists()


def test_a_machine_that_is_slow_when_another_fails(machines):
    """The file that it writes late is removed as well."""
    slow = SSH.replace("exec env", '[ "$host" != slow ] || [[ $* == rm* ]] || sleep 1\nexec env')
    (machines / "ssh").write_text(slow)
    with (
        pytest.raises(UserError, match="sent to unreachable"),
        remote_file({"KEY": "s3cret"}, ["unreachable", "slow"]),
    ):
        raise AssertionError("nothing is started")
    path = re.findall(r"rm -f (\S+)", (machines / "notes").read_text())[0]
    time.sleep(1.5)
    assert not Path(path).exists()


@pytest.mark.parametrize(("when", "number"), [("sending", signal.SIGTERM), ("removing", signal.SIGINT)])
def test_a_signal_while_variables_are_sent_or_removed(when, number, machines):
    """Leaves no file behind; nothing is started where it comes before."""
    pattern = "*'cat >'*" if when == "sending" else "rm*"
    kill = f"[[ $* != {pattern} ]] || {{ kill -{number.value} {os.getpid()}; sleep 0.3; }}"
    (machines / "ssh").write_text(SSH.replace("exec env", f"{kill}\nexec env"))
    before = signal.getsignal(number)
    processes = LaunchPlan(2, 1, ssh_options=("--hostfile", str(machines / "hosts")), ssh_hosts=("first", "second"))
    status = launch(processes, ["ppo"])
    notes = (machines / "notes").read_text()
    assert status == (143 if when == "sending" else 0)
    assert ("pdsh" in notes) == (when == "removing") and signal.getsignal(number) == before
    assert not Path(re.findall(r"rm -f (\S+)", notes)[0]).exists()


def test_a_closed_terminal_is_told_to_the_launcher_as_sigterm():
    """DeepSpeed's launcher handles SIGTERM and SIGINT alone."""
    command = ["sh", "-c", "trap 'exit 9' HUP; trap 'exit 8' TERM; echo ready; while :; do sleep 0.05; done"]
    launcher = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"ready\n"
    remote._send_to_launcher(launcher, signal.SIGHUP)
    assert launcher.wait(30) == 8
    remote._send_to_launcher(launcher, signal.SIGHUP)  # it has gone


@pytest.mark.parametrize(("missing", "package"), [("pdsh", "pdsh"), ("ssh", "openssh-client")])
def test_a_program_that_is_missing(missing, package, machines, monkeypatch):
    (machines / missing).unlink()
    monkeypatch.setenv("PATH", str(machines))
    processes = LaunchPlan(2, 1, ssh_options=("--hostfile", str(machines / "hosts")), ssh_hosts=("first", "second"))
    with pytest.raises(UserError, match=f"reached by {missing}, .*Debian package {package}"):
        launch(processes, ["ppo"])


def test_what_the_package_reads_is_carried():
    """Every key, token and setting of our own that the code names, but for those of one process or machine alone."""
    names = set()
    for file in Path(remote.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        names |= {*re.findall(r'"([A-Z][A-Z0-9_]*_(?:API_KEY|TOKEN)|MA_RLHF_[A-Z_]+)"', text)}
    assert {"REWARD_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY", "MA_RLHF_DATE"} <= names
    names -= {f"MA_RLHF_{name}" for name in ("FOLLOWS_LAUNCHER", "ERROR_FILE", "VARIABLES", "RUN_DATE", "COMMIT")}
    assert names == {*remote_variables(dict.fromkeys(names, "x"), {})}


def test_a_file_that_is_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("MA_RLHF_VARIABLES", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="gone, the variables of this run on this machine, cannot be read"):
        receive()


def test_which_variables_are_delivered():
    """Not those of one machine or process; the file of variables has precedence."""
    delivered = dict.fromkeys(("HF_TOKEN", "HTTPS_PROXY", "NCCL_DEBUG", "UCX_TLS", "CUDA_LAUNCH_BLOCKING"), "/p/%h $x")
    others = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "MA_RLHF_ERROR_FILE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"), "0")
    assert remote_variables(delivered | others, {}) == delivered
    assert remote_variables({"NCCL_X": "a$b"}, {"NCCL_X": "plain", "OWN": "1"}) == {"NCCL_X": "plain", "OWN": "1"}


def test_what_the_start_of_python_depends_on():
    """DeepSpeed's launcher passes it on, unless its name is that of a secret; a file would come too late."""
    assert remote_variables({"PATH": "/bin", "PYTHON_KEYRING_BACKEND": "x"}, {}) == {"PYTHON_KEYRING_BACKEND": "x"}
    with pytest.raises(UserError, match="PYTHONPATH: the shell of another machine would read its value otherwise"):
        remote_variables({"PYTHONPATH": "/a:$x"}, {})
    with pytest.raises(UserError, match="DS_ENV_FILE: PYTHONPATH is read when Python starts"):
        remote_variables({}, {"PYTHONPATH": "/a"})


@pytest.mark.parametrize("folder", ["two words", "a%b"])
def test_a_folder_that_the_launcher_cannot_name(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(UserError, match="--hostfile: the current folder, .* use a path of letters, digits"):
        remote.check_paths()
