# SPDX-License-Identifier: Apache-2.0
"""A run of the commands in a project folder, and a report on two runs."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dschat.evaluation.runs import build_report
from handmade_runs import Page, make_two_runs
from project_fixtures import interrupt, models, plain, project


@pytest.fixture
def options(plain: dict[str, Any]) -> Callable[..., Any]:
    """options(**changes): the checked flags of inference_with_rewards.py."""
    from dschat.evaluation.generate_options import InferenceOptions

    def make(**changes: Any) -> Any:
        made = InferenceOptions(**(plain | changes))
        made.validate()
        return made

    return make


@pytest.fixture
def run(options: Callable[..., Any]) -> Callable[..., Path]:
    """run(**changes): does the run of `options(**changes)`; its file."""
    from dschat.evaluation.generate import run_inference

    def go(**changes: Any) -> Path:
        chosen = options(**changes)
        run_inference(chosen)
        return chosen.result_path

    return go


__all__ = ["interrupt", "models", "plain", "project"]
Built = namedtuple("Built", "outcome folder page")


@pytest.fixture
def two_runs(tmp_path):
    return make_two_runs(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The report on the two runs."""
    folder = tmp_path_factory.mktemp("report")
    outcome = build_report(make_two_runs(folder), folder / "out", about=["About."], notes=["A remark."])
    return Built(outcome, folder / "out", Page((folder / "out" / "report.html").read_text(encoding="utf-8")))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("dschat.evaluation.run_page.draw_charts", lambda *args, **more: b"")
