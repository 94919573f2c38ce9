# SPDX-License-Identifier: Apache-2.0
"""Responses without a token, of one token, all at the longest, and prompts of one token."""

import math

import pytest
import torch

from closeness import UPDATE, assert_near
from factories import largest_difference, make_rollout, ragged_rows, score, weights_of_all
from macro_actions.segments import segment
from macro_actions.types import select_rows
from nonfinite_cases import batches, empty_responses, trainer_for

CONDITIONS = [
    {"termination_condition": "fixed", "ngram": math.inf, "value_function": "position"},
    {"termination_condition": "randomized"},
    {"termination_condition": "parsing", "parser": "chunker"},
    {"termination_condition": "ppl", "isolate_last_token": True, "macro_reward": "mean"},
]


def named(flags):
    return "-".join(str(value) for value in flags.values())


def finite(metrics):
    return all(math.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("flags", CONDITIONS, ids=named)
def test_a_rollout_of_empty_responses(flags, group, tmp_path):
    """Nothing to learn: the actor is left alone; the critic's first step of Adam, of gradients of 0, is 0."""
    trainer = trainer_for(tmp_path, whiten_advantages=True, **flags)
    empty_responses(trainer, 0)
    engines = trainer.algorithm.models.trained
    before = weights_of_all(**engines)
    metrics = trainer.iterate(batches(0))
    assert finite(metrics)
    zero = ("response/length", "response/repetition", "macro/count", "objective/kl", "loss/value")
    assert [metrics[name] for name in zero] == [0.0] * len(zero) and "loss/policy" not in metrics
    assert largest_difference(weights_of_all(**engines), before) == 0
    assert finite(trainer.evaluate())


@pytest.mark.parametrize("flags", CONDITIONS, ids=named)
def test_rows_without_a_token_change_nothing_for_the_others(flags, group, tmp_path):
    """Credit of four rows is that of the same rows with two empty ones between them."""
    trainer = trainer_for(tmp_path, **flags)
    rows = ragged_rows([2, 5, 1, 4], [7, 1, 4, 6], seed=8)
    mixed = [rows[0], (rows[0][0], []), rows[1], rows[2], (rows[1][0], []), rows[3]]
    batches_of = []
    for case, places in ((rows, [0, 1, 2, 3]), (mixed, [0, 2, 3, 5])):
        rollout = make_rollout(case)
        rollout.prompt_index[places] = torch.arange(4)  # which `randomized` draws from
        models, scores = trainer.algorithm.models, rollout.response_mask.sum(1).float()
        trajectory = score(rollout, scores, models.actor, models.reference, models.critic, 1.0, 8)
        batch = trainer.algorithm.credit(
            trajectory, segment(trainer.algorithm.scorer.condition(trajectory, 0).ends, rollout.response_mask)
        )
        batches_of.append(select_rows(batch, torch.tensor(places)))
    for name in ("advantages", "returns", "rewards"):
        numbers, others = (getattr(batch, name) for batch in batches_of)
        assert_near(others, numbers, UPDATE, scale=0.1)
