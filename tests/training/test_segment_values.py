# SPDX-License-Identifier: Apache-2.0
"""--advantage_estimator segment_mc: values that completions measure, and the advantages that follow."""

import math

import pytest
import torch

from closeness import FORMULA, assert_near
from dschat.rollouts.sampling import row_seed
from dschat.run.state import SeedKind
from dschat.scoring.function import FunctionScores
from dschat.scoring.source import Scores, Weighted
from dschat.scoring.weighted import WeightedScores
from dschat.training.iteration import Clock
from dschat.training.ppo.collect import ActorSampler
from dschat.training.ppo.segment_values import mean_scores
from factories import credit_of_batch, make_causal_lm, make_prompts, ppo_config, ppo_loop
from macro_actions.conditions import at_most
from rl_cases import credit_of, mask_of, trajectory_of
from rollout_cases import by_hand

FLAGS = {
    "advantage_estimator": "segment_mc",
    "self_checks": False,
    "kl_coef": 0.0,
    "mc_samples": 3,
    "ngram": 3,
    "per_device_generation_batch_size": 2,
    "per_device_training_batch_size": 4,
    "generation_batches": 2,
    "samples_per_prompt": 2,
}


def length(prompts, responses, rows):
    return [len(response) / 4 for response in responses]


def trainer_of(folder, reward=length, **overrides):
    config = ppo_config(folder, **(FLAGS | overrides))
    return ppo_loop(config, reward, make_prompts(16), make_prompts(3), reference=make_causal_lm(seed=1))


def batch_of(trainer, iteration=0):
    batch = trainer.algorithm.collect([[1, 2], [3, 0]], iteration, Clock())
    return credit_of_batch(trainer.algorithm, batch), batch.stats


# -- the estimator


def test_advantages_by_hand():
    """V .5 .2 before macro actions of 2 and 1 tokens, a score of 1: .2 − .5 and 1 − .2; a response of one: 1 − .5."""
    trajectory = trajectory_of([3, 1, 0], 3, 0)
    values = torch.tensor([[0.5, 9.0, 0.2], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    given = {"values": values, "scores": torch.ones(3)}
    trajectory = type(trajectory)(**(vars(trajectory) | given))
    ends = torch.tensor([[False, True, True], [True, False, False], [False] * 3])
    found = credit_of(trajectory, ends, "segment_mc", kl_coef=0.0)
    assert_near(found.advantages, [[-0.3, -0.3, 0.8], [0.5, 0.0, 0.0], [0.0] * 3], FORMULA)
    assert found.returns is None
    # The KL of a macro action and of those behind it costs, as without values.
    kl = (trajectory.logprobs - trajectory.ref_logprobs)[0]
    costly = credit_of(trajectory, ends, "segment_mc", kl_coef=0.1).advantages[0]
    to_go = torch.stack([kl.sum(), kl.sum(), kl[2]])
    assert_near(costly, torch.tensor([-0.3, -0.3, 0.8]) - 0.1 * to_go, FORMULA)


@pytest.mark.parametrize(
    "lengths, most, joined", [([2, 1, 3], 3, [2, 1, 3]), ([2, 1, 3], 1, [6]), ([1, 2, 1, 2], 3, [3, 1, 2])]
)
def test_neighbours_are_joined(lengths, most, joined):
    """Of 4, number 0 and 1 come to ⌊0⌋ and ⌊3/4⌋ = 0, number 2 to ⌊6/4⌋ = 1, number 3 to ⌊9/4⌋ = 2."""
    width = sum(lengths) + 2
    ends = torch.zeros(2, width, dtype=torch.bool)
    ends[0, torch.tensor(lengths).cumsum(0) - 1] = True
    expected = torch.zeros_like(ends)
    expected[0, torch.tensor(joined).cumsum(0) - 1] = True
    assert torch.equal(at_most(ends, mask_of([sum(lengths), 0], width), most), expected)


# -- the values


def test_values_are_means_of_completions_drawn_by_hand(group, tokenizer, tmp_path):
    """Of every state, from a forward pass over the whole row for each token, with a seed for each completion."""
    trainer = trainer_of(tmp_path)
    batch, stats = batch_of(trainer, iteration=5)
    causal_lm, sampling = make_causal_lm(), trainer.algorithm.sampler.sampling
    examples = [trainer.algorithm.prompts[n] for n in (1, 1, 2, 2, 3, 3, 0, 0)]
    expected, tokens = torch.zeros(batch.response_mask.shape), 0
    for row, response in enumerate(batch.rollout.response_rows()):
        for number, start in enumerate(range(0, len(response), 3)):
            prompt, scores = examples[row].prompt_ids + response[:start], []
            for n in range(3):
                parts = (1234, SeedKind.COMPLETION, 5, examples[row].index, row % 2, number, n)
                drawn = by_hand(causal_lm, prompt, sampling, row_seed(*parts))[: sampling.max_new_tokens - start]
                tokens += len(drawn)
                scores.append(len(tokenizer.decode(response[:start] + drawn, skip_special_tokens=True)) / 4)
            expected[row, start : start + 3] = sum(scores) / 3
    expected[~batch.response_mask] = 0
    assert batch.trajectory.values is not None and batch.macro.mask.sum() > 2 * len(examples)
    assert_near(batch.trajectory.values, expected)
    assert stats.totals["rollout/mc_tokens"] == tokens


def test_weights_are_sent_once_for_all_parts(group, tmp_path, monkeypatch):
    """Three parts: the first opens a session, the others go on with its weights."""
    trainer = trainer_of(tmp_path)
    sessions = []
    session = ActorSampler.session

    def counted(sample, same_weights=False):
        sessions.append(same_weights)
        return session(sample, same_weights)

    monkeypatch.setattr(ActorSampler, "session", counted)
    batch_of(trainer)
    parts = len(sessions) - 1  # beside the rollout's own
    assert parts > 1 and sessions == [False, False] + [True] * (parts - 1)


def test_completions_are_scored_as_they_are_trained_on(group, tmp_path):
    """A constant score s of which (s − mean) / deviation, less the penalty of a cut response, is clamped."""
    flags = {"missing_eos_penalty": 0.25, "clip_reward_value": 0.5, "ngram": math.inf}
    constant = trainer_of(tmp_path, lambda prompts, responses, rows: [0.6] * len(prompts), **flags)
    batch, _ = batch_of(constant)
    values = batch.trajectory.values
    assert values is not None
    found = {round(float(x), 4) for x in values[:, 0]}
    # Means of three of 0.5 (ended) and 0.35 (cut).
    assert found <= {0.35, 0.4, 0.45, 0.5} and len(found) > 1
    normalised = trainer_of(tmp_path, normalize_scores=True, ngram=math.inf)
    batch, _ = batch_of(normalised)
    plain, _ = batch_of(trainer_of(tmp_path, ngram=math.inf))
    scores = plain.trajectory.scores.double()
    deviation = (scores.var(correction=0) + 1e-8).sqrt()
    assert batch.trajectory.values is not None and plain.trajectory.values is not None
    expected = torch.where(plain.response_mask, (plain.trajectory.values.double() - scores.mean()) / deviation, 0.0)
    assert_near(batch.trajectory.values, expected.float())


def test_mean_scores_by_hand():
    """(1 + 5) / 2; of a state without a score, the 2 that its source gave; NaN if the source had none to give."""
    scores = torch.tensor([[1.0, 9.0, 5.0], [2.0, 2.0, 2.0], [math.nan] * 3, [math.nan, 1.0, 3.0]])
    missing = torch.tensor([[False, True, False], [True] * 3, [True] * 3, [True, False, False]])
    means = mean_scores(scores, missing).tolist()
    assert means[:2] == [3.0, 2.0] and math.isnan(means[2]) and means[3] == 2.0


def scored_by(answer):
    """2 for each response of the first call, and what `answer` says of each completion by its number."""

    def score(prompts, responses, rows):
        calls.append(len(prompts))
        return [2.0 if len(calls) == 1 else answer(number) for number in range(len(prompts))]

    calls = []
    return WeightedScores([Weighted(None, 1.0, FunctionScores(score, "--f", "skip"))], skips=True)


def test_completions_without_a_score_are_left_out(group, tmp_path):
    """Scores that are all 2: V is 2 where most completions have none, and by the others where all have none."""
    source = scored_by(lambda number: 2.0 if number % 5 == 0 else None)
    batch, stats = batch_of(trainer_of(tmp_path, source, on_reward_error="skip"))
    completions = 3 * int(batch.macro.mask.sum())
    assert 0.7 * completions < stats.totals["rollout/mc_unscored"] <= 0.8 * completions
    assert batch.trajectory.values is not None
    assert_near(batch.trajectory.values, 2.0 * batch.response_mask.float())
    assert_near(batch.advantages, torch.zeros_like(batch.advantages))


def test_completions_are_paid_for(group, tmp_path):
    """A judge that costs a dollar a text: each response, and three completions of each of its states."""

    class DearJudge:
        model = None

        def __call__(self, rollout, texts):
            count = float(len(texts.responses))
            measured = {"judge/cached": (0.0, count), "judge/cost": (count, count)}
            return Scores(torch.zeros(len(texts.responses)), measured=measured)

    batch, stats = batch_of(trainer_of(tmp_path, DearJudge()))
    rows = len(batch.response_mask)
    states = int(batch.macro.mask.sum())
    assert stats.measured["judge/cost"] == (rows + 3 * states, rows)
    assert stats.measured["judge/cached"] == (0.0, rows + 3 * states)
