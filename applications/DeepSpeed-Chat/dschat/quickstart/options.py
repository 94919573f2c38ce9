# SPDX-License-Identifier: Apache-2.0
"""Flags of the examples that run the whole pipeline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.settings.common import EngineFlags, OptimisationFlags, OutputFlags
from dschat.settings.flags import AT_LEAST_1, check_values, flag, like
from dschat.settings.processes import LaunchFlags


@dataclass(kw_only=True)
class ExampleFlags:
    """Flags of every example."""

    output_dir: Path = like(OutputFlags, "output_dir", Path("runs"), "folder of everything made")
    small: bool = flag("a few updates only: shows that every part runs", False)
    seed: int = like(OptimisationFlags, "seed", help="of data, model and training")

    def __post_init__(self) -> None:
        """Raises UserError, which names the flag."""
        check_values(self)


@dataclass(kw_only=True)
class QuickstartOptions(ExampleFlags):
    """Run the whole pipeline on this machine, in minutes: corpus, model, three steps, with and without macro actions.

    Runs the same commands as any training, as processes of their own, on a synthetic corpus and a small Gemma.
    """

    output_dir: Path = like(ExampleFlags, "output_dir", Path("runs/quickstart"))
    num_gpus: Literal[1, 2, 4, 8] = like(LaunchFlags, "num_gpus", 1, "processes, each on a GPU or CPU")
    zero_stage: Literal[0, 1, 2, 3] = like(EngineFlags, "zero_stage", help="ZeRO stage of every model")
    jobs: int = flag("runs of step 3 at a time, where each is one process", 2, AT_LEAST_1)


@dataclass(kw_only=True)
class ProgramsOptions(ExampleFlags):
    """Programs on one machine: problems, step 1, step 3 with rewards by execution, pass@1 and pass@5."""

    output_dir: Path = like(ExampleFlags, "output_dir", Path("runs/programs"))
