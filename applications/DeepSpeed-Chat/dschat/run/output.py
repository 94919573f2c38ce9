# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: its flags (train_config.json), its record (run.json) and its metrics."""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

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
from dschat.run.metrics import MetricsLog
from dschat.run.record import RunRecord, new_record
from dschat.run.state import Json
from dschat.run.trackers import TensorBoard, Tracker, Trackers, WandB
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.parse import to_json, to_yaml
from dschat.settings.rules import RUN_FOLDERS, check_output_dir

logger = logging.getLogger("dschat")

FLAGS_FILE = "train_config.json"
CONFIG_FILE = "config.yaml"  # the flags for --config
UNFINISHED = ".unfinished"  # subfolder of a run that replaces an earlier one, until its first save
INITIAL_FILES = ("run.json", FLAGS_FILE, CONFIG_FILE, "metrics.jsonl")  # written at the beginning of a run
TRACKER_FOLDERS = ("tensorboard", "wandb")
# Files that a run leaves in its folder, besides RUN_FOLDERS.
RUN_FILES = ("*.safetensors", "*.safetensors.index.json", "metrics.jsonl", "run.json", FLAGS_FILE, CONFIG_FILE)


def earlier_date(config: CommonConfig) -> str | None:
    """The date in the chat templates of the run that is resumed; None if no run is resumed."""
    requested = config.output.resume_from_checkpoint
    if requested is None:
        return None
    file = Path(config.output.output_dir) / "run.json"
    if not file.exists() and Path(requested).is_dir():  # the checkpoint is in another run's folder
        file = Path(requested).resolve().parent.parent / "run.json"
    return read_object(file).get("template_date") or None


def warn_unless_made_by(step: str, path: str, flag: str) -> None:
    """Warns if a model was not made by an expected earlier step, according to run.json in its or the parent folder."""
    folder = Path(path)
    record = read_object(folder / "run.json") or read_object(folder.parent / "run.json")
    if record.get("step") != step:
        logger.warning("%s %s was not made by the %s step: results will differ from the method's", flag, path, step)


class Run(Protocol):
    """The run that a trainer belongs to."""

    plan: BatchPlan
    record: RunRecord
    metrics: MetricsLog

    @property
    def folder(self) -> Path:
        """The folder that files of the run are currently written to."""

    def begin(self) -> None:
        """Creates the folder; nothing is written before. Every rank must call it."""


class Data(Protocol):
    """The data of a run, as far as they are recorded; see `dschat.data.sources.Share`."""

    @property
    def eval(self) -> Sequence[object]: ...

    @property
    def sources(self) -> list[dict[str, object]]: ...

    @property
    def files(self) -> tuple[Path, ...]: ...


class RunOutput:
    """The output folder of a run; every rank has this object, and the main process writes and holds the lock.

    Nothing is written before `begin`, so a run that is refused while data and models are loaded leaves no folder. With
    --overwrite_output_dir, the files of an earlier run remain until this one first saves something. Until then, this
    run writes into a subfolder.
    """

    metrics: MetricsLog  # from `begin` on

    def __init__(self, step: str, config: CommonConfig, plan: BatchPlan) -> None:
        """Locks the folder if it exists, and creates the record.

        Args:
            step: name of the step.
            config: its flags.
            plan: its batch sizes.

        Raises:
            UserError: on every rank, if another run uses the folder, or has left its files there.
        """
        self.plan = plan
        self._config = config
        self._output_dir = Path(config.output.output_dir)
        self._backup = Backup(self._output_dir)  # an earlier run's files, until this run has saved something
        self._awaits_resume = config.output.resume_from_checkpoint is not None  # until the checkpoint is loaded
        self._has_begun = False
        self._created_folders: list[Path] = []  # by this run, the innermost first
        self._initial_paths: list[Path] = []  # files, and trackers' folders, that `begin` wrote
        self._lock: Lock | None = None
        if broadcast_object(self._output_dir.exists()):
            self._lock_folder()

        replaces = config.output.overwrite_output_dir and not self._awaits_resume
        replaces = replaces and broadcast_object((self._output_dir / "run.json").exists())
        self._folder = self._output_dir / UNFINISHED if replaces else self._output_dir
        self._earlier_boards = set(self._output_dir.glob("tensorboard/*")) if replaces else set()

        self.record = new_record(step, sys.argv, config.optimisation.seed, world_size())
        date = broadcast_object(begin_date(earlier_date(config)) if is_main() else None)
        self.record.template_date = begin_date(date)
        self.record.batches = asdict(plan)
        self._wandb: WandB | None = None
        if "wandb" in config.trackers:
            self._wandb = WandB(self._output_dir, json.loads(to_json(config, plan)))
            self.record.wandb_id = self._wandb.run_id

    def begin(self) -> None:
        """Creates the folder if it does not exist, writes flags and record, and opens metrics and trackers.

        Every rank must call it.

        Raises:
            UserError: on every rank, if another run uses the folder by now, or it cannot be written.
        """
        if self._has_begun:
            return
        if is_main() and not self._output_dir.exists():
            self._created_folders = missing_folders(self._output_dir)
        if not broadcast_object(self._lock is not None):
            self._lock_folder()
        self._has_begun = True
        earlier_tracker_paths = self._tracker_paths()
        self._initial_paths = [self._folder / name for name in INITIAL_FILES]
        with reporting(f"--output_dir {self._output_dir}"):
            if is_main():
                remove(self._output_dir / UNFINISHED)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._save_record()
        trackers: list[Tracker] = []
        if "tensorboard" in self._config.trackers:
            trackers.append(TensorBoard(Path(str(self._config.output.tensorboard_path))))
        if self._wandb is not None:
            trackers.append(self._wandb)
        with reporting(f"--output_dir {self._output_dir}"):
            self.metrics = MetricsLog(self._folder, Trackers(trackers), keep=self._awaits_resume)
        self._initial_paths += sorted(self._tracker_paths() - earlier_tracker_paths)

    def discard(self) -> None:
        """Removes what `begin` wrote when a run is refused, unless it has measured, trained or saved anything.

        Other files remain, such as a batch that an error names, or a reference's log-probs; so does the folder of an
        earlier run that this one was to resume.
        """
        resumes_in_place = self._config.output.resume_from_checkpoint is not None and not self._created_folders
        if not is_main() or not self._has_begun or resumes_in_place or self.record.saved:
            return
        assert self._lock is not None
        if not self._lock.is_held():  # another run uses the folder by now
            return
        if hasattr(self, "metrics"):  # else `begin` has failed
            if self.metrics.rows():
                return
            self.metrics.close()
        for path in self._initial_paths:
            if path.is_dir():
                remove(path)
            else:
                path.unlink(missing_ok=True)
        tracker_folders = [self._output_dir / name for name in TRACKER_FOLDERS]
        remove_empty([*tracker_folders, self._output_dir / UNFINISHED])
        self._lock.close()
        remove_empty(self._created_folders)

    def _tracker_paths(self) -> set[Path]:
        """Files and folders that trackers have written."""
        paths: set[Path] = set()
        for name in TRACKER_FOLDERS:
            paths.update(self._output_dir.glob(f"{name}/*"))
        return paths

    @property
    def folder(self) -> Path:
        """The folder that files of the run are currently written to."""
        return self._folder

    def _lock_folder(self) -> None:
        """Acquires the folder's lock on the main process; raises UserError on every rank if another process has it."""
        refusal: UserError | None = None
        try:
            if is_main():
                with reporting(f"--output_dir {self._output_dir}"):
                    self._lock = Lock(self._output_dir / ".lock", f"--output_dir {self._output_dir}")
                    self._backup.restore()
                    overwrite = self._config.output.overwrite_output_dir
                    models = self._config.saved_models
                    check_output_dir(str(self._output_dir), overwrite, self._awaits_resume, [], models)
        except UserError as error:
            refusal = error
        if refusal := broadcast_object(refusal):
            refusal.on_every_rank = True
            raise refusal

    def writing(self, target: Path) -> AbstractContextManager[Path | None]:
        """A temporary folder on the main process, whose content is moved into ``target`` at the end.

        See `writing_into`. Raises UserError, before and after writing, if another process uses the run's folder.
        """
        if self._lock is None:
            return nullcontext()
        self._lock.check()
        return writing_into(target, self._output_dir / WRITING, self._take_over)

    def _take_over(self) -> None:
        """Moves an earlier run's files into the backup, and this run's files out of the subfolder."""
        assert self._lock is not None
        self._lock.check()
        self.metrics.text()  # raises if anything else has changed the metrics
        if self._folder == self._output_dir:
            return
        self._backup.put_aside(self._earlier_files())
        move_all(self._folder, self._output_dir)
        self._folder = self._output_dir

    def forget_earlier_run(self) -> None:
        """Deletes the backup of an earlier run's files, after this run has saved something."""
        self._backup.drop()
        for board in self._earlier_boards:
            board.unlink(missing_ok=True)

    def _earlier_files(self) -> list[Path]:
        paths = []
        for name in RUN_FOLDERS:
            if (self._output_dir / name).is_dir():
                paths.append(self._output_dir / name)
        for pattern in RUN_FILES:
            paths.extend(self._output_dir.glob(pattern))
        return paths

    def describe_data(self, data: Data, **dropped: Mapping[str, int]) -> None:
        """Records sources, row counts, file hashes, and for each split the numbers of dropped rows by reason."""
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
        """Logs the size and number of updates, and the examples that remain in each epoch."""
        plan = self.plan
        left_over = num_examples % plan.iteration_size
        self.record.batches.update(total_updates=total_updates, left_over_per_epoch=left_over)
        self._save_record()
        micro_batches = f"micro-batch {plan.micro_batch}, accumulation {plan.accumulation}"
        if plan.max_tokens is not None:
            micro_batches = f"micro-batches of at most {plan.micro_batch} rows and {plan.max_tokens} tokens"
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
            micro_batches,
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
        """The state for `load_state_dict`; on the main process."""
        record = {
            "first_metrics": self.record.first_metrics,
            "metrics": self.record.metrics,
            "metrics_update": self.record.metrics_update,
            "saved": self.record.saved,
            "resumed_at": self.record.resumed_at,
            "wandb_id": self.record.wandb_id,
        }
        return {"seconds": self.metrics.seconds(), "record": record}

    def start_over(self) -> None:
        """Begins in a folder whose earlier run saved no checkpoint. Raises UserError if that run is finished."""
        if broadcast_object(read_object(self._output_dir / "run.json").get("finished") is True):
            raise UserError(
                f"--resume_from_checkpoint: {self._output_dir} holds a finished run without a checkpoint to continue "
                "from. Give another --output_dir, or --overwrite_output_dir without --resume_from_checkpoint to"
                " replace it."
            )
        self._cut("", 0.0, 0)

    def load_state_dict(self, state: Json, metrics: str, update: int) -> None:
        """Resumes a run from a checkpoint; what was written after the checkpoint is removed.

        Args:
            state: from `state_dict`.
            metrics: content of the checkpoint's metrics.jsonl.
            update: number of updates at the checkpoint.
        """
        saved = state["record"]
        self.record.first_metrics = saved["first_metrics"]
        self.record.metrics = saved["metrics"]
        self.record.metrics_update = saved["metrics_update"]
        self.record.saved[:] = saved["saved"]
        self.record.resumed_at = [*saved["resumed_at"], update]
        if saved["wandb_id"] is not None:
            self.record.wandb_id = saved["wandb_id"]
            if self._wandb is not None:
                self._wandb.resume(saved["wandb_id"])
        self._cut(metrics, state["seconds"], update)

    def _cut(self, metrics: str, seconds: float, update: int) -> None:
        """Removes rows and samples after an update."""
        self.metrics.cut(metrics, seconds, update)
        self._awaits_resume = False
        if is_main():
            for file in (self._output_dir / "samples").glob("*update-*"):
                is_incomplete = file.name.startswith(".")
                number = re.fullmatch(r"update-(\d+)", file.stem)  # other files are the user's
                if is_incomplete or (number is not None and int(number[1]) > update):
                    file.unlink()
        self._save_record()

    def _save_record(self) -> None:
        if is_main() and self._has_begun and not self._awaits_resume:
            self.record.save(self._folder)
            write_file(self._folder / FLAGS_FILE, to_json(self._config, self.plan))
            write_file(self._folder / CONFIG_FILE, to_yaml(self._config))


def due(interval: int, before: int, after: int) -> bool:
    """Whether there is a multiple of ``interval`` in (before, after]; never if ``interval`` is 0."""
    return interval > 0 and after // interval > before // interval
