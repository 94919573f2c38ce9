# SPDX-License-Identifier: Apache-2.0
"""Files of all responses to each prompt at several temperatures, as inference/best_of_n.py writes them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.jsonl import iterate_rows, text_of
from dschat.errors import UserError
from dschat.evaluation.pairs.responses import number_of

FLAG = "FILE"


@dataclass(frozen=True)
class Sweep:
    """The rewards of one model's responses."""

    model: str
    rewards: dict[float, list[list[float]]]  # temperature → for each prompt the rewards, in the order they were drawn
    prompts: list[str]  # the same at every temperature

    def draws(self, temperature: float) -> int:
        """Responses to each prompt at a temperature."""
        return len(self.rewards[temperature][0])

    @property
    def most_draws(self) -> int:
        """The largest number of responses to a prompt at any temperature."""
        return max(map(self.draws, self.rewards))


def holds_sweep(row: dict[str, Any]) -> bool:
    """Whether a row is that of a sweep."""
    return {"temperature", "responses", "rewards"} <= set(row)


def read_sweep(file: Path, model: str) -> Sweep:
    """The sweep of a file; raises UserError where it is missing or holds something else."""
    return sweep_of(model, iterate_rows(file, FLAG))


def sweep_of(model: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
    """A model's sweep from its rows, each with its place "file:line".

    Raises:
        UserError: a row holds something else, or the temperatures differ in their prompts.
    """
    rewards: dict[float, list[list[float]]] = {}
    prompts: dict[float, list[str]] = {}
    for origin, row in rows:
        temperature = number_of(row, "temperature", origin)
        if temperature is None:
            raise UserError(f"{origin}: no column 'temperature'; give files that inference/best_of_n.py wrote.")
        given = _rewards_of(row, origin)
        known = rewards.setdefault(temperature, [])
        if known and len(known[0]) != len(given):
            sizes = f"{len(given)} rewards, and {len(known[0])} in the rows before it"
            raise UserError(f"{origin}: {sizes}, at the same temperature; correct the file.")
        known.append(given)
        prompts.setdefault(temperature, []).append(text_of(row, "prompt", origin))
    first, *others = prompts
    for temperature in others:
        if prompts[temperature] != prompts[first]:
            temperatures = f"the prompts at temperature {temperature:g} are not those at {first:g}"
            raise UserError(f"{model}: {temperatures}; give the file of one finished run.")
    return Sweep(model, dict(sorted(rewards.items())), prompts[first])


def _rewards_of(row: dict[str, Any], origin: str) -> list[float]:
    values = row.get("rewards")
    if not isinstance(values, list) or not values:
        raise UserError(f"{origin}: column 'rewards' must be a list of numbers; correct the row.")
    numbers = [number_of({"rewards": value}, "rewards", origin) for value in values]
    if None in numbers:
        raise UserError(f"{origin}: column 'rewards' must be a list of numbers; correct the row.")
    return [number for number in numbers if number is not None]
