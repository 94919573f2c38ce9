# SPDX-License-Identifier: Apache-2.0
"""Instructions with constraints that a program can check: a topic, and a number of sentences.

Twelve kinds of instruction about 120 everyday topics. Every sixth topic is held out: no step trains on it.
"""

import random
from dataclasses import dataclass
from typing import Any

TOPICS = (
    "bread cheese coffee tea soup honey chocolate pasta rice salad apples oranges bananas grapes lemons tomatoes "
    "onions carrots mushrooms pancakes dogs cats horses birds bees fish rabbits whales elephants penguins trees "
    "flowers roses gardens forests rivers lakes mountains islands beaches rain snow wind clouds thunder sunshine "
    "winter spring summer autumn books letters poems stories newspapers maps photographs paintings music guitars "
    "pianos drums songs dances movies theatres museums libraries schools hospitals parks markets cafes kitchens "
    "bedrooms windows doors chairs tables lamps clocks mirrors blankets pillows candles bicycles trains buses "
    "boats airplanes bridges roads tunnels football tennis swimming running hiking chess puzzles games toys kites "
    "balloons holidays birthdays weddings neighbours friends teachers doctors farmers painters umbrellas shoes "
    "hats gloves scarves coats glasses computers robots telescopes"
).split()
HELD_OUT_EVERY = 6  # every sixth topic
# Kinds of instruction, with the number of sentences that each asks for.
KINDS = (
    ("Write one sentence about {topic}.", 1),
    ("Describe {topic} in one sentence.", 1),
    ("Explain {topic} to a child in one sentence.", 1),
    ("Recommend {topic} to a friend in one sentence.", 1),
    ("Write a one-sentence advertisement for {topic}.", 1),
    ("Say in one sentence what you think of {topic}.", 1),
    ("Write one sentence of a postcard that mentions {topic}.", 1),
    ("Write two sentences about {topic}.", 2),
    ("In two sentences, say why people like {topic}.", 2),
    ("Give two short reasons to care for {topic}, one sentence each.", 2),
    ("Write a short message of two sentences that thanks somebody for {topic}.", 2),
    ("Begin a story about {topic} with two sentences.", 2),
)


@dataclass(frozen=True)
class Instruction:
    """An instruction and its constraints."""

    text: str
    topic: str
    sentences: int

    def row(self, **columns: Any) -> dict[str, Any]:
        """A row of data: the prompt as a message, the constraints, and further columns."""
        prompt = [{"role": "user", "content": self.text}]
        return {"prompt": prompt, "topic": self.topic, "sentences": self.sentences} | columns


def training_instructions(count: int, seed: int) -> list[Instruction]:
    """Distinct instructions about the topics for training, in shuffled order; all of them if there are fewer."""
    return _shuffled_instructions(is_held_out=False, seed=seed)[:count]


def held_out_instructions(count: int, seed: int) -> list[Instruction]:
    """Distinct instructions about the topics that no step trains on."""
    return _shuffled_instructions(is_held_out=True, seed=seed)[:count]


def _shuffled_instructions(is_held_out: bool, seed: int) -> list[Instruction]:
    instructions = []
    for number, topic in enumerate(TOPICS):
        if (number % HELD_OUT_EVERY == 0) is not is_held_out:
            continue
        for template, sentences in KINDS:
            instructions.append(Instruction(template.format(topic=topic), topic, sentences))
    random.Random(f"{seed} {is_held_out}").shuffle(instructions)
    return instructions
