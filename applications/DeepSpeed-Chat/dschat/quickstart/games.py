# SPDX-License-Identifier: Apache-2.0
"""Two environments for --environment, and demonstrations of how to play them.

`Guess`: find a number from 1 to 8; every guess is answered with "higher" or "lower".
`Calculator`: add up three numbers with a tool that adds two, and then say the answer.

Demonstrations follow the rules of the game but play it badly, so that step 3 has something to improve.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Literal

from dschat.base.jsonl import write_rows

Game = Literal["guess", "calculator"]
Message = dict[str, str]
Played = tuple[list[Message], float, bool]  # messages, reward, whether the episode is over

# A message of the user or of a tool is a line, and so is a reply, which ends with EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
CLASSES: dict[Game, str] = {"guess": "Guess", "calculator": "Calculator"}

# The guessing game.
LARGEST = 8
GUESSES = 4  # most guesses of an episode
WIN = 1.0  # reward of the right guess
GUESS_COST = 0.1  # reward that each earlier guess costs
NO_NUMBER = -0.5  # reward of a reply that is not a number
HINT_RATE = 0.5  # probability that a demonstrated guess agrees with all hints

# The calculator.
TERMS = 3  # numbers of a chain
LARGEST_TERM = 9
CALLS = 4  # most replies of an episode
RIGHT_ANSWER = 1.0
NO_CALL = -0.5  # reward of a reply that is neither a call nor an answer
CALL_RATE = 0.5  # probability that a demonstration uses the tool rather than guess the answer
_CALL = re.compile(r"\s*add (\d+) (\d+)\s*")
_ANSWER = re.compile(r"\s*answer (\d+)\s*")


class Guess:
    """A number is to be found; higher or lower is all that is said."""

    def reset(self, row: dict[str, int], seed: int) -> list[Message]:
        """Begins with the number of a row."""
        self._number = row["number"]
        self._guesses = 0
        return [{"role": "user", "content": f"guess 1 to {LARGEST}"}]

    def step(self, messages: list[Message], reply: str) -> Played:
        """Answers a guess. The right one ends the episode; so does a reply that is not a number."""
        self._guesses += 1
        text = reply.strip()
        if not text.isdecimal():
            return [], NO_NUMBER, True
        guess = int(text)
        if guess == self._number:
            return [], WIN - GUESS_COST * (self._guesses - 1), True
        hint = "higher" if guess < self._number else "lower"
        return [{"role": "user", "content": hint}], 0.0, self._guesses == GUESSES


class Calculator:
    """A chain of additions, and a tool that adds two numbers."""

    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two numbers.",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
            },
        }
    ]
    roles = ("tool",)

    def reset(self, row: dict[str, list[int]], seed: int) -> list[Message]:
        """Begins with the numbers of a row."""
        self._numbers = row["numbers"]
        self._calls = 0
        return [{"role": "user", "content": f"add up {' '.join(map(str, self._numbers))}"}]

    def step(self, messages: list[Message], reply: str) -> Played:
        """Runs a call of the tool, or judges an answer, which ends the episode."""
        self._calls += 1
        answer = _ANSWER.fullmatch(reply)
        if answer is not None:
            return [], RIGHT_ANSWER * (int(answer[1]) == sum(self._numbers)), True
        call = _CALL.fullmatch(reply)
        if call is None:
            return [], NO_CALL, True
        result = int(call[1]) + int(call[2])
        return [{"role": "tool", "content": str(result)}], 0.0, self._calls == CALLS


def write_game(folder: Path, game: Game, demonstrations: int, episodes: int, held_out: int, seed: int) -> None:
    """Writes `demonstrations/` for step 1 and `episodes/` for step 3, each as train.jsonl and test.jsonl."""
    rng = random.Random(f"{seed} {game}")
    make_demonstration = _demonstrated_guesses if game == "guess" else _demonstrated_sum
    for split, count in {"train": demonstrations, "test": held_out}.items():
        rows = []
        for _ in range(count):
            rows.append({"messages": make_demonstration(rng)})
        write_rows(folder / "demonstrations" / f"{split}.jsonl", rows)
    for split, count in {"train": episodes, "test": held_out}.items():
        write_rows(folder / "episodes" / f"{split}.jsonl", [make_row(game, rng) for _ in range(count)])


def make_row(game: Game, rng: random.Random) -> dict[str, object]:
    """A row of step 3: what the environment reads, and the prompt with which it begins."""
    row: dict[str, object]
    if game == "guess":
        number = rng.randint(1, LARGEST)
        row = {"number": number}
        messages = Guess().reset({"number": number}, 0)
    else:
        numbers = _terms(rng)
        row = {"numbers": numbers}
        messages = Calculator().reset({"numbers": numbers}, 0)
    return {**row, "messages": messages}


def demonstration_texts(game: Game, count: int, seed: int) -> list[str]:
    """Texts of demonstrations, from which a tokenizer is made."""
    rng = random.Random(f"{seed} {game} texts")
    make_demonstration = _demonstrated_guesses if game == "guess" else _demonstrated_sum
    texts = []
    for _ in range(count):
        messages = make_demonstration(rng)
        texts.append("\n".join(message["content"] for message in messages))
    return texts


def _demonstrated_guesses(rng: random.Random) -> list[Message]:
    """Guesses at random, of which some agree with the hints."""
    number = rng.randint(1, LARGEST)
    game = Guess()
    messages = game.reset({"number": number}, 0)
    low = 1
    high = LARGEST
    done = False
    while not done:
        heeds_hints = rng.random() < HINT_RATE
        guess = rng.randint(low, high) if heeds_hints else rng.randint(1, LARGEST)
        reply = f" {guess}"
        answer, _, done = game.step(messages, reply)
        messages = [*messages, {"role": "assistant", "content": reply}]
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        if not done:
            messages += answer
    return messages


def _demonstrated_sum(rng: random.Random) -> list[Message]:
    """Additions by the tool, each of which may be left out: then the answer is guessed."""
    numbers = _terms(rng)
    game = Calculator()
    messages = game.reset({"numbers": numbers}, 0)
    total = numbers[0]
    for number in numbers[1:]:
        if rng.random() >= CALL_RATE:
            guess = rng.randint(TERMS, TERMS * LARGEST_TERM)
            return [*messages, {"role": "assistant", "content": f" answer {guess}"}]
        reply = f" add {total} {number}"
        answer, _, _ = game.step(messages, reply)
        messages = [*messages, {"role": "assistant", "content": reply}, *answer]
        total += number
    return [*messages, {"role": "assistant", "content": f" answer {total}"}]


def _terms(rng: random.Random) -> list[int]:
    return [rng.randint(1, LARGEST_TERM) for _ in range(TERMS)]


def share_of_best(game: Game, score: float) -> float:
    """A mean score, divided by that of the best strategy: halving the numbers that are left, or the right answer.

    Halving 1 to 8 finds one number with the first guess, two with the second, four with the third and one with the
    fourth: (1 + 2 · .9 + 4 · .8 + .7) / 8 = .8375.
    """
    best = RIGHT_ANSWER
    if game == "guess":
        numbers_by_guess = (1, 2, 4, 1)
        total = 0.0
        for guess, count in enumerate(numbers_by_guess):
            total += count * (WIN - GUESS_COST * guess)
        best = total / LARGEST
    return score / best
