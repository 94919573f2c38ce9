# SPDX-License-Identifier: Apache-2.0
"""The processes of environments: how they are started, what they report, and how they end."""

import functools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dschat.base.errors import UserError
from dschat.run.state import SeedKind, derive_seed
from dschat.turns.environment import _checked_flag as checked_flag
from dschat.turns.environment import traits_of
from dschat.turns.environments import EnvironmentPool, Failure, environment_seed
from turn_cases import write_environments

# An environment that draws with NumPy, and imports it late.
DRAWS = """
class Environment:
    def reset(self, row, seed):
        import numpy

        return [{"role": "user", "content": str(numpy.random.randint(10**6))}]

    def step(self, messages, reply):
        return [], 0.0, True
"""


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


def with_number(method):
    """A decorator that gives a method a further argument."""

    @functools.wraps(method)
    def call(self, row, seed):
        return method(self, 3, row, seed)

    return call


class NumberedEnvironment:
    """Its `reset` has three arguments, of which a decorator gives the first."""

    @with_number
    def reset(self, number, row, seed):
        return [{"role": "user", "content": str(number)}]

    def step(self, messages, reply):
        return [], 1.0, True


def test_a_decorator_may_give_further_arguments() -> None:
    assert traits_of(NumberedEnvironment).roles == ["user"]


@pytest.mark.parametrize(
    ("value", "is_over"),
    [(True, True), (np.bool_(False), False), (np.array(True), True), (torch.tensor(False), False)],
)
def test_flags_of_other_libraries(value, is_over) -> None:
    assert checked_flag(value, "`done`") is is_over


@pytest.mark.parametrize("value", [1, None, "no", torch.tensor(1.0), np.float32(1)])
def test_what_is_no_flag(value) -> None:
    """A number may be the reward in the place of the flag."""
    with pytest.raises(UserError, match="must be true or false"):
        checked_flag(value, "`done`")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Environment: pass", "has no method reset"),
        ("class Environment:\n def reset(self, *, seed=None): pass\n step = print", r"reset\(row, seed\).* too many"),
        (ROUND + " def step(self, action): pass", r"called as step\(messages, reply\): too many positional"),
        (
            ROUND + " async def step(self, messages, reply): pass",
            r"step is an async function; give a plain one \(def\)",
        ),
        (ROUND + " step = print\n def __init__(self, level): pass", "is made without arguments: missing .*'level'"),
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


def test_a_module_that_ignores_the_end_of_its_processes(tmp_path) -> None:
    """Then no status would be left of an episode's process that has ended."""
    file = write_environments(tmp_path)
    file.write_text(f"import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{file.read_text()}")
    pool = EnvironmentPool(f"{file}:Counts", 30.0, 2)
    for _ in range(3):
        with pool.episodes(1) as processes:
            pool.call(processes, [("reset", {"prompt": "a"}, 0)])
            pid = processes[0]._pid
        assert wait_until(lambda pid=pid: not is_running(pid))
    pool.close()


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


def test_numpy_is_seeded_however_late_it_is_imported(tmp_path):
    (tmp_path / "draws.py").write_text(DRAWS)
    pool = EnvironmentPool(f"{tmp_path / 'draws.py'}:Environment", 30.0, 4)
    try:
        with pool.episodes(3) as processes:
            first, second, third = pool.call(processes, [("reset", {}, 7), ("reset", {}, 7), ("reset", {}, 8)])
    finally:
        pool.close()
    assert first == second != third
