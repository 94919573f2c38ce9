# SPDX-License-Identifier: Apache-2.0
"""Sums of several sources by hand, and what happens where one fails or gives no number."""

import json

import pytest
import torch

from dschat.models.scalar import ScalarModel
from dschat.run import stop
from dschat.run.stop import Stopped
from dschat.scoring.function import FunctionScores
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.source import ResponseTexts, Scores, Weighted
from dschat.scoring.weighted import WeightedScores
from factories import make_classifier, make_prompt, make_rollout, ragged_rows
from launches import run_ranks

ROWS = ragged_rows([2, 5, 9], [7, 1, 4])
TEXTS = ResponseTexts(
    ["p"] * 3, ["a", "bb", "ccc"], [make_prompt([], "p", i, {"n": i}).row for i in range(3)], [True] * 3
)
NAN = float("nan")


def source(*numbers, on_error="stop"):
    return FunctionScores(lambda *_: list(numbers), "--reward_function", on_error)


def score(*sources, skips=False):
    return WeightedScores([Weighted(*one) for one in sources], skips)(make_rollout(ROWS), TEXTS)


def test_a_sum_by_hand():
    """1·(1, 2, 3) + ½·(10, −20, 0) = (6, −8, 3)."""
    found = score(("f", 1.0, source(1, 2, 3)), ("g", 0.5, source(10, -20, 0)))
    assert found.values.tolist() == [6, -8, 3] and found.values.dtype == torch.float32
    assert {name: x.tolist() for name, x in found.parts.items()} == {"f": [1, 2, 3], "g": [10, -20, 0]}
    assert found.missing is None


def test_what_sources_measure_and_miss_is_kept():
    class Programs:
        model = None

        def __call__(self, rollout, texts):
            return Scores(torch.ones(3), torch.tensor([False, True, False]), {"programs/passed": (2.0, 3.0)})

    found = score(("f", 2.0, source(1, 2, 3)), ("programs", 1.0, Programs()))
    assert found.missing.tolist() == [False, True, False] and found.measured == {"programs/passed": (2.0, 3.0)}
    assert found.values.tolist() == [3, 5, 7]


def test_the_reward_model_is_the_one_that_the_self_check_looks_at():
    model = RewardModelScores(ScalarModel(make_classifier()), 2)
    assert WeightedScores([Weighted("f", 1.0, source(1)), Weighted("m", 1.0, model)]).model is model.model
    assert WeightedScores([Weighted("f", 1.0, source(1))]).model is None


def test_rows_without_a_number_are_missing_and_leave_means_as_they_are():
    """f misses the second, g the third: the first is left, with 1 + 2·4 = 9."""
    found = score(("f", 1.0, source(1, None, 3)), ("g", 2.0, source(4, 5, float("inf"))), skips=True)
    assert found.missing.tolist() == [False, True, True]
    assert found.values.tolist() == [9, 9, 9]
    parts = {name: x.tolist() for name, x in found.parts.items()}
    assert parts == {"f": [1, 1, 1], "g": [4, 4, 4], "unscored": [0, 1, 1]}


class Flaky:
    """Fails as often as it is told to, and then scores by length; a response named `bad` always fails."""

    def __init__(self, failures, bad=None):
        self.failures, self.bad, self.calls = failures, bad, []

    def __call__(self, prompts, responses, rows):
        assert len(prompts) == len(responses) == len(rows)
        self.calls.append(list(responses))
        if len(self.calls) <= len(self.failures):
            failure = self.failures[len(self.calls) - 1]
            if isinstance(failure, Exception):
                raise failure
            return failure
        if self.bad in responses:
            raise ValueError("cannot read it")
        return [float(len(text)) for text in responses]


@pytest.fixture
def waits(monkeypatch):
    """Seconds that a source waited, none of which pass."""
    waited = []
    monkeypatch.setattr("dschat.scoring.function.pause", waited.append)
    return waited


def test_a_failing_function_is_called_three_times_more(waits, caplog):
    flaky = Flaky([ValueError("down"), [1.0], [1.0, NAN, 2.0]])
    scores = FunctionScores(flaky, "--reward_function", "retry")(make_rollout(ROWS), TEXTS)
    assert scores.tolist() == [1, 2, 3] and len(flaky.calls) == 4 and waits == [1, 2, 4]
    for words in ("ValueError: down", "returned shape (1,) for 3", "not finite", "called again in 4 s"):
        assert words in caplog.text


def test_a_signal_ends_the_wait(monkeypatch):
    monkeypatch.setattr(stop, "_received", 15)
    with pytest.raises(Stopped):
        FunctionScores(Flaky([ValueError("down")] * 9), "--reward_function", "retry")(make_rollout(ROWS), TEXTS)


def test_rows_at_which_a_function_fails_are_found(caplog):
    flaky = Flaky([], bad="bb")
    found = score(("f", 1.0, FunctionScores(flaky, "--reward_function", "skip")), skips=True)
    assert flaky.calls == [["a", "bb", "ccc"], ["a"], ["bb"], ["ccc"]]
    assert found.missing.tolist() == [False, True, False] and found.values.tolist() == [1, 2, 3]  # (1 + 3) / 2
    assert "cannot read it" in caplog.text and "fails at 1 of 3" in caplog.text


TWO = """
import json, sys
import torch.distributed as dist
dist.init_process_group("gloo")
from dschat.run.distributed import make_host_groups
make_host_groups(60.0, 60.0)
from dschat.base.errors import UserError
from dschat.scoring.function import FunctionScores
from dschat.programs.run import ProgramOutcome
from dschat.programs.scores import ProgramScores
from dschat.scoring.source import ResponseTexts
from dschat.scoring.source import Weighted
from dschat.scoring.weighted import WeightedScores
from factories import make_prompt, make_rollout, ragged_rows
rows = [make_prompt([], "p", i, {"input_output": "{}"}).row for i in range(2)]
texts, rollout = ResponseTexts(["p"] * 2, ["a", "bb"], rows, [True] * 2), make_rollout(ragged_rows([1, 1], [2, 2]))
rank = dist.get_rank()
def f(prompts, responses, rows):
    if rank == 1:
        raise ValueError("rank 1 fails")
    return [1.0, 4.0]
class Pool:
    def run(self, programs, tests, origins):
        ends = [("invalid",), ("invalid",)] if rank == 1 else [("passed", "wrong"), ("passed", "passed")]
        return [ProgramOutcome(tests, 2, "namespaces", 0.1, "no room") for tests in ends]
def scores(source):
    found = WeightedScores([Weighted("f", 2.0, source)], True)(rollout, texts)
    return [found.values.tolist(), found.missing.tolist(), found.parts["f"].tolist()]
found = [scores(FunctionScores(f, "--reward_function", "skip")), scores(ProgramScores(Pool(), "ratio", True))]
try:
    ProgramScores(Pool(), "ratio")(rollout, texts)
except UserError as error:
    found.append(str(error))
json.dump(found, open(f"{sys.argv[1]}/{rank}.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_one_of_two_processes_without_scores(tmp_path):
    """Rank 0 has 2·(1, 4), and of programs 2·(½, 1); rank 1 has none, and takes their means, 5 and 1½.

    Without --on_reward_error skip both stop where rank 1 could run no program.
    """
    script = tmp_path / "two.py"
    script.write_text(TWO)
    for rank in run_ranks(script, [str(tmp_path)], tmp_path):
        rank.expect(0)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in "01")
    assert first[:2] == [[[2, 8], [False, False], [1, 4]], [[1, 2], [False, False], [0.5, 1]]]
    assert second[:2] == [[[5, 5], [True, True], [2.5, 2.5]], [[1.5, 1.5], [True, True], [0.75, 0.75]]]
    assert first[2] == second[2] and first[2].startswith("no program of rank 1 could be run: no room.")
