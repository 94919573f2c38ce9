# SPDX-License-Identifier: Apache-2.0
"""The policy loss on macro-action ratios, and over several updates until its clip binds."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_references as ref
from closeness import FORMULA, assert_near
from dschat.rl.losses import policy_loss
from dschat.rl.macro_actions import macro_logprobs, segment, token_weights
from rl_cases import PROPERTY, SEEDS, draw, masked_case, normal


@PROPERTY
@given(
    segments=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4),
    seed=SEEDS,
    mean=st.booleans(),
)
def test_macro_ratios_have_their_closed_form(segments, seed, mean) -> None:
    """Mean over actions of the clipped product of ratios; mean over tokens of the clipped geometric mean."""
    ends, mask = masked_case(segments, 1)
    macro = segment(ends, mask)
    old = draw(mask, seed)
    new = (old + draw(mask, seed + 1, 0.2)).requires_grad_()
    per_action = [normal((len(row),), seed + 2 + i).tolist() for i, row in enumerate(segments)]
    adv = torch.tensor([ref.broadcast(a, row, mask.shape[1]) for a, row in zip(per_action, segments, strict=True)])
    actions, tokens = max(1, sum(map(len, segments))), max(1, sum(map(sum, segments)))
    if mean:
        count, weights = tokens, None
    else:
        count, weights = actions, token_weights(macro)
    loss, stats = policy_loss(
        macro_logprobs(new, macro, mean), macro_logprobs(old, macro, mean), adv, mask, 0.2, count, weights
    )
    loss.backward()
    expected, gradient = 0.0, torch.zeros_like(old)
    for i, row in enumerate(segments):
        pairs = zip(ref.chunks(new[i].tolist(), row), ref.chunks(old[i].tolist(), row), per_action[i], strict=True)
        start = 0
        for n, o, a in pairs:
            m = len(n)
            log_ratio = (sum(n) - sum(o)) / (m if mean else 1)
            expected += ref.policy_term(log_ratio, 0.0, a, 0.2) * (m if mean else 1) / count
            ratio = math.exp(log_ratio)
            active = -a * ratio >= -a * max(0.8, min(1.2, ratio))
            gradient[i, start : start + m] = -a * ratio / count if active else 0.0
            start += m
    assert_near(loss, expected)
    assert_near(new.grad, gradient)
    assert all(torch.isfinite(value) for value in stats.values())


def test_macro_statistics_count_macro_actions() -> None:
    ends, mask = masked_case([[3, 2], [4]], 1)
    macro = segment(ends, mask)
    old = macro_logprobs(draw(mask, 0), macro, mean=False)
    _, stats = policy_loss(old, old, draw(mask, 1), mask, 0.2, 3, token_weights(macro))
    assert_near(stats["ratio"], 1.0, FORMULA)
    assert stats["clipfrac"] == 0.0 and stats["approxkl"] == 0.0


# clipping over several updates


def scalar_updates(logits: list[list[float]], actions: list[int], adv: list[float], lr: float, steps: int) -> list:
    """Gradient descent on the clipped surrogate of a table of softmaxes, by hand.

    Returns:
        The logits after each update, and whether each token was clipped in it.
    """
    logits = [list(row) for row in logits]
    count = len(actions)

    def probs(row: list[float]) -> list[float]:
        top = max(row)
        weights = [math.exp(x - top) for x in row]
        return [w / sum(weights) for w in weights]

    old = [math.log(probs(row)[a]) for row, a in zip(logits, actions, strict=True)]
    history = []
    for _ in range(steps):
        clipped = []
        for j, action in enumerate(actions):
            p = probs(logits[j])
            ratio = math.exp(math.log(p[action]) - old[j])
            binds = ratio > 1.2 if adv[j] > 0 else ratio < 0.8
            slope = 0.0 if binds else -adv[j] * ratio / count
            logits[j] = [x - lr * slope * ((k == action) - p[k]) for k, x in enumerate(logits[j])]
            clipped.append(binds)
        history.append(([list(row) for row in logits], clipped))
    return history


def test_several_updates_until_the_clip_binds() -> None:
    start = normal((6, 4), 0)
    actions = torch.tensor([0, 1, 2, 3, 0, 1])
    adv = torch.tensor([[2.0, -2.0, 0.5, -0.1, 3.0, 1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    history = scalar_updates(start.tolist(), actions.tolist(), adv[0].tolist(), 1.0, 6)
    logits = start.clone().requires_grad_()
    old = torch.log_softmax(start, 1).gather(1, actions[:, None]).T
    for expected, clipped in history:
        new = torch.log_softmax(logits, 1).gather(1, actions[:, None]).T
        loss, stats = policy_loss(new, old, adv, mask, 0.2)
        (gradient,) = torch.autograd.grad(loss, logits)
        for j, binds in enumerate(clipped):
            assert (gradient[j] == 0).all() == binds
        assert_near(stats["clipfrac"], sum(clipped) / 6, FORMULA)
        logits = (logits - gradient).detach().requires_grad_()
        assert_near(logits, expected)
    assert not any(history[0][1]) and sum(history[-1][1]) >= 3
