# SPDX-License-Identifier: Apache-2.0
"""What is logged of a rollout, and responses written down token by token."""

from dataclasses import replace

import pytest
import torch

from dschat.data.encoding import decode_response
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import Trajectory
from dschat.trainers.ppo.metrics import rollout_metrics, token_table, token_texts
from factories import (
    EOS,
    make_rollout,
)
from rl_cases import trajectory_of


def test_rollout_metrics_by_hand():
    """Two rows of 3 and 1 tokens, the first finished; log-ratios 0.3, 0 and 0.1 against the reference."""
    rollout = make_rollout([([5], [6, 7, EOS]), ([5], [8])])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
    ref = logprobs - torch.tensor([[0.3, 0.0, 0.1], [0.2, 0.0, 0.0]])
    values = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    trajectory = Trajectory(rollout, logprobs, ref, values, torch.tensor([1.0, 3.0]))
    ends = fixed_ngram_ends(rollout.response_mask, 2)
    batch = replace(
        ppo_batch(trajectory, ends, kl_coef=0.5, gamma=1.0, lam=0.9),
        returns=torch.tensor([[1.0, 1.0, 2.0], [4.0, 9.0, 9.0]]),
    )
    metrics = rollout_metrics(batch, 0.9, torch.tensor([0.2, 0.6]), "gold")
    expected = {
        "objective/kl": 0.3,
        "objective/kl_per_token": 0.15,
        "objective/entropy": 5.0,
        "objective/scores": 2.0,
        "objective/rlhf_reward": 2.0 - 0.15,
        "objective/gold": 0.4,
        "response/length": 2.0,
        "response/eos_rate": 0.5,
        "macro/count": 1.5,
        "macro/length": 4 / 3,
        "macro/lambda_eff": 0.9**0.75,
        "val/num_eos_tokens": 1.0,
        "val/explained_variance": 1 - 0.1875 / 1.5,  # residuals 1, 1, 1, 2; returns 1, 1, 2, 4
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_decoded_responses_and_token_texts(tokenizer):
    texts = [" the quick fox", "a cat; on a mat."]
    rows = [([5], [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS]) for text in texts]
    rollout = make_rollout(rows, right=2)
    assert [decode_response(tokenizer, ids) for ids in rollout.response_rows()] == texts
    parts = token_texts(rows[0][1], tokenizer)
    assert len(parts) == len(rows[0][1]) and "".join(parts) == " the quick fox<eos>"


def test_a_character_of_several_tokens_is_shown_once():
    from dschat.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["abc"], 259)
    ids = tokenizer("a\N{GRINNING FACE}b", add_special_tokens=False)["input_ids"]
    assert token_texts(ids, tokenizer) == ["a", "", "", "", "\N{GRINNING FACE}", "b"]
    assert "".join(token_texts(ids[:3], tokenizer)) == tokenizer.decode(ids[:3])


def test_token_table(tokenizer):
    trajectory = trajectory_of([7, 3], 8, seed=0)
    ends = fixed_ngram_ends(trajectory.response_mask, 3)
    batch = ppo_batch(trajectory, ends, kl_coef=0.1, gamma=1.0, lam=0.95)
    table = token_table(batch, 0, tokenizer)
    assert len(token_table(batch, 1, tokenizer)) == 3
    assert [row["macro_action"] for row in table] == [0, 0, 0, 1, 1, 1, 2]
    assert [row["reward"] for row in table] == pytest.approx(batch.rewards[0, :7].tolist(), abs=1e-5)
    assert set(table[0]) == {"text", "macro_action", "value", "reward", "advantage", "logprob", "ref_logprob"}
