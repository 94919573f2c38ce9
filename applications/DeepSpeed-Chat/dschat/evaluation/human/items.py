# SPDX-License-Identifier: Apache-2.0
"""Pairs as one rater sees them: the response of which model stands at which place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import Verdict, mirrored
from dschat.evaluation.pairs.responses import Pair

LONGEST_NAME = 60  # characters
CHOICES: dict[str, Verdict] = {"1": "A", "2": "B", "3": "tie", "4": "skip"}  # A and B are places here


@dataclass(frozen=True)
class Item:
    """A pair as one rater sees it.

    Attributes:
        pair: prompt and responses, a of the first model and b of the second.
        first: the model whose response stands at the first place.
    """

    pair: Pair
    first: Literal["A", "B"]

    @property
    def responses(self) -> tuple[str, str]:
        """The texts at the first and the second place."""
        texts = (self.pair.a.response, self.pair.b.response)
        return texts if self.first == "A" else texts[::-1]

    def verdict(self, choice: str) -> Verdict:
        """What a choice says about the models.

        Args:
            choice: 1, the first place is better; 2, the second; 3, equal; 4, the rater passes.
        """
        verdict = CHOICES[choice]
        return verdict if self.first == "A" else mirrored(verdict)  # type: ignore[return-value]


def items_for(pairs: Sequence[Pair], rater: str, seed: int) -> list[Item]:
    """The items of one rater, in the order of the pairs; a pair of the same texts is asked once.

    Half of the items (to one) have the first model at the first place. Which half follows from seed, rater and the
    texts alone, not from the order of the files.

    Args:
        pairs: the pairs.
        rater: name of the rater; upper and lower case are the same.
        seed: of the shuffling.
    """
    once = {pair.id: pair for pair in pairs}
    offset = int(_draw(seed, rater, "")[-1], 16) % 2
    ranked = sorted(once, key=lambda name: _draw(seed, rater, name))
    ahead = set(ranked[offset::2])
    return [Item(pair, "A" if name in ahead else "B") for name, pair in once.items()]


def rater_name(text: str) -> str:
    """A rater's name: one space between words and none around.

    Raises:
        UserError: it is empty, too long or holds characters that are not shown.
    """
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(f"--rater {name!r}: a name of 1 to {LONGEST_NAME} visible characters is needed.")
    return name


def _draw(seed: int, rater: str, name: str) -> str:
    return hashlib.sha256(f"{seed}\0{rater.casefold()}\0{name}".encode("utf-8", "replace")).hexdigest()
