# SPDX-License-Identifier: Apache-2.0
"""RLOO's credit assignment against numbers worked out by hand, and what a row's advantage may depend on."""

import math

import pytest
import torch

from closeness import FORMULA, assert_near, near
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import Rollout, Trajectory, select_rows
from rl_cases import credit_of, mask_of, trajectory_of

# Of four responses the log-ratios to the reference, and the scores. At a KL coefficient of 0.1 the returns are
# 3 - 0.3 = 2.7, 1 - 0 = 1, 0 - 0.4 = -0.4 and 2 + 0.2 = 2.2, in all 5.5.
LOG_RATIOS = [[1.0, 2.0], [0.5, -1.0, 0.5], [4.0], [0.0, -2.0]]
SCORES = [3.0, 1.0, 0.0, 2.0]


def recorded(padding: int = 1, unscored: tuple[int, ...] = (), finished: tuple[bool, ...] = (True,) * 4) -> Trajectory:
    """The four responses; what lies off them is not finite."""
    lengths = [0 if i in unscored else len(row) for i, row in enumerate(LOG_RATIOS)]
    width = 3 + padding
    logprobs = torch.tensor([row + [math.nan] * (width - len(row)) for row in LOG_RATIOS])
    mask, index = mask_of(lengths, width), torch.arange(4)
    rollout = Rollout(torch.zeros(4, width + 1, dtype=torch.long), mask, mask, index, torch.tensor(finished))
    return Trajectory(rollout, logprobs, torch.zeros(4, width), None, torch.tensor(SCORES))


def advantages_of(trajectory: Trajectory, samples: int, **options) -> list[float]:
    """Of each row, from its first token; all its tokens have the same, and padding has 0."""
    mask = trajectory.response_mask
    batch = credit_of(trajectory, fixed_ngram_ends(mask, 2), "rloo", samples=samples, **({"kl_coef": 0.1} | options))
    assert_near(batch.advantages, torch.where(mask, batch.advantages[:, :1], 0.0))
    assert batch.returns is None
    return batch.advantages[:, 0].tolist()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("samples", "advantages"),
    [
        (1, [0.0, 0.0, 0.0, 0.0]),
        (2, [2.7 - 1.0, 1.0 - 2.7, -0.4 - 2.2, 2.2 + 0.4]),
        (4, [2.7 - 2.8 / 3, 1.0 - 4.5 / 3, -0.4 - 5.9 / 3, 2.2 - 3.3 / 3]),
    ],
)
def test_ragged_responses_by_hand(samples, advantages, padding) -> None:
    assert advantages_of(recorded(padding), samples) == near(advantages, FORMULA)


@pytest.mark.parametrize(
    ("options", "returns"),
    [
        ({"kl_coef": 0.0}, [3.0, 1.0, 0.0, 2.0]),
        # d²/2 sums to 2.5, 0.75, 8 and 2
        ({"kl_estimator": "k2"}, [2.75, 0.925, -0.8, 1.8]),
        # the first two responses were cut: 3 - 1 = 2 and 1 - 1 = 0; then scores are held to 1.5
        ({"missing_eos_penalty": 1.0, "clip_reward_value": 1.5}, [1.2, 0.0, -0.4, 1.7]),
    ],
)
def test_the_return_is_the_sum_of_the_token_rewards(options, returns) -> None:
    first, second, third, fourth = returns
    found = advantages_of(recorded(finished=(False, False, True, True)), 2, **options)
    assert found == near([first - second, second - first, third - fourth, fourth - third], FORMULA)


def test_a_response_that_could_not_be_scored_is_no_baseline() -> None:
    found = advantages_of(recorded(unscored=(1,)), 4)
    assert found == near([2.7 - 1.8 / 2, 0.0, -0.4 - 4.9 / 2, 2.2 - 2.3 / 2], FORMULA)
    assert advantages_of(recorded(unscored=(1,)), 2)[:2] == [0.0, 0.0]


def test_a_batch_equals_its_prompts() -> None:
    trajectory = trajectory_of([3, 5, 1, 0, 7, 2, 4, 4, 6], 9, seed=3)
    ends = fixed_ngram_ends(trajectory.response_mask, 3)
    whole = credit_of(trajectory, ends, "rloo", samples=3, kl_coef=0.2)
    for start in (0, 3, 6):
        rows = torch.arange(start, start + 3)
        alone = credit_of(select_rows(trajectory, rows), ends[rows], "rloo", samples=3, kl_coef=0.2)
        assert_near(alone.advantages, whole.advantages[rows])
        assert_near(alone.rewards, whole.rewards[rows])


def test_macro_actions_leave_the_advantages_alone() -> None:
    trajectory = recorded()
    batches = [
        credit_of(trajectory, fixed_ngram_ends(trajectory.response_mask, n), "rloo", samples=2, kl_coef=0.1)
        for n in (1, 3)
    ]
    assert torch.equal(batches[0].advantages, batches[1].advantages)
    assert [batch.macro.mask.sum(1).tolist() for batch in batches] == [[2, 3, 1, 2], [1, 1, 1, 1]]


def test_rows_that_are_no_whole_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows are not 3 samples of each prompt"):
        advantages_of(recorded(), 3)
