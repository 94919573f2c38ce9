# SPDX-License-Identifier: Apache-2.0
"""An evaluation report as tables for a terminal."""

from collections.abc import Sequence

from dschat.common.display import text_table, text_width
from dschat.common.statistics import Rate, Tally, WinRates
from dschat.evaluation.report.results import SectionResult

NONE = "–"
REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."


def report_text(sections: Sequence[SectionResult], margin: float) -> str:
    """The tables of all sections and how to read them; rewards that differ by no more than the margin were a tie."""
    remarks = list(REMARKS)
    if any(rater.pooled for section in sections for rater in section.raters):
        remarks.append(POOLED)
    if any(section.means["reward"] for section in sections):
        remarks.append(f"Reward model: the higher reward wins; a difference of no more than {margin:g} is a tie.")
    return "\n\n".join([*map(_section_text, sections), "\n".join(remarks)]) + "\n"


def _section_text(section: SectionResult) -> str:
    first, second = section.names
    dataset = f", {section.dataset}" if section.dataset else ""
    title = f"{first} against {second}{dataset}: {section.items} items"
    raters = section.raters
    remarks = [(rater.rater, rater.length_controlled.remark) for rater in raters]
    aspects = [(f"{rater.rater}: {name}", rates) for rater in raters for name, rates in rater.aspects.items()]
    places = [(rater.rater, rater.position) for rater in raters if rater.position is not None]
    parts = [
        f"{title}\n{'=' * text_width(title)}\nwin: {first} is better; loss: {second} is better",
        _table(
            ["rater", "items", "verdicts", "counted", "win", "tie", "loss", "invalid", "skipped"],
            [[rater.rater, rater.items, *_counts(rater.rates.tally)] for rater in raters],
        ),
        _table(
            ["in %", "win", "tie", "loss", "win + ½ tie", "at equal length"],
            [[rater.rater, *_shares(rater.rates), _rate(rater.length_controlled.rate)] for rater in raters],
        ),
        "\n".join(f"At equal length, {rater}: {remark}." for rater, remark in remarks if remark),
        _means(section),
        _table(
            ["by criterion, in %", "counted", "win", "tie", "loss", "win + ½ tie"],
            [[name, rates.tally.counted, *_shares(rates)] for name, rates in aspects],
        ),
        _table(
            ["place, in %", "items in both orders", "same verdict in both", "wins by place", "of first place"],
            [[name, p.both_orders, _rate(p.consistent), p.decided, _rate(p.first_place)] for name, p in places],
        ),
        _agreements(section),
        _groups(section),
    ]
    return "\n\n".join(part for part in parts if part)


def _agreements(section: SectionResult) -> str:
    """Where there are several people, their majority stands for them beside judges and the reward model."""
    people = {rater.rater for rater in section.raters if rater.kind == "human" and not rater.pooled}
    shown = [one for one in section.agreement if len(people) < 2 or len(people.intersection(one.raters)) != 1]
    rows = []
    for one in shown:
        decided = NONE if one.same_decided is None else f"{100 * one.same_decided.value:.1f} of {one.decided}"
        rows.append([" – ".join(one.raters), one.items, _rate(one.same), _kappa(one.kappa), decided])
    table = _table(["agreement, in %", "common items", "same verdict", "Cohen's κ", "same where decided"], rows)
    if len(shown) < len(section.agreement):
        return f"{table}\n\nEach person by themselves against judges and reward model: report.json."
    return table


def _groups(section: SectionResult) -> str:
    rows = []
    for group in section.group_agreement:
        same = NONE if group.same is None else f"{100 * group.same:.1f}"
        kappa = NONE if group.kappa is None else f"{group.kappa:.2f}"
        rows.append([f"{group.name} ({len(group.raters)})", group.items, same, kappa])
    return _table(["agreement of groups, in %", "common items", "same verdict", "Fleiss' κ"], rows)


def _means(section: SectionResult) -> str:
    rows = []
    for name, means in section.means.items():
        if means is not None:
            digits = 3 if name == "reward" else 1
            estimates = (means.first, means.second, means.difference)
            rows.append([name, *(estimate.text(digits) for estimate in estimates), means.items])
    return _table(["mean ± standard error", *section.names, "difference", "items"], rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; nothing where there are no rows."""
    return text_table(headers, [list(map(str, row)) for row in rows]) if rows else ""


def _counts(tally: Tally) -> list[int]:
    return [tally.given, tally.counted, tally.wins, tally.ties, tally.losses, tally.invalid, tally.skipped]


def _shares(rates: WinRates) -> list[str]:
    return [_rate(rate) for rate in (rates.win, rates.tie, rates.loss, rates.half)]


def _rate(rate: Rate | None) -> str:
    return NONE if rate is None else rate.text()


def _kappa(rate: Rate | None) -> str:
    if rate is None:
        return NONE
    if rate.low is None or rate.high is None:
        return f"{rate.value:.2f}"
    return f"{rate.value:.2f} [{rate.low:.2f}, {rate.high:.2f}]"
