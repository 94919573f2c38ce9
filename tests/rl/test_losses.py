# SPDX-License-Identifier: Apache-2.0
"""Losses, ratios and importance weights against closed forms, hand arithmetic and their invariances."""

import math

import pytest
import torch

from closeness import FORMULA, assert_near, near
from macro_actions.importance import importance_weights, masked_policy_loss
from macro_actions.losses import kl_loss, loss_weights, policy_loss, value_loss
from macro_actions.segments import macro_logprobs, segment
from macro_actions.supervised_losses import dpo_loss, regression_loss, sft_loss
from rl_cases import draw, mask_of, masked_case, normal


def assert_plain(loss: torch.Tensor, stats: dict[str, torch.Tensor]) -> None:
    """A loss is a finite scalar; statistics are finite scalar tensors without a graph."""
    assert loss.dim() == 0 and torch.isfinite(loss)
    for name, value in stats.items():
        assert isinstance(value, torch.Tensor) and value.dim() == 0, name
        assert torch.isfinite(value) and not value.requires_grad, name


# policy


# ratio, advantage -> loss, gradient: clipping binds only where it would stop a gain.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_policy_loss_of_one_token_by_hand(ratio, advantage, loss, gradient) -> None:
    old = torch.tensor([[-1.0, math.nan]])
    new = torch.tensor([[-1.0 + math.log(ratio), math.inf]], requires_grad=True)
    found, stats = policy_loss(new, old, torch.tensor([[advantage, math.nan]]), mask_of([1], 2), 0.2)
    found.backward()
    assert_near(found, loss, FORMULA)
    assert_near(new.grad, [[gradient, 0.0]], FORMULA)
    assert_near(stats["ratio"], ratio, FORMULA)
    assert_near(stats["approxkl"], math.log(ratio) ** 2 / 2, FORMULA)
    assert stats["clipfrac"] == (gradient == 0.0)
    assert_plain(found, stats)


def test_losses_do_not_depend_on_how_rows_are_split() -> None:
    """The first part of rows is empty, or has an empty row."""
    mask = mask_of([3, 0, 5, 2], 6)
    old, target, step = draw(mask, 0), draw(mask, 1), draw(mask, 2, 0.4)

    def run(*parts: slice) -> list[torch.Tensor]:
        new = (old + step).requires_grad_()
        sums: dict[str, torch.Tensor] = {}
        for rows in parts:
            own = new[rows], old[rows], target[rows], mask[rows]
            losses = {
                "policy": policy_loss(*own, 0.2, 10),
                "value": value_loss(*own, 0.2, 10),
                "sft": sft_loss(new[rows], mask[rows], 10),
            }
            for name, (loss, stats) in losses.items():
                loss.backward()
                for key, value in {"loss": loss.detach(), **stats}.items():
                    sums[f"{name}/{key}"] = sums.get(f"{name}/{key}", torch.zeros(())) + value
        return [new.grad, *sums.values()]

    whole = run(slice(0, 4))
    for cut in (0, 2):
        for found, expected in zip(run(slice(0, cut), slice(cut, 4)), whole, strict=True):
            assert_near(found, expected, FORMULA)


# value


# Old value 0, clip 0.2. New 1, return 2: max(1, 1.8²)/2 = 1.62, clipped. New 1, return -1: max(4, 1.44)/2 = 2.
# New 0.1, return 1: 0.9²/2 = 0.405. New -1, return -2: as the first.
@pytest.mark.parametrize(
    ("new", "target", "loss", "gradient"),
    [(1.0, 2.0, 1.62, 0.0), (-1.0, -2.0, 1.62, 0.0), (1.0, -1.0, 2.0, 2.0), (0.1, 1.0, 0.405, -0.9)],
)
def test_value_loss_of_one_token_by_hand(new, target, loss, gradient) -> None:
    values = torch.tensor([[new, math.inf]], requires_grad=True)
    old, returns = torch.tensor([[0.0, math.nan]]), torch.tensor([[target, math.nan]])
    found, stats = value_loss(values, old, returns, mask_of([1], 2), 0.2)
    found.backward()
    assert_near(found, loss, FORMULA)
    assert_near(values.grad, [[gradient, 0.0]], FORMULA)
    assert stats["clipfrac"] == (gradient == 0.0)
    assert_plain(found, stats)


@pytest.mark.parametrize("loss_of", [policy_loss, value_loss])
def test_without_a_token_a_loss_is_0(loss_of) -> None:
    new = torch.full((2, 3), math.nan, requires_grad=True)
    loss, stats = loss_of(new, new.detach(), new.detach(), mask_of([0, 0], 3), 0.2)
    loss.backward()
    assert loss == 0 and not new.grad.any() and not any(stats.values())


# supervised


def test_sft_loss_is_the_mean_negative_logprob() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, math.nan], [-2.0, math.inf, math.nan]], requires_grad=True)
    loss, stats = sft_loss(logprobs, mask_of([2, 1], 3))
    loss.backward()
    assert_near(loss, 2.0, FORMULA)
    assert_near(logprobs.grad, [[-1 / 3, -1 / 3, 0.0], [-1 / 3, 0.0, 0.0]], FORMULA)
    assert_plain(loss, stats)
    assert sft_loss(logprobs, mask_of([0, 0], 3))[0] == 0


# preferences


# Log-probs of four pairs of responses, token by token, and of whole responses under the reference.
CHOSEN = [[-1.5, -0.25, -2.0], [-0.5, -3.0], [-4.0], [-0.75, -0.75, -6.5]]
REJECTED = [[-2.0, -2.5], [-1.25, -0.5, -0.125], [-9.0, -0.0625], [-3.0]]
REF_CHOSEN, REF_REJECTED = [-3.0, -4.0, -2.5, -8.75], [-4.0, -2.5, -8.0, -1.0]
# What the loss of TRL 1.12.0's DPOTrainer (its method _compute_loss, with logits of these log-probs) gives for them:
# "sigmoid", which has no smoothing; with smoothing "aot", which for one pair at a time is conservative DPO.
TRL = [
    (0.1, 0.0, 0.6713684797286987),
    (0.01, 0.0, 0.6907498240470886),
    (0.5, 0.0, 0.6290972232818604),
    (0.1, 0.1, (0.7032252550125122 + 0.6981666684150696 + 0.7108863592147827 + 0.5925706624984741) / 4),
    (0.5, 0.3, (0.7200990915298462 + 0.7061353921890259 + 0.7428667545318604 + 0.6379126310348511) / 4),
]


@pytest.mark.parametrize(("beta", "smoothing", "expected"), TRL)
def test_dpo_loss_is_that_of_trl(beta, smoothing, expected) -> None:
    chosen = torch.tensor([sum(tokens) for tokens in CHOSEN]) - torch.tensor(REF_CHOSEN)
    rejected = torch.tensor([sum(tokens) for tokens in REJECTED]) - torch.tensor(REF_REJECTED)
    loss, stats = dpo_loss(chosen, rejected, beta, smoothing)
    assert loss.item() == near(expected, FORMULA)
    # TRL's rewards/accuracies, and rewards/margins, which for β = 0.1 are 0.04843749850988388.
    assert stats["accuracy"].item() == 0.25
    assert stats["margin"].item() == near(beta / 0.1 * 0.04843749850988388, FORMULA)
    # Log-ratios −.75, .5, −1.5, .75 and −.5, .625, −1.0625, −2; TRL's rewards/chosen and rewards/rejected are β times
    # their means.
    assert stats["chosen"].item() == near(beta * -0.25, FORMULA)
    assert stats["rejected"].item() == near(beta * -0.734375, FORMULA)


def test_dpo_of_an_untrained_policy_is_log_2() -> None:
    loss, stats = dpo_loss(torch.zeros(4), torch.zeros(4), 0.1, 0.2)
    assert loss.item() == pytest.approx(math.log(2)) and stats["accuracy"] == 0


def test_regression_loss_by_hand() -> None:
    first = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    other = torch.tensor([0.25, 0.0, 2.0], requires_grad=True)
    loss, stats = regression_loss(first, other, torch.tensor([1.0, 2.0, 0.0]), 0.5)
    # D = .25, −1, 0; η ΔR = .5, 1, 0; squares .0625, 4, 0
    assert loss.item() == pytest.approx(4.0625 / 3)
    loss.backward()
    assert first.grad.tolist() == pytest.approx([-0.5 / 3, -4 / 3, 0])
    assert other.grad.tolist() == pytest.approx([0.5 / 3, 4 / 3, 0])
    assert stats["agreement"].item() == pytest.approx(1 / 3)
    assert stats["log_ratio"].item() == pytest.approx(3.75 / 6)
    assert stats["log_ratio_better"].item() == pytest.approx((0.5 - 1.0 + 2.0) / 3)
    assert stats["log_ratio_worse"].item() == pytest.approx(2.25 / 3)
    ratios = [math.exp(x) for x in (0.5, -1, 2, 0.25, 0, 2)]
    assert stats["ratio"].item() == pytest.approx(sum(ratios) / 6)
    assert stats["ratio_squared"].item() == pytest.approx(sum(r * r for r in ratios) / 6)
    assert_plain(loss.detach(), stats)


def test_preference_losses_are_divided_by_the_count_of_the_whole_update() -> None:
    first, other, difference = normal((4,), 1), normal((4,), 2), normal((4,), 3)
    for split in (
        lambda rows: dpo_loss(first[rows], other[rows], 0.5, 0.1, num_pairs=4.0),
        lambda rows: regression_loss(first[rows], other[rows], difference[rows], 0.5, num_pairs=4.0),
    ):
        whole, stats = split(slice(0, 4))
        parts = [split(slice(0, 1)), split(slice(1, 4))]
        assert_near(whole, sum(loss for loss, _ in parts))
        for name, value in stats.items():
            assert_near(value, sum(part[name] for _, part in parts))


def test_macro_statistics_count_macro_actions() -> None:
    ends, mask = masked_case([[3, 2], [4]], 1)
    macro = segment(ends, mask)
    old = macro_logprobs(draw(mask, 0), macro, "macro")
    _, stats = policy_loss(old, old, draw(mask, 1), mask, 0.2, 3, loss_weights("macro", macro, mask))
    assert_near(stats["ratio"], 1.0, FORMULA)
    assert stats["clipfrac"] == 0.0 and stats["approxkl"] == 0.0


def test_the_weight_is_the_ratio_of_the_probabilities_up_to_the_clip() -> None:
    """Probabilities 0.3 and 0.6 under the actor, 0.2 and 0.1 where they were drawn: 1.5, and 6 cut to 2."""
    own = torch.tensor([[0.3, 0.6], [0.1, 0.5]]).log()
    drawn = torch.tensor([[0.2, 0.1], [0.4, 0.5]]).log()
    expected = torch.tensor([[1.5, 2.0], [0.25, 1.0]])
    assert_near(importance_weights(own, drawn, 2.0), expected, FORMULA)


# ratio -> loss and gradient at an advantage of 2: the ratio itself inside of [.5, 1.5], and nothing outside.
@pytest.mark.parametrize(
    ("ratio", "loss", "gradient"), [(1.25, -2.5, -2.5), (0.5, -1.0, -1.0), (0.4, 0.0, 0.0), (1.6, 0.0, 0.0)]
)
def test_ratios_outside_of_the_range_are_masked(ratio, loss, gradient) -> None:
    """The second token is not masked: its loss is -(1 x -1), and the mean is over both. No ratio is clipped."""
    drawn = torch.tensor([[-1.0, -2.0, math.nan]])
    new = torch.tensor([[-1.0 + math.log(ratio) * (1 - 1e-6), -2.0, math.inf]], requires_grad=True)
    mask = mask_of([2], 3)
    advantages = torch.tensor([[2.0, -1.0, math.nan]])
    found, stats = masked_policy_loss(new, drawn, advantages, mask, 0.5, 1.5)
    found.backward()
    assert_near(found, (loss + 1) / 2, FORMULA)
    assert_near(new.grad, [[gradient / 2, 0.5, 0.0]], FORMULA)
    assert stats["clipfrac"] == (0.5 if gradient == 0 else 0.0)
    assert_near(stats["ratio"], ((ratio if gradient else 0) + 1) / 2, FORMULA)
    assert_near(stats["approxkl"], math.log(ratio) ** 2 / 4, FORMULA)
    assert_plain(found, stats)


def test_a_ratio_that_overflows_is_masked_without_a_trace() -> None:
    new = torch.tensor([[200.0, -1.0]], requires_grad=True)
    found, _ = masked_policy_loss(new, torch.tensor([[0.0, -1.0]]), torch.ones(1, 2), mask_of([2], 2), 0.2, 4.0)
    found.backward()
    assert found == -0.5 and new.grad.tolist() == [[0.0, -0.5]]


@pytest.mark.parametrize("name", ["policy", "kl"])
def test_weights_outside_of_the_mask_are_not_read(name) -> None:
    """Ratio 1, advantage 2 and weight 3: a policy loss of −6; a KL of 2: 6."""
    mask = mask_of([1], 2)
    logprobs = torch.zeros(1, 2, requires_grad=True)
    weights = torch.tensor([[3.0, math.nan]])
    twos = torch.full((1, 2), 2.0)
    if name == "kl":
        loss = kl_loss(twos + logprobs, mask, weights=weights)
    else:
        loss, _ = policy_loss(logprobs, logprobs.detach(), twos, mask, 0.2, weights=weights)
    loss.backward()
    assert loss.item() == (6.0 if name == "kl" else -6.0)
    assert logprobs.grad.tolist() == [[3.0 if name == "kl" else -6.0, 0.0]]


def test_a_rows_weight_multiplies_its_value_loss_and_not_the_count() -> None:
    """Errors 1, 1 of a row that weighs 3, and 2 of one that weighs ½: ½ (3 + 3 + 2) / 3 tokens."""
    mask = mask_of([2, 1], 2)
    values = torch.tensor([[1.0, 1.0], [2.0, math.nan]])
    loss, stats = value_loss(values, values, torch.zeros(2, 2), mask, 0.2, row_weights=torch.tensor([3.0, 0.5]))
    assert_near(loss, 4 / 3, FORMULA)
    assert stats["clipfrac"] == 0


def test_the_gradient_of_a_ratio_that_overflows_is_finite() -> None:
    """As of a long macro action whose every token moved: clipped, so that there is nothing to gain."""
    new_logprobs = torch.full((1, 2), 200.0, requires_grad=True)
    zeros = torch.zeros(1, 2)
    loss, _ = policy_loss(new_logprobs, zeros, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), 0.2)
    loss.backward()
    assert loss.item() == near(-1.2) and new_logprobs.grad is not None and not new_logprobs.grad.any()
