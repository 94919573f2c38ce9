# SPDX-License-Identifier: Apache-2.0
"""The files of all reports on evaluations, and the tables of verdicts and rewards: who is better, how surely.

The tables of the other reports stand with their numbers: `best_of`, `programs`, `text`, `turns`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from dschat.common.atomic import reporting, write_file
from dschat.common.display import text_table, text_width
from dschat.common.jsonl import read_rows
from dschat.common.statistics import RESAMPLES, MeanInterval, Rate, WinRates
from dschat.data.hub import find_known
from dschat.errors import UserError
from dschat.evaluation.best_of import Sweep, best_of_n, best_of_tables, published_numbers, read_sweep
from dschat.evaluation.pairs import FILE, model_names
from dschat.evaluation.programs import pass_rates, pass_table
from dschat.evaluation.report.plots import draw_best_of, draw_comparisons, draw_texts, draw_turns
from dschat.evaluation.report.results import RaterResult, SectionResult, section_result
from dschat.evaluation.report.votes import read_votes, sections_of
from dschat.evaluation.text import PolicyResult, RewardResult, text_tables, without_nan
from dschat.evaluation.turns import Published, TurnRates, published_mean, published_rates, rates_by_turn, turn_tables

NAME = "report"
OUTPUT = "--output "
BOOTSTRAP = {"level": 0.95, "bootstrap_resamples": RESAMPLES}
NONE = "–"
REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."


@dataclass(frozen=True)
class EvaluationReport:
    """What files of verdicts and of scored responses say."""

    files: list[Path]
    margin: float  # rewards that differ by no more were a tie
    sections: list[SectionResult]  # one per pair of models and data set

    def text(self) -> str:
        """The tables for a terminal, and how to read them."""
        remarks = list(REMARKS)
        if any(rater.pooled for section in self.sections for rater in section.raters):
            remarks.append(POOLED)
        if any(section.means["reward"] for section in self.sections):
            remarks.append(
                f"Reward model: the higher reward wins; a difference of no more than {self.margin:g} is a tie."
            )
        return "\n\n".join([*map(_section_text, self.sections), "\n".join(remarks)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON can hold them: what is not defined is null."""
        return {
            "files": [str(file) for file in self.files],
            "reward_margin": self.margin,
            "intervals": BOOTSTRAP,
            "sections": [_section_row(section) for section in self.sections],
        }


def build_evaluation_report(
    files: Sequence[Path], output_dir: Path, reward_margin: float = 0.0, dataset: str = ""
) -> EvaluationReport:
    """Writes `report.json` and `report.png`; `.text()` of what it returns is the table for the terminal.

    The files are of verdicts and of responses with rewards (`dschat.evaluation.pairs`), in any mixture and order.
    Rewards that differ by no more than the margin are a tie; `dataset` is that of the files that name none.
    """
    if not files:
        raise UserError("A report needs at least one file of verdicts, or two of responses with rewards.")
    if not (math.isfinite(reward_margin) and reward_margin >= 0):
        raise UserError(f"--reward_margin {reward_margin}: must be 0 or more.")
    paths = [Path(file) for file in files]
    sections = sections_of(read_votes(paths, reward_margin), reward_margin, dataset)
    report = EvaluationReport(paths, reward_margin, [section_result(section) for section in sections])
    write_report(output_dir, NAME, report.to_json(), picture=draw_comparisons(report.sections), flag=OUTPUT)
    return report


def best_of_report(files: Sequence[Path], numbers: Sequence[int] | None, output_dir: Path) -> str:
    """Writes `report.json`, `report.md` and `report.png` on finished sweeps, one file per model; returns the tables.

    `numbers` of responses to choose from are the published ones that were drawn, and all, where they are None. Raises
    UserError where a file holds something else, other prompts than the first, or fewer responses than they say.
    """
    sweeps = [read_sweep(file, name) for file, name in zip(files, model_names(files), strict=True)]
    for file, sweep in zip(files, sweeps, strict=True):
        if sweep.prompts != sweeps[0].prompts:
            raise UserError(
                f"{file} holds other prompts than {files[0]}: compare sweeps of the same prompts (--dataset, "
                "--data_path, --num_samples of inference/best_of_n.py)."
            )
        if numbers is not None and 1 < sweep.most_draws < max(numbers):
            problem = f"{file} holds {sweep.most_draws} responses to a prompt"
            raise UserError(f"--best_of {max(numbers)}: {problem}; give at most that number.")
    return write_best_of(sweeps, numbers or published_numbers(sweeps), output_dir, NAME)


def write_best_of(sweeps: Sequence[Sweep], numbers: Sequence[int], folder: Path, name: str) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    found = [each for sweep in sweeps for each in best_of_n(sweep, numbers)]
    content = {"intervals": {"level": 0.95, "method": "Student's t over prompts"}, "rows": list(map(asdict, found))}
    return write_report(folder, name, content, best_of_tables(found), draw_best_of(found))


def turns_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Writes `report.json`, `report.md` and `report.png` on finished files of verdicts; returns the tables.

    `dataset` names the set whose prompts the dialogues begin with.
    """
    found = [rates_by_turn(read_rows(file, FILE)) for file in files]
    return write_turns(found, output_dir, NAME, published_rates(dataset))


def write_turns(found: Sequence[TurnRates], folder: Path, name: str, published: Published) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    content = {
        "intervals": BOOTSTRAP,
        "comparisons": [_turns_row(rates) for rates in found],
        "published against Llama-3-8B-it, not measured here": {
            title: {"turns": rates, "mean": published_mean(rates)} for title, rates in published.items()
        },
    }
    return write_report(folder, name, content, turn_tables(found, published), draw_turns(found, published))


def write_text_report(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult], folder: Path) -> str:
    """Writes report.md, report.json and report.png; returns the tables. Raises UserError where it cannot.

    The two are in the order of the table; at least one of them is not empty.
    """
    content = {
        "policies": [asdict(each) | {"perplexity": asdict(each.perplexity)} for each in policies],
        "reward_models": [asdict(each) for each in rewards],
    }
    text = text_tables(policies, rewards)
    write_report(folder, NAME, without_nan(content), f"{text}\n", draw_texts(policies, rewards), OUTPUT)
    return text


def write_pass_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Writes `report.json` with pass@1 and pass@5; returns the table. Raises UserError where that is not possible.

    `dataset` is that of rows that name none.
    """
    known = find_known(dataset)
    found = pass_rates(files, (1, 5), known.name if known else "")
    rows = [
        asdict(each) | {"rates": {f"pass@{k}": rate and asdict(rate) for k, rate in each.rates.items()}}
        for each in found
    ]
    write_report(output_dir, NAME, {"files": [str(file) for file in files], "programs": rows}, flag=OUTPUT)
    return pass_table(found)


def write_report(
    folder: Path, name: str, content: Mapping[str, Any], text: str = "", picture: bytes = b"", flag: str = ""
) -> str:
    """Writes name.json into a folder, name.md and name.png where there is something for them; returns the text.

    Raises UserError, which begins with the flag, where that is not possible.
    """
    numbers = json.dumps(content, indent=1, allow_nan=False) + "\n"
    files: dict[str, str | bytes] = {"json": numbers, "md": text, "png": picture}
    with reporting(f"{flag}{folder}"):
        for ending, inside in files.items():
            if inside:
                write_file(folder / f"{name}.{ending}", inside)
    return text


def _turns_row(rates: TurnRates) -> dict[str, Any]:
    first, second = rates.models
    turns = {str(turn): asdict(each) for turn, each in rates.turns.items()}
    return {"model_a": first, "model_b": second, "rater": rates.rater, "turns": turns, "all": asdict(rates.overall)}


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
            [[r.rater, r.items, r.rates.tally.given, r.rates.tally.counted, *astuple(r.rates.tally)] for r in raters],
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
        same = None if group.same is None else Rate(group.same)
        kappa = None if group.kappa is None else MeanInterval(group.kappa)
        rows.append([f"{group.name} ({len(group.raters)})", group.items, _rate(same), _kappa(kappa)])
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


def _shares(rates: WinRates) -> list[str]:
    return [_rate(rate) for rate in (rates.win, rates.tie, rates.loss, rates.half)]


def _rate(rate: Rate | None) -> str:
    return NONE if rate is None else rate.text()


def _kappa(kappa: MeanInterval | None) -> str:
    return NONE if kappa is None else kappa.text(2)
