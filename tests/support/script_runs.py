# SPDX-License-Identifier: Apache-2.0
"""Training scripts and presets: their resolved settings, and the commands that the scripts would start."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cli_runs import STEPS, TIMEOUT, TRAINING, Result, environment, run_command, warm_programs
from dschat.cli import COMMANDS
from dschat.settings.parse import Resolved, resolve
from dschat.settings.presets import preset_names

SCRIPTS = sorted(TRAINING.glob("*/training_scripts/*.sh"))
GEMMA = {step: folder / "training_scripts" / "run_gemma.sh" for step, folder in STEPS.items()}
METHODS = ("easyppo", "sao")  # presets of step 3 without a model and data, for any run
FEW_ROWS = "few_rows"  # the same for every step
PRESETS = [
    (step, name)
    for step in ("sft", "reward", "dpo", "ppo")
    for name in preset_names(step)
    if name not in (*METHODS, FEW_ROWS)
]
# Everything that a preset or the launcher reads, so that a test sees nothing of the machine it runs on.
VARIABLES = (
    *("PROJ_PATH", "MODEL", "REWARD_MODEL", "DATA", "MA_RLHF_DATA", "NUM_GPUS", "MASTER_PORT", "CLUSTER"),
    *("HOSTFILE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "DS_ENV_FILE", "PARSER", "PARSER_MODEL"),
)
SHIM = re.compile(r'exec python -m dschat (\S+) --config (\S+) "\$@"')
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD.$RANK"
env > "$RECORD.$RANK.env"
exit ${RECORDER_STATUS:-0}
"""
# Python reads it first: a rank of dschat, or DeepSpeed's launcher, becomes another program.
BECOMES_ANOTHER = """
import os, sys
module = sys.orig_argv[1:3]
if module == ["-m", "deepspeed.launcher.runner"] or (module == ["-m", "dschat"] and "RANK" in os.environ):
    os.execv({program!r}, [{program!r}, *sys.orig_argv[3:]])
"""


def called(script: Path) -> tuple[str, str]:
    """Subcommand and preset of a training script."""
    found = SHIM.search(script.read_text(encoding="utf-8"))
    assert found is not None, script
    return found[1], found[2]


def preset(step: str, name: str, words: Any = (), processes: int = 1, **variables: str) -> Resolved[Any]:
    """What a preset says, with flags that win over it, in an environment of these of VARIABLES alone."""
    kept = {key: value for key, value in os.environ.items() if key not in (*VARIABLES, "WORLD_SIZE")}
    with patch.dict(os.environ, kept | variables, clear=True):
        kind = COMMANDS[step].flags_class()
        given = [str(word) for word in words]
        return resolve(kind, given, command=step, processes=processes, config=name)


def false_ranks(folder: Path, program: str) -> dict[str, str]:
    """Variables under which a program, with its first line, stands in the place of ranks and DeepSpeed's launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "program"
    file.write_text(program)
    file.chmod(0o755)
    (folder / "sitecustomize.py").write_text(BECOMES_ANOTHER.format(program=str(file)))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def run_recorded(script: Path, tmp_path: Path, *flags: Any, **variables: str | None) -> Result:
    """How a script ends whose ranks only leave tmp_path/record.RANK; two of them, if nothing else is given."""
    given = dict.fromkeys(VARIABLES) | {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "2"} | variables
    given |= false_ranks(tmp_path / "programs", RECORDER) | {"RECORD": str(tmp_path / "record")}
    return run_command(["bash", script, *flags], cwd=tmp_path, **given)


def recorded(tmp_path: Path, rank: int = 0) -> tuple[list[str], dict[str, str]]:
    """What the last script gave a rank: the words of `dschat`, and the environment."""
    words = (tmp_path / f"record.{rank}").read_text().split("\0")[:-1]
    lines = (tmp_path / f"record.{rank}.env").read_text().splitlines()
    return words, dict(line.split("=", 1) for line in lines if "=" in line)


def bash(command: str, cwd: Path, stdin: str = "", **variables: str) -> Result:
    """A line as a user types it, with this suite's programs first on the PATH; see `warm_programs`."""
    path = os.pathsep.join(map(str, (warm_programs(), Path(sys.executable).parent, os.environ["PATH"])))
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(**{"PATH": path} | variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return Result(done.returncode, done.stdout, done.stderr)
