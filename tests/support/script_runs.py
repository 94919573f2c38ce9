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
PRESETS = [(step, name) for step in ("sft", "reward", "dpo", "ppo") for name in preset_names(step)]
# Everything that a preset or the launcher reads, so that a test sees nothing of the machine it runs on.
VARIABLES = (
    *("PROJ_PATH", "MODEL", "REWARD_MODEL", "DATA", "MA_RLHF_DATA", "NUM_GPUS", "MASTER_PORT", "CLUSTER"),
    *("HOSTFILE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "DS_ENV_FILE", "PARSER", "PARSER_MODEL"),
)
SHIM = re.compile(r'exec python -m dschat (\S+) --config (\S+) "\$@"')
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD"
env > "$RECORD.env"
[ -z "$DS_ENV_FILE" ] || cp "$DS_ENV_FILE" "$RECORD.remote"
for word; do [ "$last" = --hostfile ] && cp "$word" "$RECORD.hostfile"; last=$word; done
exit ${RECORDER_STATUS:-0}
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


def false_launcher(folder: Path, program: str) -> dict[str, str]:
    """Variables under which a program, with its first line, stands in the place of DeepSpeed's launcher."""
    place = folder / "deepspeed" / "launcher"
    place.mkdir(parents=True, exist_ok=True)
    file = place / "program"
    file.write_text(program)
    file.chmod(0o755)
    for package in (place.parent, place):
        (package / "__init__.py").write_text("")
    (place / "runner.py").write_text(f"import os, sys\nos.execv({str(file)!r}, sys.argv)\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def run_recorded(script: Path, tmp_path: Path, *flags: Any, **variables: str | None) -> Result:
    """How a script ends whose launcher only leaves tmp_path/record; two processes, if nothing else is given."""
    given = dict.fromkeys(VARIABLES) | {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "2"} | variables
    given |= false_launcher(tmp_path / "programs", RECORDER) | {"RECORD": str(tmp_path / "record")}
    return run_command(["bash", script, *flags], cwd=tmp_path, **given)


def recorded(tmp_path: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """What the last script gave its launcher: the launcher's flags, those of `dschat`, and the environment."""
    words = (tmp_path / "record").read_text().split("\0")[:-1]
    place = words.index("dschat")
    lines = (tmp_path / "record.env").read_text().splitlines()
    return words[:place], words[place + 1 :], dict(line.split("=", 1) for line in lines if "=" in line)


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
