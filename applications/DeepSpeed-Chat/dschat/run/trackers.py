# SPDX-License-Identifier: Apache-2.0
"""Trackers: TensorBoard and W&B show the rows of metrics.jsonl, and samples. Used by the main process alone.

They are guests: what goes wrong in one is said once, and the run goes on without it.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dschat.base.display import markdown_table
from dschat.base.glossary import HEAD

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

SHOWN_SAMPLES = 64  # of an evaluation; the file in samples/ holds all of them
LISTS = ("tokens", "prompt_ids", "response_ids", "prompt_messages")  # columns of a sample that no table shows

Row = Mapping[str, float | None]  # of metrics.jsonl; None stands for a number that is not finite
Sample = Mapping[str, object]
Cell = str | float | bool | None


class Tracker(Protocol):
    """Where rows go beside metrics.jsonl."""

    name: str  # as --report_to knows it

    def open(self, kept: Sequence[Row], update: int | None) -> None:
        """Begins, or goes on after so many updates, of which metrics.jsonl keeps these rows."""

    def log(self, row: Row) -> None:
        """Shows one row."""

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        """Shows samples as a table."""

    def close(self) -> None:
        """Writes what is left."""


class TensorBoard:
    """A scalar for each metric, by update; samples as text."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._board: SummaryWriter | None = None

    def open(self, kept: Sequence[Row], update: int | None) -> None:
        """Hides what an earlier part of the run wrote from that update on, and shows that update's rows anew."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        is_new = not any(self._folder.glob("events.out.*"))
        self._board = SummaryWriter(str(self._folder), purge_step=update)
        for row in kept:
            if is_new or row["update"] == update:
                self.log(row)

    def log(self, row: Row) -> None:
        assert self._board is not None
        for name, value in row.items():
            if name not in HEAD and value is not None:
                self._board.add_scalar(name, value, row["update"])

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        assert self._board is not None
        columns, cells = table_of(samples)
        self._board.add_text("samples", markdown_table(columns, [list(map(_one_line, row)) for row in cells]), update)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class WandB:
    """A W&B run, which goes on under its id. WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME and WANDB_MODE are heeded."""

    name = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Takes the run's folder, where the client's files go into `wandb` unless WANDB_DIR is set, and its flags."""
        self._folder, self._config = folder, config
        self.run_id, self._goes_on = uuid.uuid4().hex[:12], False
        self._run: wandb.Run | None = None

    def resume(self, run_id: str) -> None:
        """Takes up an earlier part's W&B run. To be called before `open`."""
        self.run_id, self._goes_on = run_id, True

    def open(self, kept: Sequence[Row], update: int | None) -> None:
        """Rows of an earlier part of the run are there already, unless that part did not report to W&B."""
        import wandb

        self._run = wandb.init(
            id=self.run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "ma-rlhf"),
            name=os.environ.get("WANDB_NAME", self._folder.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
            config=dict(self._config),
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        # W&B refuses rows behind its own step counter, and a run that goes on from a checkpoint steps back.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        online = self._run.settings.mode == "online"
        logger.info("W&B: %s", self._run.url if online else f"offline, in {Path(self._run.dir).parent}")
        for row in [] if self._goes_on else kept:
            self.log(row)

    def log(self, row: Row) -> None:
        assert self._run is not None
        self._run.log({name: value for name, value in row.items() if value is not None})

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        assert self._run is not None
        import wandb

        columns, cells = table_of(samples)
        self._run.log({"update": update, "samples_table": wandb.Table(columns=[*columns], data=cells)})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackers:
    """All of a run's trackers; one that fails is left out from there on, after a warning."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def open(self, kept: Sequence[Row], update: int | None) -> None:
        """See `Tracker.open`."""
        self._each(lambda tracker: tracker.open(kept, update))

    def log(self, row: Row) -> None:
        """See `Tracker.log`."""
        self._each(lambda tracker: tracker.log(row))

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        """See `Tracker.show`; the first few samples are shown."""
        if samples:
            self._each(lambda tracker: tracker.show(update, samples[:SHOWN_SAMPLES]))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    "--report_to %s: %s; the run goes on without it, metrics.jsonl is whole", tracker.name, reason
                )


def table_of(samples: Sequence[Sample]) -> tuple[list[str], list[list[Cell]]]:
    """Columns and cells of samples, without their lists of tokens and messages."""
    columns = [name for name in dict.fromkeys(name for sample in samples for name in sample) if name not in LISTS]
    return columns, [[_cell(sample.get(name)) for name in columns] for sample in samples]


def wandb_problem() -> str | None:
    """Why W&B cannot be reported to; None where it can, or is told to stay offline."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return None
    if wandb.login(prompt=False, verify=False):
        return None
    return (
        "--report_to wandb: W&B has no API key. Run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline to send "
        "the run later with wandb sync."
    )


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, str | float | int | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def _one_line(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", "<br>")
