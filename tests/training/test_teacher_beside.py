# SPDX-License-Identifier: Apache-2.0
"""A teacher beside an environment's rewards, and beside a reward model: whole runs, the first update's advantages."""

import torch

from closeness import assert_near, near
from dschat.scoring.reward_model import RewardModelScores
from factories import frozen_engine_of, hf_score, make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop
from resume_runs import result_of
from rl_references import broadcast, chunks, gae, pool

TEACHER_COEF = 0.5
KL_COEF = 0.1
GAMMA = 0.9
LAM = 0.95
FLAGS = {
    "teacher_model_name_or_path": "unused",
    "teacher_coef": TEACHER_COEF,
    "kl_coef": KL_COEF,
    "gamma": GAMMA,
    "lam": LAM,
    "ppo_epochs": 2,  # so that advantages are known before the first update
    "num_train_epochs": 1,
    "self_checks": False,
}


def models():
    """Teacher and reference, neither of which is the actor."""
    return {"teacher": make_causal_lm(seed=3), "reference": make_causal_lm(seed=5)}


def run_with_first_batch(loop, folder, monkeypatch):
    """Runs a loop to its end: its first rollout with advantages, and the rows of metrics."""
    batches = []
    finish_rollout = loop.algorithm.finish_rollout

    def record(batch, credit, *arguments):
        batches.append(credit.whole())
        return finish_rollout(batch, credit, *arguments)

    monkeypatch.setattr(loop.algorithm, "finish_rollout", record)
    _, rows, _ = result_of(loop, folder)
    return batches[0], [row for row in rows if "teacher/kl" in row]


def ids_of(batch, row):
    """The ids of a row without padding, and which of them the policy sampled."""
    rollout = batch.rollout
    is_token = rollout.attention_mask[row]
    is_sampled = torch.zeros_like(is_token)
    is_sampled[rollout.prompt_width :] = batch.response_mask[row]
    return rollout.input_ids[row][is_token], is_sampled[is_token]


@torch.no_grad()
def logprobs_by_transformers(model, batch, row):
    """Log-probs of the tokens of a row that the policy sampled, by a forward pass without padding."""
    ids, is_sampled = ids_of(batch, row)
    logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[is_sampled[1:]]


def advantages_by_hand(batch, row, lengths, token_rewards):
    """Advantages of a row's sampled tokens, from the columns of its rollout.

    Args:
        batch: the rollout.
        row: its number.
        lengths: tokens of each macro action.
        token_rewards: of each sampled token, without the KL penalty.
    """
    mask = batch.response_mask[row]
    trajectory = batch.trajectory
    logprobs = trajectory.logprobs[row][mask].tolist()
    reference = trajectory.ref_logprobs[row][mask].tolist()
    teacher = trajectory.teacher_logprobs[row][mask].tolist()
    values = trajectory.values[row][mask].tolist()

    rewards = []
    log_ratios = []
    for number, logprob in enumerate(logprobs):
        rewards.append(token_rewards[number] - KL_COEF * (logprob - reference[number]))
        log_ratios.append(teacher[number] - logprob)
    macro_rewards = [sum(chunk) for chunk in chunks(rewards, lengths)]
    advantages, _ = gae(pool(values, lengths, "equal"), macro_rewards, GAMMA, LAM)
    for number, chunk in enumerate(chunks(log_ratios, lengths)):
        advantages[number] += TEACHER_COEF * sum(chunk)
    return broadcast(advantages, lengths, len(logprobs))


def check_credit(batch, metrics, turn_rewards=None):
    """Compares advantages, log-probs and metrics of the first update with those made here.

    Args:
        batch: the first rollout.
        metrics: rows of metrics.
        turn_rewards: of an environment, shape (B, R), on the last tokens of turns; the score stands on the row's last
            token without them.
    """
    teacher = make_causal_lm(seed=3)
    mask = batch.response_mask
    teacher_kl = 0.0
    for row in range(len(mask)):
        expected = logprobs_by_transformers(teacher, batch, row)
        assert_near(batch.trajectory.teacher_logprobs[row][mask[row]], expected, scale=8.0)
        teacher_kl += float((batch.trajectory.logprobs[row][mask[row]] - expected).sum())

        token_rewards = [0.0] * int(mask[row].sum())
        token_rewards[-1] = float(batch.trajectory.scores[row])
        if turn_rewards is not None:
            token_rewards = turn_rewards[row][mask[row]].tolist()
        lengths = [length for length in batch.macro.lengths[row].tolist() if length > 0]
        by_hand = advantages_by_hand(batch, row, lengths, token_rewards)
        assert_near(batch.advantages[row][mask[row]], by_hand, scale=16.0)
    assert metrics[0]["teacher/kl"] == near(teacher_kl / len(mask), scale=64.0)
    assert metrics[0]["teacher/kl"] > 0.1 and len(metrics) > 1


def test_a_teacher_beside_a_reward_model(group, tmp_path, monkeypatch):
    """In macro actions of three tokens; the scores are those of the classifier's own forward passes."""
    reward = RewardModelScores(frozen_engine_of(make_classifier(seed=7, initializer_range=0.5)), 4)
    config = ppo_config(tmp_path / "out", ngram=3, **(FLAGS | {"reward_function": None}))
    loop = ppo_loop(config, reward, make_prompts(16), **models())
    batch, metrics = run_with_first_batch(loop, tmp_path / "out", monkeypatch)
    classifier = make_classifier(seed=7, initializer_range=0.5)
    scores = []
    for row in range(len(batch.response_mask)):
        ids, _ = ids_of(batch, row)
        scores.append(hf_score(classifier, ids.tolist()))
    assert_near(batch.trajectory.scores, scores, scale=8.0)
    assert max(scores) - min(scores) > 0.1
    check_credit(batch, metrics)
