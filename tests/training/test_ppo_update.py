# SPDX-License-Identifier: Apache-2.0
"""PPO updates from one recorded PPOBatch; and those whose own forward passes give log-probs and values."""

import math
from dataclasses import replace

import pytest
import torch

from cli_runs import read_jsonl
from closeness import EPS, FORMULA, FORWARD, UPDATE, assert_near, assert_weights_near, near
from dschat.base.errors import UserError
from dschat.settings.ppo import PPOConfig
from factories import (
    collected,
    hf_logprobs,
    largest_difference,
    make_causal_lm,
    make_classifier,
    taken_up,
    to_device,
    weights_of_all,
)
from macro_actions.losses import loss_weights
from nonfinite_cases import batches, spoiled, trainer_for
from recorded_updates import MEANS, ROWS, scored_batch, updated

TOKENS = 39


@pytest.fixture
def batch(group):
    return to_device(scored_batch())


@pytest.mark.parametrize("policy_ratio", MEANS)
def test_the_update_is_that_of_the_formulas_in_plain_torch(policy_ratio, batch):
    """Policy: max(-A r, -A clip r), by tokens over 39, by macro actions of up to 3 tokens over their number, 16, or
    with the ratio of a whole response by responses.

    Value: half the larger squared error, over 39 tokens.
    """
    if policy_ratio == "sequence_mean":  # each response has one advantage
        advantages = torch.where(batch.response_mask, batch.advantages[:, :1], 0.0)
        batch = replace(batch, advantages=advantages)
    clip = 0.01 if policy_ratio == "sequence_mean" else 0.2
    weights, stats = updated(batch, 2, policy_ratio=policy_ratio, cliprange=clip)
    trajectory, device = batch.trajectory, batch.response_mask.device
    actor, critic = make_causal_lm().to(device), make_classifier(seed=2).to(device)
    policy_sum = value_sum = clipped_sum = 0.0
    for row, (prompt, response) in enumerate(ROWS):
        ids, n = torch.tensor([prompt + response], device=device), len(response)
        logits = actor(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        new = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        states = critic.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        value = critic.score(states)[:, 0]
        target, old = batch.returns[row, :n], trajectory.values[row, :n]
        clipped = old + (value - old).clamp(-0.2, 0.2)
        value_sum = value_sum + torch.maximum((value - target) ** 2, (clipped - target) ** 2).sum() / 2
        size = {"token": 1, "sequence_mean": max(n, 1)}.get(policy_ratio, 3)
        for start in range(0, n, size):
            chunk = slice(start, min(start + size, n))
            log_ratio = (new - trajectory.logprobs[row, :n])[chunk]
            log_ratio = log_ratio.mean() if policy_ratio.endswith("mean") else log_ratio.sum()
            weight = chunk.stop - start if policy_ratio == "macro_mean" else 1
            ratio, advantage = log_ratio.exp(), batch.advantages[row, start]
            plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)
            policy_sum = policy_sum + weight * torch.maximum(plain, clipped)
            clipped_sum += weight * (clipped > plain).item()
    count = {"macro": 16, "sequence_mean": sum(bool(response) for _, response in ROWS)}.get(policy_ratio, TOKENS)
    assert stats["loss/policy"] == near(policy_sum.item() / count, UPDATE, scale=0.01)
    assert stats["loss/value"] == near(value_sum.item() / TOKENS, UPDATE)
    assert stats["policy/clipfrac"] == near(clipped_sum / count, FORMULA) and clipped_sum > 0
    expected = {}
    parts = (("actor", actor, policy_sum / count), ("critic", critic, value_sum / TOKENS))
    for name, model, loss in parts:
        adam = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert stats[f"grad_norm/{name}"] == near(norm, UPDATE)
        adam.step()
        expected |= {f"{name}.inner.{n}": p.detach().cpu() for n, p in model.named_parameters()}
    assert_weights_near(weights, expected)


def test_truncated_importance_weights_multiply_the_advantages(batch):
    """The engine drew each token with half of the actor's probability: weights of 2, or 1.5 where that is the most."""
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs - math.log(2))
    drawn = replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))
    for clip, weight in ((None, 1.0), (5.0, 2.0), (1.5, 1.5)):
        found, stats = updated(drawn, rollout_is_clip=clip)
        expected, expected_stats = updated(replace(batch, advantages=weight * batch.advantages))
        # Log-probs minus log 2 are rounded once more, and so are the weights: twice the roundings of one pass.
        assert largest_difference(found, expected) < 2 * FORWARD * EPS / 10
        assert stats.pop("rollout/importance_clipped", None) == (None if clip is None else clip < 2)
        assert stats == near(expected_stats, scale=0.1)


@pytest.mark.parametrize(("policy_ratio", "power"), [("macro", True), ("macro_mean", False)])
def test_importance_weights_are_of_what_the_ratio_is_of(policy_ratio, power, batch):
    """Of a macro action of n tokens, each drawn with half of the actor's probability: 2^n, or their geometric mean."""
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs - math.log(2))
    drawn = replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))
    lengths = 1 / loss_weights("macro", batch.macro, batch.response_mask).clamp(min=1e-9)
    for clip in (100.0, 3.0):
        weights = (2**lengths if power else torch.full_like(lengths, 2.0)).clamp(max=clip)
        found, stats = updated(drawn, rollout_is_clip=clip, policy_ratio=policy_ratio)
        # A mean as the loss is one: over macro actions, or over tokens.
        shares = batch.response_mask / lengths if power else batch.response_mask
        is_clipped = (shares * (2**lengths > clip if power else 2 > clip)).sum() / shares.sum()
        assert stats["rollout/importance_clipped"] == near(float(is_clipped), UPDATE)
        advantages = torch.where(batch.response_mask, weights * batch.advantages, 0.0)
        expected, _ = updated(replace(batch, advantages=advantages), policy_ratio=policy_ratio)
        assert largest_difference(found, expected) < FORWARD * EPS / 10


@pytest.mark.parametrize("loss_mean", ["response", "length"])
def test_statistics_are_means_whatever_the_loss_is(loss_mean, group):
    """The weights have not moved: every ratio is 1, also where the loss is divided by a constant length."""
    _, stats = updated(to_device(scored_batch(drift=0.0)), 2, loss_mean=loss_mean, max_answer_seq_len=100)
    assert stats["val/ratio"] == near(1.0, UPDATE) and stats["policy/clipfrac"] == 0


CASES = {
    "randomized": {"value_function": "position", "normalize_advantages": "row"},
    "ppl": {"policy_ratio": "macro"},
    "fixed": {"missing_eos_penalty": 1.0, "kl_estimator": "k3", "policy_ratio": "macro_mean", "temperature": 0.7},
}


def one_update(folder, zero_stage=0, **flags):
    return trainer_for(folder, zero_stage, ppo_epochs=1, **flags)


def two_iterations(trainer):
    metrics = [trainer.iterate(batches(number)) for number in (0, 1)]
    return weights_of_all(**trainer.algorithm.models.trained), [
        {name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics
    ]


@pytest.mark.parametrize("condition", CASES)
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_and_metrics_are_those_with_scoring_passes(stage, condition, group, tmp_path, monkeypatch):
    flags = {"termination_condition": condition} | CASES[condition]
    late = one_update(tmp_path / "late", stage, **flags)
    assert collected(late, batches(0)).batch.logprobs is None
    weights, metrics = two_iterations(late)
    monkeypatch.setattr(PPOConfig, "credit_is_fused", lambda config, plan: False)
    early = one_update(tmp_path / "early", stage, **flags)
    assert collected(early, batches(0)).batch.logprobs is not None
    expected, others = two_iterations(early)
    assert_weights_near(weights, expected, updates=2)  # an update in each iteration
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


@pytest.mark.parametrize("place", ["logprobs", "values", "gradients of the actor"])
def test_what_is_not_finite_is_named_and_left_out(place, group, tmp_path):
    trainer = one_update(tmp_path / "stop")
    with spoiled(trainer, place, 0), pytest.raises(UserError, match=f"after 0 updates, {place} on rank 0 are not"):
        trainer.iterate(batches(0))
    trainer = one_update(tmp_path / "skip", on_nonfinite="skip")
    before = weights_of_all(critic=trainer.algorithm.models.critic)
    with spoiled(trainer, place, 0):
        assert trainer.iterate(batches(0))["skipped/nonfinite"] == 1
    if place != "gradients of the actor":
        assert largest_difference(weights_of_all(critic=trainer.algorithm.models.critic), before) == 0
    after = trainer.iterate(batches(1))
    assert all(map(math.isfinite, after.values())) and trainer.update == 2
    rows = read_jsonl(tmp_path / "skip" / "metrics.jsonl")
    assert [row.get("skipped/nonfinite") for row in rows] == [1.0, None]


def test_a_pending_rollout_is_written_down_and_taken_up(group, tmp_path):
    trainer = one_update(tmp_path)
    iteration = collected(trainer, batches(0))
    again = taken_up(iteration)
    assert again.batch.logprobs is None and again.metrics == iteration.metrics
    assert torch.equal(again.batch.scored.ref_logprobs, iteration.batch.scored.ref_logprobs)
    trainer.algorithm.current = again
    weights, _ = two_iterations(trainer)
    expected, _ = two_iterations(one_update(tmp_path / "whole"))
    assert largest_difference(weights, expected) == 0
