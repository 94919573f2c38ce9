# SPDX-License-Identifier: Apache-2.0
"""Two made-up runs, their report built once, and reports without pictures, which take a second to draw."""

from collections import namedtuple

import pytest

from dschat.reports.runs import build_report
from report_runs import Page, make_two_runs

Built = namedtuple("Built", "outcome folder page")


@pytest.fixture
def two_runs(tmp_path):
    return make_two_runs(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The report on the two runs."""
    folder = tmp_path_factory.mktemp("report")
    outcome = build_report(make_two_runs(folder), folder / "out", notes=["A remark."])
    return Built(outcome, folder / "out", Page((folder / "out" / "report.html").read_text(encoding="utf-8")))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("dschat.reports.runs.draw_charts", lambda *args, **more: b"")
