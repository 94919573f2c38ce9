# SPDX-License-Identifier: Apache-2.0
"""Costs of judging: estimates before a run, and a limit for the run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dschat.base.errors import UserError

CHARACTERS_PER_TOKEN = 4  # characters of English text, for estimates
ROUNDING = 1 + 1e-9  # so that requests which use the limit up exactly still go


class LimitReached(UserError):
    """The next request could cost more than the limit allows."""


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens sent and answered."""

    input: float
    output: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Cost in US dollars."""
        return (input_tokens * self.input + output_tokens * self.output) / 1_000_000


def estimated_tokens(characters: int) -> int:
    """Estimated number of tokens of a text, rounded up."""
    return -(-characters // CHARACTERS_PER_TOKEN)


class Spending:
    """Tokens and dollars that a run has used so far, and its limit.

    Attributes:
        has_prices: whether prices are known.
        prices: prices of the model; 0 where they are unknown.
        requests: number of answers that came.
        lost: number of requests that were sent and whose answers did not arrive.
        input_tokens, output_tokens: tokens of both; those of lost requests are estimated, with the longest answer.
    """

    def __init__(self, prices: Prices | None, limit: float | None = None, flag: str = "--max_cost") -> None:
        """Starts at 0, with a limit in US dollars (None: no limit) and its flag, for messages."""
        self.has_prices = prices is not None
        self.prices = prices or Prices(0.0, 0.0)
        self.requests = 0
        self.lost = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self._limit = limit
        self._flag = flag
        self._reserved: list[float] = []  # the most that each pending request can cost
        self._changed = threading.Condition()

    @property
    def cost(self) -> float:
        """Cost so far in US dollars."""
        return self.prices.cost(self.input_tokens, self.output_tokens)

    @contextmanager
    def reserve(self, input_tokens: int, output_tokens: int) -> Iterator[None]:
        """Reserve money for a request while it is pending.

        Where the limit does not allow the request, waits until others have come back.

        Args:
            input_tokens, output_tokens: the most that the request can have.

        Raises:
            LimitReached: the limit does not allow the request, and no other is pending.
        """
        most = self.prices.cost(input_tokens, output_tokens)
        with self._changed:
            while self._limit is not None and self.cost + sum(self._reserved) + most > self._limit * ROUNDING:
                if not self._reserved:
                    spent = f"${self.cost:.4f} spent in this run, and the next request could cost ${most:.4f}"
                    raise LimitReached(f"{self._flag} {self._limit:g}: {spent}.")
                self._changed.wait()
            self._reserved.append(most)
        try:
            yield
        finally:
            with self._changed:
                self._reserved.remove(most)
                self._changed.notify_all()

    def add(self, input_tokens: int, output_tokens: int, lost: bool = False) -> None:
        """Count an answer, or a request that may be charged though its answer did not arrive."""
        with self._changed:
            if lost:
                self.lost += 1
            else:
                self.requests += 1
            self.input_tokens += input_tokens
            self.output_tokens += output_tokens
