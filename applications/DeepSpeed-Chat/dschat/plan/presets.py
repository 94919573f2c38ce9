# SPDX-License-Identifier: Apache-2.0
"""The flags that a training script passes on: it runs, with a program in the launcher's place that notes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat.errors import UserError

TRAINING = Path(__file__).resolve().parents[2] / "training"
# A step of the pipeline as --step names it.
Step = int | str
STEPS: dict[str, Step] = {
    "step1_supervised_finetuning": 1,
    "step2_reward_model_finetuning": 2,
    "step2_dpo_finetuning": "dpo",
    "step3_rlhf_finetuning": 3,
    "refuel": "refuel",
}
ONLINE = "online.py"  # of the scripts of REFUEL, those that name this program are of the step refuel_online
# What a script would read of this machine, and must not here: GPUs and machines are those of the plan.
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HOSTFILE", "NODE_RANK", "MASTER_ADDR", "DS_ENV_FILE")
LAUNCHER = """#!/bin/sh
printf '%s\\0' "$@" > "$MA_RLHF_PLAN_RECORD"
"""
CALLED = re.compile(r'^exec bash "\$\(dirname .*\)/(\w+\.sh)"', re.MULTILINE)


@dataclass(frozen=True)
class Preset:
    """A training script."""

    script: Path  # its path
    step: Step
    # Hub id of the published model that its models are made from; None where it is not a published run.
    base: str | None


def find_presets(name: str, step: Step | None) -> list[Preset]:
    """The scripts that a path or name means, in the order of the steps.

    Args:
        name: path of a script, or the name that scripts of several steps share, with or without `.sh`.
        step: only that of this step.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if path.is_file() and path.parent.parent.name in STEPS:
        found = [path.resolve()]
    elif path.is_file():
        raise UserError(f"{name}: plans are made for the training scripts below {TRAINING} alone.")
    else:
        found = [TRAINING / folder / "training_scripts" / f"{name.removesuffix('.sh')}.sh" for folder in STEPS]
    presets = [Preset(script, _step(script), _base(script)) for script in found if script.is_file()]
    presets = [preset for preset in presets if step in (None, preset.step)]
    if not presets:
        known = sorted({script.stem for script in TRAINING.glob("*/training_scripts/*.sh")})
        of_step = f" of step {step}" if step else ""
        raise UserError(
            f"{name}: there is no such training script{of_step}. Give its path, or one of {', '.join(known)}."
        )
    return presets


def flags_of(preset: Preset, gpus: int, flags: Sequence[str]) -> list[str]:
    """What the script passes to the step's main.py.

    Args:
        preset: the script.
        gpus: number of processes.
        flags: given to the script.

    Raises:
        UserError: what the script itself says against it.
    """
    with tempfile.TemporaryDirectory() as folder:
        launcher, record = Path(folder) / "deepspeed", Path(folder) / "record"
        launcher.write_text(LAUNCHER, encoding="utf-8")
        launcher.chmod(0o755)
        path = os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        package = os.pathsep.join(filter(None, [str(TRAINING.parent), os.environ.get("PYTHONPATH")]))
        own = {"NUM_GPUS": str(gpus), "NUM_NODES": "1", "MA_RLHF_PLAN_RECORD": str(record)}
        visible = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        environment = visible | own | {"PATH": path, "PYTHONPATH": package}
        command = ["bash", str(preset.script), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not record.exists():
            message = (done.stderr.strip().splitlines() or ["it starts nothing"])[-1]
            raise UserError(f"{preset.script}: {message.removeprefix('error: ')}")
        words = record.read_text(encoding="utf-8").split("\0")[:-1]
    main = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return words[main + 1 :]


def _step(script: Path) -> Step:
    online = script.parent.parent.name == "refuel" and ONLINE in script.read_text(encoding="utf-8")
    return "refuel_online" if online else STEPS[script.parent.parent.name]


def _base(script: Path) -> str | None:
    """The published model of a script, or of the one that it calls."""
    published = json.loads((TRAINING / "published.json").read_text(encoding="utf-8"))
    name = script.relative_to(script.parents[2]).as_posix()
    found = [run["model"] for run in published["runs"] + published["examples"] if run["script"] == name]
    called = CALLED.search(script.read_text(encoding="utf-8"))
    if not found and called and (script.parent / called[1]).is_file():
        return _base(script.parent / called[1])
    return found[0] if found else None
