# SPDX-License-Identifier: Apache-2.0
"""What is logged of a rollout, and responses written down token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from closeness import FORMULA, near
from dschat.training.ppo.metrics import repeated_4grams, rollout_metrics, token_table
from factories import EOS, make_rollout
from macro_actions.conditions import fixed
from macro_actions.types import Trajectory, select_rows, without_responses
from rl_cases import credit_of, trajectory_of


def test_rollout_metrics_by_hand():
    """Two rows of 3 and 1 tokens, the first finished; log-ratios 0.3, 0 and 0.1 against the reference."""
    rollout = make_rollout([([5], [6, 7, EOS]), ([5], [8])])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
    ref = logprobs - torch.tensor([[0.3, 0.0, 0.1], [0.2, 0.0, 0.0]])
    values = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    trajectory = Trajectory(rollout, logprobs, ref, values, torch.tensor([1.0, 3.0]))
    ends = fixed(rollout.response_mask, 2)
    batch = replace(
        credit_of(trajectory, ends, kl_coef=0.5, gamma=1.0, lam=0.9),
        returns=torch.tensor([[1.0, 1.0, 2.0], [4.0, 9.0, 9.0]]),
    )
    metrics = rollout_metrics(batch, 0.9)
    expected = {
        "objective/kl": 0.3,
        "objective/kl_per_token": 0.15,
        "objective/entropy": 5.0,
        "objective/scores": 2.0,
        "objective/scores_std": 1.0,
        "objective/rlhf_reward": 2.0 - 0.15,
        "response/length": 2.0,
        "response/eos_rate": 0.5,
        "response/repetition": 0.0,  # neither has 4 tokens
        "response/score_length_correlation": -1.0,  # the shorter one scores higher
        "macro/count": 1.5,
        "macro/length": 4 / 3,
        "macro/lambda_eff": 0.9**0.75,
        "val/num_eos_tokens": 1.0,
        "val/explained_variance": 1 - 0.1875 / 1.5,  # residuals 1, 1, 1, 2; returns 1, 1, 2, 4
    }
    assert metrics == near(expected, FORMULA)


def test_a_response_without_a_score_counts_in_no_mean():
    """Its tokens are taken away, and its score was filled in."""
    whole = trajectory_of([3, 1, 4, 2], 5, seed=1)
    missing = torch.tensor([False, False, False, True])
    scores = torch.where(missing, 100.0, whole.scores)
    cut = replace(whole, rollout=without_responses(whole.rollout, missing), scores=scores)
    batch = credit_of(cut, fixed(cut.response_mask, 2), kl_coef=0.5, gamma=1.0, lam=0.9)
    expected = rollout_metrics(select_rows(batch, torch.arange(3)), 0.9)
    assert expected["response/length"] == pytest.approx(8 / 3)
    assert rollout_metrics(batch, 0.9) == pytest.approx(expected)


def test_repeated_4grams_by_hand():
    """6 7 6 7 6 7 has the 4-grams 6767, 7676, 6767; nine times 8 six times the same; the third is too short."""
    rows = [([5], [6, 7, 6, 7, 6, 7]), ([5], [8] * 9), ([5, 5], [9] * 3), ([5], [10, 11, 12, 13, 14])]
    rollout = make_rollout(rows, right=3)
    assert [int(x) for x in repeated_4grams(rollout)] == [1 + 5, 3 + 6 + 2]


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_correlation_is_pearsons(offset):
    lengths = [3, 9, 4, 7, 1, 8]
    trajectory = trajectory_of(lengths, 9, seed=0)
    scores = torch.tensor([0.5, 2.0, 0.25, 1.0, -1.0, 3.0]) + offset
    trajectory = replace(trajectory, scores=scores)
    ends = fixed(trajectory.response_mask, 2)
    batch = credit_of(trajectory, ends, kl_coef=0.5, gamma=1.0, lam=0.9)
    expected = float(np.corrcoef(lengths, scores.double().numpy())[0, 1])
    name = "response/score_length_correlation"
    assert rollout_metrics(batch, 0.9)[name] == near(expected)
    assert rollout_metrics(batch, 0.9)["objective/scores_std"] == near(float(np.std(scores.double().numpy())))
    constant = credit_of(replace(trajectory, scores=torch.full((6,), 1.3)), ends, kl_coef=0.5, gamma=1.0, lam=0.9)
    metrics = rollout_metrics(constant, 0.9)
    assert metrics[name] == metrics["objective/scores_std"] == 0


def test_token_table(tokenizer):
    trajectory = trajectory_of([7, 3], 8, seed=0)
    ends = fixed(trajectory.response_mask, 3)
    batch = credit_of(trajectory, ends, kl_coef=0.1, gamma=1.0, lam=0.95)
    table = token_table(batch, 0, tokenizer)
    assert [row["macro_action"] for row in table] == [0, 0, 0, 1, 1, 1, 2]
    assert [row["reward"] for row in table] == near(batch.rewards[0, :7].tolist())
    assert set(table[0]) == {"text", "macro_action", "value", "reward", "advantage", "logprob", "ref_logprob"}
