# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: pairs that share a state, their rewards, the regression, and whole runs."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli_runs import read_jsonl
from closeness import FORMULA, UPDATE, assert_near, assert_weights_near, near
from dschat.data.dialogues import state
from dschat.refuel.models import compared_turn
from dschat.refuel.online import pair_metrics, refuel_update
from dschat.settings.batches import BatchPlan
from dschat.training.ppo.update import UpdateProgress
from factories import (
    BOS,
    PAD,
    collected,
    engine_of,
    frozen_engine_of,
    hf_logprobs,
    largest_difference,
    make_causal_lm,
    weights_of,
)
from refuel_runs import config_of, examples_of, pair_batch, paired_rows, share_of_early, talker, trainer_of

# -- drawing


def test_the_turn_is_drawn_evenly_and_follows_from_seed_round_and_row_alone():
    (example,) = [one for one in examples_of(3) if one.num_turns == 3]
    drawn = Counter(compared_turn(7, number, example) for number in range(3000))
    assert sorted(drawn) == [0, 1, 2] and all(900 < count < 1100 for count in drawn.values())
    examples = examples_of(60)
    turns, again, other_round, other_seed = (
        [compared_turn(seed, number, one) for one in examples]
        for seed, number in ((1234, 5), (1234, 5), (1234, 6), (1235, 5))
    )
    assert turns == again and other_round != turns != other_seed
    assert all(turn < one.num_turns for turn, one in zip(turns, examples, strict=True))


def test_both_dialogues_of_a_pair_are_one_up_to_the_state(group, tmp_path):
    trainer, examples = trainer_of(tmp_path), examples_of(12)
    pairs = trainer.algorithm.sampler.sample_pairs(examples, iteration=0)
    assert {pair.turn for pair in pairs} == {0, 1, 2}
    for pair, example in zip(pairs, examples, strict=True):
        assert pair.turn == compared_turn(1234, 0, example)
        first, second = pair.replies
        assert first.state_ids == second.state_ids
        shared = state(pair.first.messages, pair.turn)
        assert shared == state(pair.second.messages, pair.turn) and len(shared) == 2 * pair.turn + 1
        assert sorted(pair.first.replies) == list(range(example.num_turns))
        assert sorted(pair.second.replies) == list(range(pair.turn, example.num_turns))
        for talk in (pair.first, pair.second):
            assert talk.messages[0::2] == example.messages[0::2]  # the user says what the data say
            assert len(talk.messages) == 2 * example.num_turns
    assert sum(a.ids != b.ids for a, b in (pair.replies for pair in pairs)) > 9


def test_a_round_draws_with_a_seed_for_each_row(group, tmp_path):
    """Two rows of one dialogue do not say the same."""
    trainer = trainer_of(tmp_path)
    twins = [replace(examples_of(3)[2], index=index) for index in range(4)]
    talks = [str(pair.first.messages) for pair in trainer.algorithm.sampler.sample_pairs(twins, iteration=0)]
    assert len(set(talks)) == 4


# -- rewards


def test_scores_penalty_and_kl_by_hand(group, tmp_path):
    """Log-probs of plain transformers, and a reference that is another model."""
    trainer = trainer_of(tmp_path, kl_coef=0.5, penalty_reward_value=-7.0, temperature=0.7)
    trainer.algorithm.models = replace(trainer.algorithm.models, reference=frozen_engine_of(talker(seed=3)))
    examples = examples_of(12)
    pairs = trainer.algorithm.sampler.sample_pairs(examples, 0)
    ends = []
    function = trainer.algorithm.models.reward

    def reward(dialogues, rows, last_replies_ended):
        ends.extend(last_replies_ended)
        return function(dialogues, rows, last_replies_ended)

    trainer.algorithm.models = replace(trainer.algorithm.models, reward=reward)
    batch = trainer.algorithm.score_pairs(pairs, examples)
    talks = [pair.first for pair in pairs] + [pair.second for pair in pairs]
    assert ends == [talk.replies[max(talk.replies)].finished for talk in talks]
    own, other = talker(), talker(seed=3)
    finished = []
    for number, pair in enumerate(pairs):
        for side, (reply, talk) in enumerate(zip(pair.replies, (pair.first, pair.second), strict=True)):
            row = number + side * len(pairs)
            logprobs = [
                float(hf_logprobs(model, (reply.state_ids, reply.ids), 0.7)[0].sum()) for model in (own, other)
            ]
            assert batch.logprobs[row] == near(logprobs[0], UPDATE)
            assert batch.kl[row] == near(logprobs[0] - logprobs[1], UPDATE)
            (score,) = share_of_early([talk.messages], [])
            assert batch.scores[row] == pytest.approx(score)
            kept = score if reply.finished else -7.0
            assert batch.rewards[row] == near(kept - 0.5 * (logprobs[0] - logprobs[1]), UPDATE)
            finished.append(reply.finished)
    assert True in finished and False in finished
    metrics = pair_metrics(batch, pairs, has_reference=True)
    gaps = batch.rewards[:12] - batch.rewards[12:]
    assert metrics["objective/reward_gap"] == near(float(gaps.abs().mean()))
    assert metrics["response/eos_rate"] == pytest.approx(sum(finished) / 24)
    assert metrics["dialogue/turn"] == pytest.approx(sum(pair.turn + 1 for pair in pairs) / 12)


def test_whitening_scales_the_rewards_of_a_round(group, tmp_path):
    plain, whitened = (
        collected(trainer_of(tmp_path / str(w), whiten_rewards=w), range(8)).batch for w in (False, True)
    )
    assert whitened.rewards.mean() == near(0)
    assert whitened.rewards.square().mean() == near(1, UPDATE)
    expected = plain.reward_differences / plain.rewards.std(unbiased=False)
    assert_near(whitened.reward_differences, expected, UPDATE, scale=0.1)
    torch.testing.assert_close(whitened.scores, plain.scores)


def test_without_a_kl_there_is_no_reference_and_none_is_reported(group, tmp_path):
    trainer = trainer_of(tmp_path, kl_coef=0.0)
    assert trainer.algorithm.models.reference is None
    metrics = trainer.iterate([range(8)])
    assert "objective/kl" not in metrics and "eval/kl" not in trainer.evaluate()
    assert metrics["objective/kl_coef"] == 0


def test_only_replies_of_the_policys_own_temperature_say_its_kl(group, tmp_path):
    """Greedy replies are no samples of the policy, so that their log-ratios are no estimate of a KL."""
    trainer = trainer_of(tmp_path / "greedy", eval_temperature=0.0, temperature=0.7)
    assert "eval/kl" not in trainer.evaluate()
    trainer = trainer_of(tmp_path / "sampled", eval_temperature=0.7, temperature=0.7)
    assert trainer.evaluate()["eval/kl"] == near(0)  # nothing has been trained


def test_the_kl_coefficient_is_steered(group, tmp_path):
    """The first round's KL is 0: error −1, clipped to −0.2, over 8 of 10000 dialogues."""
    trainer = trainer_of(tmp_path, adaptive_kl_target=6.0, kl_coef=0.05)
    trainer.iterate([range(8)])
    assert trainer.algorithm.kl.value == pytest.approx(0.05 * (1 - 0.2 * 8 / 10000))


# -- the regression


def settings_of(count, micro, updates=1, **flags):
    """The flags of updates on so many pairs, and the batch sizes."""
    config = config_of(Path("unused"), **{"eta": 2.0, "temperature": 1.0} | flags)
    return config, BatchPlan(1, micro, count // micro, count, count, count, updates)


def test_at_the_start_the_log_ratios_are_0_and_the_loss_is_that_of_the_rewards(group, tmp_path):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, noptepochs=1, eta=3.0, **sizes)
    current = collected(trainer, range(8))
    metrics = trainer.algorithm.update(current, 0)
    expected = float((3.0 * current.batch.reward_differences).square().mean())
    assert metrics["loss/refuel"] == near(expected, UPDATE) and expected > 1e-3
    assert metrics["policy/log_ratio"] == near(0)
    assert metrics["val/ratio"] == near(1) and metrics["val/ratio_variance"] < 1e-4


def test_the_gradient_is_that_of_the_mean_over_pairs_by_autograd(group):
    """mean (D − η ΔR)² of plain transformers, one pair at a time without padding; one step of SGD-like Adam."""
    rows = paired_rows(3)
    batch, model = pair_batch(rows), make_causal_lm()
    losses = []
    for number in range(3):
        sums = []
        for row in (number, number + 3):
            state_ids, reply = rows[row]
            logits = model(input_ids=torch.tensor([state_ids + reply])).logits[0, len(state_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None]).sum()
            sums.append(logprobs - batch.logprobs[row])
        losses.append((sums[0] - sums[1] - 2.0 * (batch.rewards[number] - batch.rewards[number + 3])) ** 2)
    loss = torch.stack(losses).mean()
    loss.backward()
    loss = loss.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    engine = engine_of(make_causal_lm(), 3, 1, gradient_clipping=0.0)
    metrics = refuel_update(engine, batch, *settings_of(3, 3), UpdateProgress())
    assert metrics["loss/refuel"] == near(float(loss), UPDATE)
    assert metrics["grad_norm"] == near(float(norm), UPDATE)


def test_micro_batches_and_accumulation_change_nothing(group):
    batch, weights, metrics = pair_batch(paired_rows(8)), [], []
    for micro in (8, 2):
        engine = engine_of(make_causal_lm(), micro, 8 // micro, learning_rate=1e-3)
        metrics.append(refuel_update(engine, batch, *settings_of(8, micro, updates=3), UpdateProgress()))
        weights.append(weights_of(engine))
    assert_weights_near(*weights)
    assert metrics[1] == near(metrics[0], 8 * UPDATE, scale=0.1)
    assert largest_difference(weights[0], weights_of(engine_of(make_causal_lm()))) > 1e-3


def test_the_updates_of_a_round_take_the_same_pairs_and_lower_the_loss(group, tmp_path):
    """Four passes by default; another four begin with what the first reached."""
    trainer = trainer_of(tmp_path)
    assert trainer.run.plan.updates_per_rollout == 4 and trainer.run.plan.global_rollout == 8
    trainer.iterate([range(8)])
    assert trainer.update == 4 == trainer.algorithm.models.policy._engine.global_steps and trainer.iteration == 1
    batch = pair_batch(paired_rows(8))
    losses = []
    engine = engine_of(make_causal_lm(), 8, 1, learning_rate=1e-3)
    for _ in range(3):
        losses.append(refuel_update(engine, batch, *settings_of(8, 8, updates=4), UpdateProgress())["loss/refuel"])
    assert losses[0] > losses[1] > losses[2]


# -- whole runs


def test_fit_writes_what_it_should(group, tmp_path):
    """Two epochs of two rounds of two updates."""
    trainer = trainer_of(tmp_path, noptepochs=2, num_train_epochs=2, eval_temperature=1.0)
    result = trainer.fit()
    train = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "loss/refuel" in row]
    assert len(train) == 4 and train[0]["objective/kl"] == near(0, UPDATE)
    assert result["eval/rows"] == 5
    samples = read_jsonl(tmp_path / "samples" / "update-000008.jsonl")
    assert [sample["number"] for sample in samples] == [0, 1, 2, 3, 4]
    for sample, example in zip(samples, examples_of(5), strict=True):
        assert set(sample) == {"number", "messages", "scores", "finished"}
        assert sample["messages"][0::2] == example.messages[0::2]
        ends = [2 * turn + 2 for turn in range(example.num_turns)]
        assert sample["scores"] == pytest.approx(share_of_early([sample["messages"][:end] for end in ends], []))
        assert len(sample["finished"]) == example.num_turns
    last = [sample["scores"][-1] for sample in samples]
    assert result["eval/scores"] == near(sum(last) / 5, FORMULA)
    assert result["eval/scores_stderr"] == near(statistics.stdev(last) / math.sqrt(5), FORMULA)
    second = [sample["scores"][1] for sample in samples if len(sample["scores"]) > 1]
    assert result["eval/scores_turn_2"] == near(sum(second) / len(second), FORMULA) and len(second) == 3
    ended = [one for sample in samples for one in sample["finished"]]
    assert result["eval/eos_rate"] == pytest.approx(sum(ended) / 9)


def test_evaluations_draw_the_likeliest_tokens_or_the_same_ones_every_time(group, tmp_path):
    likeliest, drawn = (trainer_of(tmp_path / str(t), eval_temperature=t) for t in (0.0, 1.0))
    texts = []
    for trainer in (likeliest, drawn):
        first, second = (trainer.evaluate() for _ in range(2))
        assert first == second
        texts.append((trainer.run.folder / "samples" / "update-000000.jsonl").read_text())
    assert texts[0] != texts[1]
    (talk,) = likeliest.algorithm.sampler.answers(examples_of(1), 0.0)
    row = list(talk.replies[0].state_ids)
    for token in talk.replies[0].ids:
        logits = talker()(input_ids=torch.tensor([row])).logits[0, -1]
        logits[[PAD, BOS]] = -torch.inf
        assert int(logits.argmax()) == token
        row.append(token)
