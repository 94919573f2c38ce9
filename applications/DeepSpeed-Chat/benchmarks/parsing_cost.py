# SPDX-License-Identifier: Apache-2.0
"""What does the termination condition `parsing` cost with each parser, per sentence and per rollout?

A unit is a sentence, one of twenty of 16 words (all --sentences are parsed in one call), or for tree-sitter a program
of 11 lines with other names each time. A rollout is --responses of them, in a byte-level BPE tokenizer's ids; its time
is all of `ParsingCondition`: from ids to characters, sentences, trees and lengths. Time is CPU seconds of this
process; one thread; the fastest of --repeats runs after one to warm up. A real model of benepar is measured with
``--benepar_model benepar_en3``, the small one of the tests with:

    python ../../../tests/support/toy_parser.py runs/toy && python parsing_cost.py --benepar_model runs/toy/toy.pt
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from constituent_treelib import TreelibError, make_backend
from constituent_treelib.parsing import Backend
from dschat.models.tiny import train_tokenizer
from harness import report, settings_parser
from macro_actions.constituents import ParsingCondition

R = TypeVar("R")
PARSERS = ("chunker", "tree-sitter", "benepar")
WORDS_PER_SENTENCE = 16
SENTENCES = """
The library near the river was closed for three weeks because the roof had leaked again.
My sister told me that she would rather walk home than wait for the crowded bus.
When the rain finally stopped, the children ran into the garden and jumped over wide puddles.
I bought a used bicycle from a neighbour, but the brakes never worked as he promised.
He asked whether anyone had seen his keys, which he usually left on the kitchen table.
We should talk about the budget before the meeting, since nobody else has read the report.
After a long, tiring journey, they found a quiet village where people still baked their bread.
The teacher explained the same problem twice, yet most of them could not solve it alone.
If you want a better answer, you should describe what you tried and where it failed.
Some of the workers, who were promised higher wages, decided to leave the company in March.
Her first novel was about a doctor in a mountain town that everyone else had forgotten.
You can grow tomatoes on your balcony as long as you remember to water them daily.
The dog that used to bark at every stranger now sleeps on the sofa all day.
They will paint the house next summer unless the price of paint rises even more sharply.
A small group of scientists has found a simple way to clean water with cheap sand.
Nobody in the office knew why the printer stopped working right after it had been repaired.
I think that cooking at home is cheaper and more fun than ordering food every evening.
The museum opens at nine, so we could have breakfast and still avoid the longest queues.
Although he had trained for months, the runner was unable to sleep before the big race.
Please keep the letter somewhere very safe, because we may need it again later this year.
""".strip().splitlines()
PROGRAM = """
def {name}(values, limit={number}):
    \"\"\"Sums what is above a limit.\"\"\"
    total = 0
    for index, value in enumerate(values):
        if value > limit and index % 2 == 0:
            total += value * {number}
        elif value == limit:
            continue
        else:
            total -= abs(value - limit) / 2
    return {{"total": total, "{name}": [v for v in values if v]}}
"""


def main() -> None:
    """Measures every parser and prints one JSON object; the defaults are a rollout of 64 responses of 64 words."""
    parser = settings_parser(__doc__, responses=64, cutoff=5, sentences=256, repeats=15)
    parser.add_argument("--parsers", nargs="+", choices=PARSERS, default=list(PARSERS))
    parser.add_argument("--benepar_model", help="name or path; without it, benepar is not measured")
    parser.add_argument("--words", type=int, default=64, help="of a response, in whole sentences of 16 words")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    report(settings, {parser: measure(parser, settings) for parser in settings.parsers})


def measure(parser: str, settings: argparse.Namespace) -> dict[str, object]:
    """Figures of a parser, or why there are none."""
    if parser == "benepar" and settings.benepar_model is None:
        return {"not_measured": "no --benepar_model"}
    try:
        backend = make_backend(parser, settings.benepar_model if parser == "benepar" else None)
    except TreelibError as error:
        return {"not_measured": str(error)}
    units = make_units(backend, settings.sentences, seed=0)
    milliseconds, trees = least_cpu_time(lambda: backend.parse(units), settings.repeats)
    per_response = max(1, settings.words // WORDS_PER_SENTENCE) if backend.unit == "sentence" else 1
    responses = make_units(backend, settings.responses * per_response, seed=1)
    texts = [" ".join(responses[i : i + per_response]) for i in range(0, len(responses), per_response)]
    tokenizer = train_tokenizer(texts, vocab_size=2000)
    rows = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    condition = ParsingCondition(tokenizer, backend, settings.cutoff)
    whole, found = least_cpu_time(lambda: condition(rows), settings.repeats)
    return {
        "parsed_percent": round(100 * sum(tree is not None for tree in trees) / len(units), 1),
        "milliseconds_per_unit": round(milliseconds / len(units), 4),
        "rollout_milliseconds": round(whole, 2),
        "rollout_units": found.counts.sentences,
    }


def make_units(backend: Backend, count: int, seed: int) -> list[str]:
    """Sentences or programs."""
    chance = random.Random(seed)
    if backend.unit == "sentence":
        return [chance.choice(SENTENCES) for _ in range(count)]
    return [PROGRAM.format(name=f"f{chance.randrange(10**6)}", number=chance.randrange(100)) for _ in range(count)]


def least_cpu_time(work: Callable[[], R], repeats: int) -> tuple[float, R]:
    """CPU milliseconds of this process in the fastest run after one to warm up; the last result."""
    result = work()
    runs = []
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        runs.append(1000 * (time.process_time() - start))
    return min(runs), result


if __name__ == "__main__":
    main()
