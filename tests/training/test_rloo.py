# SPDX-License-Identifier: Apache-2.0
"""Step 3 without a critic, and with several responses to a prompt."""

import json
import math
from dataclasses import replace

import pytest
import torch

from cli_runs import read_jsonl
from closeness import FORMULA, FORWARD, UPDATE, assert_near, assert_weights_near, near
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.sampling import row_seed
from dschat.run.state import SeedKind
from dschat.training.ppo.credit import assign_credit, tokens_that_count
from factories import (
    batch_of_iteration,
    make_causal_lm,
    make_classifier,
    make_prompts,
    ppo_config,
    ppo_loop,
    weights_of,
)
from macro_actions.segments import segment
from macro_actions.types import PPOBatch
from rl_cases import trajectory_of

RLOO = {"advantage_estimator": "rloo", "samples_per_prompt": 4, "per_device_generation_batch_size": 2}
KL_COEF = 0.1


def length(prompts, responses, rows):
    return [len(response) / 4 for response in responses]


def trainer_of(folder, reward=length, **overrides):
    """A trainer of 16 prompts whose reference is another model, so that there is a KL from the first rollout on."""
    config = ppo_config(folder, **({"self_checks": False, "kl_coef": KL_COEF} | RLOO | overrides))
    prompts = make_prompts(16, input_output="{}")
    models = {"reference": make_causal_lm(seed=1), "critic": make_classifier(seed=2)}
    return ppo_loop(config, reward, prompts, prompts[:3], **models, learning_rate=5e-5)


# -- draws


def drawn_by(trainer, samples, numbers=(0, 5, 9), draw=3):
    """The rows' responses, by prompt and sample."""
    found, texts = trainer.algorithm.sampler.sample(
        [trainer.algorithm.prompts[n] for n in numbers], SeedKind.TRAINING, draw, samples
    )
    rows = found.rollout.response_rows()
    assert texts.prompts == [f"p{n}" for n in numbers for _ in range(samples)]
    assert found.rollout.prompt_index.tolist() == [n for n in numbers for _ in range(samples)]
    places = [(n, sample) for n in numbers for sample in range(samples)]
    return dict(zip(places, rows, strict=True)), found.rollout


def test_seeds_of_rows_are_those_of_prompt_and_sample(group, tmp_path, monkeypatch):
    trainer, seeds = trainer_of(tmp_path), []
    real = ContinuousEngine.sampler_for

    def noted(engine, causal_lm):
        draw = real(engine, causal_lm)
        return lambda prompts, sampling, given: (seeds.extend(given), draw(prompts, sampling, given))[1]

    monkeypatch.setattr(ContinuousEngine, "sampler_for", noted)
    drawn_by(trainer, 1, (0, 5), draw=7)
    assert seeds == [row_seed(1234, SeedKind.TRAINING, 7, index) for index in (0, 5)]
    seeds.clear()
    drawn_by(trainer, 3, (0, 5), draw=7)
    own = [(1234, SeedKind.TRAINING, 7, index, *sample) for index in (0, 5) for sample in ((), (1,), (2,))]
    assert seeds == [row_seed(*parts) for parts in own] and len(set(seeds)) == 6


def test_samples_of_a_prompt_depend_on_nothing_else(group, tmp_path):
    """Not on the other prompts (which another process may draw), the number of samples, or the slots."""
    trainer = trainer_of(tmp_path)
    rows, rollout = drawn_by(trainer, 4)
    assert rollout.sample_index.tolist() == [0, 1, 2, 3] * 3
    assert all(len({tuple(rows[n, sample]) for sample in range(4)}) == 4 for n in (0, 5, 9))
    only, alone = drawn_by(trainer, 1)
    assert alone.sample_index.tolist() == [0, 0, 0]
    assert all(only[n, 0] == rows[n, 0] for n in (0, 5, 9))
    for slots, numbers in ((1, (9, 5)), (64, (5,))):
        trainer.algorithm.sampler.engine = ContinuousEngine(slots)
        others, _ = drawn_by(trainer, 4, numbers)
        assert all(others[place] == rows[place] for place in others)


# -- updates


def grpo(batch, beta, rate):
    """GRPO in plain torch: the mean over responses, but those of equal groups, of the mean over their tokens.

    Returns:
        Weights after a step, the norm of its gradient, and the mean KL.
    """
    model, reference = make_causal_lm(), make_causal_lm(seed=1)
    rollout, scores = batch.rollout, batch.trajectory.scores.view(-1, 4)
    losses, kls = [], []
    for row, response in enumerate(rollout.response_rows()):
        group, score = scores[row // 4], scores[row // 4, row % 4]
        if len(set(group.tolist())) == 1:
            continue
        ids = rollout.input_ids[row][rollout.attention_mask[row]].cpu()[None]
        tables = [m(input_ids=ids).logits[0, -len(response) - 1 : -1].log_softmax(-1) for m in (model, reference)]
        own, other = (table.gather(1, ids[0, -len(response) :, None])[:, 0] for table in tables)
        kl = (other.detach() - own).exp() - (other.detach() - own) - 1
        losses.append((-(score - group.mean()) / (group.std() + 1e-6) * (own - own.detach()).exp() + beta * kl).mean())
        kls.append(kl.mean().item())
    assert 0 < len(losses) < 8
    (sum(losses) / len(losses)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0).step()
    return {f"inner.{name}": p.detach() for name, p in model.named_parameters()}, norm, sum(kls) / len(kls)


def test_an_update_is_plain_grpo(group, tmp_path):
    """Of two prompts, one whose responses all have the same score."""

    def reward(prompts, responses, rows):
        return [
            1.0 if prompt == "p4" else len(response) / 4 for prompt, response in zip(prompts, responses, strict=True)
        ]

    flags = {"advantage_estimator": "grpo", "kl_in": "loss", "kl_estimator": "k3", "loss_mean": "response"}
    sizes = {"per_device_training_batch_size": 4, "global_batch_size": 8, "drop_equal_groups": True}
    trainer = trainer_of(tmp_path, reward, kl_coef=0.5, **flags, **sizes)
    numbers = [[11, 4]]
    expected, norm, kl = grpo(batch_of_iteration(trainer, numbers), 0.5, 5e-5)
    metrics = trainer.iterate(numbers)
    assert metrics["grad_norm/actor"] == near(norm, UPDATE) and norm > 0.1
    assert metrics["loss/kl"] == near(kl, UPDATE) and kl > 1e-4
    assert 0 < metrics["policy/counted"] < 1
    assert_weights_near(weights_of(trainer.algorithm.models.actor), expected)


def test_tokens_that_count_by_hand():
    """Two prompts with two responses, the second's scores equal; probabilities .1, .9 and .5."""
    mask = torch.tensor([[True, True, True]] * 3 + [[True, False, False]])
    trajectory = replace(trajectory_of([3, 3, 3, 1], 3, 0), logprobs=torch.tensor([[0.1, 0.9, 0.5]] * 4).log())
    trajectory, none = replace(trajectory, scores=torch.tensor([1.0, 2.0, 1.0, 1.0])), torch.zeros(4, 3)
    batch = PPOBatch(trajectory, segment(mask, mask), none, none, none, None)
    first, unlikely = mask & torch.tensor([[True]] * 2 + [[False]] * 2), torch.tensor([True, False, True])
    assert tokens_that_count(batch, 2, False, None) is None and tokens_that_count(batch, 1, True, None) is None
    assert torch.equal(tokens_that_count(batch, 2, True, None), first)
    assert torch.equal(tokens_that_count(batch, 1, False, 0.6), mask & unlikely)
    assert torch.equal(tokens_that_count(batch, 2, True, 0.6), first & unlikely)
    assert replace(batch, counted=first).policy_mask is first and torch.equal(batch.policy_mask, mask)


@pytest.mark.parametrize("over", ["batch", "row"])
def test_tokens_that_are_left_out_count_in_no_mean_and_deviation(over, group, tmp_path):
    """Advantages 1, 2, 6 of one row count, 9 and those of another do not: 1, 2, 6 has mean 3 and variance 14/3."""
    mask = torch.tensor([[True] * 4] * 2)
    trajectory = replace(trajectory_of([4, 4], 4, 0), logprobs=torch.tensor([[0.1, 0.2, 0.95, 0.3], [0.99] * 4]).log())

    def estimator(trajectory, macro, settings):
        advantages = torch.tensor([[1.0, 2.0, 9.0, 6.0], [5.0, 7.0, 5.0, 7.0]])
        return PPOBatch(trajectory, macro, torch.zeros(2, 4), torch.zeros(2, 4), advantages, None)

    config = ppo_config(tmp_path, normalize_advantages=over, max_token_probability=0.9)
    found = assign_credit(trajectory, segment(mask, mask), 0.0, config, estimator=estimator).advantages
    deviation = math.sqrt(14 / 3)
    expected = [[-2 / deviation, -1 / deviation, 0.0, 3 / deviation], [0.0] * 4]
    assert_near(found, expected, FORMULA)


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_estimator": "reinforce_pp_baseline"},
        {"advantage_estimator": "grpo", "normalize_advantages": "batch"},
    ],
)
def test_the_kl_penalty_is_no_part_of_what_is_normalised(flags, group, tmp_path):
    """Two prompts of two responses, of scores 1, 3 and 5, 5: ±x, 0, 0 over rows alike have the variance x²/2."""
    kl = torch.tensor([[0.1, 0.3], [0.0, -0.2], [0.4, 0.4], [-0.1, 0.0]])
    trajectory = trajectory_of([2] * 4, 2, 0)
    trajectory = replace(trajectory, logprobs=trajectory.ref_logprobs + kl, scores=torch.tensor([1.0, 3.0, 5.0, 5.0]))
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    config = ppo_config(tmp_path, samples_per_prompt=2, **flags)
    found = assign_credit(trajectory, macro, 0.5, config, samples=2).advantages
    from_scores = [-math.sqrt(2), math.sqrt(2), 0.0, 0.0]
    penalties = [-0.2, 0.1, -0.4, 0.05]
    expected = [[x + penalty] * 2 for x, penalty in zip(from_scores, penalties, strict=True)]
    assert_near(found, expected, FORWARD)


def test_rloo_is_normalised_with_its_kl_penalty(group, tmp_path):
    """Rewards 1 − .2 and 3 + .1 of one token each: differences of ∓2.3 become ∓1."""
    trajectory = trajectory_of([1, 1], 1, 0)
    logprobs = trajectory.ref_logprobs + torch.tensor([[0.4], [-0.2]])
    trajectory = replace(trajectory, logprobs=logprobs, scores=torch.tensor([1.0, 3.0]))
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    flags = {"advantage_estimator": "rloo", "samples_per_prompt": 2, "normalize_advantages": "batch"}
    found = assign_credit(trajectory, macro, 0.5, ppo_config(tmp_path, **flags), samples=2).advantages
    assert_near(found, [[-1.0], [1.0]], FORWARD)


# -- runs


def test_a_run_without_a_critic_leaves_none(group, tmp_path):
    """Rollouts of 2 prompts with 4 responses, updates of 4 responses: 2 rollouts of 2 updates."""
    flags = {"per_device_training_batch_size": 4, "max_steps": 4, "save_steps": 4}
    trainer = trainer_of(tmp_path, enable_ema=True, **flags)
    assert list(trainer.algorithm.models.trained) == ["actor"] == list(trainer.checkpoints._engines)
    trainer.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    train = [row for row in rows if "objective/scores" in row]
    assert [(row["update"], row["samples"]) for row in train] == [(2, 8), (4, 16)]
    assert {"macro/count", "macro/length", "loss/policy", "lr/actor", "grad_norm/actor"} <= train[0].keys()
    absent = ("critic", "value", "val/clipfrac", "explained_variance", "lambda_eff")
    assert not [name for name in train[0] if any(part in name for part in absent)]
    names = {path.name for path in tmp_path.rglob("*") if path.is_dir()}
    assert {"checkpoints", "step-4", "actor", "samples"} <= names and "critic" not in names
    samples = read_jsonl(tmp_path / "samples" / "update-000004.jsonl")
    assert samples[0]["tokens"][0].keys() == {"text", "macro_action", "reward", "logprob", "ref_logprob"}
    manifest = json.loads((tmp_path / "checkpoints" / "step-4" / "manifest.json").read_text())
    assert {file.split("/")[0] for file in manifest["files"] if "/" in file} == {"actor"}


def test_the_kl_coefficient_is_steered_by_responses(group, tmp_path):
    """8 responses at a horizon of 8, and a KL far above the target: a fifth more."""
    flags = {"adaptive_kl_target": 1e-3, "adaptive_kl_horizon": 8, "per_device_training_batch_size": 8}
    trainer = trainer_of(tmp_path, **flags)
    assert trainer.iterate([[3, 8]])["objective/kl"] > 0.1
    assert trainer.algorithm.kl.value == pytest.approx(1.2 * KL_COEF)
