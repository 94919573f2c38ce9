# SPDX-License-Identifier: Apache-2.0
"""What judging costs: estimates before a run, and a limit that a run does not exceed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dschat.base.errors import UserError

CHARACTERS_PER_TOKEN = 4  # of English text, for estimates
ROUNDING = 1 + 1e-9  # so that requests which use the limit up exactly still go


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens sent and answered."""

    input: float
    output: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """In US dollars."""
        return (input_tokens * self.input + output_tokens * self.output) / 1_000_000


def estimated_tokens(characters: int) -> int:
    """Tokens of a text with this many characters, rounded up."""
    return -(-characters // CHARACTERS_PER_TOKEN)


class Spending:
    """What a run has used so far, and the most it may cost in US dollars (None: no limit)."""

    def __init__(self, prices: Prices | None, limit: float | None = None) -> None:
        self.prices, self._limit = prices or Prices(0.0, 0.0), limit
        self.requests = 0  # answers that came
        self.lost = 0  # requests that were sent and whose answers did not arrive
        self.input_tokens = self.output_tokens = 0  # of both; of lost ones by estimate and as the longest answer
        self._reserved: list[float] = []  # the most that each request on its way can cost
        self._changed = threading.Condition()

    @property
    def cost(self) -> float:
        """In US dollars."""
        return self.prices.cost(self.input_tokens, self.output_tokens)

    @contextmanager
    def reserve(self, input_tokens: int, output_tokens: int) -> Iterator[None]:
        """Keeps money for one request on its way that can have so many tokens at the most.

        Where it is not enough, waits for others to come back; raises UserError if none is on its way.
        """
        most = self.prices.cost(input_tokens, output_tokens)
        with self._changed:
            while self._limit is not None and self.cost + sum(self._reserved) + most > self._limit * ROUNDING:
                if not self._reserved:
                    spent = f"${self.cost:.4f} spent in this run, and the next request could cost ${most:.4f}"
                    raise UserError(f"--max_cost {self._limit:g}: {spent}.")
                self._changed.wait()
            self._reserved.append(most)
        try:
            yield
        finally:
            with self._changed:
                self._reserved.remove(most)
                self._changed.notify_all()

    def add(self, input_tokens: int, output_tokens: int, lost: bool = False) -> None:
        """Counts an answer, or a request that was sent and may be charged though its answer did not arrive."""
        with self._changed:
            self.lost += lost
            self.requests += not lost
            self.input_tokens += input_tokens
            self.output_tokens += output_tokens
