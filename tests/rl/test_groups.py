# SPDX-License-Identifier: Apache-2.0
"""Credit without a critic: groups of responses, the policy's ratio of a response, and the means of a loss."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

import record_other_trainers as recorded
from closeness import FORMULA, FORWARD, assert_near, near
from macro_actions.conditions import fixed, surprise
from macro_actions.groups import are_equal, critic_weights, dr_grpo, grpo, prefix_values
from macro_actions.losses import kl_loss, loss_count, loss_weights, policy_loss
from macro_actions.returns import adaptive_lam
from macro_actions.rewards import kl_estimate, penalise_length
from macro_actions.segments import macro_logprobs, segment, sequence_logprobs
from macro_actions.types import MacroActions, Rollout, Trajectory
from rl_cases import PROPERTY, ROW_LENGTHS, SEEDS, credit_of, mask_of, normal, width_of

PEERS = json.loads(recorded.FILE.read_text("utf-8"))
VERL, TRL = PEERS["verl 0.7.0"], PEERS["trl 1.16.0"]
MASK = mask_of(recorded.LENGTHS, 3)
OLD, REFERENCE = torch.tensor(recorded.OLD), torch.tensor(recorded.REFERENCE)
ALL = torch.ones(1, 3, dtype=torch.bool)


def whole(mask: torch.Tensor) -> MacroActions:
    """Responses of one macro action each."""
    return segment(fixed(mask, math.inf), mask)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 2.0, 6.0], [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),
        ([3.0, 3.0, 3.0], [0.0, 0.0, 0.0]),
        ([0.9, 0.9, 0.9], [0.0, 0.0, 0.0]),  # whose mean is not 0.9 to the last bit
        ([math.nan, 2.0, 6.0], [0.0, -1 / math.sqrt(2), 1 / math.sqrt(2)]),
        ([math.nan, 2.0, math.inf], [0.0, 0.0, 0.0]),
    ],
)
def test_grpo_by_hand(scores, expected) -> None:
    x = torch.tensor([scores])
    assert_near(grpo(x, x.isfinite()), [expected], FORWARD)
    if x.isfinite().all():
        assert_near(grpo(x), [expected], FORWARD)


def test_dr_grpo_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 6.0], [math.nan, 2.0, 6.0], [math.nan, math.nan, 1.0]])
    assert_near(dr_grpo(x, x.isfinite()), [[-2.0, -1.0, 3.0], [0.0, -2.0, 2.0], [0.0, 0.0, 0.0]])


def test_equal_groups_are_those_of_one_score() -> None:
    x = torch.tensor([[1.0, 1.0, math.nan], [1.0, 2.0, 1.0], [math.nan, math.nan, 3.0], [math.nan] * 3])
    assert are_equal(x, x.isfinite()).tolist() == [True, False, True, True]


def scored(scores: list[float], lengths: list[int], ids: list[list[int]] | None = None) -> Trajectory:
    """Responses without a KL and with these scores."""
    mask = mask_of(lengths, max(lengths))
    tokens = torch.zeros(mask.shape, dtype=torch.long) if ids is None else torch.tensor(ids)
    prompt = torch.zeros(len(lengths), 1, dtype=torch.long)
    seen = torch.cat([torch.ones_like(prompt, dtype=torch.bool), mask], 1)
    rollout = Rollout(torch.cat([prompt, tokens], 1), seen, mask, torch.arange(len(lengths)), mask.any(1))
    zeros = torch.zeros(mask.shape)
    return Trajectory(rollout, zeros, zeros, None, torch.tensor(scores))


# Responses a b, a c, d with scores 1, 3, 8.
TREE = ([1.0, 3.0, 8.0], [2, 2, 1], [[7, 1], [7, 2], [9, 0]])


def test_the_value_of_a_prefix_by_hand() -> None:
    scores, lengths, ids = TREE
    rows = torch.where(mask_of(lengths, 2), torch.tensor(ids), -1)[None]
    x = torch.tensor([scores])
    assert_near(prefix_values(rows, x, x.isfinite()), [[[4.0, 2.0, 1.0], [4.0, 2.0, 3.0], [4.0, 8.0, 8.0]]])
    same_end = torch.tensor([[[7, 1], [9, 1]]])
    assert_near(prefix_values(same_end, x[:, :2], x[:, :2] > 0), [[[2.0, 1.0, 1.0], [2.0, 3.0, 3.0]]])


def test_tempo_by_hand() -> None:
    """Deviation √13: (r − 4)/√13 on all tokens; a adds (2 − 4)/√13, b (1 − 2)/√13, c (3 − 2)/√13, d (8 − 4)/√13."""
    trajectory, root = scored(*TREE), math.sqrt(13)
    by_token = credit_of(trajectory, trajectory.response_mask, "tempo", kl_coef=0.0, samples=3)
    assert_near(by_token.advantages, [[-5 / root, -4 / root], [-3 / root, 0.0], [8 / root, 0.0]], FORWARD)
    assert by_token.returns is None
    # Of a whole response the differences add up: (1 − 4)/√13 once more.
    ends = fixed(trajectory.response_mask, math.inf)
    found = credit_of(trajectory, ends, "tempo", kl_coef=0.0, samples=3).advantages
    assert_near(found, [[-6 / root] * 2, [-2 / root] * 2, [8 / root, 0.0]], FORWARD)


def test_tempo_refuses_holes() -> None:
    """Between turns, prefixes differ by texts that are no tokens of the policy."""
    trajectory = scored([0.0, 1.0], [3, 3], [[1, 2, 3], [1, 2, 4]])
    mask = torch.tensor([[True, False, True]] * 2)
    trajectory = replace(trajectory, rollout=replace(trajectory.rollout, response_mask=mask))
    with pytest.raises(ValueError, match="holes are not supported"):
        credit_of(trajectory, mask, "tempo", kl_coef=0.0, samples=2)


# KLs of four responses of two tokens: .001, .007, -.003 and -.011 nats, at a coefficient of .5.
KLS_BY_TOKEN = [[0.004, -0.003], [0.002, 0.005], [-0.004, 0.001], [-0.010, -0.001]]
PENALTIES = [-0.0005, -0.0035, 0.0015, 0.0055]


def with_kl(scores: list[float]) -> Trajectory:
    """Four responses with these scores, the first tokens of the first two alike."""
    trajectory = scored(scores, [2] * 4, [[7, 1], [7, 2], [8, 3], [9, 4]])
    return replace(trajectory, logprobs=torch.tensor(KLS_BY_TOKEN))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce_pp_baseline", "tempo"])
def test_of_equal_scores_the_kl_penalty_is_all_that_is_left(name: str) -> None:
    """The penalty of the whole response, on each of its tokens: neither shifted nor scaled."""
    trajectory = with_kl([2.0] * 4)
    found = credit_of(trajectory, trajectory.response_mask, name, kl_coef=0.5, samples=4).advantages
    assert_near(found, [[penalty] * 2 for penalty in PENALTIES], FORMULA, scale=0.01)


@pytest.mark.parametrize(("name", "half"), [("grpo", 1 / math.sqrt(2)), ("dr_grpo", 1.0), ("tempo", 2 / math.sqrt(2))])
def test_a_group_leaves_out_what_could_not_be_scored(name: str, half: float) -> None:
    """Scores 1 and 3 count; a response without a token does not, and has no advantage. TEMPO adds as much again."""
    trajectory = scored([1.0, 9.0, 3.0], [1, 0, 2], [[7, 0], [0, 0], [8, 8]])
    trajectory = replace(trajectory, logprobs=torch.tensor([[0.2, math.nan], [math.nan] * 2, [-0.2, -0.2]]))
    ends = fixed(trajectory.response_mask, math.inf)
    found = credit_of(trajectory, ends, name, kl_coef=0.5, samples=3).advantages
    assert_near(found, [[-half - 0.1, 0.0], [0.0, 0.0], [half + 0.2, half + 0.2]], FORWARD)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "tempo"])
def test_scores_are_compared_as_they_are_trained_on(name: str) -> None:
    """A cut response costs 1, and scores end at −3: all four are −3, though their parts by macro actions differ."""
    trajectory = with_kl([-2.0, -3.0, -5.0, -3.0])
    finished = torch.tensor([False, True, True, True])
    parts = torch.tensor([[0.1, 0.2], [0.7, 0.1], [0.3, 0.3], [0.0, 0.0]])
    trajectory = replace(trajectory, rollout=replace(trajectory.rollout, finished=finished), segment_rewards=parts)
    options = {"missing_eos_penalty": 1.0, "clip_reward_value": 3.0, "kl_coef": 0.5, "samples": 4}
    found = credit_of(trajectory, trajectory.response_mask, name, **options).advantages
    assert_near(found, [[penalty] * 2 for penalty in PENALTIES], FORMULA, scale=0.01)


def test_reinforce_pp_by_hand() -> None:
    """Rewards −.1, −.2 and 3 − .3 by a KL of 1, 2, 3 nats: with γ = .5 from the last one on 2.7, 1.15, .475."""
    trajectory = replace(scored([3.0], [3]), logprobs=torch.tensor([[1.0, 2.0, 3.0]]))
    found = credit_of(trajectory, ALL, "reinforce_pp", kl_coef=0.1, gamma=0.5)
    assert_near(found.advantages, [[0.475, 1.15, 2.7]], FORMULA)
    pairs = credit_of(trajectory, torch.tensor([[False, True, True]]), "reinforce_pp", kl_coef=0.1, gamma=0.5)
    assert_near(pairs.advantages, [[-0.3 + 1.35, -0.3 + 1.35, 2.7]], FORMULA)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_verls(name) -> None:
    trajectory = scored(recorded.SCORES, recorded.LENGTHS)
    found = credit_of(trajectory, fixed(MASK, 5), name, kl_coef=0.3, samples=2).advantages
    assert_near(found, VERL["advantages"][name], FORMULA)


def loss_of(ratio: str, mean: str, advantages: list[list[float]], beta: float) -> tuple[float, list[list[float]]]:
    """The loss on the recorded responses and its gradient."""
    new, macro = torch.tensor(recorded.NEW, requires_grad=True), segment(MASK, MASK)
    weights, count = loss_weights(mean, macro, MASK), loss_count(mean, macro, MASK, recorded.LONGEST)
    of_ratio = (sequence_logprobs(x, MASK) if ratio == "sequence_mean" else x for x in (new, OLD))
    loss, _ = policy_loss(
        *of_ratio, torch.tensor(advantages), MASK, recorded.LOW, count, weights, cliprange_high=recorded.HIGH
    )
    loss = loss + beta * kl_loss(kl_estimate(new, REFERENCE, "k3"), MASK, count, weights)
    return loss.item(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize(
    ("ratio", "mean", "name"),
    [
        ("token", "token", "token-mean"),
        ("token", "response", "seq-mean-token-mean"),
        ("sequence_mean", "response", "gspo"),
    ],
)
def test_losses_are_verls(ratio, mean, name) -> None:
    loss, gradient = loss_of(ratio, mean, VERL["advantages"]["grpo"], 0.0)
    assert loss == near(VERL["losses"][name]["loss"], FORMULA)
    assert_near(gradient, VERL["losses"][name]["gradient"], FORMULA)


@pytest.mark.parametrize(
    ("ratio", "mean", "name"),
    [
        ("token", "response", "grpo"),
        ("token", "length", "dr_grpo"),
        ("token", "token", "dapo"),
        ("sequence_mean", "response", "gspo"),
    ],
)
def test_losses_are_trls(ratio, mean, name) -> None:
    loss, gradient = loss_of(ratio, mean, VERL["advantages"]["grpo"], recorded.BETA)
    assert loss == near(TRL["losses"][name]["loss"], FORMULA)
    assert_near(gradient, TRL["losses"][name]["gradient"], FORMULA)


@PROPERTY
@given(lengths=ROW_LENGTHS, seed=SEEDS)
def test_the_ratio_of_a_response_is_that_of_one_macro_action(lengths, seed) -> None:
    mask = mask_of(lengths, width_of(lengths))
    logprobs = normal(mask.shape, seed)
    assert_near(sequence_logprobs(logprobs, mask), macro_logprobs(logprobs, whole(mask), "macro_mean"), FORMULA)


def test_the_mean_of_few_bits_is_one_of_float32() -> None:
    """256 tokens of −1 and one of −2: their mean −258/257 is −1 in bfloat16."""
    logprobs = -torch.ones(1, 257, dtype=torch.bfloat16)
    logprobs[0, 0] = -2
    found = sequence_logprobs(logprobs, torch.ones(1, 257, dtype=torch.bool))
    assert found.dtype == torch.float32
    assert_near(found[:, 1], [-258 / 257], FORMULA)


# Two responses of 3 and 1 tokens; macro actions of 2 and 1, and of 1. The second token of the first is not counted.
def test_means_of_a_loss_by_hand() -> None:
    mask = mask_of([3, 1], 3)
    macro = segment(torch.tensor([[False, True, True], [True, False, False]]), mask)
    counted = mask & torch.tensor([[True, False, True], [True, True, True]])
    third, half = 1 / 3, 1 / 2
    for mean, of, weights, count in (
        ("token", mask, None, 4),
        ("token", counted, None, 3),
        ("macro", mask, [[half, half, 1], [1, 0, 0]], 3),
        ("macro", counted, [[1, 0, 1], [1, 0, 0]], 3),
        ("response", mask, [[third, third, third], [1, 0, 0]], 2),
        ("response", counted, [[half, 0, half], [1, 0, 0]], 2),
        ("length", mask, None, 14),
    ):
        found = loss_weights(mean, macro, of)
        assert (found is None) is (weights is None)
        if found is not None:
            assert_near(found, weights, FORMULA)
        assert loss_count(mean, macro, of, 7) == count
    none = torch.zeros_like(mask)
    assert {float(loss_count(mean, macro, none, 7)) for mean in ("token", "macro", "response", "length")} == {0.0}


def test_the_clip_range_above_1_is_its_own() -> None:
    """Ratios e^.5 and e^−.5 with advantages 1 and −1: clipped at 1.28 and at .8."""
    loss, stats = policy_loss(
        torch.tensor([[0.5, -0.5]]),
        torch.zeros(1, 2),
        torch.tensor([[1.0, -1.0]]),
        ALL[:, :2],
        0.2,
        cliprange_high=0.28,
    )
    assert loss.item() == near((-1.28 + 0.8) / 2, FORMULA) and stats["clipfrac"] == 1


def test_the_lambda_of_a_response_by_hand() -> None:
    assert_near(adaptive_lam(torch.tensor([0, 10, 20, 100, 200]), 0.05), [0.0, 0.0, 0.0, 0.8, 0.9], FORMULA)


# Values .5 .2 0 and rewards 0 0 1: deltas −.3, −.2, 1. α = 1, 3 steps: λ = 2/3, A = 1, −.2 + 2/3, −.3 + 2/3 · 7/15.
def test_vapo_by_hand() -> None:
    trajectory = replace(scored([1.0], [3]), values=torch.tensor([[0.5, 0.2, 0.0]]))
    batch = credit_of(trajectory, ALL, kl_coef=0.0, lam=0.3, lam_alpha=1.0, lam_critic=1.0)
    assert_near(batch.advantages, [[-0.3 + 2 / 3 * 7 / 15, 7 / 15, 1.0]], FORMULA)
    assert_near(batch.returns, [[1.0, 1.0, 1.0]], FORMULA)
    assert_near(credit_of(trajectory, ALL, kl_coef=0.0, lam_alpha=1.0).returns, [[0.2 + 14 / 45, 0.2 + 7 / 15, 1.0]])


def test_a_lambda_by_length_counts_macro_actions() -> None:
    """Four tokens in two macro actions: α = 1 gives λ = 1/2; of values 0 and a last reward of 1, A = 1/2, 1."""
    trajectory = replace(scored([1.0], [4]), values=torch.zeros(1, 4))
    ends = torch.tensor([[False, True, False, True]])
    assert_near(credit_of(trajectory, ends, kl_coef=0.0, lam_alpha=1.0).advantages, [[0.5, 0.5, 1.0, 1.0]], FORMULA)


def test_the_penalty_of_length_by_hand() -> None:
    found = penalise_length(torch.ones(4), torch.tensor([10, 80, 90, 100]), 100, 20, 2.0)
    assert_near(found, [1.0, 1.0, 0.0, -1.0], FORMULA)
    assert penalise_length(found, torch.tensor([1, 1, 1, 1]), 100, None) is found


@pytest.mark.parametrize(
    ("probabilities", "count", "lengths"),
    [
        ([0.9, 0.2, 0.9, 0.1, 0.3], 2, [3, 2]),
        ([0.9, 0.2, 0.9, 0.1, 0.3], 1, [1, 2, 1, 1]),
        ([0.2, 0.9], 1, [2]),  # nothing lies before the first token
        ([0.9, 0.9, 0.9], 1, [3]),
        ([0.4, 0.4], 3, [2]),
    ],
)
def test_surprise_by_hand(probabilities, count, lengths) -> None:
    logprobs = torch.tensor([probabilities + [math.nan]]).log()
    mask = mask_of([len(probabilities)], len(probabilities) + 1)
    macro = segment(surprise(mask, logprobs, 0.5, count), mask)
    assert macro.lengths[macro.mask].tolist() == lengths


def test_weights_of_the_critics_loss_are_easyppos() -> None:
    """Scores 0, 1 and ½, ½ with beta 1 and at least .01 weigh 4 and 100, over their mean 52; one row alone, 100."""
    scores = torch.tensor([[0.0, 1.0], [0.5, 0.5], [7.0, math.nan]])
    counted = torch.tensor([[True, True], [True, True], [True, False]])
    weights = critic_weights(scores, 1.0, 0.01, counted)
    assert_near(weights, [4.0, 100.0, 100.0], FORMULA)
    assert_near(weights[:2] / weights[:2].mean(), [4 / 52, 100 / 52], FORMULA)
    assert_near(critic_weights(scores[:2], 0.5, 0.25), [2.0, 4.0], FORMULA)  # by the deviation, with a floor
    assert critic_weights(scores, 1.0, 0.01, counted & False).tolist() == [0.0] * 3
