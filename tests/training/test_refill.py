# SPDX-License-Identifier: Apache-2.0
"""--refill_rounds: further prompts take the places of those whose responses all have the same score."""

from dataclasses import replace

import pytest
import torch

from closeness import assert_near
from dschat.rollouts.sampling import row_seed
from dschat.run.state import SeedKind, derive_seed
from dschat.scoring.function import FunctionScores
from dschat.training.iteration import Clock, pass_size
from dschat.training.ppo import refill
from dschat.training.ppo.models import response_logprobs, response_values
from dschat.training.ppo.refill import prompts_with_equal_scores, refill_slots, replace_prompts
from dschat.training.ppo.score import ExternalStats, ScoredBatch, ScoredRows
from factories import credit_of_batch, make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop
from macro_actions.conditions import fixed
from macro_actions.segments import segment
from macro_actions.types import ScoredRollout
from rl_cases import trajectory_of
from rollout_cases import by_hand

FLAGS = {
    "advantage_estimator": "grpo",
    "self_checks": False,
    "kl_coef": 0.0,
    "ngram": 3,
    "samples_per_prompt": 2,
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 4,
    "drop_equal_groups": True,
    "refill_rounds": 1,
}
WORK = [[1, 2], [3, 0]]
SAME = {1, 3}  # prompts whose responses have one score


@pytest.mark.parametrize(
    ("equal", "further", "ranks", "expected"),
    [
        ("=.==", ".=.", 1, [4, 1, 6, 3]),  # fewer than places
        ("..=.", "=...", 1, [0, 1, 5, 3]),  # more
        ("", "", 1, []),
        ("==..", "=...", 2, [6, 5, 2, 3]),  # each has one, and keeps it
        ("=.=.", "=.=.", 2, [5, 1, 7, 3]),  # what the one has is drawn by the other
        ("====", ".=.=", 2, [4, 6, 2, 3]),  # of the first two places one is the second's, which has drawn nothing
    ],
)
def test_places_of_equal_groups_by_hand(equal, further, ranks, expected):
    """An = is a group of equal scores."""
    given = (torch.tensor([sign == "=" for sign in groups], dtype=torch.bool) for groups in (equal, further))
    groups = refill_slots(*given, ranks)
    assert groups.tolist() == expected and groups.dtype == torch.int64


class Scores(FunctionScores):
    """Of a prompt in `same` 1, of others n + 0, n + 0.5; notes what it is asked."""

    def __init__(self, same):
        self.asked = []  # rollouts

        def score(prompts, responses, rows):
            return [1.0 if row["n"] in same else row["n"] + i % 2 / 2 for i, row in enumerate(rows)]

        super().__init__(score, "--reward_function")

    def __call__(self, rollout, texts):
        self.asked.append(rollout)
        return super().__call__(rollout, texts)


def trainer_of(folder, reward, rollouts=None, **overrides):
    config = ppo_config(folder, **(FLAGS | overrides))
    models = {"reference": make_causal_lm(seed=1), "critic": make_classifier(seed=2)}
    return ppo_loop(config, reward, make_prompts(16), make_prompts(3), rollouts=rollouts, **models)


def collected(trainer, iteration=0):
    found = trainer.algorithm.collect(WORK, iteration, Clock())
    return found


def rows_of(trajectory, macro):
    scored = ScoredRollout(trajectory.rollout, trajectory.ref_logprobs, trajectory.scores)
    return ScoredRows(scored, macro, trajectory.logprobs, trajectory.values)


def numbers_of(rollout):
    """The prompts' numbers."""
    numbers = rollout.prompt_index.tolist()
    assert numbers[::2] == numbers[1::2]
    return numbers[::2]


def test_places_are_taken_by_others(group, tmp_path):
    """Prompts 1 and 3 give way to the first two of unequal scores among four others, drawn with seeds of their own."""
    scores = Scores(SAME)
    trainer = trainer_of(tmp_path, scores, advantage_estimator="gae")
    found, algorithm = collected(trainer, iteration=5), trainer.algorithm
    first, further = scores.asked
    others = numbers_of(further)
    assert numbers_of(first) == [1, 2, 3, 0] and len(set(others)) == 4 and not {0, 1, 2, 3} & set(others)
    known = found.rows.trajectory
    assert numbers_of(known.rollout) == [others[0], 2, others[1], 0]
    assert known.rollout.sample_index.tolist() == [0, 1] * 4
    assert known.scores.tolist() == [n + half for n in (others[0], 2, others[1], 0) for half in (0.0, 0.5)]
    # Drawn by hand: tokens, and whatever the models say of them.
    causal_lm, sampling, seeds = make_causal_lm(), algorithm.sampler.sampling, []
    for place, number in enumerate(numbers_of(known.rollout)):
        kind = (SeedKind.TRAINING, 5) if place % 2 else (SeedKind.REFILL, derive_seed(5, 0))
        seeds += [row_seed(1234, *kind, number), row_seed(1234, *kind, number, 1)]
    prompts = [make_prompts(16)[n].prompt_ids for n in numbers_of(known.rollout) for _ in range(2)]
    rows = [by_hand(causal_lm, prompt, sampling, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert known.rollout.response_rows() == rows
    models, size = algorithm.models, pass_size(algorithm.plan).without_gradient
    assert_near(known.logprobs, response_logprobs(models.actor, known.rollout, 1.0, size))
    assert_near(known.ref_logprobs, response_logprobs(models.reference, known.rollout, 1.0, size))
    assert_near(known.values, response_values(models.critic, known.rollout, size))
    tokens = int(further.response_mask.sum())
    assert found.stats.totals == {"rollout/refilled": 2, "rollout/refill_tokens": tokens} and tokens > 8
    batch = credit_of_batch(algorithm, found)
    assert batch.counted is not None and torch.equal(batch.counted, batch.response_mask)


def test_rounds_end_when_no_place_is_left_or_at_their_number(group, tmp_path):
    """Of prompts that are all of one score, but for some: three rounds ask every other once."""
    nothing = Scores(set())
    found = collected(trainer_of(tmp_path / "none", nothing, refill_rounds=3))
    assert len(nothing.asked) == 1 and set(found.stats.totals.values()) == {0}
    enough = Scores(SAME)
    collected(trainer_of(tmp_path / "enough", enough, refill_rounds=3))
    assert len(enough.asked) == 2
    scarce = Scores(set(range(16)) - {0, 9})
    trainer = trainer_of(tmp_path / "scarce", scarce, refill_rounds=3)
    found = collected(trainer)
    rounds = [numbers_of(rollout) for rollout in scarce.asked[1:]]
    assert sorted(n for part in rounds for n in part) == list(range(4, 16))
    assert numbers_of(found.rows.rollout) == [9, 2, 3, 0]
    tokens = sum(int(rollout.response_mask.sum()) for rollout in scarce.asked[1:])
    assert found.stats.totals == {"rollout/refilled": 1, "rollout/refill_tokens": tokens}
    batch = credit_of_batch(trainer.algorithm, found)
    assert batch.counted.any(1).tolist() == [True, True, False, False, False, False, True, True]


def test_a_prompt_that_is_asked_twice_is_answered_anew(group, tmp_path):
    """In four rounds of four of 16 prompts, the last are the iteration's own; the fifth begins the order again."""
    scores = Scores(set(range(16)))
    collected(trainer_of(tmp_path, scores, refill_rounds=5))
    first, *_, fourth, fifth = scores.asked[1:]
    assert sorted(numbers_of(fourth)) == [0, 1, 2, 3] and numbers_of(fifth) == numbers_of(first)
    assert fifth.response_rows() != first.response_rows()


def test_logits_that_are_not_finite_are_not_passed_over():
    """Two prompts of equal scores, one of them drawn from such logits."""
    trajectory = replace(trajectory_of([3, 2, 1, 3], 3, 0), scores=torch.ones(4))
    bad = torch.tensor([False, False, True, False])
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    found = ScoredBatch(rows_of(trajectory, macro), bad, ExternalStats({}, {}, {}))
    assert prompts_with_equal_scores(found, 2).tolist() == [True, False]


def test_places_of_a_rank_are_taken_by_prompts_of_others(monkeypatch):
    """Three ranks of two prompts each, of two responses: places 1, 2 and 4 are taken by further ones 0, 2 and 3.

    The third rank keeps what it has drawn, and the second has nothing to pass on.

    Numbers are those of the rows; sums, and what programs came to, are those of all that the rank drew.
    """

    def of_rank(number, further):
        groups = [number + 10 * further, number + 3 + 10 * further]
        lengths = [group % 10 % 3 + 1 + sample for group in groups for sample in (0, 1)]
        known = trajectory_of(lengths, max(lengths), number)
        index = torch.tensor(groups).repeat_interleave(2)
        rollout = replace(known.rollout, prompt_index=index, sample_index=torch.tensor([0, 1, 0, 1]))
        known = replace(known, rollout=rollout, scores=index + rollout.sample_index / 2)
        numbers = {"a": 2 * known.scores}
        sums = {"parsing/sentences": 5.0 + 2 * further}, {"programs/passed": (1.0 + further, 2.0)}
        macro = segment(fixed(known.response_mask, 2), known.response_mask)
        return ScoredBatch(rows_of(known, macro), index == 13, ExternalStats(numbers, *sums), index + 100)

    equal, further = (torch.tensor(x).bool() for x in ([0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 1, 1]))
    groups = refill_slots(equal, further, ranks=3)
    passed = []

    class Passed(Exception):
        """The rank has said what it passes on."""

    def note(rows):
        passed.append(rows)
        raise Passed

    def taken(number, gather):
        monkeypatch.setattr(refill, "rank", lambda: number)
        monkeypatch.setattr(refill, "world_size", lambda: 3)
        monkeypatch.setattr(refill, "gather_on_host", gather)
        return replace_prompts(of_rank(number, False), of_rank(number, True), groups, 2, pad_id=99)

    for number in range(3):
        with pytest.raises(Passed):
            taken(number, note)
    assert [list(rows) for rows in passed] == [[6, 9], [], []]
    for number, expected in enumerate([[0, 3], [10, 13], [12, 5]]):
        found = taken(number, lambda rows: passed)
        known = found.rows.trajectory
        assert numbers_of(known.rollout) == expected and known.rollout.sample_index.tolist() == [0, 1, 0, 1]
        assert known.scores.tolist() == [group + half for group in expected for half in (0.0, 0.5)]
        assert known.response_mask.sum(1).tolist() == [n % 10 % 3 + 1 + half for n in expected for half in (0, 1)]
        assert torch.equal(found.rows.macro.lengths.sum(1), known.response_mask.sum(1))
        assert found.prompt_numbers is not None
        assert found.prompt_numbers.tolist() == [n + 100 for n in expected for _ in range(2)]
        assert found.bad_rows.tolist() == [n == 13 for n in expected for _ in range(2)]
        assert found.stats.auxiliary["a"].tolist() == (2 * known.scores).tolist()
        assert found.stats.totals == {"parsing/sentences": 12.0}
        assert found.stats.measured == {"programs/passed": (3.0, 4.0)}
