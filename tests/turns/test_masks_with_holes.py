# SPDX-License-Identifier: Apache-2.0
"""Places of the trainer that read the response mask, on rows with an environment's tokens between their turns."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_near
from dschat.models.layout import Lengths, lay_out
from dschat.rollouts.text_conditions import _runs_of
from dschat.scoring.source import EpisodeRecords, ResponseTexts
from dschat.training.ppo.credit import assign_credit, with_scores
from dschat.training.ppo.metrics import repeated_4grams, rollout_metrics, token_table
from dschat.turns.scores import EnvironmentScores
from factories import condition_of, make_rollout, make_tokenizer, ppo_config, ragged_rows
from macro_actions.masked import last_true
from macro_actions.rewards import ScoreMoments
from macro_actions.segments import segment
from macro_actions.types import PPOBatch, Rollout, ScoredRollout, Trajectory

# Turns of 3, 1 and 2 tokens with holes of 2 and 1; one turn of 4; turns of 1 and 5 with a hole of 1.
RUNS = [[3, -2, 1, -1, 2], [4], [1, -1, 5]]


def holes_of(runs: Any) -> list[bool]:
    """Whether each token is the policy's; a negative number is a hole."""
    flags: list[bool] = []
    for length in runs:
        flags += [length > 0] * abs(length)
    return flags


def holed_rollout() -> Rollout:
    """Rows of random ids with these runs, all of whose turns were cut."""
    rows = ragged_rows([4, 2, 6], [sum(map(abs, runs)) for runs in RUNS])
    rollout = make_rollout(rows)
    mask = torch.zeros_like(rollout.response_mask)
    for row, runs in enumerate(RUNS):
        flags = holes_of(runs)
        mask[row, : len(flags)] = torch.tensor(flags)
    return replace(rollout, response_mask=mask, cut_turns=last_true(mask))


def whole(rollout: Rollout) -> Rollout:
    """The rollout without holes: the environment's tokens are the policy's, too."""
    return replace(rollout, response_mask=rollout.attention_mask[:, rollout.prompt_width :], cut_turns=None)


def test_lengths_tell_prompts_episodes_and_sampled_tokens_apart() -> None:
    lengths = Lengths.of(holed_rollout())
    assert lengths.prompts.tolist() == [4, 2, 6]
    assert lengths.responses.tolist() == [9, 4, 7]
    assert lengths.sampled.tolist() == [6, 4, 6]
    assert lengths.totals.tolist() == [13, 6, 13]
    assert Lengths.of(whole(holed_rollout())).holes is None


def test_a_forward_pass_reads_all_and_predicts_the_policys_tokens_alone() -> None:
    rollout = holed_rollout()
    lengths = Lengths.of(rollout)
    layout = lay_out(rollout, torch.tensor([2, 0]).numpy(), lengths)
    assert layout.width == 9 and layout.input_ids.shape == (2, 13)
    targets = layout.input_ids.flatten()[layout.targets].tolist()
    rows = rollout.response_rows()
    assert targets == rows[2] + rows[0]
    spread = layout.spread(torch.ones(len(targets)))
    assert torch.equal(spread.bool(), rollout.response_mask[[2, 0], :9])


def scored(rollout: Rollout) -> Trajectory:
    mask = rollout.response_mask
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    nan = torch.tensor(float("nan"))
    logprobs = torch.where(mask, noise - 2, nan)
    return Trajectory(
        rollout, logprobs, torch.where(mask, noise - 2.5, nan), torch.where(mask, noise, nan), noise[:, 0]
    )


def credited(trajectory: Trajectory, folder: Path, **flags: Any) -> PPOBatch:
    """The batch of step 3, a macro action to a turn."""
    mask = trajectory.response_mask
    return assign_credit(trajectory, segment(last_true(mask), mask), 0.1, ppo_config(folder, **flags))


def test_kl_entropy_lengths_and_whitening_are_of_the_policys_tokens(tmp_path) -> None:
    """Numbers off the mask are NaN, so that one that counted would be seen."""
    rollout = holed_rollout()
    trajectory = scored(rollout)
    mask = rollout.response_mask
    batch = credited(trajectory, tmp_path, whiten_advantages=True)
    assert not batch.advantages[~mask].any() and not batch.kl[~mask].any()
    advantages = batch.advantages[mask].double()
    assert_near(advantages.mean(), 0.0)
    assert_near(advantages.square().mean(), 1.0)
    metrics = rollout_metrics(batch, 0.95)
    assert metrics["objective/kl_per_token"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["objective/kl"] == pytest.approx(0.5 * 16 / 3, abs=1e-5)
    entropy = -float(trajectory.logprobs[mask].sum()) / 3
    assert metrics["objective/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["response/length"] == pytest.approx(16 / 3)
    assert metrics["macro/count"] == 2.0  # 3, 1 and 2 turns
    assert metrics["macro/length"] == pytest.approx(16 / 6)
    rows = ScoredRollout(rollout, trajectory.ref_logprobs, trajectory.scores)
    assert with_scores(ScoreMoments(), rows).count == 3


def test_scores_are_compared_with_the_lengths_of_replies(tmp_path) -> None:
    """Replies have 2, 4 and 3 tokens on average. Many turns are no long replies."""
    trajectory = replace(scored(holed_rollout()), scores=torch.tensor([0.5, 4.0, 1.0]))
    batch = credited(trajectory, tmp_path)
    expected = np.corrcoef([2.0, 4.0, 3.0], [0.5, 4.0, 1.0])[0, 1]
    assert rollout_metrics(batch, 0.95)["response/score_length_correlation"] == pytest.approx(expected)


def test_metrics_of_episodes_are_of_the_rows_that_count() -> None:
    """A process with fewer held-out prompts than others answers one twice. Row 1 has failed."""
    rollout = holed_rollout()
    rewards = torch.zeros(rollout.response_mask.shape)
    records = EpisodeRecords(
        rewards, torch.tensor([False, True, False]), torch.tensor([True, True, False]), [[]] * 3, [[]] * 3, []
    )
    texts = ResponseTexts([""] * 3, [""] * 3, [], [True] * 3, episodes=records)
    assert EnvironmentScores()(rollout, texts).measured["episode/turns"] == (5.0, 2.0)
    counted = EnvironmentScores()(rollout, replace(texts, counted=2)).measured
    assert counted == {
        "episode/turns": (3.0, 1.0),
        "episode/done": (1.0, 1.0),
        "episode/cut_turns": (3.0, 3.0),
        "episode/environment_tokens": (3.0, 1.0),
    }


def test_4grams_do_not_span_an_environments_tokens() -> None:
    """1 2 3 4 twice in one turn; then apart in two turns, in the second of which a hole lies inside."""
    ids = [1, 2, 3, 4, 1, 2, 3, 4]
    rollout = make_rollout([([5], ids), ([5], ids)])
    mask = torch.ones_like(rollout.response_mask)
    mask[1, 5] = False
    rollout = replace(rollout, response_mask=mask)
    repeated, count = repeated_4grams(rollout)
    # Row 0 has 5 4-grams, the last of which is the first again; row 1 those that end in its columns 3 and 4.
    assert (int(repeated), int(count)) == (1, 5 + 2)


def test_the_token_table_shows_both_sides(tmp_path) -> None:
    trajectory = scored(holed_rollout())
    numbers = replace(trajectory, values=torch.nan_to_num(trajectory.values))
    table = token_table(credited(numbers, tmp_path), 0, make_tokenizer())
    assert [token["macro_action"] for token in table] == [0, 0, 0, -1, -1, 1, -1, 2, 2]


@pytest.mark.parametrize("condition", ["turn", "fixed", "ppl", "sentence"])
def test_a_macro_action_never_spans_a_hole(condition, tmp_path) -> None:
    """Conditions cut each turn as a response of its own, those that read texts included."""
    tokenizer = make_tokenizer()
    rollout = holed_rollout()
    mask = rollout.response_mask
    trajectory = scored(rollout)
    config = ppo_config(tmp_path, termination_condition=condition)
    find = condition_of(config, tokenizer)
    macro = segment(find(trajectory, 0).ends, mask)
    for row in range(len(mask)):
        runs = rollout.response_runs()[row]
        numbers = macro.index[row][mask[row]].split([len(run) for run in runs])
        for before, behind in pairwise(numbers):
            assert before.max() < behind.min()
    if condition == "turn":
        assert macro.lengths.tolist() == [[3, 1, 2], [4, 0, 0], [1, 5, 0]]


def test_conditions_read_each_turn_as_a_text() -> None:
    """An environment's tokens stand between two turns, so that no sentence or constituent goes over both."""
    rollout = holed_rollout()
    texts, rows = _runs_of(rollout)
    assert rows == [0, 0, 0, 1, 2, 2]
    first, second, third = rollout.response_ids.tolist()
    assert texts == [first[:3], first[5:6], first[7:9], second[:4], third[:1], third[2:7]]
