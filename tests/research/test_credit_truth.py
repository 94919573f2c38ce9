# SPDX-License-Identifier: Apache-2.0
"""What pieces of responses are worth, measured by completions, against a task whose values are known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import credit_truth
from credit_truth import CREDITS, TrainedRun, completion_scores, correlation_table, correlations, piece_worth
from dschat.models.classifiers import load_scalar
from dschat.models.scalar import ScalarModel
from macro_actions.conditions import fixed
from macro_actions.segments import segment
from starts import Policy, SFTModel, make_model, save_model
from tasks import TASKS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedRun:
    """A random policy, whose tokens are nearly uniform; the score is the share of words with an even rank."""
    task = TASKS["style-32"]
    tokenizer = task.tokenizer()
    policy = Policy(make_model(task, tokenizer, 0).eval(), tokenizer)
    save_model(tmp_path, policy)
    critic = ScalarModel(load_scalar(str(tmp_path), "critic", torch.float32, tokenizer))  # its values are 0

    def even_share(_task: object, _prompts: object, responses: list[str]) -> torch.Tensor:
        shares = [np.mean([tokenizer.vocab[word] % 2 == 0 for word in text.split()]) for text in responses]
        return torch.tensor(shares, dtype=torch.float32)

    monkeypatch.setattr(credit_truth, "gold_scores", even_share)
    monkeypatch.setattr(credit_truth, "RESPONSES", 5)
    monkeypatch.setattr(credit_truth, "COMPLETIONS", 64)
    return TrainedRun(task, policy, critic, SFTModel(tmp_path, 0.0, 1.0), 0)


def test_worth_by_hand() -> None:
    """Values .5 .2 and a score of 1."""
    worth = piece_worth(torch.tensor([[0.5, 0.2]]), torch.tensor([1.0]))
    assert worth[0].tolist() == pytest.approx([-0.3, 0.8])


@pytest.mark.slow
@torch.no_grad()
def test_completions_measure_what_a_piece_is_worth(run: TrainedRun) -> None:
    """Of uniform tokens each even one is worth half a token's share, and each odd one costs as much."""
    rows = run.task.rows(6, 0, "credit")
    prompts, _ = credit_truth.prompt_examples(run.task.parse(rows), run.policy.tokenizer, run.task.max_prompt)
    rollout = run.sample([prompt.prompt_ids for prompt in prompts], list(range(6)), [32] * 6)
    pieces = segment(fixed(rollout.response_mask, 5), rollout.response_mask)
    completed = completion_scores(run, prompts, rollout, pieces)
    assert completed.shape == (6, 7, 64)

    scores = run.scores([""] * 6, rollout.response_rows())
    measured = piece_worth(completed.mean(2), scores).flatten().numpy()
    is_even = (rollout.response_ids % 2 == 0).double().numpy()
    expected = np.add.reduceat(is_even - 0.5, [0, 5, 10, 15, 20, 25, 30], axis=1).flatten() / 32
    assert np.corrcoef(measured, expected)[0, 1] > 0.85
    assert np.polyfit(expected, measured, 1)[0] == pytest.approx(1, abs=0.2)


def test_advantages_without_a_critic_correlate_alike(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a critic of zeros all tokens of a response have its score at λ 1, and `first` and `equal` are the same."""
    monkeypatch.setattr(credit_truth, "COMPLETIONS", 16)
    numbers = correlations(run)
    assert numbers.keys() == {"values", "reliability", *CREDITS}
    assert numbers["n = 5, first"] == numbers["n = 5, equal"]
    assert 0.3 < numbers["reliability"] < 1
    assert 0 < numbers["λ 1"] < 0.8


def test_reliability_by_hand() -> None:
    """Halves with signal and noise of variance 1 agree by 1/2; their mean has noise of variance 1/2."""
    assert credit_truth.spearman_brown(0.5) == pytest.approx(1 / (1 + 0.5))


def test_values_are_of_the_states_before_tokens(run: TrainedRun) -> None:
    """A critic whose value is the column that it has read: the first token's is that of the prompt's last column."""
    rows = run.task.rows(2, 0, "credit")
    prompts, _ = credit_truth.prompt_examples(run.task.parse(rows), run.policy.tokenizer, run.task.max_prompt)
    rollout = run.sample([prompt.prompt_ids for prompt in prompts], [0, 1], [32, 32])

    def column(ids: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.shape[1]).expand_as(ids).float()

    values = credit_truth.scored_trajectory(replace(run, critic=column), prompts, rollout).values
    assert values is not None
    width = rollout.prompt_width
    assert values[0].tolist() == list(range(width - 1, width + 31))


def test_table_by_hand() -> None:
    """Two seeds of one critic: means with standard errors."""
    rows = []
    for value in (0.1, 0.3):
        rows.append(
            {"updates": 20, "critic": "new", "values": value, "reliability": 0.75, **dict.fromkeys(CREDITS, value)}
        )
    text = correlation_table(pd.DataFrame(rows))
    assert text.splitlines()[2].startswith("| 20 | new | 2 | 0.75 | 0.20 ± 0.10 | 0.20 ± 0.10 |")
