# SPDX-License-Identifier: Apache-2.0
"""Scores of programs from their outcomes, and which problems can be trained on."""

import json

import pytest
import torch

from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.programs.run import ProgramOutcome
from dschat.programs.scores import ProgramScores
from dschat.programs.step3 import rows_with_tests
from dschat.scoring.source import EpisodeRecords, ResponseTexts
from dschat.training.steps.scores import SourceParts, reward_source
from factories import make_rollout, ppo_config, ragged_rows

ROWS = ragged_rows([2, 5, 9, 1], [7, 1, 4, 3])


def row(tests: object, solution: str | None = None, number: int = 0) -> Row:
    """A problem."""
    return Row("p", None, solution, None, {"input_output": tests}, f"apps.jsonl:{number}")


class Pool:
    """Gives each program the tests that its text names, and remembers the programs."""

    def __init__(self) -> None:
        self.programs: list[str | None] = []

    def run(self, programs, tests, origins):
        self.programs += programs
        statuses = [tuple((program or "").split()) for program in programs]
        return [ProgramOutcome(status, 2, "namespaces", 0.1, "no room") for status in statuses]


def scores_of(responses, reward="paper", skips=False):
    texts = ResponseTexts(["p"] * 4, responses, [row("{}")] * 4, [True] * 4)
    return ProgramScores(Pool(), reward, skips)(make_rollout(ROWS), texts)


def test_a_process_without_responses_has_no_scores():
    texts = ResponseTexts([], [], [], [])
    found = ProgramScores(Pool(), "paper")(make_rollout(ROWS), texts)
    assert found.values.shape == (0,) and found.missing is None


def test_scores_and_shares():
    found = scores_of(["passed passed", "passed wrong", "compile_error", "passed timeout"])
    assert found.missing is None
    torch.testing.assert_close(found.values, torch.tensor([1.0, 0.35, -1.0, -0.6]))
    assert found.measured["programs/passed"] == (1, 4) and found.measured["programs/timeout"] == (1, 4)
    assert found.measured["programs/tests_per_second"][0] == 7
    assert scores_of(["passed wrong"] * 4, "ratio").values.tolist() == [0.5] * 4


def test_the_program_of_an_episode_is_in_its_last_reply():
    """Messages of the environment, and of the prompt's examples, are no programs; nor are earlier replies."""
    shots = [{"role": "assistant", "content": "timeout"}, {"role": "user", "content": "q"}]
    reply, answer = {"role": "assistant", "content": "wrong"}, {"role": "user", "content": "again"}
    last = {"role": "assistant", "content": "passed passed"}
    messages = [[*shots, last], [*shots, reply, answer, last, answer], [*shots, last], shots]
    rewards = [[0.0], [0.0, 0.0], [0.0], []]
    flags = torch.zeros(4, dtype=torch.bool)
    records = EpisodeRecords(torch.zeros(4, 9), flags, flags, messages, rewards, [])
    texts = ResponseTexts(
        ["p"] * 4, ["timeout wrong again passed passed"] * 4, [row("{}")] * 4, [True] * 4, episodes=records, counted=3
    )
    pool = Pool()
    found = ProgramScores(pool, "paper", True)(make_rollout(ROWS), texts)
    assert pool.programs == ["passed passed"] * 3 + [None]
    assert found.measured["programs/passed"] == (3, 3)


def test_a_row_without_an_outcome_has_no_score_and_leaves_the_mean():
    found = scores_of(["passed passed", "invalid", "passed wrong", "compile_error"])
    assert found.missing.tolist() == [False, True, False, False]
    assert float(found.values.mean()) == pytest.approx((1.0 + 0.35 - 1.0) / 3)
    with pytest.raises(UserError, match="no program of rank 0 could be run: no room. .*--on_reward_error skip"):
        scores_of(["invalid"] * 4)


def test_weights_go_by_the_names_of_sources(tmp_path):
    """Whatever their order, and 1 for a source without weight: −.5 × 3 + 1 × 10."""
    (tmp_path / "f.py").write_text(
        "def three(prompts, responses, rows): return [3.0] * len(rows)\n"
        "def ten(prompts, responses, rows): return [10.0] * len(rows)\n"
    )
    functions = [f"{tmp_path / 'f.py'}:ten", f"{tmp_path / 'f.py'}:three"]
    config = ppo_config(tmp_path / "run", reward_function=functions, reward_weights=["three=-.5"])
    assert config.rewards.formula == "score = 1 × ten − 0.5 × three"
    texts = ResponseTexts(["p"] * 4, ["r"] * 4, [row("{}")] * 4, [True] * 4)
    scores = reward_source(SourceParts(config, None, None, None))(make_rollout(ROWS), texts)
    assert scores.values.tolist() == [8.5] * 4
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"ten": [10.0] * 4, "three": [3.0] * 4}


def test_rows_without_tests_and_without_a_working_solution():
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = [row("", number=1), row(tests, "passed passed", 2), row(tests, "wrong", 3), row(tests, None, 4)]
    rows.append(row("{}", "x", 5))
    kept, dropped = rows_with_tests(rows, Pool())
    assert [r.origin for r in kept] == ["apps.jsonl:2", "apps.jsonl:3", "apps.jsonl:4"] and dropped == {"no tests": 2}
    kept, dropped = rows_with_tests(rows, Pool(), drop_unsolvable=True)
    assert [r.origin for r in kept] == ["apps.jsonl:2", "apps.jsonl:4"]
    assert dropped == {"no tests": 2, "its own solution fails its tests": 1}
    with pytest.raises(UserError, match="apps.jsonl:7: no column 'input_output', which holds the tests"):
        rows_with_tests([Row("p", None, None, None, {}, "apps.jsonl:7")], Pool())
