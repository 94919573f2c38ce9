# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: its flags (train_config.json), its record (run.json) and its metrics."""

import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from dschat.base.atomic import (
    WRITING,
    Backup,
    missing_folders,
    move_all,
    remove,
    remove_empty,
    reporting,
    write_file,
    writing_into,
)
from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash
from dschat.base.jsonl import read_object
from dschat.base.lock import Lock
from dschat.models.template_date import begin_date
from dschat.run.distributed import broadcast_object, is_main, world_size
from dschat.run.metrics import MetricsLog, evaluation_line, few_rows_warning
from dschat.run.state import Json
from dschat.run.trackers import TensorBoard, Tracker, Trackers, WandB
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.parse import to_json, to_yaml
from dschat.settings.rules import RUN_FOLDERS, check_output_dir

logger = logging.getLogger("dschat")

PACKAGES = ("ma-rlhf", "torch", "transformers", "deepspeed", "accelerate", "datasets", "peft", "tokenizers", "numpy")
CHECKOUT = (Path(__file__).resolve().parent / "../../../..").resolve()  # where the package lies in its repository
FLAGS_FILE = "train_config.json"
CONFIG_FILE = "config.yaml"  # the same for --config
UNFINISHED = ".unfinished"  # below the folder of an earlier run that this one replaces, until its first save
BEGUN = ("run.json", FLAGS_FILE, CONFIG_FILE, "metrics.jsonl")  # files that are there from the beginning of a run on
TRACKED = ("tensorboard", "wandb")  # folders of trackers
# Files that a run leaves in its folder, beside RUN_FOLDERS.
FILES = ("*.safetensors", "*.safetensors.index.json", "metrics.jsonl", "run.json", FLAGS_FILE, CONFIG_FILE)


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
    template_date: str = ""  # that chat templates read, see `dschat.models.template_date`; kept when the run goes on
    data: dict[str, object] = field(default_factory=dict)
    batches: dict[str, object] = field(default_factory=dict)
    parser: dict[str, str] = field(default_factory=dict)  # of the termination condition parsing: name and version
    sandbox: str | None = None  # level at which programs were run
    decoding: str | None = None  # how continuous batching launches its steps, and why not as CUDA graphs
    layers: dict[str, str] = field(default_factory=dict)  # trained model → how decoder layers are computed
    peaks: dict[str, str | float] = field(default_factory=dict)  # of the main process's GPU, and where they are from
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_update: int = 0  # after how many updates they were measured
    saved: list[str] = field(default_factory=list)  # folders that models were written into, in turn
    resumed_at: list[int] = field(default_factory=list)  # after how many updates the run was taken up again
    wandb_id: str | None = None  # of the W&B run, which goes on when this one does
    finished: bool = False

    def measured(self, metrics: dict[str, float], update: int) -> None:
        """Keeps an evaluation's metrics for model cards, and says what has changed since the one before."""
        warning = few_rows_warning(metrics)
        if warning and not self.metrics and is_main():
            logger.warning("%s", warning)
        logger.info("%s", evaluation_line(update, metrics, self.metrics))
        self.metrics, self.metrics_update = metrics, update

    def save(self, folder: Path) -> None:
        """Writes ``folder/run.json``."""
        write_file(folder / "run.json", json.dumps(vars(self), indent=2) + "\n")


def new_record(step: str, command: list[str], seed: int, processes: int) -> RunRecord:
    """A record of this process's packages and machine."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    hardware: dict[str, object] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "processes": processes,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    code = {"version": versions.get("ma-rlhf")} | commit_of(CHECKOUT)
    return RunRecord(step, started, command, versions, hardware, {"seed": seed}, code)


def earlier_date(config: CommonConfig) -> str | None:
    """The date that the chat templates of the run to go on with have read; None where there is no such run."""
    wanted = config.output.resume_from_checkpoint
    if wanted is None:
        return None
    own = Path(config.output.output_dir) / "run.json"
    is_elsewhere = Path(wanted).is_dir() and not own.exists()
    record = read_object(Path(wanted).resolve().parent.parent / "run.json" if is_elsewhere else own)
    return record.get("template_date") or None


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


def warn_unless_made_by(step: str, path: str, flag: str) -> None:
    """Warns where a model that should come from an earlier step does not: by run.json in its folder, or above."""
    folder = Path(path)
    if (read_object(folder / "run.json") or read_object(folder.parent / "run.json")).get("step") != step:
        logger.warning("%s %s was not made by the %s step: results will differ from the method's", flag, path, step)


class Run(Protocol):
    """What a trainer needs of its run."""

    plan: BatchPlan
    record: RunRecord
    metrics: MetricsLog

    @property
    def folder(self) -> Path:
        """Where files of the run go now."""

    def begin(self) -> None:
        """Makes the folder; before it, nothing is written. Every rank must call it."""


class Data(Protocol):
    """What a run records of its data; see `dschat.data.sources.Share`."""

    @property
    def eval(self) -> Sequence[object]: ...

    @property
    def sources(self) -> list[dict[str, object]]: ...

    @property
    def files(self) -> tuple[Path, ...]: ...


class RunOutput:
    """The folder while the run goes on; every rank has one, the main process writes and has its lock.

    Nothing is written before `begin`, so that a run that is refused while data and models are read leaves no folder.
    With --overwrite_output_dir, what an earlier run left stays until this one first saves something. Until then, this
    one writes into a folder below.
    """

    metrics: MetricsLog  # from `begin` on

    def __init__(self, step: str, config: CommonConfig, plan: BatchPlan) -> None:
        """Takes the step's name, its flags and the batch sizes that follow from them, and makes the record.

        Raises UserError, on every rank: another run has the folder, or has left a run there.
        """
        self.plan, self._config, self._place = plan, config, Path(config.output.output_dir)
        self._backup = Backup(self._place)  # what an earlier run left, until this one's first save stands in its place
        self._held = config.output.resume_from_checkpoint is not None  # until it is clear where the run goes on
        self._has_begun = False
        self._made: list[Path] = []  # folders that this run made, the innermost first
        self._begun: list[Path] = []  # files, and trackers' folders, that `begin` wrote
        self._lock: Lock | None = None
        if broadcast_object(self._place.exists()):
            self._lock_folder()
        replaces = config.output.overwrite_output_dir and not self._held
        replaces = replaces and broadcast_object((self._place / "run.json").exists())
        self._folder = self._place / UNFINISHED if replaces else self._place
        self._old_boards = set(self._place.glob("tensorboard/*")) if replaces else set()
        self.record = new_record(step, sys.argv, config.optimisation.seed, world_size())
        date = broadcast_object(begin_date(earlier_date(config)) if is_main() else None)
        self.record.template_date = begin_date(date)
        self.record.batches = asdict(plan)
        self._wandb = WandB(self._place, json.loads(to_json(config, plan))) if "wandb" in config.trackers else None
        self.record.wandb_id = None if self._wandb is None else self._wandb.run_id

    def begin(self) -> None:
        """Makes the folder, if need be, and writes the flags and the record; opens metrics and trackers.

        Every rank must call it. Raises UserError, on every rank, where another run has the folder by now; or where it
        cannot be written.
        """
        if self._has_begun:
            return
        if is_main() and not self._place.exists():
            self._made = missing_folders(self._place)
        if not broadcast_object(self._lock is not None):
            self._lock_folder()
        self._has_begun = True
        tracked = self._tracked()
        self._begun = [self._folder / name for name in BEGUN]
        with reporting(f"--output_dir {self._place}"):
            if is_main():
                remove(self._place / UNFINISHED)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._save_record()
        trackers: list[Tracker] = []
        if "tensorboard" in self._config.trackers:
            trackers.append(TensorBoard(Path(str(self._config.output.tensorboard_path))))
        if self._wandb is not None:
            trackers.append(self._wandb)
        with reporting(f"--output_dir {self._place}"):
            self.metrics = MetricsLog(self._folder, Trackers(trackers), keep=self._held)
        self._begun += sorted(self._tracked() - tracked)

    def discard(self) -> None:
        """After a refusal: removes what `begin` wrote, unless the run has measured, trained or saved anything.

        What else is in the folder stays, such as a batch that an error names, or a reference's log-probs; so does an
        earlier run's folder, which this one was to go on in.
        """
        resumes_in_place = self._config.output.resume_from_checkpoint is not None and not self._made
        if not is_main() or not self._has_begun or resumes_in_place or self.record.saved:
            return
        assert self._lock is not None
        if not self._lock.is_held():  # the folder is another run's by now
            return
        if hasattr(self, "metrics"):  # else `begin` has failed
            if self.metrics.rows():
                return
            self.metrics.close()
        for path in self._begun:
            if path.is_dir():
                remove(path)
            else:
                path.unlink(missing_ok=True)
        remove_empty([*(self._place / name for name in TRACKED), self._place / UNFINISHED])
        self._lock.close()
        remove_empty(self._made)

    def _tracked(self) -> set[Path]:
        """What trackers have written in the folder."""
        return {path for name in TRACKED for path in self._place.glob(f"{name}/*")}

    @property
    def folder(self) -> Path:
        """Where files of the run go now."""
        return self._folder

    def _lock_folder(self) -> None:
        """Takes the folder's lock, on the main process; raises UserError on every rank."""
        refusal: UserError | None = None
        try:
            if is_main():
                with reporting(f"--output_dir {self._place}"):
                    self._lock = Lock(self._place / ".lock", f"--output_dir {self._place}")
                    self._backup.restore()
                    check_output_dir(str(self._place), self._config.output.overwrite_output_dir or self._held, [])
        except UserError as error:
            refusal = error
        if refusal := broadcast_object(refusal):
            refusal.on_every_rank = True
            raise refusal

    def writing(self, place: Path) -> AbstractContextManager[Path | None]:
        """A new folder, on the main process, whose content is in ``place`` afterwards; see `writing_into`. Raises
        UserError, before and after writing, where another process has the run's folder by now.
        """
        if self._lock is None:
            return nullcontext()
        self._lock.check()
        return writing_into(place, self._place / WRITING, self._take_over)

    def _take_over(self) -> None:
        """Puts aside what the earlier run left: this one has written something to put there."""
        assert self._lock is not None
        self._lock.check()
        self.metrics.text()  # only what stands beside its own metrics is moved to its place
        if self._folder == self._place:
            return
        self._backup.put_aside(self._left_by_earlier_run())
        move_all(self._folder, self._place)
        self._folder = self._place

    def forget_earlier_run(self) -> None:
        """Deletes what `take_over` put aside, now that what this run saved is in its place."""
        self._backup.drop()
        for board in self._old_boards:
            board.unlink(missing_ok=True)

    def _left_by_earlier_run(self) -> list[Path]:
        folders = [self._place / name for name in RUN_FOLDERS if (self._place / name).is_dir()]
        return [*folders, *(file for pattern in FILES for file in self._place.glob(pattern))]

    def describe_data(self, data: Data, **dropped: Mapping[str, int]) -> None:
        """Records sources, row counts, the files' hashes, and by split what tokenisation dropped and why."""
        self.record.data = {
            "sources": data.sources,
            "dropped": {split: dict(counts) for split, counts in dropped.items()},
            "sha256": {str(file): file_hash(file) for file in data.files},
        }
        if not data.eval:
            logger.warning(
                "no held-out rows: nothing will be evaluated. Give more rows, or valid* files in the folder."
            )
        self._save_record()
        for split, counts in dropped.items():
            for reason, count in counts.items():
                logger.warning("%s: %d rows dropped (%s)", split, count, reason)

    def announce(self, total_updates: int, num_examples: int) -> None:
        """Says once how large an update is, how many there will be, and what is left over."""
        plan = self.plan
        left_over = num_examples % plan.iteration_size
        self.record.batches.update(total_updates=total_updates, left_over_per_epoch=left_over)
        self._save_record()
        cut = f"micro-batch {plan.micro_batch}, accumulation {plan.accumulation}"
        if plan.max_tokens is not None:
            cut = f"micro-batches of at most {plan.micro_batch} rows and {plan.max_tokens} tokens"
        length = f"{total_updates} updates"
        if self._config.optimisation.max_steps is not None:
            iterations_per_pass = num_examples // plan.iteration_size
            passes = total_updates / (iterations_per_pass * plan.updates_per_iteration)
            length += f" by --max_steps, {passes:.2f} passes over the examples"
        logger.info(
            "global batch %d = %d per process x %d processes (%s); %s; %d of %d examples left over in each epoch",
            plan.global_batch,
            plan.update_per_rank,
            plan.world_size,
            cut,
            length,
            left_over,
            num_examples,
        )
        self._config.warn_of_warmup(total_updates)

    def finish(self) -> None:
        """Marks the run as finished."""
        self.metrics.close()
        self.record.finished = True
        self._save_record()

    def state_dict(self) -> Json:
        """What `load_state_dict` takes; on the main process."""
        record = self.record
        kept = {
            name: getattr(record, name) for name in ("metrics", "metrics_update", "saved", "resumed_at", "wandb_id")
        }
        return {"seconds": self.metrics.seconds(), "record": kept}

    def start_over(self) -> None:
        """Begins in a folder whose earlier run saved no checkpoint. Raises UserError where that run was finished."""
        if broadcast_object(read_object(self._place / "run.json").get("finished") is True):
            raise UserError(
                f"--resume_from_checkpoint: {self._place} holds a finished run without a checkpoint to go on from. "
                "Give another --output_dir, or --overwrite_output_dir alone to replace it."
            )
        self._cut("", 0.0, 0)

    def load_state_dict(self, state: Json, metrics: str, update: int) -> None:
        """Goes on with an earlier run's folder from its `state` and rows: what that wrote after the update goes."""
        record, kept = self.record, state["record"]
        record.metrics, record.metrics_update = kept["metrics"], kept["metrics_update"]
        record.saved[:], record.resumed_at = kept["saved"], [*kept["resumed_at"], update]
        if kept["wandb_id"] is not None:
            record.wandb_id = kept["wandb_id"]
            if self._wandb is not None:
                self._wandb.resume(kept["wandb_id"])
        self._cut(metrics, state["seconds"], update)

    def _cut(self, metrics: str, seconds: float, update: int) -> None:
        self.metrics.cut(metrics, seconds, update)
        self._held = False
        if is_main():
            for file in (self._place / "samples").glob("*update-*"):  # a hidden one was not written to its end
                if file.name.startswith(".") or int(file.stem.removeprefix("update-")) > update:
                    file.unlink()
        self._save_record()

    def _save_record(self) -> None:
        if is_main() and self._has_begun and not self._held:
            self.record.save(self._folder)
            write_file(self._folder / FLAGS_FILE, to_json(self._config, self.plan))
            write_file(self._folder / CONFIG_FILE, to_yaml(self._config))


def due(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of ``interval`` updates was passed between ``before`` and ``after``; never for 0."""
    return interval > 0 and after // interval > before // interval
