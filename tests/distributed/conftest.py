# SPDX-License-Identifier: Apache-2.0
"""One run of two processes, whose results many tests look at."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import built_once
from launches import WORKERS, run_ranks
from recorded_updates import FAST_CASES, Case

CHECKS = ("updates", "untied", "generation", "saving", "lora", "loading", "reduction")
SLOW_CHECKS = ("resume", "nonfinite", "empty", "rehearsal", "shared_base", "self_checks", "critic_updates")


class Outputs:
    """The folder that launched processes wrote into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def numbers(self, name: str, rank: int = 0) -> Any:
        """What a rank noted."""
        return json.loads((self.folder / f"{name}-{rank}.json").read_text())

    def tensors(self, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
        """What a rank kept."""
        return load_file(self.folder / f"{name}-{rank}.safetensors")


@pytest.fixture(scope="session")
def run_cases(shared: Path) -> Callable[..., Outputs]:
    """run_cases(name, cases, checks): starts two processes, once for all test processes."""

    def run(name: str, cases: tuple[Case, ...], checks: tuple[str, ...]) -> Outputs:
        def build(folder: Path) -> None:
            folder.mkdir()
            (folder / "cases.json").write_text(json.dumps([vars(case) for case in cases]))
            for rank in run_ranks(WORKERS, [str(folder), *checks], folder / "printed", timeout=900):
                rank.expect(0)

        return Outputs(built_once(shared, name, build))

    return run


@pytest.fixture(scope="session")
def two_processes(run_cases: Callable[..., Outputs]) -> Outputs:
    """Results of every check."""
    return run_cases("two-processes", FAST_CASES, CHECKS)


@pytest.fixture(scope="session")
def two_slow(run_cases: Callable[..., Outputs]) -> Outputs:
    """Results of the checks of slow tests: runs that are stopped or meet numbers that are not finite, and others."""
    return run_cases("two-slow", (), SLOW_CHECKS)
