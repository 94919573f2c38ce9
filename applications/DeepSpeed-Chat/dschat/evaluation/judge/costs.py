# SPDX-License-Identifier: Apache-2.0
"""What judging costs: list prices, estimates before a run, and a limit that a run does not exceed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dschat.errors import UserError

MILLION = 1_000_000
CHARACTERS_PER_TOKEN = 4  # of English text, for estimates


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens.

    Attributes:
        input: of what is sent.
        output: of what is answered.
    """

    input: float
    output: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """In US dollars."""
        return (input_tokens * self.input + output_tokens * self.output) / MILLION


# List prices of OpenAI's API without discounts, as known when this was written; --price-in and --price-out go before.
PRICES = {
    "gpt-4o-2024-05-13": Prices(5.0, 15.0),
    "gpt-4o-2024-08-06": Prices(2.5, 10.0),
    "gpt-4o-2024-11-20": Prices(2.5, 10.0),
    "gpt-4o": Prices(2.5, 10.0),
    "gpt-4o-mini": Prices(0.15, 0.6),
    "gpt-4.1": Prices(2.0, 8.0),
    "gpt-4.1-mini": Prices(0.4, 1.6),
    "gpt-4.1-nano": Prices(0.1, 0.4),
}


def prices_of(model: str, price_in: float | None, price_out: float | None) -> Prices | None:
    """Prices of a model; None where they are not known.

    Raises:
        UserError: one price is given, and the other is not known.
    """
    known = PRICES.get(model)
    if known is None and (price_in is None) != (price_out is None):
        raise UserError(f"--price-in and --price-out: give both, the prices of {model} are not known here.")
    if known is None:
        return None if price_in is None or price_out is None else Prices(price_in, price_out)
    return Prices(known.input if price_in is None else price_in, known.output if price_out is None else price_out)


def estimated_tokens(*texts: str) -> int:
    """Tokens of texts: one per four characters, rounded up."""
    return -(-sum(map(len, texts)) // CHARACTERS_PER_TOKEN)


def most_tokens(*texts: str) -> int:
    """More tokens than the texts can have: one per byte, and some for the chat format."""
    return sum(len(text.encode("utf-8", "replace")) for text in texts) + 64


class Spending:
    """What a run has used, counted from the answers, and the most it may cost.

    Attributes:
        requests: answers that came.
        lost: requests that were sent and whose answers did not arrive.
        input_tokens: sent for answers, and, by estimate, for lost ones.
        output_tokens: answered; for a lost one the most it can have been.
        cost: of both in US dollars; 0 without prices.
    """

    def __init__(self, prices: Prices | None = None, limit: float | None = None) -> None:
        """Starts at nothing.

        Args:
            prices: of the model; needed for a limit.
            limit: US dollars; None for no limit.
        """
        self.prices, self.limit = prices, limit
        self.requests = self.lost = self.input_tokens = self.output_tokens = 0
        self.cost = 0.0
        self._held: list[float] = []  # the most that each request on its way can cost
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, input_tokens: int, output_tokens: int) -> Iterator[None]:
        """Keeps money for one request on its way; waits for others where it would not be enough.

        Args:
            input_tokens: the most it can have.
            output_tokens: the most it can have.

        Raises:
            UserError: the limit could be exceeded, and no request is on its way that might leave enough.
        """
        most = self.prices.cost(input_tokens, output_tokens) if self.prices else 0.0
        with self._changed:
            while self.limit is not None and self.cost + sum(self._held) + most > self.limit * (1 + 1e-9):
                if not self._held:
                    raise UserError(
                        f"--max-cost {self.limit:g}: ${self.cost:.4f} spent in this run, and the next request could "
                        f"cost ${most:.4f}."
                    )
                self._changed.wait()
            self._held.append(most)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(most)
                self._changed.notify_all()

    def add(self, input_tokens: int, output_tokens: int) -> None:
        """Counts an answer."""
        with self._changed:
            self.requests += 1
            self._count(input_tokens, output_tokens)

    def add_lost(self, input_tokens: int, output_tokens: int) -> None:
        """Counts a request that was sent and may be charged, though its answer did not arrive."""
        with self._changed:
            self.lost += 1
            self._count(input_tokens, output_tokens)

    def _count(self, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        if self.prices:
            self.cost += self.prices.cost(input_tokens, output_tokens)
