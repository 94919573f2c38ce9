# SPDX-License-Identifier: Apache-2.0
"""One update per rollout, whose own forward passes give log-probs and values, against scoring passes before it."""

import math

import pytest
import torch

from cli_runs import read_jsonl
from closeness import UPDATE, WEIGHT_GAP, assert_near, near
from dschat.errors import UserError
from dschat.trainers.ppo_update import PendingBatch
from factories import collected, hf_logprobs, largest_difference, make_causal_lm, taken_up, weights_of_all
from nonfinite_cases import batches, spoiled, trainer_for

CASES = [
    {},
    {"ngram": 1},
    {"termination_condition": "randomized", "value_function": "position"},
    {"termination_condition": "ppl", "policy_ratio": "macro"},
    {"normalize_advantages": "row"},
    {"missing_eos_penalty": 1.0, "kl_estimator": "k3", "policy_ratio": "macro_mean", "temperature": 0.7},
]


def one_update(folder, zero_stage=0, **flags):
    return trainer_for(folder, zero_stage, ppo_epochs=1, **flags)


def two_iterations(trainer):
    metrics = [trainer.iterate(batches(number)) for number in (0, 1)]
    return weights_of_all(**trainer.algorithm.models.trained), [
        {name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics
    ]


@pytest.mark.parametrize("flags", CASES)
@pytest.mark.parametrize("stage", [0, 2])
def test_weights_and_metrics_are_those_with_scoring_passes(stage, flags, group, tmp_path, monkeypatch):
    late = one_update(tmp_path / "late", stage, **flags)
    assert isinstance(collected(late, batches(0)).batch, PendingBatch)
    weights, metrics = two_iterations(late)
    early = one_update(tmp_path / "early", stage, **flags)
    monkeypatch.setattr(type(early.algorithm), "credit_is_fused", False)
    expected, others = two_iterations(early)
    assert largest_difference(weights, expected) < WEIGHT_GAP
    for row, other in zip(metrics, others, strict=True):
        assert row == near(other, UPDATE, scale=0.1)


def test_a_rollout_is_scored_by_the_reference_at_the_sampling_temperature(group, tmp_path):
    trainer = one_update(tmp_path, temperature=0.7)
    scored = collected(trainer, batches(0)).batch.scored
    responses = scored.rollout.response_rows()
    for row, number in enumerate(batches(0)[0]):
        expected, _ = hf_logprobs(
            make_causal_lm(seed=1), (trainer.algorithm.prompts[number].prompt_ids, responses[row]), 0.7
        )
        own = scored.ref_logprobs[row, : len(expected)].cpu()
        assert_near(own, expected)


def test_actor_and_critic_run_once_per_micro_batch(group, tmp_path):
    trainer = one_update(tmp_path)
    calls = []
    for name in ("actor", "critic"):
        module = getattr(trainer.algorithm.models, name).module
        module.register_forward_hook(lambda m, i, o, name=name: calls.append(name))
    trainer.iterate(batches(0))
    assert sorted(calls) == ["actor"] * 2 + ["critic"] * 2


def user_ends(trajectory, tokenizer):
    return trajectory.logprobs < -1


@pytest.mark.parametrize(
    "flags",
    [{"ppo_epochs": 2}, {"whiten_advantages": True}, {"termination_condition": f"{__file__}:user_ends"}],
    ids=str,
)
def test_scoring_passes_where_they_are_needed(flags, group, tmp_path):
    trainer = trainer_for(tmp_path, **({"ppo_epochs": 1} | flags))
    assert not trainer.algorithm.credit_is_fused
    assert math.isfinite(trainer.iterate(batches(0))["loss/policy"])


@pytest.mark.parametrize("place", ["logits", "scores", "logprobs", "values", "gradients of the actor"])
def test_what_is_not_finite_is_named_and_left_out(place, group, tmp_path):
    trainer = one_update(tmp_path / "stop")
    with spoiled(trainer, place, 0), pytest.raises(UserError, match=f"after 0 updates, {place} on rank 0 are not"):
        trainer.iterate(batches(0))
    trainer = one_update(tmp_path / "skip", on_nonfinite="skip")
    before = weights_of_all(critic=trainer.algorithm.models.critic)
    with spoiled(trainer, place, 0):
        assert trainer.iterate(batches(0))["skipped/nonfinite"] == 1
    if "of the" not in place:
        assert largest_difference(weights_of_all(critic=trainer.algorithm.models.critic), before) == 0
    after = trainer.iterate(batches(1))
    assert all(map(math.isfinite, after.values())) and trainer.update == 2
    rows = read_jsonl(tmp_path / "skip" / "metrics.jsonl")
    assert [row.get("skipped/nonfinite") for row in rows] == [1.0, None]


def test_a_pending_rollout_is_written_down_and_taken_up(group, tmp_path):

    trainer = one_update(tmp_path)
    iteration = collected(trainer, batches(0))
    again = taken_up(iteration)
    assert isinstance(again.batch, PendingBatch) and again.metrics == iteration.metrics
    assert torch.equal(again.batch.scored.ref_logprobs, iteration.batch.scored.ref_logprobs)
    trainer.algorithm.current = again
    weights, _ = two_iterations(trainer)
    expected, _ = two_iterations(one_update(tmp_path / "whole"))
    assert largest_difference(weights, expected) == 0
