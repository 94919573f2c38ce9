# SPDX-License-Identifier: Apache-2.0
"""Scoring against one row at a time."""

import pytest
import torch

from closeness import assert_near
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from factories import hf_logprobs, hf_score, make_causal_lm, make_classifier, make_rollout, ragged_rows, score


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_score_is_each_row_alone_under_each_model(kind, batch_size):
    """values[j] is the critic's number for the prefix BEFORE token j."""
    rows = ragged_rows([2, 5, 9, 1], [7, 1, 4, 3])
    actor, reference = make_causal_lm(kind, seed=0), make_causal_lm(kind, seed=1)
    critic = make_classifier(kind, seed=2)
    rollout, scores = make_rollout(rows, left=1, right=2), torch.tensor([1.0, -2.0, 0.5, 3.0])
    trajectory = score(
        rollout, scores, PolicyModel(actor), PolicyModel(reference), ScalarModel(critic), 0.7, batch_size
    )
    assert trajectory.rollout is rollout and torch.equal(trajectory.scores, scores)
    for row, (prompt, response) in enumerate(rows):
        n = len(response)
        expected = {
            "logprobs": hf_logprobs(actor, (prompt, response), 0.7)[0],
            "ref_logprobs": hf_logprobs(reference, (prompt, response), 0.7)[0],
            "values": torch.tensor([hf_score(critic, prompt + response[:j]) for j in range(n)]),
        }
        for name, numbers in expected.items():
            stored = getattr(trajectory, name)
            assert stored.dtype == torch.float32 and not stored.requires_grad
            assert_near(stored[row, :n], numbers, message=name)
            assert not bool(stored[row, n:].any())
