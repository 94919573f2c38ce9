# SPDX-License-Identifier: Apache-2.0
"""`dschat data preview --environment`: the prompts of rows are what their environments say first."""

import pytest

from cli_runs import write_jsonl
from data_cases import look_at_data as main
from dschat.run.state import SeedKind
from dschat.turns.environments import environment_seed

GAMES = """
class Seeded:
    tools = [{"type": "function", "function": {"name": "look"}}]

    def reset(self, row, seed):
        if row.get("breaks"):
            raise ValueError("no beginning")
        return [{"role": "user", "content": f"{row['animal']} {seed}"}]

    def step(self, messages, reply):
        raise AssertionError("nobody replies in a preview")
"""


@pytest.fixture
def arguments(tmp_path):
    """A preview of two rows."""
    (tmp_path / "games.py").write_text(GAMES)
    rows = [{"prompt": "unread", "animal": animal} for animal in ("fox", "cat")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return ["preview", str(path), "--environment", f"{tmp_path / 'games.py'}:Seeded"]


def test_the_messages_of_reset_are_shown(arguments, capsys):
    """With the seeds that training with the default --seed has in its first iteration."""
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "prompts: the messages with which the environment begins an episode of each row" in shown
    assert "step 3: " in shown and "unread" not in shown
    first, second = (environment_seed(1234, SeedKind.TRAINING, 0, number) for number in (0, 1))
    assert f"[[prompt: read]]user: fox {first}\n" in shown and f"[[prompt: read]]user: cat {second}" in shown


def test_an_environment_that_fails_is_named_with_its_row(arguments, tmp_path, caplog):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "animal": "fox"}, {"prompt": "a", "breaks": True}])
    assert main(arguments) == 2
    assert f"{tmp_path / 'rows.jsonl'}:2: --environment: reset failed in " in caplog.messages[-1]
