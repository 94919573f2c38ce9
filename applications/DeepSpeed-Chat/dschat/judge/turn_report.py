# SPDX-License-Identifier: Apache-2.0
"""The report on win rates by turn: `dschat judge-turns`, and `dschat report` on its files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dschat.base.jsonl import read_rows
from dschat.base.pictures import GREY, legend_label
from dschat.base.statistics import BOOTSTRAP, WinRates
from dschat.evaluation.chart import INK, Chart, Curve, draw_charts, look_of, offset_of
from dschat.evaluation.page import NAME, Report, Table, write_report
from dschat.evaluation.responses import FILE
from dschat.judge.command import judge_turns
from dschat.judge.options import TurnOptions
from dschat.judge.turn_pairs import Published, TurnRates, published_mean, published_rates, rates_by_turn

REMARK = (
    "Win rate of the first policy in per cent: wins and half of the ties, of the verdicts counted, without invalid "
    "answers. [ ] holds 95 %: a bootstrap over dialogues. All turns: every verdict counts once, which is the mean of "
    "the turns where each dialogue has all of them."
)
DASHES = ("--", ":", "-.")
TURNS_APART = 0.06  # offset of neighbouring lines along the axis


def run_turns(options: TurnOptions) -> str:
    """Judge dialogues turn by turn and report on it; returns the table, or a dry run's estimate."""
    rates, output, line = judge_turns(options)
    if rates is None:
        return line
    name = output.name.removesuffix(".jsonl")
    return f"{write_turns([rates], output.parent, name, {})}\n{line}, and in the same folder {name}.md, .json and .png"


def turns_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Write `report.json`, `report.md` and `report.png` on finished files of verdicts; returns the tables.

    Args:
        files: verdicts by turn, one comparison each.
        output_dir: folder of the report.
        dataset: data set whose prompts the dialogues begin with.
    """
    comparisons = [rates_by_turn(read_rows(file, FILE)) for file in files]
    return write_turns(comparisons, output_dir, NAME, published_rates(dataset))


def write_turns(comparisons: Sequence[TurnRates], folder: Path, name: str, published: Published) -> str:
    """Write name.json, name.md and name.png into a folder; returns the tables. Raises UserError if it cannot."""
    published_rows = {}
    for title, rates in published.items():
        published_rows[title] = {"turns": rates, "mean": published_mean(rates)}
    content = {
        "intervals": BOOTSTRAP,
        "comparisons": [_comparison_row(rates) for rates in comparisons],
        "published against Llama-3-8B-it, not measured here": published_rows,
    }
    tables = [
        _turn_table("win rate of the first, in %", comparisons, lambda rates: rates.half),
        _turn_table("wins – ties – losses – invalid", comparisons, _counts),
    ]
    if published:
        tables.append(_published_table(published))
    report = Report("", tables, remarks=[REMARK])
    return write_report(folder, name, content, report, lambda: draw_turns(comparisons, published))


def _comparison_row(rates: TurnRates) -> dict[str, Any]:
    model_a, model_b = rates.models
    return {
        "model_a": model_a,
        "model_b": model_b,
        "rater": rates.rater,
        "turns": {str(turn): at_turn for turn, at_turn in rates.turns.items()},
        "all": rates.overall,
    }


def _all_turns(comparisons: Sequence[TurnRates]) -> list[int]:
    return sorted(set().union(*(rates.turns for rates in comparisons)))


def _turn_table(header: str, comparisons: Sequence[TurnRates], cell_of: Callable[[WinRates], object]) -> Table:
    """Table with a row for each comparison, a column for each turn and one for all turns."""
    all_turns = _all_turns(comparisons)
    rows = []
    for rates in comparisons:
        row: list[object] = [rates.title]
        for turn in all_turns:
            row.append(cell_of(rates.turns[turn]) if turn in rates.turns else None)
        row.append(cell_of(rates.overall))
        rows.append(row)
    headers = [header, *(f"turn {turn}" for turn in all_turns), "all turns"]
    return Table(headers, rows)


def _counts(rates: WinRates) -> str:
    tally = rates.tally
    return f"{tally.wins} – {tally.ties} – {tally.losses} – {tally.invalid}"


def _published_table(published: Published) -> Table:
    rows = []
    for title, rates in published.items():
        rows.append([title, *(f"{rate:.1f}" for rate in rates), f"{published_mean(rates):.2f}"])
    title = "published, against Llama-3-8B-it; not measured here"
    return Table([title, *(f"turn {turn}" for turn in range(1, 6)), "mean"], rows)


def draw_turns(comparisons: Sequence[TurnRates], published: Published) -> bytes:
    """Draw a line with intervals for each comparison, and thin grey ones for published rates, as PNG."""
    lines = []
    for number, rates in enumerate(comparisons):
        offset = TURNS_APART * offset_of(number, len(comparisons))
        x = []
        y = []
        for turn, at_turn in rates.turns.items():
            if at_turn.half is not None:
                x.append(turn + offset)
                y.append(at_turn.half.per_cent)
        lines.append(Curve(x, y, look_of(number, legend_label(rates.title))))
    for dash, (title, turn_rates) in zip(DASHES, published.items(), strict=False):
        look = {"color": GREY, "linestyle": dash, "linewidth": 1.1, "zorder": 1}
        look["label"] = f"published, against Llama-3-8B-it: {title}"
        lines.append(Curve(range(1, len(turn_rates) + 1), turn_rates, look))
    last_turn = max([*_all_turns(comparisons), *map(len, published.values())])
    chart = Chart(
        "Win rate by turn",
        "turn",
        "win rate of the first, %, 95 % interval over dialogues",
        lines,
        levels=[(50, {"color": INK, "linewidth": 0.8})],
        ticks={turn: str(turn) for turn in range(1, last_turn + 1)},
        legend="below",
    )
    return draw_charts([chart], (9, 5.4))
