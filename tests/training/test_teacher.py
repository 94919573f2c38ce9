# SPDX-License-Identifier: Apache-2.0
"""--teacher_model_name_or_path: what a run computes with it, learns from it, logs, and takes up again."""

from functools import partial

import pytest
import torch

from closeness import assert_near
from factories import batch_of_iteration, make_causal_lm, make_prompts, ppo_config, ppo_loop
from resume_runs import check_every_stop, ppo, result_of

ALONE = {
    "teacher_model_name_or_path": "unused",
    "advantage_estimator": "distillation",
    "reward_function": None,
    "kl_coef": 0.0,
}
BESIDE = {"teacher_model_name_or_path": "unused", "teacher_coef": 0.5}


def zeros(prompts, responses, rows):
    return [0.0] * len(responses)


def loop_of(folder, teacher, reward=zeros, prompts=8, **flags):
    examples = make_prompts(prompts)
    return ppo_loop(ppo_config(folder, **flags), reward, examples, examples[:4], teacher=teacher)


def teacher_logprobs_of(model, rollout, temperature=1.0):
    """Log-probs of the response tokens by transformers' own forward, row by row without padding."""
    result = torch.zeros(rollout.response_mask.shape)
    for row in range(len(result)):
        ids = rollout.input_ids[row][rollout.attention_mask[row]]
        length = int(rollout.response_mask[row].sum())
        logits = model(ids[None]).logits[0, :-1].float() / temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        result[row, :length] = logprobs[-length:]
    return result


@torch.no_grad()
def test_advantages_are_the_teachers_log_ratios(group, tmp_path):
    """Of macro actions of two tokens, at a sampling temperature of .7; nothing else without a KL penalty."""
    flags = ALONE | {"teacher_coef": 2.0, "ngram": 2, "temperature": 0.7}
    teacher = make_causal_lm(seed=3)
    batch = batch_of_iteration(loop_of(tmp_path / "out", teacher, **flags), [list(range(8))])
    mask = batch.response_mask
    expected = teacher_logprobs_of(make_causal_lm(seed=3), batch.rollout, 0.7)
    policy = teacher_logprobs_of(make_causal_lm(), batch.rollout, 0.7)
    assert_near(batch.trajectory.teacher_logprobs, expected, scale=8.0)
    log_ratios = (expected - policy).masked_fill(~mask, 0.0)
    for row in range(len(mask)):
        ratios = log_ratios[row][mask[row]]
        for first in range(0, len(ratios), 2):
            pair = slice(first, first + 2)
            total = 2.0 * float(ratios[pair].sum())
            assert_near(batch.advantages[row, pair][mask[row, pair]].mean(), total, scale=16.0)
    # The score that is logged, and chooses the best checkpoint.
    assert_near(batch.trajectory.scores, log_ratios.sum(1), scale=32.0)
    assert batch.returns is None and not batch.advantages[~mask].any()


def test_a_policy_comes_close_to_its_teacher(group, tmp_path):
    """The KL falls to less than a third in rollouts and on held-out prompts."""
    sizes = {"per_device_generation_batch_size": 64, "per_device_training_batch_size": 64, "max_answer_seq_len": 6}
    flags = {"num_train_epochs": 20, "ppo_epochs": 2, "actor_learning_rate": 1e-2, "eval_interval": 40, "ngram": 1}
    loop = loop_of(tmp_path, make_causal_lm(seed=3), prompts=64, **(ALONE | sizes | flags))
    _, rows, _ = result_of(loop, tmp_path)
    kl = [row["teacher/kl_per_token"] for row in rows if "teacher/kl_per_token" in row]
    assert sum(kl[-3:]) < sum(kl[:3]) / 3
    held_out = [row for row in rows if "eval/teacher_kl" in row]
    assert held_out[-1]["eval/teacher_kl"] < held_out[0]["eval/teacher_kl"] / 3
    for row in held_out:  # the score is the log-ratio, which chooses the best checkpoint
        assert row["eval/scores"] == pytest.approx(-row["eval/teacher_kl"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ALONE | {"kl_coef": 0.01, "adaptive_kl_target": None},
        # One update of a rollout, whose forward passes give the log-probs that the teacher's are compared with.
        BESIDE | {"ppo_epochs": 1, "generation_batches": 1},
    ],
    ids=["alone", "beside"],
)
def test_a_distilled_run_stops_anywhere(flags, group, tmp_path):
    make = partial(ppo, teacher=make_causal_lm(seed=3), **flags)
    assert check_every_stop(make, tmp_path, 43, first=11) > 20
