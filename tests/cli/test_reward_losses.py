# SPDX-License-Identifier: Apache-2.0
"""The script that trains the quickstart's reward model with each loss."""

import subprocess
import sys

import pytest

from cli_runs import TRAINING, run_command

SCRIPT = TRAINING / "quickstart" / "reward_losses.py"


def test_table_by_hand():
    """Accuracies of 0.5 and 0.7 have the mean 0.6 and, of two, the standard error 0.1."""
    code = (
        "from reward_losses import table\n"
        "print(table({'end': [{'eval/accuracy': 0.5}, {'eval/accuracy': 0.7}],"
        " 'average': [{'eval/accuracy': 0.5, 'eval/end_accuracy': 0.25, 'eval/mean_accuracy': 0.75}]}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[2:] == [
        "| `end` |  | 60.0 ± 10.0 % | 60.0 ± 10.0 % |",
        "| `average` | 75.0 % | 50.0 % | 25.0 % |",
    ]


@pytest.mark.slow
def test_small(tmp_path):
    result = run_command([sys.executable, SCRIPT, "--small", "--seeds", "1", "--output_dir", tmp_path / "out"]).expect(
        0
    )
    table = (tmp_path / "out" / "reward-losses.md").read_text(encoding="utf-8")
    assert table.strip() in result.stdout and "27 held-out pairs" in result.stdout
    assert [row.split("`")[1] for row in table.splitlines()[2:]] == ["end", "last_token", "per_sample", "average"]
