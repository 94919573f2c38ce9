# SPDX-License-Identifier: Apache-2.0
"""The training scripts for tests: what they would start, recorded by a program that stands in for the launcher."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli_runs import STEPS, Result, run_command
from flag_cases import config_of

SCRIPTS = sorted(path for step in STEPS.values() for path in (step / "training_scripts").glob("*.sh"))
GEMMA = {step: folder / "training_scripts" / "run_gemma.sh" for step, folder in STEPS.items()}
# Everything that a script reads, so that a test sees nothing of the machine it runs on.
VARIABLES = (
    *("PROJ_PATH", "MODEL", "REWARD_MODEL", "DATA", "MA_RLHF_DATA", "NUM_GPUS", "MASTER_PORT"),
    *("HOSTFILE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "DS_ENV_FILE"),
)
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD"
env > "$RECORD.env"
[ -z "$DS_ENV_FILE" ] || cp "$DS_ENV_FILE" "$RECORD.remote"
for word; do [ "$last" = --hostfile ] && cp "$word" "$RECORD.hostfile"; last=$word; done
exit ${RECORDER_STATUS:-0}
"""


@dataclass(frozen=True)
class Launch:
    """A recorded start: the launcher's own flags, the program, the program's flags, and the environment."""

    options: list[str]
    program: Path
    flags: list[str]
    environment: dict[str, str]


def step_of(script: Path) -> str:
    """sft, reward, dpo or ppo."""
    return next(step for step, folder in STEPS.items() if folder == script.parent.parent)


def script_id(script: Path) -> str:
    """Name of a script in a test's id."""
    return f"{step_of(script)}-{script.stem}"


def recorded(script: Path, tmp_path: Path, *flags: Any, **variables: str | None) -> Launch:
    """What a script starts; it must end well.

    Args:
        script: one of SCRIPTS.
        tmp_path: PROJ_PATH unless given, the current folder, and place of the record.
        flags: given to the script.
        variables: of its environment; the other VARIABLES are not set.
    """
    run_recorded(script, tmp_path, *flags, **variables).expect(0)
    words = (tmp_path / "record").read_text().split("\0")[:-1]
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    lines = (tmp_path / "record.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    return Launch(words[:place], Path(words[place]), words[place + 1 :], environment)


def run_recorded(script: Path, tmp_path: Path, *flags: Any, **variables: str | None) -> Result:
    """How a script ends whose launcher only leaves tmp_path/record."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    launcher = programs / "deepspeed"
    launcher.write_text(RECORDER)
    launcher.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = dict.fromkeys(VARIABLES) | {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "1"} | variables
    given |= {"PATH": path, "RECORD": str(tmp_path / "record")}
    return run_command(["bash", script, *flags], cwd=tmp_path, **given)


def parsed(launch: Launch, step: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that each of the step's processes would make of it."""
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    return config_of(step, launch.flags, [])
