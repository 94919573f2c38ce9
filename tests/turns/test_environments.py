# SPDX-License-Identifier: Apache-2.0
"""The processes of environments: how they are started, what they report, and how they end."""

import time
from pathlib import Path

import pytest
import torch

from dschat.base.errors import UserError
from dschat.run.state import SeedKind, derive_seed
from dschat.turns.environment import _checked_flag as checked_flag
from dschat.turns.environment import traits_of
from dschat.turns.environments import EnvironmentPool, Failure, environment_seed
from turn_cases import write_environments


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition, seconds: float = 60.0) -> bool:
    """Whether a condition holds in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


ROUND = "class Environment:\n def reset(self, row, seed): pass\n"


@pytest.mark.parametrize("value", [1, "no", torch.tensor(1.0)])
def test_what_is_no_flag(value) -> None:
    """A number may be the reward in the place of the flag."""
    with pytest.raises(UserError, match="must be true or false"):
        checked_flag(value, "`done`")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Environment:\n def reset(self, *, seed=None): pass\n step = print", r"no method reset\(row, seed\)"),
        (ROUND + " def step(self, action): pass", r"no method step\(messages, reply\)"),
        (
            ROUND + " async def step(self, messages, reply): pass",
            r"step is an async function; give a plain one \(def\)",
        ),
        (ROUND + " step = print\n def __init__(self, level): pass", "is made without arguments"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("import os; os._exit(1)", "ended while it imported the file"),
        ("class Environment:\n reset = step = print\n roles = 'tool'", "`roles` must be a list or tuple.*not text"),
        ("class Environment:\n reset = step = print\n tools = 3", "`tools`"),
    ],
)
def test_classes_that_cannot_be_used(tmp_path, text, said) -> None:
    file = tmp_path / "environment.py"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        EnvironmentPool(f"{file}:Environment", 30.0, 2)


def test_methods_of_other_kinds_are_not_counted() -> None:
    """A static method has no self, and a class method is bound already."""

    class Environment:
        @staticmethod
        def reset(row, seed): ...

        @classmethod
        def step(cls, messages, reply): ...

    assert list(traits_of(Environment).roles) == ["user"]


def test_programs_end_with_their_episode(tmp_path, capfd) -> None:
    pool = EnvironmentPool(f"{write_environments(tmp_path)}:Starts", 30.0, 2)
    with pool.episodes(1) as processes:
        pool.call(processes, [("reset", {"prompt": "a", "folder": str(tmp_path)}, 0)])
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid) and not (tmp_path / "closed").exists()
    assert wait_until(lambda: not is_running(pid)) and (tmp_path / "closed").exists()
    assert capfd.readouterr().out.count("started") == 1
    pool.close()


def test_programs_end_with_an_episode_that_hangs_or_a_pool_that_is_closed(tmp_path) -> None:
    pool = EnvironmentPool(f"{write_environments(tmp_path)}:Starts", 30.0, 2)
    row = {"prompt": "a", "folder": str(tmp_path), "hangs": True}
    pool._timeout = 5.0
    with pool.episodes(1) as processes:
        (result,) = pool.call(processes, [("reset", row, 0)])
        assert isinstance(result, Failure) and "did not return in 5 s" in result.problem
        assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    pool._timeout = 30.0
    with pool.episodes(1) as processes:
        processes[0].send(("reset", row, 0))
        (tmp_path / "pid").unlink()
        assert wait_until((tmp_path / "pid").exists) and wait_until(lambda: (tmp_path / "pid").read_text())
        pid = int((tmp_path / "pid").read_text())
        pool.close()
        assert wait_until(lambda: not is_running(pid))


def test_every_part_changes_the_seed_of_an_environment():
    """The last seed is the one of other uses of the same parts, such as the policy's draws."""
    seeds = [
        environment_seed(7, SeedKind.TRAINING, 2, 3),
        environment_seed(8, SeedKind.TRAINING, 2, 3),
        environment_seed(7, SeedKind.EVALUATION, 2, 3),
        environment_seed(7, SeedKind.TRAINING, 1, 3),
        environment_seed(7, SeedKind.TRAINING, 2, 4),
        derive_seed(7, SeedKind.TRAINING, 2, 3),
    ]
    assert len(set(seeds)) == len(seeds)
