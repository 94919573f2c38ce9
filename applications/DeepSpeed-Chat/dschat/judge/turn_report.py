# SPDX-License-Identifier: Apache-2.0
"""The report on win rates by turn: `dschat judge-turns`, and `dschat report` on its files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat.base.jsonl import read_rows
from dschat.base.pictures import legend_labels
from dschat.base.statistics import INTERVALS, WinRates
from dschat.evaluation.chart import INK, Chart, Curve, draw_charts, look_of, offset_of
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Report, Table, write_report
from dschat.evaluation.responses import FILE_FLAG
from dschat.judge.command import judge_turns
from dschat.judge.options import TurnOptions
from dschat.judge.turn_pairs import TurnRates, rates_by_turn

REMARK = (
    "Win rate of the first policy in per cent: (wins + ½ ties) / (wins + ties + losses). Brackets: 95 % interval, "
    "bootstrap over dialogues; absent if resampling shows no spread. All turns: every verdict has equal weight."
)
TURNS_APART = 0.06  # offset of neighbouring curves along the axis


def run_turns(options: TurnOptions) -> str:
    """Judge dialogues turn by turn and report on it; returns the table, or a dry run's estimate."""
    rates, output, summary = judge_turns(options)
    if rates is None:
        return summary
    name = output.name.removesuffix(".jsonl")
    tables = write_turns([rates], [output], output.parent, name)
    return f"{tables}\n{summary}; report: {output.parent / name}.md"


def turns_report(files: Sequence[Path], output_dir: Path) -> str:
    """Write `report.json`, `report.md` and `report.png` on finished files of verdicts; returns the tables.

    Args:
        files: verdicts by turn, one comparison each.
        output_dir: folder of the report.

    Raises:
        UserError: a file is not verdicts by turn on one comparison; or the report cannot be written.
    """
    comparisons = [rates_by_turn(read_rows(file, FILE_FLAG)) for file in files]
    return write_turns(comparisons, files, output_dir, REPORT_NAME)


def write_turns(comparisons: Sequence[TurnRates], files: Sequence[Path], folder: Path, name: str) -> str:
    """Write name.json, name.md and name.png into a folder; returns the tables.

    Several comparisons are numbered, in tables and chart, in the order of their files.

    Raises:
        UserError: a file cannot be written.
    """
    content = {
        "files": list(map(str, files)),
        "intervals": INTERVALS,
        "comparisons": [_comparison_row(rates) for rates in comparisons],
    }
    by_title = {rates.title: rates for rates in comparisons}
    if len(comparisons) > 1:
        by_title = {f"{number}: {rates.title}": rates for number, rates in enumerate(comparisons, start=1)}
    tables = [
        _turn_table("win rate of the first, in %", by_title, lambda rates: rates.half),
        _turn_table("wins – ties – losses – invalid", by_title, _counts),
    ]
    report = Report("", tables, remarks=[REMARK])
    return write_report(folder, name, content, report, lambda: draw_turns(by_title), OUTPUT)


def _comparison_row(rates: TurnRates) -> dict[str, Any]:
    model_a, model_b = rates.models
    return {
        "model_a": model_a,
        "model_b": model_b,
        "rater": rates.rater,
        "turns": {str(turn): at_turn for turn, at_turn in rates.turns.items()},
        "all": rates.overall,
    }


def _all_turns(comparisons: Mapping[str, TurnRates]) -> list[int]:
    return sorted(set().union(*(rates.turns for rates in comparisons.values())))


def _turn_table(header: str, comparisons: Mapping[str, TurnRates], cell_of: Callable[[WinRates], object]) -> Table:
    """Table with a row for each comparison, a column for each turn and one for all turns."""
    all_turns = _all_turns(comparisons)
    rows = []
    for title, rates in comparisons.items():
        row: list[object] = [title]
        for turn in all_turns:
            row.append(cell_of(rates.turns[turn]) if turn in rates.turns else None)
        row.append(cell_of(rates.overall))
        rows.append(row)
    headers = [header, *(f"turn {turn}" for turn in all_turns), "all turns"]
    return Table(headers, rows)


def _counts(rates: WinRates) -> str:
    tally = rates.tally
    return f"{tally.wins} – {tally.ties} – {tally.losses} – {tally.invalid}"


def draw_turns(comparisons: Mapping[str, TurnRates]) -> bytes:
    """Draw a curve with intervals for each comparison, by its title, as PNG."""
    labels = legend_labels(list(comparisons))
    curves = []
    for number, (label, rates) in enumerate(zip(labels, comparisons.values(), strict=True)):
        offset = TURNS_APART * offset_of(number, len(comparisons))
        x = []
        y = []
        for turn, at_turn in rates.turns.items():
            if at_turn.half is not None:
                x.append(turn + offset)
                y.append(at_turn.half.per_cent)
        curves.append(Curve(x, y, look_of(number, label)))
    chart = Chart(
        "Win rate by turn",
        "turn",
        "win rate of the first, %, 95 % interval over dialogues",
        curves,
        levels=[(50, {"color": INK, "linewidth": 0.8})],
        ticks={turn: str(turn) for turn in _all_turns(comparisons)},
        legend="below",
    )
    return draw_charts([chart], (9, 5.4))
