# SPDX-License-Identifier: Apache-2.0
"""The report on verdicts of judges, people and reward models: which of two models is better, how surely."""

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.pictures import short
from dschat.base.statistics import BOOTSTRAP, Rate, Tally, WinRates
from dschat.lab.chart import INK, LOSS, NO_DIFFERENCE, TIE, WIN, Bar, Bars, Look, draw_bars
from dschat.lab.page import NAME, OUTPUT, Report, Table, write_report
from dschat.lab.results import RaterResult, SectionResult, section_result
from dschat.lab.votes import read_votes, sections_of

REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."
HALF: Look = {"marker": "D", "markerfacecolor": "white", "markersize": 7}
EQUAL_LENGTH: Look = {"marker": "o", "markerfacecolor": INK, "markersize": 7}


def build_evaluation_report(
    files: Sequence[Path], output_dir: Path, reward_margin: float = 0.0, dataset: str = ""
) -> Report:
    """Writes `report.json` and `report.png`; `.text()` of what it returns is the table for the terminal.

    The files are of verdicts and of responses with rewards (`dschat.lab.responses`), in any mixture and order.
    Rewards that differ by no more than the margin are a tie; `dataset` is that of the files that name none.
    """
    if not files:
        raise UserError("A report needs at least one file of verdicts, or two of responses with rewards.")
    if not (math.isfinite(reward_margin) and reward_margin >= 0):
        raise UserError(f"--reward_margin {reward_margin}: must be 0 or more.")
    paths = [Path(file) for file in files]
    sections = [section_result(each) for each in sections_of(read_votes(paths, reward_margin), reward_margin, dataset)]
    content = {"files": [str(file) for file in paths], "reward_margin": reward_margin, "intervals": BOOTSTRAP}
    content["sections"] = [_section_row(section) for section in sections]
    write_report(output_dir, NAME, content, picture=draw_comparisons(sections), flag=OUTPUT)
    remarks = list(REMARKS)
    if any(rater.pooled for section in sections for rater in section.raters):
        remarks.append(POOLED)
    if any(section.means["reward"] for section in sections):
        tie = f"a difference of no more than {reward_margin:g} is a tie."
        remarks.append(f"Reward model: the higher reward wins; {tie}")
    return Report("", [table for section in sections for table in _section_tables(section)], remarks=remarks)


def draw_comparisons(sections: Sequence[SectionResult]) -> bytes:
    """One panel per section (at least one) below each other, as PNG."""
    panels = []
    for section in sections:
        first, second = (short(name) for name in section.names)
        dataset = f" · {section.dataset}" if section.dataset else ""
        title = f"{first} against {second}{dataset} · {section.items} items"
        panels.append(Bars(title, list(map(_bar, section.raters))))
    first, second = sections[0].names if len(sections) == 1 else ("the first model", "the second model")
    whisker: Look = {"color": INK, "linewidth": 1.8}
    legend: list[tuple[str, str] | Look] = [
        (WIN[0], f"win of {short(first)}"),
        (TIE[0], "tie"),
        (LOSS[0], f"win of {short(second)}"),
        {**whisker, "label": "win + ½ tie, 95 % interval", **HALF},
        {**whisker, "label": "the same at equal length, 95 % interval", **EQUAL_LENGTH},
        {"label": "no difference", **NO_DIFFERENCE},
    ]
    return draw_bars(panels, legend)


def _bar(rater: RaterResult) -> Bar:
    rates, at_equal_length = rater.rates, rater.length_controlled.rate
    label = f"{short(rater.rater)}\nn = {rates.tally.counted}{_aside(rates.tally)}"
    shares = [rate.per_cent for rate in (rates.win, rates.tie, rates.loss) if rate is not None]
    if rates.half is None:
        return Bar(label, [])
    over = [(rates.half.per_cent, -0.12, HALF)]
    return Bar(label, shares, [*over, *([(at_equal_length.per_cent, 0.42, EQUAL_LENGTH)] if at_equal_length else [])])


def _aside(tally: Tally) -> str:
    parts = ((tally.invalid, "invalid"), (tally.skipped, "skipped"))
    return "".join(f", {number} {word}" for number, word in parts if number)


def _section_tables(section: SectionResult) -> list[Table]:
    first, second = section.names
    dataset = f", {section.dataset}" if section.dataset else ""
    raters = section.raters
    lengths = [(rater.rater, rater.length_controlled) for rater in raters]
    remarks = [f"At equal length, {rater}: {length.remark}." for rater, length in lengths if length.remark]
    aspects = [(f"{rater.rater}: {name}", rates) for rater in raters for name, rates in rater.aspects.items()]
    places = [
        [rater.rater, place.both_orders, place.consistent, place.decided, place.first_place]
        for rater in raters
        if (place := rater.position) is not None
    ]
    tables = [
        Table(
            ["rater", "items", "verdicts", "counted", "win", "tie", "loss", "invalid", "skipped"],
            [[r.rater, r.items, r.rates.tally.given, r.rates.tally.counted, *astuple(r.rates.tally)] for r in raters],
            heading=f"{first} against {second}{dataset}: {section.items} items",
            caption=f"win: {first} is better; loss: {second} is better",
        ),
        Table(
            ["in %", "win", "tie", "loss", "win + ½ tie", "at equal length"],
            [[r.rater, *_shares(r.rates), r.length_controlled.rate] for r in raters],
            note="\n".join(remarks),
        ),
        _means(section),
        Table(
            ["by criterion, in %", "counted", "win", "tie", "loss", "win + ½ tie"],
            [[name, rates.tally.counted, *_shares(rates)] for name, rates in aspects],
        ),
        Table(
            ["place, in %", "items in both orders", "same verdict in both", "wins by place", "of first place"],
            places,
        ),
        _agreements(section),
        _groups(section),
    ]
    return [table for table in tables if table.rows]


def _section_row(section: SectionResult) -> dict[str, Any]:
    """A section as JSON; `a` is the first model, `win` its win."""
    row = asdict(section)
    model_a, model_b = row.pop("models")
    return {"model_a": model_a, "model_b": model_b, **row, "raters": [_rater_row(rater) for rater in section.raters]}


def _rater_row(rater: RaterResult) -> dict[str, Any]:
    row = asdict(rater)
    del row["rates"]
    aspects = {name: _rates_row(rates) for name, rates in rater.aspects.items()}
    return row | _rates_row(rater.rates) | {"aspects": aspects}


def _rates_row(rates: WinRates) -> dict[str, Any]:
    shares = asdict(rates)
    counts = shares.pop("tally")
    return {"verdicts": rates.tally.given, "counted": rates.tally.counted, "counts": counts, "rates": shares}


def _agreements(section: SectionResult) -> Table:
    """Where there are several people, their majority stands for them beside judges and the reward model."""
    people = {rater.rater for rater in section.raters if rater.kind == "human" and not rater.pooled}
    shown = [one for one in section.agreement if len(people) < 2 or len(people.intersection(one.raters)) != 1]
    rows = []
    for one in shown:
        decided = one.same_decided and f"{100 * one.same_decided.value:.1f} of {one.decided}"
        rows.append([" – ".join(one.raters), one.items, one.same, one.kappa and one.kappa.text(2), decided])
    less = "Each person by themselves against judges and reward model: report.json."
    head = ["agreement, in %", "common items", "same verdict", "Cohen's κ", "same where decided"]
    return Table(head, rows, note=less if len(shown) < len(section.agreement) else "")


def _groups(section: SectionResult) -> Table:
    rows = []
    for group in section.group_agreement:
        same = None if group.same is None else Rate(group.same)
        kappa = None if group.kappa is None else f"{group.kappa:.2f}"
        rows.append([f"{group.name} ({len(group.raters)})", group.items, same, kappa])
    return Table(["agreement of groups, in %", "common items", "same verdict", "Fleiss' κ"], rows)


def _means(section: SectionResult) -> Table:
    rows = []
    for name, means in section.means.items():
        if means is not None:
            digits = 3 if name == "reward" else 1
            estimates = (means.first, means.second, means.difference)
            rows.append([name, *(estimate.text(digits) for estimate in estimates), means.items])
    return Table(["mean ± standard error", *section.names, "difference", "items"], rows)


def _shares(rates: WinRates) -> list[object]:
    return [rates.win, rates.tie, rates.loss, rates.half]
