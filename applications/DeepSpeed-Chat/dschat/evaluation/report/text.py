# SPDX-License-Identifier: Apache-2.0
"""An evaluation report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dschat.common.statistics import Rate
from dschat.common.tables import text_table, text_width
from dschat.evaluation.report.agreement import Agreement, GroupAgreement
from dschat.evaluation.report.results import Means, RaterResult, SectionResult

NONE = "–"
REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."


def report_text(sections: Sequence[SectionResult], margin: float) -> str:
    """The tables of all sections and how to read them.

    Args:
        sections: at least one.
        margin: rewards that differ by no more were a tie.
    """
    remarks = list(REMARKS)
    if any(rater.pooled for section in sections for rater in section.raters):
        remarks.append(POOLED)
    if any(section.rewards for section in sections):
        remarks.append(f"Reward model: the higher reward wins; a difference of no more than {margin:g} is a tie.")
    return "\n\n".join([*map(_section_text, sections), "\n".join(remarks)]) + "\n"


def _section_text(section: SectionResult) -> str:
    first, second = section.names
    dataset = f", {section.dataset}" if section.dataset else ""
    title = f"{first} against {second}{dataset}: {section.characters.items} items"
    parts = [
        f"{title}\n{'=' * text_width(title)}\nwin: {first} is better; loss: {second} is better",
        _counts(section.raters),
        _rates(section.raters),
        *_length_remarks(section.raters),
        _means(section),
        *_aspects(section.raters),
        *_positions(section.raters),
        *_agreements(section),
        *_groups(section.groups),
    ]
    return "\n\n".join(parts)


def _counts(raters: Sequence[RaterResult]) -> str:
    rows = []
    for rater in raters:
        tally = rater.rates.tally
        numbers = (rater.items, tally.given, tally.counted, tally.wins, tally.ties, tally.losses)
        rows.append([rater.label, *map(str, (*numbers, tally.invalid, tally.skipped))])
    headers = ["rater", "items", "verdicts", "counted", "win", "tie", "loss", "invalid", "skipped"]
    return text_table(headers, rows)


def _rates(raters: Sequence[RaterResult]) -> str:
    rows = []
    for rater in raters:
        rates = (rater.rates.win, rater.rates.tie, rater.rates.loss, rater.rates.half, rater.length.rate)
        rows.append([rater.label, *map(_rate, rates)])
    return text_table(["in %", "win", "tie", "loss", "win + ½ tie", "at equal length"], rows)


def _length_remarks(raters: Sequence[RaterResult]) -> list[str]:
    remarks = [f"At equal length, {rater.label}: {rater.length.remark}." for rater in raters if rater.length.remark]
    return ["\n".join(remarks)] if remarks else []


def _aspects(raters: Sequence[RaterResult]) -> list[str]:
    rows = [
        [
            f"{rater.label}: {name}",
            str(rates.tally.counted),
            *map(_rate, (rates.win, rates.tie, rates.loss, rates.half)),
        ]
        for rater in raters
        for name, rates in rater.aspects.items()
    ]
    return [text_table(["by criterion, in %", "counted", "win", "tie", "loss", "win + ½ tie"], rows)] if rows else []


def _positions(raters: Sequence[RaterResult]) -> list[str]:
    rows = [
        [
            rater.label,
            str(rater.position.both_orders),
            _rate(rater.position.consistent),
            str(rater.position.decided),
            _rate(rater.position.first_place),
        ]
        for rater in raters
        if rater.position is not None
    ]
    headers = ["place, in %", "items in both orders", "same verdict in both", "wins by place", "of first place"]
    return [text_table(headers, rows)] if rows else []


def _agreements(section: SectionResult) -> list[str]:
    """Where there are several people, their majority stands for them beside judges and the reward model."""
    people = {rater.label for rater in section.raters if rater.kind == "human" and not rater.pooled}
    shown = [one for one in section.agreements if len(people) < 2 or len(people.intersection(one.raters)) != 1]
    rows = [
        [" – ".join(one.raters), str(one.items), _rate(one.same), _kappa(one.kappa), _decided(one)] for one in shown
    ]
    headers = ["agreement, in %", "common items", "same verdict", "Cohen's κ", "same where decided"]
    tables = [text_table(headers, rows)] if rows else []
    if len(shown) < len(section.agreements):
        tables.append("Each person by themselves against judges and reward model: report.json.")
    return tables


def _decided(one: Agreement) -> str:
    return NONE if one.same_decided is None else f"{100 * one.same_decided.value:.1f} of {one.decided}"


def _groups(groups: Sequence[GroupAgreement]) -> list[str]:
    rows = [
        [
            f"{group.name} ({len(group.raters)})",
            str(group.items),
            NONE if group.same is None else f"{100 * group.same:.1f}",
            NONE if group.kappa is None else f"{group.kappa:.2f}",
        ]
        for group in groups
    ]
    return (
        [text_table(["agreement of groups, in %", "common items", "same verdict", "Fleiss' κ"], rows)] if rows else []
    )


def _means(section: SectionResult) -> str:
    first, second = section.names
    rows = [_means_row("characters", section.characters, 1), _means_row("words", section.words, 1)]
    if section.rewards is not None:
        rows.append(_means_row("reward", section.rewards, 3))
    return text_table(["mean ± standard error", first, second, "difference", "items"], rows)


def _means_row(name: str, means: Means, digits: int) -> list[str]:
    estimates = (means.first, means.second, means.difference)
    return [name, *(estimate.text(digits) for estimate in estimates), str(means.items)]


def _rate(rate: Rate | None) -> str:
    return NONE if rate is None else rate.text()


def _kappa(rate: Rate | None) -> str:
    if rate is None:
        return NONE
    if rate.low is None or rate.high is None:
        return f"{rate.value:.2f}"
    return f"{rate.value:.2f} [{rate.low:.2f}, {rate.high:.2f}]"
