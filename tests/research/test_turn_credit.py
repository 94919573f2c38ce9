# SPDX-License-Identifier: Apache-2.0
"""Credit by turn against credit by token: curves, equal tokens and the table by hand."""

import json
from pathlib import Path

import pandas as pd
import pytest

from turn_credit import SETTINGS, TOKEN, TurnRun, credit_table, read_seed

TURN = "MA-PPO (turn)"


def write_run(output: Path, scores: list[float], length: float) -> None:
    """A finished run of ten episodes an iteration, whose scores and lengths are these."""
    rows: list[dict[str, float]] = [{"update": 0, "samples": 0, "eval/scores": scores[0]}]
    for number, score in enumerate(scores):
        row = {
            "update": number + 1,
            "samples": 10 * (number + 1),
            "objective/scores": score,
            "response/length": length,
            "objective/kl": 0.1 * number,
            "macro/lambda_eff": 0.95,
        }
        rows.append(row)
    rows.append({"update": len(scores), "samples": 10 * len(scores), "eval/scores": scores[-1]})
    (output / "actor").mkdir(parents=True)
    (output / "actor" / "config.json").write_text("{}")
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (output / "metrics.jsonl").write_text(text)


def test_settings_are_compared_at_equal_tokens(tmp_path) -> None:
    """Episodes of the turn setting are twice as long: its second of four rollouts ends where the others end."""
    token, turn, control = (TurnRun("calculator", 3, setting) for setting in SETTINGS)
    write_run(token.output(tmp_path), [0.0, 0.2, 0.4, 0.6], 5.0)
    write_run(turn.output(tmp_path), [0.1, 0.5, 0.9, 1.0], 10.0)
    assert read_seed(tmp_path, "calculator", 3) == []  # the control is not finished
    write_run(control.output(tmp_path), [0.0, 0.0, 0.3, 0.3], 5.0)
    rows = pd.DataFrame(read_seed(tmp_path, "calculator", 3)).set_index("setting")
    assert set(rows["equal_tokens"]) == {200.0}
    assert rows.loc[TOKEN, "score"] == pytest.approx(0.6)
    assert rows.loc[TURN, "score"] == pytest.approx(0.5)
    # A third of 200 tokens: a third of the way from the first rollout (50 tokens) to the second (100 tokens).
    assert rows.loc[TOKEN, "early"] == pytest.approx(0.2 / 3)
    assert rows.loc[TURN, "held_out_start"] == 0.1 and rows.loc[TURN, "held_out_end"] == 1.0
    lines = credit_table(rows.reset_index()).splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[0] == f"calculator: {TURN}" and cells[4:7] == ["0.500", "-0.100", "0/1"]
