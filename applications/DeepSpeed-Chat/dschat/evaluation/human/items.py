# SPDX-License-Identifier: Apache-2.0
"""Pairs as one rater sees them: the response of which model stands at which place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import Side, Verdict, mirrored
from dschat.evaluation.pairs.responses import Pair

LONGEST_NAME = 60  # characters
# What a rater types → the verdict, where the first model's response stands at the first place.
CHOICES: dict[str, Verdict] = {"1": "A", "2": "B", "3": "tie", "4": "skip"}


@dataclass(frozen=True)
class ShownPair:
    """A pair as one rater sees it: `first` is the model whose response stands at the first place."""

    pair: Pair
    first: Side

    @property
    def responses(self) -> tuple[str, str]:
        """The texts at the first and the second place."""
        a, b = self.pair.a.response, self.pair.b.response
        return (a, b) if self.first == "A" else (b, a)

    def verdict(self, choice: str) -> Verdict:
        """What a choice, one of CHOICES, says about the models."""
        verdict = CHOICES[choice]
        return verdict if self.first == "A" else mirrored(verdict)


def items_for(pairs: Sequence[Pair], rater: str, seed: int) -> list[ShownPair]:
    """What one rater is shown, in the order of the pairs; a pair of the same texts is asked once.

    Every second pair in an order drawn from seed, rater and texts has the first model at the first place; whether
    that begins with the first or the second pair is drawn as well. The order of the files and the case of the
    rater's name change nothing.
    """
    once = {pair.id: pair for pair in pairs}
    start = int(_draw(seed, rater, "")[-1], 16) % 2
    drawn = sorted(once, key=lambda pair_id: _draw(seed, rater, pair_id))
    ahead = set(drawn[start::2])
    return [ShownPair(pair, "A" if pair_id in ahead else "B") for pair_id, pair in once.items()]


def rater_name(text: str) -> str:
    """A rater's name: one space between words and none around.

    Raises:
        UserError: it is empty, too long or holds characters that are not shown.
    """
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(f"--rater {name!r}: a name of 1 to {LONGEST_NAME} visible characters is needed.")
    return name


def _draw(seed: int, rater: str, text: str) -> str:
    """A hash to sort by; the same on every machine."""
    return hashlib.sha256(f"{seed}\0{rater.casefold()}\0{text}".encode("utf-8", "replace")).hexdigest()
