# SPDX-License-Identifier: Apache-2.0
"""The two games of `make turns`: their rules, their demonstrations, and an episode as a table."""

import pytest

from dschat.base.errors import UserError
from dschat.quickstart.games import Calculator, Guess
from dschat.turns.environment import reset_environment, step_environment, traits_of
from dschat.turns.show import episode_table, longest_episode


def test_guesses_are_answered_with_higher_and_lower() -> None:
    game = Guess()
    messages = reset_environment(game, {"number": 6}, 0)
    answers = [step_environment(game, messages, reply) for reply in (" 4", " 7", " 6")]
    assert [answer.messages for answer in answers] == [
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "lower"}],
        [],
    ]
    assert [answer.reward for answer in answers] == [0.0, 0.0, pytest.approx(0.8)]
    assert [answer.done for answer in answers] == [False, False, True]
    game.reset({"number": 6}, 0)
    assert step_environment(game, messages, " none") == step_environment(game, messages, "")
    game.reset({"number": 6}, 0)
    assert [game.step(messages, "1")[2] for _ in range(4)] == [False, False, False, True]


def test_the_calculator_adds_and_judges() -> None:
    game = Calculator()
    messages = reset_environment(game, {"numbers": [5, 8, 3]}, 0)
    assert messages[0]["content"] == "add up 5 8 3"
    first = step_environment(game, messages, " add 5 8")
    assert first.messages == [{"role": "tool", "content": "13"}] and not first.done
    assert step_environment(game, messages, " answer 16").reward == 1.0
    game.reset({"numbers": [5, 8, 3]}, 0)
    assert step_environment(game, messages, " answer 15").reward == 0.0
    assert step_environment(game, messages, " add 5").reward == -0.5
    traits = traits_of(Calculator)
    assert traits.roles == ["tool"] and traits.tools is not None and traits.tools[0]["function"]["name"] == "add"


def sample(turns: int) -> dict:
    """An episode of some turns of two tokens each, with one token of the environment between them."""
    tokens = []
    messages = [{"role": "user", "content": "guess"}]
    for turn in range(turns):
        if turn:
            tokens.append({"text": "h", "macro_action": -1, "value": 0.0, "reward": 0.0, "advantage": 0.0})
            messages.append({"role": "user", "content": "higher\n"})
        for value in (0.5 + turn, 1.5 + turn):
            numbers = {"value": value, "reward": 0.0, "advantage": 0.25 * (turn + 1)}
            tokens.append({"text": "x", "macro_action": turn, **numbers})
        messages.append({"role": "assistant", "content": f"reply {turn}"})
    return {
        "tokens": tokens,
        "messages": messages,
        "prompt_messages": messages[:1],
        "turn_rewards": [0.0, 0.9][:turns],
    }


def test_an_episode_turn_by_turn() -> None:
    table = episode_table(sample(2), "an episode")
    assert table.rows == [
        ["", "user", "guess", "–", "–", "–"],
        ["1", "policy", "reply 0", "0.00", "0.50", "0.25"],
        ["", "user", "higher\n", "–", "–", "–"],
        ["2", "policy", "reply 1", "0.90", "1.50", "0.50"],
    ]
    assert longest_episode([sample(1), sample(2), sample(1)])["turn_rewards"] == [0.0, 0.9]
    with pytest.raises(UserError, match="--environment"):
        longest_episode([{"tokens": []}])
