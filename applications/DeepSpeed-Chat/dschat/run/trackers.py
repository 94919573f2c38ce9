# SPDX-License-Identifier: Apache-2.0
"""TensorBoard, W&B and Trackio, which `MetricsLog` (run/metrics.py) shows the rows of metrics.jsonl and samples."""

from __future__ import annotations

import io
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dschat.base.display import markdown_table
from dschat.base.glossary import HEAD
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.parse import to_json

if TYPE_CHECKING:
    import trackio
    import wandb
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

HIDDEN_COLUMNS = ("tokens", "prompt_ids", "response_ids", "prompt_messages")  # columns of samples not shown in tables

Row = Mapping[str, float | None]  # row of metrics.jsonl; None is a number that is not finite
Sample = Mapping[str, object]
Cell = str | float | bool | None


class Tracker(Protocol):
    """Shows the rows of metrics.jsonl."""

    name: str  # value of --report_to

    @property
    def run_id(self) -> str:
        """Id of the tracker's run, by which `resume` finds it."""

    def resume(self, run_id: str) -> None:
        """Continues the tracker's run of an earlier part of the run; called before `open`."""

    def open(self, earlier_rows: Sequence[Row], update: int | None) -> None:
        """Starts, or resumes after `update` updates, whose rows in metrics.jsonl are `earlier_rows`."""

    def log(self, row: Row) -> None:
        """Shows one row."""

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        """Shows samples as a table."""

    def close(self) -> None:
        """Writes everything and ends."""


class TensorBoard:
    """Shows a scalar per metric, by update, and samples as text."""

    name = "tensorboard"
    run_id = "in its folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_earlier = False  # rows of the earlier part of the run
        self._board: SummaryWriter | None = None

    def open(self, earlier_rows: Sequence[Row], update: int | None) -> None:
        """Hides what an earlier part of the run wrote from `update` on, and writes that update's rows again.

        Where rows of the earlier part are missing, all are hidden and written.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        has_earlier = self._has_earlier and any(self._folder.glob("events.out.*"))
        start = update if has_earlier or update is None else 0
        self._board = SummaryWriter(str(self._folder), purge_step=start)
        for row in earlier_rows:
            if not has_earlier or row["update"] == update:
                self.log(row)

    def log(self, row: Row) -> None:
        assert self._board is not None
        for name, value in row.items():
            if name not in HEAD and value is not None:
                self._board.add_scalar(name, value, row["update"])

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        assert self._board is not None
        columns, cells = table_of(samples)
        lines = [list(map(_one_line, row)) for row in cells]
        self._board.add_text("samples", markdown_table(columns, lines), update)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def resume(self, run_id: str) -> None:
        """The earlier part of the run has written its rows into the folder."""
        self._has_earlier = True


class WandB:
    """Shows a W&B run, resumed by its id; respects WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME and WANDB_MODE."""

    name = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Starts a W&B run, which writes into `wandb` of the run's folder unless WANDB_DIR is set."""
        self._folder = folder
        self._config = config
        self.run_id = uuid.uuid4().hex[:12]
        self._is_resumed = False
        self._run: wandb.Run | None = None

    def resume(self, run_id: str) -> None:
        """Continues the W&B run of an earlier part of the run; call it before `open`."""
        self.run_id = run_id
        self._is_resumed = True

    def open(self, earlier_rows: Sequence[Row], update: int | None) -> None:
        """Starts or resumes the W&B run; one that is resumed has the rows of the earlier part already."""
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
        # W&B refuses rows before its own step counter, but a run that resumes from a checkpoint steps back.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        online = self._run.settings.mode == "online"
        logger.info("W&B: %s", self._run.url if online else f"offline, in {Path(self._run.dir).parent}")
        if not self._is_resumed:
            for row in earlier_rows:
                self.log(row)

    def log(self, row: Row) -> None:
        assert self._run is not None
        numbers = {name: value for name, value in row.items() if value is not None}
        self._run.log(numbers)

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        assert self._run is not None
        import wandb

        columns, cells = table_of(samples)
        self._run.log({"update": update, "samples_table": wandb.Table(columns=[*columns], data=cells)})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackio:
    """Shows a Trackio run, resumed by its name; respects TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID."""

    name = "trackio"

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Names the run after its folder, with a random suffix, because Trackio finds runs by their names."""
        self._config = config
        self.run_id = f"{folder.resolve().name}-{uuid.uuid4().hex[:6]}"
        self._is_resumed = False
        self._run: trackio.Run | None = None

    def resume(self, run_id: str) -> None:
        """Continues the Trackio run of an earlier part of the run; call it before `open`."""
        self.run_id = run_id
        self._is_resumed = True

    def open(self, earlier_rows: Sequence[Row], update: int | None) -> None:
        """Starts or resumes the Trackio run; one that is resumed has the rows of the earlier part already."""
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "ma-rlhf")
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=self.run_id,
                resume="allow",
                config=dict(self._config),
                private=True,  # the space that TRACKIO_SPACE_ID names, if it is created
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        logger.info("Trackio: run %s; trackio show --project %s", self.run_id, project)
        if not self._is_resumed:
            for row in earlier_rows:
                self.log(row)

    def log(self, row: Row) -> None:
        assert self._run is not None
        numbers = {name: value for name, value in row.items() if value is not None}
        self._run.log(numbers, step=int(numbers["update"]))

    def show(self, update: int, samples: Sequence[Sample]) -> None:
        assert self._run is not None
        import trackio

        columns, cells = table_of(samples)
        self._run.log({"samples_table": trackio.Table(columns=columns, data=cells)}, step=update)

    def close(self) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(io.StringIO()):
                trackio.finish()


def build_trackers(config: CommonConfig, folder: Path, plan: BatchPlan) -> list[Tracker]:
    """The trackers that the flags of a run with this output folder ask for, not yet open."""
    trackers: list[Tracker] = []
    flags = json.loads(to_json(config, plan))
    if "tensorboard" in config.trackers:
        trackers.append(TensorBoard(Path(str(config.output.tensorboard_path))))
    if "wandb" in config.trackers:
        trackers.append(WandB(folder, flags))
    if "trackio" in config.trackers:
        trackers.append(Trackio(folder, flags))
    return trackers


def table_of(samples: Sequence[Sample]) -> tuple[list[str], list[list[Cell]]]:
    """Columns and cells of samples, without HIDDEN_COLUMNS."""
    columns: list[str] = []
    for sample in samples:
        for name in sample:
            if name not in columns and name not in HIDDEN_COLUMNS:
                columns.append(name)
    cells: list[list[Cell]] = []
    for sample in samples:
        cells.append([_cell(sample.get(name)) for name in columns])
    return columns, cells


def wandb_problem() -> str | None:
    """Why W&B cannot be used; None if it can, or if it is set to offline."""
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
