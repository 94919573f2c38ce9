# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: who speaks when, which seeds decide, and that a batch equals its dialogues alone."""

from collections.abc import Sequence

import pytest
import torch

from dialogue_cases import chat_tokenizer, dialogue
from dschat.data.encoding import turn_end
from dschat.errors import UserError
from dschat.rollouts.dialogues import AssistantTurn, PolicyAssistant, UserFromData, roll_out
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from factories import make_causal_lm


class Echo:
    """Says how many messages it has read."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, states: Sequence[list], seeds: Sequence[int]) -> list[AssistantTurn]:
        self.batches.append(len(states))
        return [AssistantTurn([len(said)], [7], f"after {len(said)}", True) for said in states]


def test_turns_alternate_until_each_dialogue_has_its_own() -> None:
    data = [dialogue("a", "-", "b", "-", "c"), dialogue("d"), dialogue("e", "-", "f")]
    echo = Echo()
    found = roll_out([d[:1] for d in data], [3, 1, 2], echo, UserFromData(data), [0, 0, 0])
    assert found[0].messages == dialogue("a", "after 1", "b", "after 3", "c", "after 5")
    assert found[1].messages == dialogue("d", "after 1")
    assert found[2].messages == dialogue("e", "after 1", "f", "after 3")
    assert echo.batches == [3, 2, 1]
    assert sorted(found[0].replies) == [0, 1, 2] and sorted(found[1].replies) == [0]


def test_a_second_rollout_keeps_what_was_said() -> None:
    start = dialogue("a", "given", "b")
    (found,) = roll_out([start], [2], Echo(), UserFromData([start]), [0])
    assert found.messages == dialogue("a", "given", "b", "after 3") and sorted(found.replies) == [1]
    done = dialogue("a", "given")
    assert roll_out([done], [1], Echo(), UserFromData([done]), [0])[0].messages == done


def policy(most: int | None = None, tokens: int = 6) -> PolicyAssistant:
    tokenizer = chat_tokenizer()
    model = make_causal_lm("gemma", vocab_size=len(tokenizer)).eval()
    end = turn_end(tokenizer).token_id
    sampling = Sampling(tokens, tuple(sorted({end, tokenizer.eos_token_id})), tokenizer.pad_token_id)
    return PolicyAssistant(ContinuousEngine(2).draw_from(model), tokenizer, sampling, most)


def test_a_batch_equals_its_dialogues_alone() -> None:
    data = [dialogue("one", "-", "two"), dialogue("a longer first question", "-", "and then"), dialogue("x")]
    starts, turns, seeds = [d[:1] for d in data], [2, 2, 1], [11, 12, 13]
    together = roll_out(starts, turns, policy(), UserFromData(data), seeds)
    for n in range(3):
        (alone,) = roll_out([starts[n]], [turns[n]], policy(), UserFromData([data[n]]), [seeds[n]])
        assert alone == together[n]
    reply = together[0].replies[1]
    assert reply.state_ids[-2:] == together[0].replies[0].state_ids[-2:]  # both end with the generation prompt
    assert reply.text == together[0].messages[3]["content"]


def test_another_seed_and_another_turn_draw_otherwise() -> None:
    data = [dialogue("same", "-", "same")] * 2
    found = roll_out([d[:1] for d in data], [2, 2], policy(tokens=12), UserFromData(data), [1, 2])
    assert found[0].messages[1] != found[1].messages[1]
    assert found[0].replies[0].ids != found[0].replies[1].ids


def test_the_shared_prefix_is_identical() -> None:
    data = [dialogue("one", "-", "two", "-", "three")]
    (first,) = roll_out([data[0][:1]], [3], policy(), UserFromData(data), [5])
    (second,) = roll_out([first.messages[:3]], [3], policy(), UserFromData(data), [6])
    assert second.messages[:3] == first.messages[:3]
    assert second.replies[1].state_ids == first.replies[1].state_ids
    assert sorted(second.replies) == [1, 2]


def test_a_dialogue_that_outgrows_the_policy_is_named() -> None:
    with pytest.raises(UserError, match="use fewer turns or shorter replies"):
        policy(most=10)([dialogue("a long question")], [0])
    assert torch.tensor(policy(most=100)([dialogue("a")], [0])[0].ids).numel() <= 6
