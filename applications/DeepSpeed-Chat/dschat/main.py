# SPDX-License-Identifier: Apache-2.0
"""How a command and a training process run and end: logging, process group, exit status, messages of errors.

`run_script` runs a command. `run_main` runs a training step as a process of its own and `run_training` inside a user's
program, both by `TrainingProcess`.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from dschat.base.atomic import NO_ROOM
from dschat.base.errors import TIMED_OUT, UserError, is_lost_peer, user_message
from dschat.base.lock import close_all
from dschat.base.progress import LinesAboveBars, is_interactive, log_plainly
from dschat.cluster import ClusterNode, adopt, process_of, read_number
from dschat.launch import ERROR_FILE, follow_launcher
from dschat.settings.common import CommonConfig

if TYPE_CHECKING:
    from dschat.run.output import RunOutput
    from dschat.settings.batches import BatchPlan

Config = TypeVar("Config", bound=CommonConfig)
Step: TypeAlias = "Callable[[Config, RunOutput], None]"  # trains what a configuration says into a run's output folder
logger = logging.getLogger("dschat")


def run_script(run: Callable[[], str | int], resumable: bool = False) -> int:
    """Runs a command and prints what it returns; warnings and errors go to stderr.

    Args:
        run: the command; returns its last lines of output ("" for none) or an exit status.
        resumable: after Ctrl-C, the same command continues where it stopped.

    Returns:
        The exit status: 0; 2 after a UserError; 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", handlers=[LinesAboveBars()])  # for warnings of libraries, too
    logging.getLogger("dschat").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        result = run()
        if isinstance(result, int):
            return result
        if result:
            print(result)
    except BrokenPipeError:
        pass  # the reader of the output, for instance `head`, has closed it
    except (UserError, OSError) as error:
        message = user_message(error)
        if message is None:
            raise
        logger.error("error: %s", message)
        return 2
    except KeyboardInterrupt:
        remark = "; what was finished is kept, the same command continues from there" if resumable else ""
        logger.error("interrupted%s", remark)
        return 130
    finally:
        _flush_or_discard()
    return 0


def run_main(step: str, read_config: Callable[[], Config], load_step: Callable[[], Step[Config]]) -> int:
    """Reads the configuration, joins the process group and trains; errors are reported on stderr.

    Args:
        step: its name in run.json: sft, reward, dpo, ppo, refuel or refuel_online.
        read_config: makes the configuration; raises UserError.
        load_step: imports the training step, after the flags are checked.

    Returns:
        The exit status: 0; 2 after a UserError; 143 after SIGTERM or --max_time, 130 after Ctrl-C; else 1. One of
        several ranks ends here with this status.
    """
    logging.basicConfig(level=logging.INFO, handlers=[LinesAboveBars()], force=_has_peers())
    _format_lines()
    follow_launcher()
    process = TrainingProcess(step, load_step)
    try:
        status = process.train(read_config()).status
    except SystemExit:
        raise
    except BaseException as error:
        status = report_error(error, process.saved_models)
    finally:
        close_all()
    if _has_peers():
        # gloo's threads may release tensors while the interpreter is being taken down, which would abort the process.
        _leave_at_once(status)
    return status


def _format_lines() -> None:
    """Log lines begin with the time, except for a person at a terminal; those of several ranks with the rank."""
    time_stamp = "" if is_interactive() else "%(asctime)s "
    form = f"{time_stamp}{_rank_prefix()}%(message)s"
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LinesAboveBars):  # possibly that of `run_script`
            handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))


def run_training(step: str, config: Config, load_step: Callable[[], Step[Config]]) -> dict[str, float]:
    """Trains inside a program of the user's own: errors are raised. Returns the metrics of the last evaluation."""
    try:
        result = TrainingProcess(step, load_step).train(config)
    finally:
        close_all()
    if result.status:
        raise SystemExit(result.status)
    return result.metrics


@dataclass(frozen=True)
class TrainingResult:
    """How a training step ended.

    Attributes:
        status: exit status, 0 unless a signal or --max_time has stopped the run.
        metrics: metrics of the last evaluation, by name.
    """

    status: int
    metrics: dict[str, float]


class TrainingProcess(Generic[Config]):
    """One of the processes that run a training step."""

    def __init__(self, step: str, load_step: Callable[[], Step[Config]]) -> None:
        """Prepares a training process of a step."""
        self._step = step
        self._load_step = load_step
        self._output: RunOutput | None = None
        self._started_at = time.monotonic()

    @property
    def saved_models(self) -> list[str]:
        """Folders of models that the run has saved so far."""
        return [] if self._output is None else self._output.record.saved

    def train(self, config: Config) -> TrainingResult:
        """Joins the process group, trains, and uploads the models if the flags say so."""
        _become_rank()
        if config.output.log == "plain":
            log_plainly()
            _format_lines()
        plan = config.plan_batches(int(os.environ.get("WORLD_SIZE") or 1))
        # The flags are checked by now. These imports take seconds.
        from dschat.engine.process_group import process_group
        from dschat.run.distributed import is_main, world_size
        from dschat.run.stop import Stopped, stopping_at

        max_seconds = config.output.max_seconds
        deadline = math.inf if max_seconds is None else self._started_at + max_seconds
        _quieten_libraries()
        with process_group(config.engine.ddp_timeout, config.engine.save_timeout), stopping_at(deadline):
            try:
                metrics = self._train_in_group(config, plan)
                is_main_rank = is_main()
            except Stopped as stop:
                if is_main():
                    with suppress(OSError):  # the terminal may be closed
                        print(
                            f"stopped by {stop}; to continue, add --resume_from_checkpoint to the command",
                            file=sys.stderr,
                        )
                _flush_or_discard()
                return TrainingResult(stop.status, {})
            except BaseException as error:
                if world_size() > 1:
                    # Other ranks may wait in a collective for this one, and leaving the group would wait for them.
                    # The launcher ends them when this process is gone.
                    _leave_at_once(report_error(error, self.saved_models))
                raise
        if config.tracking.push_to_hub and is_main_rank:  # outside of the process group, where other ranks would wait
            from dschat.run.hub import push_after_training

            push_after_training(config.output.output_dir, config.tracking.push_to_hub)
        return TrainingResult(0, metrics)

    def _train_in_group(self, config: Config, plan: BatchPlan) -> dict[str, float]:
        """Checks the machine, trains into the output folder, and returns the metrics of the last evaluation."""
        import torch

        from dschat.run.distributed import is_main
        from dschat.run.output import RunOutput
        from dschat.run.preflight import preflight

        preflight(config)
        # For new adapters and embedding rows; sampling has seeds of its own.
        torch.manual_seed(config.optimisation.seed)
        if not is_main():
            logging.getLogger().setLevel(logging.WARNING)
            logging.getLogger("dschat").setLevel(logging.NOTSET)  # `run_script` has set it in a task of srun
        output = RunOutput(self._step, config, plan)
        self._output = output
        with _disk_errors_reported(config), closing(output):
            train = self._load_step()
            train(config, output)
            output.finish()
        return output.record.metrics


@contextmanager
def _disk_errors_reported(config: CommonConfig) -> Iterator[None]:
    """Context in which a full or read-only disk raises UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"--output_dir {error.filename or config.output.output_dir} could not be written: {error.strerror}. "
            f"{config.full_disk_remedy}"
        ) from error


def report_error(error: BaseException, saved_models: Sequence[str]) -> int:
    """Prints why a run ends to stderr, and returns the exit status.

    Args:
        error: the exception that ended it.
        saved_models: folders of models that the run has saved so far.
    """
    if isinstance(error, KeyboardInterrupt):
        remark = f"the models saved last are in {saved_models[-1]}" if saved_models else "no models were saved yet"
        print(f"interrupted; {remark}", file=sys.stderr)
        return 130
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    if isinstance(error, UserError) and error.on_every_rank and not is_first_of_node:
        return 2
    message = user_message(error)
    status = 2
    if message is None:
        traceback.print_exception(error)
        message = _cause_of(error)
        status = 1
    line = f"error: {_rank_prefix()}{message}"
    print(line, file=sys.stderr)
    _write_first_error(line)
    return status


def _cause_of(error: BaseException) -> str:
    """An exception that is no UserError, in a sentence; if another rank is the cause, the sentence says so."""
    cause = f"{type(error).__name__}: {error}"
    if not (_has_peers() and is_lost_peer(error)):
        return cause
    details = cause.splitlines()[0]
    if TIMED_OUT.search(details) and "(--save_timeout)" not in details:
        from dschat.run.distributed import missing_ranks

        details = f"waited --ddp_timeout for it: {missing_ranks()}"
    return (
        "another process of this run has gone or hangs; its last messages are above, or on its machine. To continue"
        f" from the last checkpoint, add --resume_from_checkpoint to the command. ({details})"
    )


def _leave_at_once(status: int) -> None:
    """Ends this process without waiting for other ranks."""
    close_all()
    _flush_or_discard()
    os._exit(status)


def _flush_or_discard() -> None:
    """Writes what was printed; it is discarded if its reader has gone, which would change the exit status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream that the shell has closed is None
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _become_rank() -> None:
    """Makes this process the rank that a cluster says it is. Raises UserError if it would train a model of its own."""
    process = process_of(os.environ)
    if isinstance(process, ClusterNode):
        raise UserError(
            f"{process.source}: {process.count} machines run this program, and each would train a model of its own."
            " Start the step by `dschat`, which starts one process per GPU, or the program by torchrun."
        )
    if process is not None:
        adopt(process, os.environ.get("MASTER_ADDR"), read_number(os.environ, "MASTER_PORT", 29500))


def _has_peers() -> bool:
    """Whether the launcher has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _rank_prefix() -> str:
    """Start of each line of a process's output: its rank, if there are several processes."""
    return f"[rank {os.environ.get('RANK', '0')}] " if _has_peers() else ""


def _write_first_error(message: str) -> None:
    """Leaves the message of the first failure for `launch`, which repeats it below the launcher's own lines."""
    file = os.environ.get(ERROR_FILE)
    if file and os.path.exists(file) and os.path.getsize(file) == 0:
        Path(file).write_text(message + "\n", encoding="utf-8")


def _quieten_libraries() -> None:
    """Turns off transformers' bars for loading weights and its report on a new head, which load.py logs itself."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every request of --reward_url
