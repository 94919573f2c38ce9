# SPDX-License-Identifier: Apache-2.0
"""Responses without a token, of one token, all at the longest, and prompts of one token."""

import math

import pytest

from factories import largest_difference, weights_of_all
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
