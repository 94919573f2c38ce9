# SPDX-License-Identifier: Apache-2.0
"""Evaluations on dialogues: their means by hand, and dialogues without a reply."""

import pytest
import torch

from closeness import FORMULA, near
from dialogue_cases import dialogue
from dschat.data.dialogues import DialogueExample
from dschat.data.rows import Row
from dschat.refuel import evaluation
from dschat.turns.dialogues import AssistantTurn, DialogueRollout


def example(index, turns):
    texts = ["x"] * (2 * turns - 1)
    return DialogueExample(dialogue(*texts), 10 + index, Row(None, None, None, None, {}, f"row {index}"), index)


def conversation(*lengths):
    """A dialogue with replies of some lengths, of which odd ones were cut."""
    replies = {turn: AssistantTurn([0], [1] * n, "y" * n, n % 2 == 0) for turn, n in enumerate(lengths)}
    texts = []
    for reply in replies.values():
        texts += ["x", reply.text]
    return DialogueRollout(dialogue(*texts), replies)


def last_length(dialogues, rows, finished):
    """A dialogue's score is the length of its last reply, which ended if that is even."""
    assert list(finished) == [len(messages[-1]["content"]) % 2 == 0 for messages in dialogues]
    return torch.tensor([float(len(messages[-1]["content"])) for messages in dialogues])


def lengths_squared(replies):
    return torch.tensor([float(len(reply.ids)) ** 2 for reply in replies])


def test_means_over_dialogues_by_hand(group):
    """Replies of 1 and 2 tokens in one dialogue, of 4 in the other."""
    rollouts = [conversation(1, 2), conversation(4)]
    metrics, samples = evaluation.evaluate_dialogues(
        [example(0, 2), example(1, 1)], lambda _: rollouts, last_length, lengths_squared
    )
    means = {name: number for name, number in metrics.items() if not name.endswith("_stderr")}
    assert means == near(
        {
            "eval/scores": 3.0,
            "eval/scores_turn_1": 2.5,
            "eval/scores_turn_2": 2.0,
            "eval/eos_rate": 2 / 3,
            "eval/length": 7 / 3,
            "eval/kl": 7.0,
            "eval/kl_per_token": 3.0,
            "eval/rows": 2.0,
        },
        FORMULA,
    )
    assert [row["scores"] for row in samples] == [[1.0, 2.0], [4.0]]


@pytest.mark.parametrize("rollouts", [[conversation(), conversation()], [conversation(), conversation(4)]])
def test_dialogues_without_a_reply_are_in_the_samples(rollouts, group):
    examples = [example(0, 1), example(1, 1)]
    metrics, samples = evaluation.evaluate_dialogues(examples, lambda _: rollouts, last_length, None)
    assert metrics["eval/rows"] == 2 and [row["number"] for row in samples] == [0, 1]
    assert [row["scores"] for row in samples] == [[float(n) for n in _lengths(rollout)] for rollout in rollouts]


def _lengths(rollout):
    return [len(reply.ids) for reply in rollout.replies.values()]
