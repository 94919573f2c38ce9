# SPDX-License-Identifier: Apache-2.0
"""Demonstrations and comparisons from a model's own answers, chosen by their gold scores with noise."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.jsonl import iterate_rows

LABEL_NOISE = 0.1  # share of comparisons whose choice is the worse answer
CHOICE_NOISE = 0.1  # standard deviation of the noise with which a demonstration is chosen
MIN_MARGIN = 0.05  # difference of gold scores between the answers of a comparison, at least

Message = dict[str, str]


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer of a model."""

    text: str
    score: float
    is_finished: bool  # ended by EOS, not cut off


@dataclass(frozen=True)
class Answers:
    """A model's answers to one instruction, in the order of sampling."""

    messages: list[Message]  # messages of the prompt
    answers: list[ScoredAnswer]


def read_answers(file: Path) -> list[Answers]:
    """The answers in a result file of `dschat best-of-n`. Raises UserError."""
    rows = []
    for _, row in iterate_rows(file, "--output_dir"):
        columns = zip(row["responses"], row["rewards"], row["finished"], strict=True)
        rows.append(Answers(row["prompt_messages"], [ScoredAnswer(*values) for values in columns]))
    return rows


def make_demonstrations(samples: Iterable[Answers], seed: int) -> list[dict[str, Any]]:
    """One conversation for each instruction: the finished answer whose gold score plus noise is the highest.

    Returns:
        Rows with `messages`. An instruction without a finished answer is left out.
    """
    rng = random.Random(f"{seed} demonstrations")
    rows = []
    for sample in samples:
        noisy_scores = [answer.score + rng.gauss(0, CHOICE_NOISE) for answer in sample.answers]
        usable = [i for i, answer in enumerate(sample.answers) if answer.is_finished and answer.text.strip()]
        if usable:
            best = max(usable, key=lambda index: noisy_scores[index])
            rows.append({"messages": [*sample.messages, _message(sample.answers[best])]})
    return rows


def make_comparisons(samples: Iterable[Answers], seed: int) -> list[dict[str, Any]]:
    """Comparisons of disjoint pairs of answers to each instruction; a tenth prefers the worse answer.

    Returns:
        Rows with `prompt`, `chosen` and `rejected` as messages. Pairs whose gold scores hardly differ are left out.
    """
    rng = random.Random(f"{seed} comparisons")
    rows = []
    for sample in samples:
        answers = rng.sample(sample.answers, len(sample.answers))
        for first, second in zip(answers[::2], answers[1::2], strict=False):
            worse, better = sorted([first, second], key=lambda answer: answer.score)
            if better.score - worse.score < MIN_MARGIN or not worse.text.strip():
                continue
            is_label_wrong = rng.random() < LABEL_NOISE
            chosen, rejected = (worse, better) if is_label_wrong else (better, worse)
            row = {"prompt": sample.messages, "chosen": [_message(chosen)], "rejected": [_message(rejected)]}
            rows.append(row)
    return rows


def _message(answer: ScoredAnswer) -> Message:
    return {"role": "assistant", "content": answer.text.strip()}
