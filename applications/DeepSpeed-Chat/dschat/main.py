# SPDX-License-Identifier: Apache-2.0
"""What all mains share: the command line, the process group, errors without tracebacks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dschat.config.common import CommonConfig
from dschat.config.parse import parse
from dschat.errors import UserError

if TYPE_CHECKING:
    from dschat.run.output import RunOutput

C = TypeVar("C", bound=CommonConfig)


def run_main(step: str, config_class: type[C], train: Callable[[C, RunOutput], None]) -> int:
    """Parses the command line, joins the process group and runs a step.

    Args:
        step: sft, reward or ppo.
        config_class: the step's configuration.
        train: the step; gets the configuration and the run's output folder.

    Returns:
        The exit status: 0, or 2 after a UserError, whose message goes to stderr.
    """
    logging.basicConfig(level=logging.INFO, format=f"{_rank_prefix()}%(message)s")
    try:
        config = parse(config_class)
        plan = config.plan_batches(int(os.environ.get("WORLD_SIZE") or 1))
        # Flags are checked by now. What follows takes seconds to import.
        import torch

        from dschat.engine.process_group import process_group
        from dschat.run.distributed import is_main
        from dschat.run.output import RunOutput
        from dschat.run.preflight import preflight

        _quieten_libraries()
        with process_group():
            preflight(Path(config.output_dir), config.model_paths)
            torch.manual_seed(config.seed)  # adapters and new embedding rows; sampling has seeds of its own
            if not is_main():
                logging.getLogger().setLevel(logging.WARNING)
            run = RunOutput(step, config, plan)
            train(config, run)
            run.finish()
    except UserError as error:
        print(f"error: {_rank_prefix()}{error}", file=sys.stderr)
        _keep_cause(f"error: {_rank_prefix()}{error}")
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was saved so far is in the output folder", file=sys.stderr)
        return 130
    except Exception as error:
        _keep_cause(f"error: {_rank_prefix()}{type(error).__name__}: {error}")
        raise
    return 0


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
