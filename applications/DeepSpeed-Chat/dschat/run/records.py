# SPDX-License-Identifier: Apache-2.0
"""What stands beside a saved model: run.json (where it came from) and a model card (README.md)."""

import importlib.metadata
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch

from dschat.common.fingerprints import file_hash
from dschat.run.terminal import after, evaluation_line
from dschat.run.whole_files import write_whole

logger = logging.getLogger(__name__)

PACKAGES = ("ma-rlhf", "torch", "transformers", "deepspeed", "accelerate", "datasets", "peft", "tokenizers", "numpy")
CHECKOUT = (Path(__file__).resolve().parent / "../../../..").resolve()  # where the package lies in its repository


@dataclass
class RunRecord:
    """Everything known of a run; ``finished`` is True once its main has reached the end."""

    step: str  # as run_main names it: sft, reward, ppo, …
    started: str
    command: list[str]
    packages: dict[str, str]
    hardware: dict[str, object]
    seeds: dict[str, int]
    code: dict[str, object]  # version of this package; of a git checkout also `commit_of`
    data: dict[str, object] = field(default_factory=dict)
    batches: dict[str, object] = field(default_factory=dict)
    parser: dict[str, str] = field(default_factory=dict)  # of the termination condition parsing: name and version
    sandbox: str | None = None  # level at which programs were run
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_update: int = 0  # after how many updates they were measured
    saved: list[str] = field(default_factory=list)  # folders that models were written into, in turn
    resumed_at: list[int] = field(default_factory=list)  # after how many updates the run was taken up again
    wandb_id: str | None = None  # of the W&B run, which goes on when this one does
    finished: bool = False

    def measured(self, metrics: dict[str, float], update: int) -> None:
        """Keeps an evaluation's metrics for model cards, and says what has changed since the one before."""
        logger.info("%s", evaluation_line(update, metrics, self.metrics))
        self.metrics, self.metrics_update = metrics, update

    def save(self, folder: Path) -> None:
        """Writes ``folder/run.json``."""
        write_whole(folder / "run.json", json.dumps(vars(self), indent=2) + "\n")


def new_record(step: str, command: list[str], seed: int, world_size: int) -> RunRecord:
    """A record of this process's packages and machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware: dict[str, object] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "processes": world_size,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    code = {"version": versions.get("ma-rlhf")} | commit_of(CHECKOUT)
    return RunRecord(step, started, command, versions, hardware, {"seed": seed}, code)


def commit_of(folder: Path) -> dict[str, object]:
    """The commit of a git checkout, and whether files that git tracks differ from it; {} where git does not tell."""
    if not (folder / ".git").exists():  # a folder above may be another project's repository
        return {}
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "changed": any(not line.startswith("#") for line in lines)}


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file, by path."""
    return {str(file): file_hash(file) for file in files}


def was_made_by(step: str, folder: str | Path) -> bool:
    """True where ``folder`` (or its parent) holds the run.json of that step."""
    for place in (Path(folder), Path(folder).parent):
        try:
            return bool(json.loads((place / "run.json").read_text(encoding="utf-8")).get("step") == step)
        except (OSError, json.JSONDecodeError):
            continue
    return False


def warn_unless_made_by(step: str, path: str, flag: str) -> None:
    """Warns where a model that should come from an earlier step of this project does not."""
    if not was_made_by(step, path):
        logger.warning("%s %s was not made by the %s step: results will differ from the method's", flag, path, step)


_TITLES = {
    "sft": "Supervised fine-tuning (step 1)",
    "reward": "Reward model (step 2)",
    "dpo": "Direct preference optimisation (step 2)",
    "ppo": "PPO with macro actions (step 3)",
    "rloo": "RLOO, without a critic (step 3)",
    "refuel": "REFUEL on pairs of replies",
    "refuel_online": "REFUEL with users from data (step 3)",
}


def write_model_card(
    folder: Path, name: str, role: str, base: str, settings: Mapping[str, object], record: RunRecord
) -> None:
    """Writes ``folder/README.md``: data, settings and metrics of the model saved there.

    Args:
        folder: of the model.
        name: of the model.
        role: policy, reward model or critic.
        base: the model it was trained from.
        settings: the flags of the run that differ from the defaults.
        record: of the run.
    """
    sources = cast("list[Mapping[str, object]]", record.data.get("sources", []))
    title = _TITLES["rloo" if settings.get("advantage_estimator") == "rloo" else record.step]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [ma-rlhf, rlhf]",
        "---",
        "",
        f"# {name}: {role}",
        "",
        f"{title} with [MA-RLHF](https://arxiv.org/abs/2410.02743), started from `{base}`.",
        "",
        "## Data",
        "",
        *[
            f"- `{s['name']}`: {s['train']} training and {s['eval']} held-out rows in this step's share"
            for s in sources
        ],
        "",
        "## Settings",
        "",
        *[f"- `--{name}`: {value}" for name, value in settings.items()],
        "",
        "## Metrics",
        "",
        f"On held-out rows, {after(record.metrics_update)}:",
        "",
        *[f"- {name}: {value:.4g}" for name, value in record.metrics.items()],
        "",
        "## Made with",
        "",
        ", ".join(f"{name} {version}" for name, version in record.packages.items()) + ".",
        "",
    ]
    write_whole(folder / "README.md", "\n".join(lines))
