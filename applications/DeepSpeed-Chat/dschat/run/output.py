# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: its flags (train_config.json), its record (run.json) and its metrics."""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dschat.base.atomic import WRITING, move_aside, recover, reporting, write_file, writing_into
from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash
from dschat.base.jsonl import read_object
from dschat.base.lock import Lock
from dschat.models.template_date import begin_date
from dschat.run.distributed import broadcast_object, is_main, world_size
from dschat.run.metrics import MetricsLog
from dschat.run.model_files import MODEL_FILES
from dschat.run.record import RunRecord, new_record, run_of_checkpoint
from dschat.run.state import Json
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.parse import to_json, to_yaml
from dschat.settings.rules import RUN_FOLDERS, check_output_dir

if TYPE_CHECKING:
    from dschat.run.trackers import Tracker

logger = logging.getLogger("dschat")

FLAGS_FILE = "train_config.json"
CONFIG_FILE = "config.yaml"  # the flags for --config
# What --overwrite_output_dir moves aside, in this order: the folder counts as a run's until run.json has gone.
# W&B's folder stays, since offline runs in it may not have been sent yet.
EARLIER_RUN = (*RUN_FOLDERS, "tensorboard", FLAGS_FILE, CONFIG_FILE, "metrics.jsonl", *MODEL_FILES)


def earlier_date(config: CommonConfig) -> str | None:
    """The date in the chat templates of the run that is resumed; None if no run is resumed."""
    requested = config.output.resume_from_checkpoint
    if requested is None:
        return None
    file = Path(config.output.output_dir) / "run.json"
    if not file.exists() and Path(requested).is_dir():  # the checkpoint is in another run's folder
        file = run_of_checkpoint(Path(requested)) / "run.json"
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
    folder: Path

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
    --overwrite_output_dir, the files of an earlier run are then moved into a subfolder `earlier-N`.
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
        self.folder = Path(config.output.output_dir)
        self._config = config
        self._awaits_resume = config.output.resume_from_checkpoint is not None  # until the checkpoint is loaded
        self._has_begun = False
        self._opened = ExitStack()  # of what `begin` opens
        self._lock: Lock | None = None
        if broadcast_object(self.folder.exists()):
            self._lock_folder()

        self.record = new_record(step, sys.argv, config.optimisation.seed, world_size())
        date = broadcast_object(begin_date(earlier_date(config)) if is_main() else None)
        self.record.template_date = begin_date(date)
        self.record.batches = asdict(plan)
        self._trackers: Sequence[Tracker] = ()
        if config.trackers:
            from dschat.run.trackers import build_trackers

            self._trackers = build_trackers(config, self.folder, plan)
        for tracker in self._trackers:
            self.record.tracker_runs[tracker.name] = tracker.run_id

    def begin(self) -> None:
        """Creates the folder if it does not exist, writes flags and record, and opens metrics and trackers.

        Every rank must call it.

        Raises:
            UserError: on every rank, if another run uses the folder by now, or it cannot be written.
        """
        if self._has_begun:
            return
        if not broadcast_object(self._lock is not None):
            self._lock_folder()
        self._has_begun = True
        with reporting(f"--output_dir {self.folder}"):
            if is_main():
                self._move_earlier_run()
                self._save_record()
            log = MetricsLog(self.folder, self._trackers, keep=self._awaits_resume)
            self.metrics = self._opened.enter_context(closing(log))

    def _move_earlier_run(self) -> None:
        """Moves an earlier run's files into a subfolder, with --overwrite_output_dir."""
        if not self._config.output.overwrite_output_dir or self._awaits_resume:
            return
        entries: dict[Path, None] = {}
        for pattern in EARLIER_RUN:
            entries.update(dict.fromkeys(sorted(self.folder.glob(pattern))))
        if entries:
            aside = move_aside(list(entries), self.folder)
            logger.warning("--overwrite_output_dir: the earlier files of %s are in %s now", self.folder, aside)

    def _lock_folder(self) -> None:
        """Acquires the folder's lock on the main process; raises UserError on every rank if another process has it."""
        refusal: UserError | None = None
        try:
            if is_main():
                with reporting(f"--output_dir {self.folder}"):
                    self._lock = Lock(self.folder / ".lock", f"--output_dir {self.folder}")
                    recover(self.folder)
                    overwrite = self._config.output.overwrite_output_dir
                    check_output_dir(str(self.folder), overwrite, self._awaits_resume, [], self._config.saved_models)
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
        return writing_into(target, self.folder / WRITING, self._check_alone)

    def _check_alone(self) -> None:
        """Raises UserError if another process writes into the folder, or has changed the metrics."""
        assert self._lock is not None
        self._lock.check()
        self.metrics.text()

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

    def close(self) -> None:
        """Closes the log and its trackers, whose last rows would be lost in a process that ends at once."""
        self._opened.close()

    def finish(self) -> None:
        """Marks the run as finished."""
        self.close()
        self.record.finished = True
        self._save_record()

    def state_dict(self) -> Json:
        """The state for `load_state_dict`; on the main process."""
        runs = self.record.tracker_runs
        record = {
            "first_metrics": self.record.first_metrics,
            "metrics": self.record.metrics,
            "metrics_update": self.record.metrics_update,
            "saved": self.record.saved,
            "resumed_at": self.record.resumed_at,
            "tracker_runs": {name: runs[name] for name in self.metrics.tracked_runs()},
        }
        return {"seconds": self.metrics.seconds(), "record": record}

    def check_unfinished(self, saved_updates: int) -> None:
        """Raises UserError if a run has finished here, later than its newest checkpoint, of so many updates."""
        record = broadcast_object(read_object(self.folder / "run.json"))
        if record.get("finished") is True and saved_updates < record["batches"]["total_updates"]:
            raise UserError(
                f"--resume_from_checkpoint: {self.folder} holds a finished run without a checkpoint of its end to"
                " continue from. Give another --output_dir, --overwrite_output_dir without --resume_from_checkpoint"
                " to replace it, or an earlier checkpoint to train again from there."
            )

    def start_over(self) -> None:
        """Begins in a folder whose earlier run saved no checkpoint."""
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
        earlier_runs = saved["tracker_runs"]
        self.record.tracker_runs.update(earlier_runs)
        for tracker in self._trackers:
            if tracker.name in earlier_runs:
                tracker.resume(earlier_runs[tracker.name])
        self._cut(metrics, state["seconds"], update)

    def _cut(self, metrics: str, seconds: float, update: int) -> None:
        """Removes rows and samples after an update."""
        self.metrics.cut(metrics, seconds, update)
        self._awaits_resume = False
        if is_main():
            for file in (self.folder / "samples").glob("*update-*"):
                is_incomplete = file.name.startswith(".")
                number = re.fullmatch(r"update-(\d+)", file.stem)  # other files are the user's
                if is_incomplete or (number is not None and int(number[1]) > update):
                    file.unlink()
        self._save_record()

    def _save_record(self) -> None:
        if is_main() and self._has_begun and not self._awaits_resume:
            self.record.save(self.folder)
            write_file(self.folder / FLAGS_FILE, to_json(self._config, self.plan))
            write_file(self.folder / CONFIG_FILE, to_yaml(self._config))


def due(interval: int, before: int, after: int) -> bool:
    """Whether there is a multiple of ``interval`` in (before, after]; never if ``interval`` is 0."""
    return interval > 0 and after // interval > before // interval
