# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --segment_rewards: rewards stand on the last tokens of the macro actions that earned them."""

from dataclasses import replace

import pytest
import torch

from closeness import assert_near
from dschat.training.iteration import Clock, pass_size
from dschat.training.ppo.credit import with_scores
from dschat.training.ppo.models import response_logprobs, response_values
from factories import make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop


def characters(prompts, responses, rows, segments):
    """The number of characters of each macro action."""
    assert ["".join(own) for own in segments] == responses
    return [[float(len(text)) for text in own] for own in segments]


def trainer_of(folder, reward=characters, **overrides):
    flags = {"self_checks": False, "kl_coef": 0.0, "segment_rewards": "each", "ngram": 3, "num_train_epochs": 2}
    config = ppo_config(folder, **(flags | overrides))
    models = {"reference": make_causal_lm(seed=1), "critic": make_classifier(seed=2)}
    return ppo_loop(config, reward, make_prompts(32), make_prompts(6), **models, learning_rate=1e-4)


def batch_of(trainer):
    algorithm = trainer.algorithm
    rows = algorithm.collect([list(range(16))], 0, Clock()).rows
    if rows.logprobs is None:
        models, size = algorithm.models, pass_size(algorithm.plan)
        logprobs = response_logprobs(models.actor, rows.rollout, 1.0, size)
        rows = replace(rows, logprobs=logprobs, values=response_values(models.critic, rows.rollout, size))
    moments = None if algorithm.moments is None else with_scores(algorithm.moments, rows.scored)
    return algorithm.credit_of(rows, moments).whole()


def expected_rewards(batch, tokenizer, scale=1.0):
    """By tokens, one macro action after the other: the characters that it adds to the response."""
    rewards = torch.zeros(batch.response_mask.shape)
    for row, ids in enumerate(batch.rollout.response_rows()):
        said = 0
        for end in [*range(3, len(ids), 3), len(ids)]:
            length = len(tokenizer.decode(ids[:end], skip_special_tokens=True))
            rewards[row, end - 1] = (length - said) * scale
            said = length
    return rewards


@pytest.mark.parametrize("condition", ["ppl", "randomized"])
def test_every_condition_comes_before_the_scores(condition, group, tmp_path):
    """One that reads log-probs gets those of the models, as without such rewards."""
    flags = {"termination_condition": condition, "temperature": 0.7, "ppo_epochs": 2}
    own = batch_of(trainer_of(tmp_path, **flags))
    plain = batch_of(trainer_of(tmp_path, lambda p, r, rows: [0.0] * len(p), segment_rewards=None, **flags))
    assert torch.equal(own.macro.index, plain.macro.index) and own.macro.lengths.shape[1] > 1
    assert_near(own.rewards.sum(1), own.trajectory.scores)


def test_normalised_scores_scale_the_rewards(group, tokenizer, tmp_path):
    """Each is divided by the deviation, and what the mean takes stands at the end."""
    trainer = trainer_of(tmp_path, ppo_epochs=2, normalize_scores=True)
    batch = batch_of(trainer)
    scores = batch.trajectory.scores.double()
    deviation = float((scores.var(correction=0) + 1e-8).sqrt())
    expected = expected_rewards(batch, tokenizer, 1 / deviation)
    last = batch.response_mask.sum(1) - 1
    expected[torch.arange(len(last)), last] -= float(scores.mean()) / deviation
    assert_near(batch.rewards, expected)
