# SPDX-License-Identifier: Apache-2.0
"""Win rates by turn: tables, JSON and a picture; on UltraInteract beside the published ones."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dschat.common.display import markdown_table
from dschat.common.jsonl import read_rows
from dschat.common.statistics import RESAMPLES, WinRates, win_rates
from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import comparison_of

FLAG = "FILE"
NONE = "–"
# Gao et al. 2024 (arXiv 2410.04612): win rates against the initial policy, Llama-3-8B-it, in per cent at turns 1 to 5,
# in dialogues that begin with prompts of this set.
PUBLISHED_ON = ("ultrainteract", "ultrainteract_pair", "openbmb/ultrainteract_pair")
Published = Mapping[str, Sequence[float]]  # policy → rate at each turn
PUBLISHED = {
    "Llama-3.1-70B-it": (70.4, 66.4, 61.0, 53.0, 55.4),
    "REFUEL, iteration 1": (54.6, 53.6, 57.8, 56.2, 59.4),
    "REFUEL, iteration 2": (55.2, 53.4, 58.8, 57.2, 58.6),
}
NOTE = (
    "Win rate of the first policy in per cent: wins and half of the ties, of the verdicts counted, without invalid "
    "answers. [ ] holds 95 %: a bootstrap over dialogues. All turns: every verdict counts once, which is the mean of "
    "the turns where each dialogue has all of them."
)


@dataclass(frozen=True)
class TurnRates:
    """One rater's verdicts on two policies' dialogues."""

    models: tuple[str, str]  # names of the first and the second
    rater: str
    turns: dict[int, WinRates]  # turn, from 1 → rates of the first policy
    overall: WinRates  # over all turns

    @property
    def title(self) -> str:
        """Who is compared, by whom."""
        return f"{self.models[0]} against {self.models[1]}, {self.rater}"


def holds_turns(row: dict[str, Any]) -> bool:
    """Whether a row is a verdict at a turn."""
    return {"verdict", "number", "turn"} <= set(row)


def rates_by_turn(rows: Iterable[tuple[str, dict[str, Any]]]) -> TurnRates:
    """The win rates of the verdicts of one file, each with its place "file:line".

    Raises:
        UserError: a row is no verdict at a turn, or compares other policies than the first one.
    """
    verdicts: dict[int, list[tuple[int, str]]] = {}
    title: tuple[tuple[str, str], str] | None = None
    for origin, row in rows:
        number, turn = row.get("number"), row.get("turn")
        if not isinstance(number, int) or not isinstance(turn, int) or turn < 1:
            raise UserError(f"{origin}: no number and turn; give files that evaluation/winrate_by_turn.py wrote.")
        one = comparison_of(row, origin)
        compared = ((one.model_a, one.model_b), one.rater)
        title = title or compared
        if title != compared:
            raise UserError(f"{origin}: it compares other policies, or by another judge, than the rows before it.")
        verdicts.setdefault(turn, []).append((number, one.verdict))
    if title is None:
        raise UserError("There is no verdict.")
    everything = [each for turn in sorted(verdicts) for each in verdicts[turn]]
    return TurnRates(*title, {turn: _rates(verdicts[turn]) for turn in sorted(verdicts)}, _rates(everything))


def turns_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Writes `report.json`, `report.md` and `report.png` on finished files of verdicts; returns the tables.

    `dataset` names the set whose prompts the dialogues begin with.
    """
    found = [rates_by_turn(read_rows(file, FLAG)) for file in files]
    return write_turns(found, output_dir, "report", PUBLISHED if dataset.lower() in PUBLISHED_ON else {})


def write_turns(found: Sequence[TurnRates], folder: Path, name: str, published: Published) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    from dschat.evaluation.turns.plot import draw_turns

    text = turn_tables(found, published)
    content = {
        "intervals": {"level": 0.95, "bootstrap_resamples": RESAMPLES},
        "comparisons": [_row(rates) for rates in found],
        "published against Llama-3-8B-it, not measured here": {
            title: {"turns": rates, "mean": published_mean(rates)} for title, rates in published.items()
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(draw_turns(found, published))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return text


def turn_tables(found: Sequence[TurnRates], published: Published) -> str:
    """Win rates and counts of every comparison, and published rates, as Markdown."""
    turns = sorted({turn for rates in found for turn in rates.turns})
    head = [*(f"turn {turn}" for turn in turns), "all turns"]
    rates, counts = [], []
    for each in found:
        columns = [*(each.turns.get(turn) for turn in turns), each.overall]
        rates.append([each.title, *(_half(one) for one in columns)])
        counts.append([each.title, *(_counts(one) for one in columns)])
    last = [*(f"turn {turn}" for turn in range(1, 6)), "mean"]
    others = [
        [title, *(f"{rate:.1f}" for rate in row), f"{published_mean(row):.2f}"] for title, row in published.items()
    ]
    parts = [
        markdown_table(["win rate of the first, in %", *head], rates),
        markdown_table(["wins – ties – losses – invalid", *head], counts),
        *([markdown_table(["published, against Llama-3-8B-it; not measured here", *last], others)] if others else []),
        NOTE,
    ]
    return "\n\n".join(parts) + "\n"


def published_mean(rates: Sequence[float]) -> float:
    """Over the turns."""
    return sum(rates) / len(rates)


def _rates(verdicts: Sequence[tuple[int, str]]) -> WinRates:
    numbers, given = zip(*verdicts, strict=True)
    return win_rates(given, numbers)


def _half(rates: WinRates | None) -> str:
    return NONE if rates is None or rates.half is None else rates.half.text()


def _counts(rates: WinRates | None) -> str:
    if rates is None:
        return NONE
    tally = rates.tally
    return f"{tally.wins} – {tally.ties} – {tally.losses} – {tally.invalid}"


def _row(rates: TurnRates) -> dict[str, Any]:
    first, second = rates.models
    turns = {str(turn): asdict(each) for turn, each in rates.turns.items()}
    return {"model_a": first, "model_b": second, "rater": rates.rater, "turns": turns, "all": asdict(rates.overall)}
