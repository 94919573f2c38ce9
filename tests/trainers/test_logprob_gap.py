# SPDX-License-Identifier: Apache-2.0
"""An engine's log-probs beside the actor's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dschat.errors import UserError
from dschat.rl.types import Trajectory
from dschat.trainers.ppo.logprob_gap import check_gap
from factories import make_rollout

FLOAT32 = SimpleNamespace(module=torch.nn.Linear(1, 1))
BFLOAT16 = SimpleNamespace(module=torch.nn.Linear(1, 1).bfloat16())


def trajectory_with(*gaps):
    """Two responses of two tokens and one; the engine's log-probs are off by the gaps, the last one on padding."""
    own = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    rollout = make_rollout([([5], [6, 7]), ([5], [8])])
    drawn = own + torch.tensor(gaps).view(2, 2)
    return Trajectory(rollout, own, own, own, torch.zeros(2), drawn_logprobs=drawn)


def test_mean_and_largest_gap_of_the_response_tokens():
    metrics = check_gap(trajectory_with(3e-4, -6e-4, 0.0, 9.0), FLOAT32)
    assert metrics == pytest.approx({"rollout/logprob_gap": 3e-4, "rollout/logprob_gap_max": 6e-4}, abs=1e-6)


def test_other_weights_are_an_error():
    with pytest.raises(UserError, match="--rollout_engine.*differ from the actor's by 0.1 on average"):
        check_gap(trajectory_with(0.3, 0.0, 0.0, 0.0), FLOAT32)
    assert check_gap(trajectory_with(0.12, 0.0, 0.0, 0.0), BFLOAT16)["rollout/logprob_gap"] == pytest.approx(0.04)
    with pytest.raises(UserError, match="rounding explains 0.05"):
        check_gap(trajectory_with(0.3, 0.0, 0.0, 0.0), BFLOAT16)


def test_an_engine_that_computes_as_the_actor_does_is_not_compared():
    assert check_gap(replace(trajectory_with(1.0, 1.0, 1.0, 1.0), drawn_logprobs=None), FLOAT32) == {}
