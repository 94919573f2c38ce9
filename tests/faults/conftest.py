# SPDX-License-Identifier: Apache-2.0
"""The small corpus and model, and the run that nothing happened to, made once for all test processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runs import built_once
from fault_runs import Trial, flags_of, make_inputs, outcome


@pytest.fixture(scope="session")
def inputs(shared: Path) -> Path:
    """See `make_inputs`."""
    return built_once(shared, "fault-inputs", make_inputs)


@pytest.fixture
def trial(inputs: Path, tmp_path: Path) -> Callable[..., Trial]:
    """trial(step, **flags): a run in this test's folder."""

    def made(step: str, name: str = "", **flags: Any) -> Trial:
        return Trial(step, flags_of(step, inputs) | flags, tmp_path / f"{step}{name}")

    return made


@pytest.fixture(scope="session")
def whole(shared: Path, inputs: Path) -> Callable[[str], dict[str, Any]]:
    """whole(step): the outcome of an uninterrupted run of `flags_of(step)`."""

    def made(step: str) -> dict[str, Any]:
        def build(folder: Path) -> None:
            Trial(step, flags_of(step, inputs), folder).run().expect(0)

        return outcome(built_once(shared, f"fault-{step}", build) / "out")

    return made
