# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation by hand: a teacher's log-ratios as advantages, by token and by macro action."""

from dataclasses import replace

import pytest
import torch

from closeness import FORMULA, assert_near
from macro_actions.estimators import with_teacher
from macro_actions.settings import EstimatorSettings
from rl_cases import credit_of, trajectory_of

# A response of three tokens in two macro actions, of two tokens and one. log π_T − log π is 1, .5 and .5; the KL to
# the reference is −.2, 0 and .4.
ENDS = torch.tensor([[False, True, True]])
LOGPROBS = [-2.0, -2.5, -1.0]
TEACHER = [-1.0, -2.0, -0.5]
REFERENCE = [-1.8, -2.5, -1.4]


def three_tokens():
    trajectory = trajectory_of([3], 3, 0)
    return replace(
        trajectory,
        logprobs=torch.tensor([LOGPROBS]),
        ref_logprobs=torch.tensor([REFERENCE]),
        teacher_logprobs=torch.tensor([TEACHER]),
        values=torch.tensor([[0.5, 0.1, 0.2]]),
        scores=torch.tensor([1.0]),
    )


@pytest.mark.parametrize(
    ("by_macro_action", "reduction", "added"),
    [(True, "sum", [3.0, 3.0, 1.0]), (False, "sum", [2.0, 1.0, 1.0]), (True, "mean", [1.5, 1.5, 1.0])],
)
def test_log_ratios_are_added_by_hand(by_macro_action, reduction, added) -> None:
    """A coefficient of 2; rewards, returns and the KL do not know the teacher."""
    settings = EstimatorSettings(lam=0.5, macro_reward=reduction)
    batch = credit_of(three_tokens(), ENDS, "gae", lam=0.5, macro_reward=reduction)
    distilled = with_teacher(batch, 2.0, by_macro_action, settings)
    assert_near(distilled.advantages - batch.advantages, [added], FORMULA, 4.0)
    assert torch.equal(distilled.returns, batch.returns) and torch.equal(distilled.rewards, batch.rewards)


def test_distillation_reads_neither_scores_nor_later_rewards() -> None:
    """The KL penalty alone: −.5 · (−.2 + 0) = .1 and −.5 · .4 = −.2; with the teacher 1.6 and .3."""
    batch = credit_of(three_tokens(), ENDS, "distillation", kl_coef=0.5)
    assert_near(batch.advantages, [[0.1, 0.1, -0.2]], FORMULA, 2.0)
    assert batch.returns is None
    distilled = with_teacher(batch, 1.0, True, EstimatorSettings(kl_coef=0.5))
    assert_near(distilled.advantages, [[1.6, 1.6, 0.3]], FORMULA, 2.0)


def test_holes_and_padding_have_no_log_ratio() -> None:
    """What stands off the response counts for nothing, also if it is not a number."""
    trajectory = trajectory_of([2, 4], 4, 1)
    mask = torch.tensor([[True, True, False, False], [True, False, True, True]])
    rollout = replace(trajectory.rollout, response_mask=mask)
    teacher = torch.where(mask, trajectory.logprobs + 1.0, torch.nan)
    trajectory = replace(trajectory, rollout=rollout, teacher_logprobs=teacher)
    assert_near(trajectory.teacher_log_ratios, mask.float(), FORMULA, 8.0)
    batch = credit_of(trajectory, torch.zeros_like(mask), "distillation")
    distilled = with_teacher(batch, 1.0, True, EstimatorSettings())
    # A macro action never spans a hole: two tokens; one token and two tokens.
    assert_near(distilled.advantages, [[2.0, 2.0, 0.0, 0.0], [1.0, 0.0, 2.0, 2.0]], FORMULA, 8.0)
