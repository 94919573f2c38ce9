# SPDX-License-Identifier: Apache-2.0
"""The condition on every kind of text, for every kind of tokenizer: always a partition."""

import pytest

from constituent_treelib.parsing import make_backend
from macro_actions.constituents import ParsingCondition
from tokenizer_families import FAMILIES, KINDS, TEXTS
from treelib_cases import flat_tree

EOS, BOS = 2, 1
PROGRAM = "def f(x):\n    # the sum\n    return [x + 1 for _ in range(3)]\n\nprint(f(2))\n"


@pytest.mark.parametrize("name", KINDS)
def test_partition(name):
    family = KINDS[name]()
    texts = [family.tokenizer.encode(text, add_special_tokens=False) for text in (*TEXTS, PROGRAM)]
    everything = list(range(len(family.tokenizer) + 3))  # characters are torn, and some ids have no token
    mixed = [BOS, *texts[0], EOS, *texts[1]]
    rows = [*texts, *([*ids, EOS] for ids in texts), [], [EOS], [EOS, EOS], mixed, everything]
    result = ParsingCondition(family.tokenizer, make_backend("chunker"), 5)(rows)
    counts = result.counts
    assert counts.sentences == counts.parsed + counts.fell_back and counts.parsed > 0
    for row, lengths in zip(rows, result.lengths, strict=True):
        assert sum(lengths) == len(row) and all(length > 0 for length in lengths)
    assert {lengths[-1] for lengths in result.lengths[len(texts) : 2 * len(texts)]} == {1}, "EOS"
    assert result.lengths[-5:-2] == [[], [1], [2]]


class Useless:
    """A parser that parses every n-th sentence only."""

    name, version, unit = "useless", "1", "sentence"

    def __init__(self, step):
        self.step = step

    def parse(self, units):
        return [flat_tree([(0, len(unit))]) if i % self.step == 0 else None for i, unit in enumerate(units)]


@pytest.mark.parametrize(("step", "messages"), [(1, 0), (2, 0), (4, 1)])
def test_a_parser_of_little_use_is_named_once(step, messages, caplog):
    family = FAMILIES["byte-level"]()
    row = family.tokenizer.encode("A fox ran. " * 20, add_special_tokens=False)
    condition = ParsingCondition(family.tokenizer, Useless(step), 5)
    for _ in range(2):
        condition([row])
    assert len(caplog.records) == messages
    if messages:
        assert caplog.messages[0] == "parser useless: 15 of 20 sentences fell back to the chunker (not parsed: 15)"
