# SPDX-License-Identifier: Apache-2.0
"""The report on verdicts of judges, people and reward models: which of two models is better, and how certain it is."""

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.pictures import short
from dschat.base.statistics import INTERVALS, Rate, Tally, WinRates
from dschat.evaluation.chart import INK, Chart, Curve, Look, draw_charts, offset_of
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Report, Table, write_report
from dschat.evaluation.results import SectionResult, section_result
from dschat.evaluation.votes import read_votes, sections_of

REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."
# Looks of the two estimates of a rater in the picture.
HALF: Look = {"label": "wins + ½ ties", "marker": "D", "markerfacecolor": "white"}
EQUAL_LENGTH: Look = {"label": "the same at equal length", "marker": "o"}
ESTIMATE: Look = {"color": INK, "linestyle": "none", "markersize": 7}
NO_DIFFERENCE: Look = {"label": "no difference", "color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}


def build_evaluation_report(
    files: Sequence[Path], output_dir: Path, reward_margin: float = 0.0, dataset: str = ""
) -> Report:
    """Write `report.json` and `report.png`; `.text()` of the returned report is the table for the terminal.

    Args:
        files: verdicts and responses with rewards (`dschat.evaluation.responses`), in any mixture and order.
        output_dir: folder of the report.
        reward_margin: rewards that differ by no more than this are a tie.
        dataset: data set of the files that name none.
    """
    if not files:
        raise UserError("A report needs at least one file of verdicts, or two of responses with rewards.")
    paths = list(map(Path, files))
    votes = read_votes(paths, reward_margin)
    sections = list(map(section_result, sections_of(votes, dataset)))
    content = {
        "files": list(map(str, paths)),
        "reward_margin": reward_margin,
        "intervals": INTERVALS,
        "sections": list(map(_section_row, sections)),
    }
    write_report(output_dir, REPORT_NAME, content, draw=lambda: draw_comparisons(sections), flag=OUTPUT)

    tables: list[Table] = []
    remarks = list(REMARKS)
    for section in sections:
        tables += _section_tables(section)
    if any(rater["pooled"] for section in sections for rater in section.raters):
        remarks.append(POOLED)
    if any(section.means["reward"] is not None for section in sections):
        tie = f"a difference of at most {reward_margin:g} is a tie."
        remarks.append(f"Reward model: the higher reward wins; {tie}")
    return Report("", tables, remarks=remarks)


def draw_comparisons(sections: Sequence[SectionResult]) -> bytes:
    """Draw the win rates of each section's raters with their intervals, sections (at least one) below each other."""
    charts = list(map(_chart, sections))
    return draw_charts(charts, (11, 4.4 * len(charts)), below=True)


def _chart(section: SectionResult) -> Chart:
    first, second = section.names
    dataset = f" · {section.dataset}" if section.dataset else ""
    ticks: dict[float, str] = {}
    for number, rater in enumerate(section.raters):
        tally = rater["rates"].tally
        ticks[number] = f"{short(rater['rater'])}\nn = {tally.counted}{_uncounted(tally)}"
    lines = []
    for number, look in enumerate((HALF, EQUAL_LENGTH)):
        x = []
        y = []
        for position, rater in enumerate(section.raters):
            rate = rater["rates"].half if look is HALF else rater["length_controlled"].rate
            if rate is not None:
                x.append(position + 0.12 * offset_of(number, 2))
                y.append(rate.per_cent)
        lines.append(Curve(x, y, {**ESTIMATE, **look}))
    return Chart(
        f"{short(first)} against {short(second)}{dataset} · {section.items} items",
        "",
        f"% for {short(first)}, 95 % interval",
        lines,
        levels=[(50, NO_DIFFERENCE)],
        ticks=ticks,
        legend="inside",
    )


def _uncounted(tally: Tally) -> str:
    text = f", {tally.invalid} invalid" if tally.invalid else ""
    if tally.skipped:
        text += f", {tally.skipped} skipped"
    return text


def _section_row(section: SectionResult) -> dict[str, Any]:
    """Section of report.json; `a` is the first model, `win` its win."""
    row = dict(vars(section))
    model_a, model_b = row.pop("models")
    raters = []
    for rater in section.raters:
        aspects = {name: _rates_row(rates) for name, rates in rater["aspects"].items()}
        raters.append(rater | {"aspects": aspects} | _rates_row(rater["rates"]))
    return {"model_a": model_a, "model_b": model_b} | row | {"raters": raters}


def _rates_row(rates: WinRates) -> dict[str, Any]:
    tally = rates.tally
    shares = {"win": rates.win, "tie": rates.tie, "loss": rates.loss, "half": rates.half}
    return {"verdicts": tally.total, "counted": tally.counted, "counts": tally, "rates": shares}


def _section_tables(section: SectionResult) -> list[Table]:
    """Tables of a section that have rows."""
    tables = [
        _counts(section),
        _shares(section),
        _means(section),
        _aspects(section),
        _positions(section),
        _agreements(section),
        _group_agreements(section),
    ]
    return [table for table in tables if table.rows]


def _counts(section: SectionResult) -> Table:
    first, second = section.names
    dataset = f", {section.dataset}" if section.dataset else ""
    rows = []
    for rater in section.raters:
        tally = rater["rates"].tally
        counts = [rater["items"], tally.total, tally.counted, *astuple(tally)]
        rows.append([rater["rater"], *counts])
    return Table(
        ["rater", "items", "verdicts", "counted", "win", "tie", "loss", "invalid", "skipped"],
        rows,
        heading=f"{first} against {second}{dataset}: {section.items} items",
        caption=f"win: {first} is better; loss: {second} is better",
    )


def _shares(section: SectionResult) -> Table:
    rows = []
    remarks = []
    for rater in section.raters:
        rates = rater["rates"]
        at_equal_length = rater["length_controlled"]
        shares = [rates.win, rates.tie, rates.loss, rates.half]
        rows.append([rater["rater"], *shares, at_equal_length.rate])
        if at_equal_length.remark:
            remarks.append(f"At equal length, {rater['rater']}: {at_equal_length.remark}.")
    return Table(["in %", "win", "tie", "loss", "win + ½ tie", "at equal length"], rows, note="\n".join(remarks))


def _means(section: SectionResult) -> Table:
    rows = []
    for name, means in section.means.items():
        if means is not None:
            digits = 3 if name == "reward" else 1
            first = means["first"].text(digits)
            second = means["second"].text(digits)
            difference = means["difference"].text(digits)
            rows.append([name, first, second, difference, means["items"]])
    return Table(["mean ± standard error", *section.names, "difference", "items"], rows)


def _aspects(section: SectionResult) -> Table:
    rows = []
    for rater in section.raters:
        for name, rates in rater["aspects"].items():
            shares = [rates.win, rates.tie, rates.loss, rates.half]
            rows.append([f"{rater['rater']}: {name}", rates.tally.counted, *shares])
    return Table(["by criterion, in %", "counted", "win", "tie", "loss", "win + ½ tie"], rows)


def _positions(section: SectionResult) -> Table:
    rows = []
    for rater in section.raters:
        if rater["position"] is not None:
            rows.append([rater["rater"], *rater["position"].values()])
    return Table(
        ["place, in %", "items in both orders", "same verdict in both", "wins by place", "of first place"], rows
    )


def _agreements(section: SectionResult) -> Table:
    """Agreement of each two raters."""
    rows = []
    for pair in section.agreement:
        kappa = None if pair["kappa"] is None else pair["kappa"].text(2)
        same_decided = pair["same_decided"]
        decided = None if same_decided is None else f"{100 * same_decided.value:.1f} of {pair['decided']}"
        rows.append([" – ".join(pair["raters"]), pair["items"], pair["same"], kappa, decided])
    headers = ["agreement, in %", "common items", "same verdict", "Cohen's κ", "same where decided"]
    return Table(headers, rows)


def _group_agreements(section: SectionResult) -> Table:
    rows = []
    for group in section.group_agreement:
        same = None if group["same"] is None else Rate(group["same"])
        kappa = None if group["kappa"] is None else f"{group['kappa']:.2f}"
        rows.append([f"{group['name']} ({len(group['raters'])})", group["items"], same, kappa])
    return Table(["agreement of groups, in %", "common items", "same verdict", "Fleiss' κ"], rows)
