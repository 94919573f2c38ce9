# SPDX-License-Identifier: Apache-2.0
"""The table of evaluations on a terminal, and lines in its place with --log plain."""

import io
import math
import sys

from dschat.base import progress as progress_module
from dschat.base.progress import is_interactive, log_plainly, progress
from dschat.run.evaluation_table import EvaluationTable

TRAINING = {"explained": "val/explained_variance", "sampled/s": "time/sampled_per_second"}
FIRST = {
    "eval/kl": -8e-7,
    "eval/scores": -0.2262,
    "eval/scores_stderr": 0.0358,
    "eval/kl_per_token": 1e-9,
    "eval/eos_rate": 0.096,
    "eval/gold": 12.34,
    "eval/gold_stderr": 1.49,
    "eval/programs/passed": 0.5,
    "eval/rows": 21.0,
}


def test_rows_and_means_of_the_updates_between_them():
    table = EvaluationTable("ppo", TRAINING)
    assert table.row(0, FIRST).splitlines() == [
        "evaluations on 21 held-out rows",
        "update            score      KL     EOS             gold  explained  sampled/s",
        "     0   -0.226 ± 0.036   0.000    10 %       12.3 ± 1.5          –          –",
    ]
    table.add_updates({"val/explained_variance": 0.25, "time/sampled_per_second": 2000.0})
    table.add_updates({"val/explained_variance": 0.5})
    second = {"eval/scores": 1.5, "eval/kl": 44.25, "eval/eos_rate": math.nan, "eval/gold": 1e7}
    assert table.row(20, second) == ("    20             1.50    44.2       –          1.0e+07      0.375       2000")
    assert table.row(40, second).endswith("–          –")  # the means begin anew


def test_a_users_metric_with_a_known_name_has_one_column():
    heading = EvaluationTable("ppo", {}).row(0, {"eval/scores": 1.0, "eval/accuracy": 0.5}).splitlines()[0]
    assert heading.split() == ["update", "accuracy", "score"]


def test_plain_lines_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_module, "_is_plain", False)
    assert is_interactive()
    log_plainly()
    assert not is_interactive()
    with progress(2, "ppo") as bar:
        bar.update(2)
    assert terminal.getvalue() == ""  # a bar of less than a minute is not shown
