# SPDX-License-Identifier: Apache-2.0
"""What all mains share: the command line, the process group, how a run ends."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dschat.common.atomic import NO_ROOM
from dschat.common.lock import close_all
from dschat.common.progress import LinesAboveBars
from dschat.errors import UserError
from dschat.launch import follow_launcher
from dschat.settings.common import CommonConfig

if TYPE_CHECKING:
    from dschat.run.output import RunOutput

# What gloo and NCCL say where the process at the other end of a connection has ended.
LOST_PEER = re.compile(r"Connection (reset|closed) by peer|remote process exited|Connection refused.*store", re.I)
C = TypeVar("C", bound=CommonConfig)
logger = logging.getLogger("dschat")


def run_script(run: Callable[[], str | int], say: Callable[[str], object], goes_on: bool = False) -> int:
    """Runs a script and says what it returns; notes and errors go to stderr.

    Args:
        run: the script; returns the last lines of the output, nothing where it has said all, or a status.
        say: writes a line to stdout: print.
        goes_on: after Ctrl-C the same command goes on where it stood.

    Returns:
        The exit status: 0; 2 after a UserError; 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(message)s")  # libraries' warnings
    logging.getLogger("dschat").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        found = run()
        if isinstance(found, int):
            return found
        if found:
            say(found)
    except UserError as error:
        logger.error("error: %s", error)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, for instance `head`, has enough
    except KeyboardInterrupt:
        kept = "; what was finished is kept, the same command goes on from there" if goes_on else ""
        logger.error("interrupted%s", kept)
        return 130
    return 0


def run_main(step: str, config: Callable[[], C], train: Callable[[], Callable[[C, RunOutput], None]]) -> int:
    """Reads the configuration, joins the process group and trains.

    Args:
        step: as run.json names it: sft, reward, dpo, ppo, refuel or refuel_online.
        config: makes the configuration; raises UserError.
        train: imports the step, once flags are checked; it gets the configuration and the run's output folder.

    Returns:
        The exit status: 0; 2 after a UserError, told on stderr; 143 after SIGTERM, 130 after Ctrl-C; else 1.
    """
    logging.basicConfig(level=logging.INFO, format=f"{_rank_prefix()}%(message)s", handlers=[LinesAboveBars()])
    follow_launcher()
    saved: list[str] = []
    try:
        return _train(step, config(), train, saved)[0]
    except SystemExit:
        raise
    except BaseException as error:
        return _report(error, saved)
    finally:
        close_all()


def run_training(step: str, config: C, train: Callable[[], Callable[[C, RunOutput], None]]) -> dict[str, float]:
    """As `run_main`, for a program of one's own: errors are raised; the metrics of the last evaluation."""
    try:
        status, metrics = _train(step, config, train, [])
    finally:
        close_all()
    if status:
        raise SystemExit(status)
    return metrics


def _train(
    step: str, config: C, train: Callable[[], Callable[[C, RunOutput], None]], saved: list[str]
) -> tuple[int, dict[str, float]]:
    """Trains; the exit status, not 0 after a signal, and metrics. Folders of models that are written go to `saved`."""
    plan = config.plan_batches(int(os.environ.get("WORLD_SIZE") or 1))
    # Flags are checked by now. What follows takes seconds to import.
    import torch

    from dschat.engine.process_group import process_group
    from dschat.run.distributed import is_main, world_size
    from dschat.run.hub import push_after_training
    from dschat.run.output import RunOutput
    from dschat.run.preflight import preflight
    from dschat.run.stop import Stopped

    _quieten_libraries()
    with process_group(config.engine.ddp_timeout):
        try:
            preflight(config)
            torch.manual_seed(
                config.optimisation.seed
            )  # adapters and new embedding rows; sampling has seeds of its own
            if not is_main():
                logging.getLogger().setLevel(logging.WARNING)
            run = RunOutput(step, config, plan)
            run.record.saved = saved
            try:
                with _clear_when_full(config):
                    train()(config, run)
                    run.finish()
            except UserError:
                run.discard()
                raise
            pushes = is_main()
        except Stopped as stop:
            if is_main():
                how = "to go on, add --resume_from_checkpoint to the command"
                if run.folder != Path(config.output.output_dir):  # the earlier run there is still whole
                    how = "nothing was saved yet: start the same command again"
                print(f"stopped by {stop}; {how}", file=sys.stderr)
            return stop.status, {}
        except BaseException as error:
            if world_size() > 1:
                # Other ranks may wait in a collective for this one, and leaving the group would wait for them. The
                # launcher ends them when this process is gone.
                _leave_at_once(_report(error, saved))
            raise
    if config.tracking.push_to_hub and pushes:  # no other rank waits by now
        push_after_training(config.output.output_dir, config.tracking.push_to_hub)
    return 0, run.record.metrics


@contextmanager
def _clear_when_full(config: CommonConfig) -> Iterator[None]:
    """Inside, a disk that is full or cannot be written is reported like a wrong flag."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"--output_dir {error.filename or config.output.output_dir} could not be written: {error.strerror}. "
            f"{config.full_disk_remedy}"
        ) from error


def _report(error: BaseException, saved: Sequence[str]) -> int:
    """Says why the run ends; returns the exit status.

    Args:
        error: that ended it.
        saved: folders that models were written into so far.
    """
    if isinstance(error, KeyboardInterrupt):
        kept = f"the models saved last are in {saved[-1]}" if saved else "no models were saved yet"
        print(f"interrupted; {kept}", file=sys.stderr)
        return 130
    if isinstance(error, UserError) and error.on_every_rank and os.environ.get("LOCAL_RANK", "0") != "0":
        return 2
    cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        if several and isinstance(error, RuntimeError) and LOST_PEER.search(cause):
            cause = (
                "another process of this run has gone; what it said last is above, or on its machine. To go on from"
                f" the last checkpoint, add --resume_from_checkpoint to the command. ({cause.splitlines()[0]})"
            )
    print(f"error: {_rank_prefix()}{cause}", file=sys.stderr)
    _keep_cause(f"error: {_rank_prefix()}{cause}")
    return 2 if isinstance(error, UserError) else 1


def _leave_at_once(status: int) -> None:
    close_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rank_prefix() -> str:
    """Which process speaks, where there are several."""
    return f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _keep_cause(message: str) -> None:
    """Leaves the first failure for the training script, which repeats it below the launcher's own lines."""
    file = os.environ.get("MA_RLHF_ERROR_FILE")
    if file and os.path.exists(file) and os.path.getsize(file) == 0:
        Path(file).write_text(message + "\n", encoding="utf-8")


def _quieten_libraries() -> None:
    """Leaves the screen to the run: no bars for loading weights, no report on a new head (load.py says it itself)."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every request of --reward_url
