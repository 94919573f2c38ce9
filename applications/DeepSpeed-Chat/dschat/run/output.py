# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: its flags (train_config.json), its record (run.json) and its metrics."""

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from dschat.common.lock import Lock
from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.parse import to_json
from dschat.config.rules import RUN_FOLDERS, check_output_dir
from dschat.errors import UserError
from dschat.run.distributed import broadcast_object, is_main, world_size
from dschat.run.metrics import MetricsLog
from dschat.run.progress import Json
from dschat.run.records import RunRecord, file_hashes, new_record
from dschat.run.trackers import TensorBoard, Trackers, WandB
from dschat.run.whole_files import write_whole, written_beside

logger = logging.getLogger("dschat")

FLAGS_FILE = "train_config.json"
UNFINISHED = ".unfinished"  # below the folder of an earlier run that this one replaces, until its first save
GIVEN_UP = ".given-up"  # what an earlier run left, put aside until this run's first save stands in its place
DELETED = ".deleted"  # the same, while it is being deleted
# Files that a run leaves in its folder, beside RUN_FOLDERS.
FILES = ("*.safetensors", "*.safetensors.index.json", "metrics.jsonl", "run.json", FLAGS_FILE)


class Run(Protocol):
    """What a trainer needs of its run."""

    plan: BatchPlan
    record: RunRecord
    metrics: MetricsLog

    @property
    def folder(self) -> Path:
        """Where files of the run go now."""


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

    With --overwrite_output_dir, what an earlier run left stays until this one first saves something. Until then, this
    one writes into a folder below.
    """

    def __init__(self, step: str, config: CommonConfig, plan: BatchPlan) -> None:
        """Makes the folder and writes flags and record.

        Args:
            step: sft, reward, dpo or ppo.
            config: the flags.
            plan: the batch sizes that follow from them.

        Raises:
            UserError: on every rank: another run has the folder, or has left a run there; or it cannot be written.
        """
        self.plan, self._config, self._place = plan, config, Path(config.output_dir)
        self._held = config.resume_from_checkpoint is not None  # until it is clear where the run goes on
        self._lock = self._lock_folder()
        replaces = config.overwrite_output_dir and not self._held
        replaces = replaces and broadcast_object((self._place / "run.json").exists())
        self._folder = self._place / UNFINISHED if replaces else self._place
        self._old_boards = set(self._place.glob("tensorboard/*")) if replaces else set()
        self.record = new_record(step, sys.argv, config.seed, world_size())
        self.record.batches = dataclasses.asdict(plan)
        self._wandb = WandB(self._place, json.loads(to_json(config, plan))) if "wandb" in config.trackers else None
        self.record.wandb_id = None if self._wandb is None else self._wandb.run_id
        try:
            if is_main():
                _put_back(self._place)
                shutil.rmtree(self._place / UNFINISHED, ignore_errors=True)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._save_record()
        except OSError as error:
            raise UserError(f"--output_dir {self._place}: cannot be written: {error}") from error
        board = [TensorBoard(Path(str(config.tensorboard_path)))] if "tensorboard" in config.trackers else []
        trackers = Trackers([*board, *([self._wandb] if self._wandb else [])])
        self.metrics = MetricsLog(self._folder, trackers, keep=self._held)

    @property
    def folder(self) -> Path:
        """Where files of the run go now."""
        return self._folder

    def _lock_folder(self) -> Lock | None:
        """The folder's lock, on the main process; raises UserError on every rank."""
        lock, refusal = None, None
        try:
            if is_main():
                lock = Lock(self._place / ".lock", f"--output_dir {self._place}")
                check_output_dir(str(self._place), self._config.overwrite_output_dir or self._held, [])
        except UserError as error:
            refusal, error.on_every_rank = error, True
        if refusal := broadcast_object(refusal):
            raise refusal
        return lock

    def writing(self, place: Path) -> AbstractContextManager[Path | None]:
        """A new folder, on the main process, whose content is in ``place`` afterwards; see `written_beside`.

        Raises UserError, before and after writing, where another process has the run's folder by now.
        """
        if self._lock is None:
            return nullcontext()
        self._lock.check()
        return written_beside(self._place, place, self._take_over)

    def _take_over(self) -> None:
        """Puts aside what the earlier run left: this one has written something to put there."""
        assert self._lock is not None
        self._lock.check()
        self.metrics.text()  # only what stands beside its own metrics is moved to its place
        if self._folder == self._place:
            return
        given_up = self._place / GIVEN_UP
        given_up.mkdir(exist_ok=True)
        for entry in self._left_by_earlier_run():
            entry.rename(given_up / entry.name)
        for entry in list(self._folder.iterdir()):
            entry.replace(self._place / entry.name)
        self._folder.rmdir()
        self._folder = self._place

    def forget_earlier_run(self) -> None:
        """Deletes what `take_over` put aside, now that what this run saved is in its place."""
        if (self._place / GIVEN_UP).exists():
            (self._place / GIVEN_UP).rename(self._place / DELETED)
            shutil.rmtree(self._place / DELETED)
            for board in self._old_boards:
                board.unlink(missing_ok=True)

    def _left_by_earlier_run(self) -> list[Path]:
        folders = [self._place / name for name in RUN_FOLDERS if (self._place / name).is_dir()]
        return [*folders, *(file for pattern in FILES for file in self._place.glob(pattern))]

    def describe_data(self, data: Data, **dropped: Mapping[str, int]) -> None:
        """Records sources, row counts, what was dropped and why, and the files' hashes.

        Args:
            data: the step's rows.
            dropped: what tokenisation dropped, by split.
        """
        self.record.data = {
            "sources": data.sources,
            "dropped": {split: dict(counts) for split, counts in dropped.items()},
            "sha256": file_hashes(data.files),
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
        left_over = num_examples % (plan.global_rollout or plan.global_batch)
        self.record.batches.update(total_updates=total_updates, left_over_per_epoch=left_over)
        self._save_record()
        logger.info(
            "global batch %d = %d per process x %d processes (micro-batch %d, accumulation %d); %d updates; "
            "%d of %d examples left over in each epoch",
            plan.global_batch,
            plan.update_per_rank,
            plan.world_size,
            plan.micro_batch,
            plan.accumulation,
            total_updates,
            left_over,
            num_examples,
        )
        self._config.warn_of_warmup(total_updates)

    def finish(self) -> None:
        """Marks the run as finished."""
        self.metrics.close()
        self.record.finished = True
        self._save_record()

    def state(self) -> Json:
        """What `go_on` takes; on the main process."""
        record = self.record
        kept = {
            name: getattr(record, name) for name in ("metrics", "metrics_update", "saved", "resumed_at", "wandb_id")
        }
        return {"seconds": self.metrics.seconds(), "record": kept}

    def start_over(self) -> None:
        """Begins in a folder whose earlier run saved no checkpoint.

        Raises:
            UserError: that run was finished.
        """
        if broadcast_object(_is_finished(self._place)):
            raise UserError(
                f"--resume_from_checkpoint: {self._place} holds a finished run without a checkpoint to go on from. "
                "Give another --output_dir, or --overwrite_output_dir alone to replace it."
            )
        self._cut("", 0.0, 0)

    def go_on(self, state: Json, metrics: str, update: int) -> None:
        """Goes on with an earlier run's folder: what that wrote after some update goes.

        Args:
            state: from `state`.
            metrics: the rows until then.
            update: optimiser updates until then.
        """
        record, kept = self.record, state["record"]
        record.metrics, record.metrics_update = kept["metrics"], kept["metrics_update"]
        record.saved[:], record.resumed_at = kept["saved"], [*kept["resumed_at"], update]
        if kept.get("wandb_id"):  # checkpoints of earlier versions have none
            record.wandb_id = kept["wandb_id"]
            if self._wandb is not None:
                self._wandb.go_on(kept["wandb_id"])
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
        if is_main() and not self._held:
            self.record.save(self._folder)
            write_whole(self._folder / FLAGS_FILE, to_json(self._config, self.plan))


def due(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of ``interval`` updates was passed between ``before`` and ``after``; never for 0."""
    return interval > 0 and after // interval > before // interval


def _put_back(folder: Path) -> None:
    """Ends what a killed process began: an earlier run that was put aside comes back unless it was being deleted."""
    shutil.rmtree(folder / DELETED, ignore_errors=True)
    for entry in list((folder / GIVEN_UP).glob("*")):
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    if (folder / GIVEN_UP).exists():
        (folder / GIVEN_UP).rmdir()


def _is_finished(folder: Path) -> bool:
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8")).get("finished") is True
    except (OSError, ValueError, AttributeError):
        return False
