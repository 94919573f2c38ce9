# SPDX-License-Identifier: Apache-2.0
"""The record of a run (run.json): packages, hardware, seeds, code, data and results."""

import importlib.metadata
import json
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from dschat.base.atomic import write_file
from dschat.base.jsonl import json_value

PACKAGES = (
    "ma-rlhf",
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "datasets",
    "peft",
    "tokenizers",
    "numpy",
    # Optional ones:
    "vllm",
    "flash-attn",
    "bitsandbytes",
    "spacy",
    "benepar",
    "gradio",
)
# Variables by which a hook of git names another repository; they would come before git's option -C.
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
COMMIT_VARIABLE = "MA_RLHF_COMMIT"  # the commit of an image, which has no .git folder
CHECKOUT = (Path(__file__).parent / "../../../..").resolve()  # root of the repository, if the package lies in one


@dataclass
class RunRecord:
    """The content of run.json; ``finished`` is True once the final models are saved and evaluated.

    In a run that was resumed, ``started`` to ``code`` describe its last process.
    """

    step: str  # sft, reward, ppo, …
    started: str
    command: list[str]
    packages: dict[str, str]
    hardware: dict[str, object]
    seeds: dict[str, int]
    code: dict[str, str | None]  # version of this package; in a git checkout or an image also its commit
    template_date: str = ""  # date that chat templates see; unchanged when the run resumes
    data: dict[str, object] = field(default_factory=dict)
    batches: dict[str, object] = field(default_factory=dict)
    parser: dict[str, str] = field(default_factory=dict)  # name and version, with the termination condition "parsing"
    sandbox: str | None = None  # sandbox level of programs
    decoding: str | None = None  # whether decoding steps are CUDA graphs; if not, why
    layers: dict[str, str] = field(default_factory=dict)  # trained model → how decoder layers are computed
    first_metrics: dict[str, float] = field(default_factory=dict)  # metrics of the first evaluation
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    metrics_update: int = 0  # number of updates made before `metrics` were measured
    saved: list[str] = field(default_factory=list)  # folders of saved models, in order
    resumed_at: list[int] = field(default_factory=list)  # numbers of updates at which the run was resumed
    tracker_runs: dict[str, str] = field(default_factory=dict)  # tracker → id of its run, resumed with this one
    finished: bool = False

    def record_evaluation(self, metrics: dict[str, float], update: int) -> None:
        """Records an evaluation. The first one stays, for comparison in the log."""
        self.first_metrics = self.first_metrics or metrics
        self.metrics = metrics
        self.metrics_update = update

    def save(self, folder: Path) -> None:
        """Writes ``folder/run.json``. Raises OSError."""
        write_file(folder / "run.json", json.dumps(json_value(self), indent=2) + "\n")


def new_record(step: str, command: list[str], seed: int, processes: int) -> RunRecord:
    """A new record with this process's packages and machine."""
    packages = package_versions()
    hardware: dict[str, object] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "processes": processes,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return RunRecord(
        step=step,
        started=started,
        command=command,
        packages=packages,
        hardware=hardware,
        seeds={"seed": seed},
        code=code_version(packages),
    )


def run_of_checkpoint(checkpoint: Path) -> Path:
    """The folder of a checkpoint's run, in which `checkpoints` may be a link to another disk."""
    run = Path(os.path.abspath(checkpoint)).parent.parent
    return run if (run / "run.json").is_file() else checkpoint.resolve().parent.parent


def package_versions() -> dict[str, str]:
    """The versions of those `PACKAGES` that are installed."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def code_version(packages: dict[str, str]) -> dict[str, str | None]:
    """The version of this package and its commit."""
    return {"version": packages.get("ma-rlhf"), "commit": commit_of(CHECKOUT)}


def commit_of(folder: Path) -> str | None:
    """The commit of a git checkout, with -dirty if tracked files have changed since; None if git fails.

    Outside of a checkout: the commit from which the image was built (`COMMIT_VARIABLE`), or None.
    """
    if not (folder / ".git").exists():  # a parent folder may be another project's repository
        return os.environ.get(COMMIT_VARIABLE) or None
    environment = {name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES}
    command = ["git", "-C", str(folder), "--no-optional-locks"]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tag
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
