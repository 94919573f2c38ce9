# SPDX-License-Identifier: Apache-2.0
"""Evaluations as lines, and lines above a progress bar."""

import io
import logging

from tqdm import tqdm

from dschat.common.progress import LinesAboveBars
from dschat.run.metrics import evaluation_line


def test_an_evaluation_is_a_line():
    first = {"eval/length": 12345.6, "eval/eos_rate": 0.5, "eval/kl": 0.0, "eval/scores": -1.23456}
    assert evaluation_line(0, first, {}) == "after 0 updates: scores -1.235, kl 0.000, length 12346, eos rate 0.5000"
    second = {"eval/scores": -1.0, "eval/kl": 0.5, "eval/new": 2.0}
    line = "after 10 updates: scores -1.000 (+0.23), kl 0.5000 (+0.5), new 2.000"
    assert evaluation_line(10, second, first) == line
    assert evaluation_line(1, {"eval/loss": 2.0}, {"eval/loss": 2.25}) == "after 1 update: loss 2.000 (−0.25)"


def test_a_line_leaves_the_bar_below_it_whole(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    handler = LinesAboveBars()
    with tqdm(total=2, file=screen, mininterval=0, ncols=40) as bar:
        bar.update()
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
    lines = screen.getvalue().replace("\r", "\n").splitlines()
    assert "a line" in lines, "nothing of the bar stands beside it"
