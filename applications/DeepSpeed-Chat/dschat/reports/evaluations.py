# SPDX-License-Identifier: Apache-2.0
"""Reports on evaluations: comparisons, the best of N, win rates by turn, pass@k, text metrics; files and tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import matplotlib

from dschat.common.jsonl import read_rows
from dschat.common.pictures import GREY, legend_label, short
from dschat.common.statistics import RESAMPLES, MeanInterval, Rate, Tally, WinRates
from dschat.data.hub import find_known
from dschat.errors import UserError
from dschat.evaluation import programs
from dschat.evaluation.best_of import BestOf, Sweep, best_of_n, published_numbers, read_sweep
from dschat.evaluation.judge.run import judge_turns
from dschat.evaluation.pairs import FILE, model_names
from dschat.evaluation.programs import PassRates, pass_rates
from dschat.evaluation.results import RaterResult, SectionResult, section_result
from dschat.evaluation.text import PolicyResult, RewardResult, without_nan
from dschat.evaluation.turns import Published, TurnRates, published_mean, published_rates, rates_by_turn
from dschat.evaluation.votes import read_votes, sections_of
from dschat.reports.plots import INK, Bar, Bars, Chart, Line, Look, draw_bars, draw_charts, look_of, place_of
from dschat.reports.report import NONE, Report, Table, write_report

NAME = "report"
OUTPUT = "--output "
BOOTSTRAP = {"level": 0.95, "bootstrap_resamples": RESAMPLES}
REMARKS = (
    "Rates are per cent of the verdicts counted: wins, ties and losses, without invalid answers and passes.",
    "[ ] holds 95 %: Wilson's interval for win, tie and loss; a bootstrap over items for win + ½ tie and first place.",
    "At equal length: a logistic regression on tanh of the standardised difference in characters, at difference 0.",
    "κ: 1 is full agreement, 0 what chance gives at the raters' own rates. Decided: neither rater said tie.",
)
POOLED = "All humans: every vote counts, and all intervals are bootstraps over items, whose votes hang together."
BEST_OF = (
    "Mean over the prompts of the reward model's score, with a 95 % interval (Student's t over prompts). All subsets: "
    "the mean over all choices of N of the responses drawn; first N: the best of the first N drawn, as published. "
    "Both estimate the same without bias; the curves show the former, which uses every response for every N and so "
    "varies less from draw to draw."
)
TURNS = (
    "Win rate of the first policy in per cent: wins and half of the ties, of the verdicts counted, without invalid "
    "answers. [ ] holds 95 %: a bootstrap over dialogues. All turns: every verdict counts once, which is the mean of "
    "the turns where each dialogue has all of them."
)
TEXTS = "[ ] holds 95 %, over texts: a percentile bootstrap; of accuracies, Wilson's interval."
# Okabe-Ito: told apart with any colour vision, and by their brightness in print. Behind each what is written on it.
WIN, TIE, LOSS = ("#0072b2", "white"), ("#d9d9d9", INK), ("#e69f00", INK)
HALF: Look = {"marker": "D", "markerfacecolor": "white", "markersize": 7}
EQUAL_LENGTH: Look = {"marker": "o", "markerfacecolor": INK, "markersize": 7}
NO_DIFFERENCE: Look = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}
REWARD = "mean reward, 95 % interval over prompts"
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
DASHES = ("--", ":", "-.")
# How far lines stand apart, along the axis.
APART_IN_DOUBLINGS, APART_IN_TEMPERATURE, APART_IN_TURNS = 0.05, 0.012, 0.06


def build_evaluation_report(
    files: Sequence[Path], output_dir: Path, reward_margin: float = 0.0, dataset: str = ""
) -> Report:
    """Writes `report.json` and `report.png`; `.text()` of what it returns is the table for the terminal.

    The files are of verdicts and of responses with rewards (`dschat.evaluation.pairs`), in any mixture and order.
    Rewards that differ by no more than the margin are a tie; `dataset` is that of the files that name none.
    """
    if not files:
        raise UserError("A report needs at least one file of verdicts, or two of responses with rewards.")
    if not (math.isfinite(reward_margin) and reward_margin >= 0):
        raise UserError(f"--reward-margin {reward_margin}: must be 0 or more.")
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
                "--data-path, --num-samples of inference/best_of_n.py)."
            )
        if numbers is not None and 1 < sweep.most_draws < max(numbers):
            problem = f"{file} holds {sweep.most_draws} responses to a prompt"
            raise UserError(f"--best-of {max(numbers)}: {problem}; give at most that number.")
    return write_best_of(sweeps, numbers or published_numbers(sweeps), output_dir, NAME)


def write_best_of(sweeps: Sequence[Sweep], numbers: Sequence[int], folder: Path, name: str) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    found = [each for sweep in sweeps for each in best_of_n(sweep, numbers)]
    content = {"intervals": {"level": 0.95, "method": "Student's t over prompts"}, "rows": list(map(asdict, found))}
    return _written(folder, name, content, Report("", _best_of_tables(found), remarks=[BEST_OF]), draw_best_of(found))


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
    report = Report("", _turn_tables(found, published), remarks=[TURNS])
    return _written(folder, name, content, report, draw_turns(found, published))


def run_turns(words: Sequence[str], description: str) -> str:
    """Judges dialogues turn by turn and reports on it; returns the table, or a dry run's estimate.

    For the arguments see `dschat.evaluation.judge.run.judge_turns`.
    """
    found, output, line = judge_turns(words, description)
    if found is None:
        return line
    name = output.name.removesuffix(".jsonl")
    return f"{write_turns([found], output.parent, name, {})}\n{line} and beside it {name}.md, .json and .png"


def write_text_report(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult], folder: Path) -> str:
    """Writes report.md, report.json and report.png; returns the tables. Raises UserError where it cannot.

    The two are in the order of the table; at least one of them is not empty.
    """
    content = {
        "policies": [asdict(each) | {"perplexity": asdict(each.perplexity)} for each in policies],
        "reward_models": [asdict(each) for each in rewards],
    }
    tables = [*([_policy_table(policies)] if policies else []), *([_reward_table(rewards)] if rewards else [])]
    report = Report("", tables, remarks=[TEXTS])
    return _written(folder, NAME, without_nan(content), report, draw_texts(policies, rewards), OUTPUT).rstrip("\n")


def write_pass_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Writes `report.json` with pass@1 and pass@5; returns the table. Raises UserError where that is not possible.

    `dataset` is that of rows that name none.
    """
    found = pass_rates(files, (1, 5), known.name if (known := find_known(dataset)) else "")
    rows = [
        asdict(each) | {"rates": {f"pass@{k}": rate and asdict(rate) for k, rate in each.rates.items()}}
        for each in found
    ]
    write_report(output_dir, NAME, {"files": [str(file) for file in files], "programs": rows}, flag=OUTPUT)
    return pass_table(found)


def pass_table(found: Sequence[PassRates]) -> str:
    """The rates in per cent with 95 % intervals; below them, where all are on APPS, what is published."""
    ks = list(found[0].rates)
    rows = [[each.model, each.difficulty, str(each.problems), *map(_rate, each.rates.values())] for each in found]
    tables = [Table(["model", "difficulty", "problems", *(f"pass@{k}, %" for k in ks)], rows)]
    if all(each.dataset == programs.APPS for each in found):
        numbers = programs.NUMBERS | {"all": sum(programs.NUMBERS.values())}
        published = [
            [model, difficulty, str(numbers[difficulty]), *(f"{rates[k][difficulty]:.2f}" for k in (1, 5))]
            for model, rates in programs.PUBLISHED.items()
            for difficulty in numbers
        ]
        title = "published by the paper, not measured here"
        tables.append(Table([title, "difficulty", "problems", "pass@1, %", "pass@5, %"], published))
    return Report("", tables).text().rstrip("\n")


def _written(
    folder: Path, name: str, content: Mapping[str, Any], report: Report, picture: bytes, flag: str = ""
) -> str:
    """Writes name.json, name.md and name.png; returns the tables."""
    text = report.markdown()
    write_report(folder, name, content, text, picture, flag)
    return text


def _best_of_tables(found: Sequence[BestOf]) -> list[Table]:
    """Both estimators: a row for each model and temperature, a column for each N."""
    numbers = sorted({each.n for each in found})
    head = ["model", "temperature", "prompts", "drawn", *(f"N = {n}" for n in numbers)]
    rows: dict[tuple[str, float], list[BestOf]] = {}
    for each in found:
        rows.setdefault((each.model, each.temperature), []).append(each)

    def table(caption: str, mean: Callable[[BestOf], MeanInterval]) -> Table:
        written = []
        for (model, temperature), cells in rows.items():
            means = {each.n: mean(each).text() for each in cells}
            start = [model, f"{temperature:g}", str(cells[0].prompts), str(cells[0].draws)]
            written.append([*start, *(means.get(n, NONE) for n in numbers)])
        return Table(head, written, caption=caption)

    all_subsets = table("Best of N, all subsets", lambda each: each.expected)
    return [all_subsets, table("Best of the first N", lambda each: each.first)]


def draw_best_of(found: Sequence[BestOf]) -> bytes:
    """A chart of the best of N for each model that has several responses, and one of single responses, as PNG."""
    drawn = [each for each in found if each.draws > 1]
    several, models = (list(dict.fromkeys(each.model for each in some)) for some in (drawn, found))
    temperatures = sorted({each.temperature for each in drawn})
    charts = [_against_n(model, [each for each in drawn if each.model == model], temperatures) for model in several]
    lines = []
    for i, model in enumerate(models):
        cells = [each for each in found if each.n == 1 and each.model == model]
        places = [each.temperature + APART_IN_TEMPERATURE * place_of(i, models) for each in cells]
        lines.append(Line(places, [each.expected for each in cells], look_of(i, legend_label(model))))
    charts.append(Chart("A single response", "temperature (0 = greedy)", REWARD, lines, legend="inside"))
    return draw_charts(charts, (5.6 * len(charts), 4.6), level_with_first=len(several))


def _against_n(model: str, found: Sequence[BestOf], temperatures: Sequence[float]) -> Chart:
    """A line for each temperature, from dark for the lowest to bright for the highest."""
    lines = []
    for i, temperature in enumerate(temperatures):
        cells = [each for each in found if each.temperature == temperature]
        if cells:
            shade = matplotlib.colormaps["plasma"](0.85 * i / max(1, len(temperatures) - 1))
            places = [each.n * 2 ** (APART_IN_DOUBLINGS * place_of(i, temperatures)) for each in cells]
            look = {**look_of(i, f"temperature {temperature:g}"), "color": shade}
            lines.append(Line(places, [each.expected for each in cells], look))
    ticks: dict[float, str] = {n: str(n) for n in sorted({each.n for each in found})}
    axes = (f"{short(model)}: best of N", "N, responses to choose from", REWARD)
    return Chart(*axes, lines, ticks=ticks, scale="doubling", legend="inside")


def _turn_tables(found: Sequence[TurnRates], published: Published) -> list[Table]:
    """Win rates and counts of every comparison, and published rates."""
    numbers = sorted({turn for rates in found for turn in rates.turns})
    head = [*(f"turn {turn}" for turn in numbers), "all turns"]
    rates, counts = [], []
    for each in found:
        columns = [*(each.turns.get(turn) for turn in numbers), each.overall]
        rates.append([each.title, *(_rate(None if one is None else one.half) for one in columns)])
        counts.append([each.title, *(_counts(one) for one in columns)])
    last = [*(f"turn {turn}" for turn in range(1, 6)), "mean"]
    others = [
        [title, *(f"{rate:.1f}" for rate in row), f"{published_mean(row):.2f}"] for title, row in published.items()
    ]
    tables = [Table(["win rate of the first, in %", *head], rows=rates)]
    tables.append(Table(["wins – ties – losses – invalid", *head], counts))
    title = "published, against Llama-3-8B-it; not measured here"
    return [*tables, *([Table([title, *last], others)] if others else [])]


def draw_turns(found: Sequence[TurnRates], published: Published) -> bytes:
    """A line for each comparison with its intervals, thin grey ones for published rates, as PNG."""
    lines = []
    for i, each in enumerate(found):
        shown = {turn: rates.half.per_cent for turn, rates in each.turns.items() if rates.half is not None}
        places = [turn + APART_IN_TURNS * place_of(i, found) for turn in shown]
        lines.append(Line(places, list(shown.values()), look_of(i, legend_label(each.title))))
    for dash, (title, rates) in zip(DASHES, published.items(), strict=False):
        look = {"color": GREY, "linestyle": dash, "linewidth": 1.1, "zorder": 1}
        look["label"] = f"published, against Llama-3-8B-it: {title}"
        lines.append(Line(range(1, len(rates) + 1), rates, look))
    last = max([*map(len, published.values()), *(max(each.turns) for each in found)])
    axes = ("Win rate by turn", "turn", "win rate of the first, %, 95 % interval over dialogues")
    ticks: dict[float, str] = {turn: str(turn) for turn in range(1, last + 1)}
    even: Look = {"color": INK, "linewidth": 0.8}
    return draw_charts([Chart(*axes, lines, [(50, even)], ticks, legend="below")], (9, 5.4))


def _policy_table(results: Sequence[PolicyResult]) -> Table:
    drawn = any(each.rouge for each in results)
    head = ["texts", "tokens", "loss", "perplexity", *([*ROUGES.values(), "length"] if drawn else [])]
    rows = []
    for each in results:
        cells = [str(each.rows), str(each.tokens), each.loss.text(4), each.perplexity.text(2)]
        cells += [*(score.text() for score in each.rouge.values()), f"{each.length:.1f}"] if drawn else []
        rows.append(cells)
    return _of_models("policy", results, head, rows)


def _reward_table(results: Sequence[RewardResult]) -> Table:
    rows = [[str(each.rows), each.loss.text(4), each.accuracy.text()] for each in results]
    return _of_models("reward model", results, ["pairs", "loss", "accuracy, %"], rows)


def _of_models(
    kind: str, results: Sequence[PolicyResult | RewardResult], head: Sequence[str], rows: Sequence[Sequence[str]]
) -> Table:
    """Names before the cells, and updates where they are known of a model."""
    known = any(each.update is not None for each in results)
    updates = [NONE if each.update is None else str(each.update) for each in results]
    starts = [[each.model, *([update] if known else [])] for each, update in zip(results, updates, strict=True)]
    whole = [[*start, *cells] for start, cells in zip(starts, rows, strict=True)]
    return Table([kind, *(["updates"] if known else []), *head], whole)


def draw_texts(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult]) -> bytes:
    """Perplexity and ROUGE of policies, loss and accuracy of reward models, a chart each, as PNG."""
    charts = []
    if policies:
        perplexity = {"": [each.perplexity for each in policies]}
        charts.append(_over_models("Perplexity", "exp(nats per token)", policies, perplexity))
    if policies and policies[0].rouge:
        scores = {ROUGES[name]: [each.rouge[name] for each in policies] for name in policies[0].rouge}
        charts.append(_over_models("ROUGE against the data's responses", "F1", policies, scores))
    if rewards:
        losses, rates = [each.loss for each in rewards], [each.accuracy.per_cent for each in rewards]
        charts.append(_over_models("Loss of the reward model", "nats per pair", rewards, {"": losses}))
        charts.append(_over_models("Accuracy of the reward model", "%", rewards, {"": rates}))
    return draw_charts(charts, (5.2 * len(charts), 4.2))


def _over_models(
    title: str,
    unit: str,
    results: Sequence[PolicyResult | RewardResult],
    estimates: Mapping[str, Sequence[MeanInterval]],
) -> Chart:
    """Lines over updates, where they are known of all models, else points for models in no order."""
    updates = [float(each.update) for each in results if each.update is not None]
    along = len(updates) == len(results)
    ticks = {} if along else {float(place): short(each.model) for place, each in enumerate(results)}
    places, look = (updates, {}) if along else (list(ticks), {"linestyle": "none"})
    lines = [Line(places, of, {**look_of(n, label), **look}) for n, (label, of) in enumerate(estimates.items())]
    axes = (title, "optimiser updates" if along else "", f"{unit}, 95 % interval over texts")
    scale, legend = ("linear" if along else "names"), ("inside" if len(lines) > 1 else "")
    return Chart(*axes, lines, ticks=ticks, scale=scale, legend=legend)  # type: ignore[arg-type]


def draw_comparisons(sections: Sequence[SectionResult]) -> bytes:
    """One panel per section (at least one) below each other, as PNG."""
    panels = []
    for section in sections:
        first, second = (short(name) for name in section.names)
        dataset = f" · {section.dataset}" if section.dataset else ""
        title = f"{first} against {second}{dataset} · {section.items} items"
        bars = [_bar(rater) for rater in section.raters]
        words = ("% of the verdicts counted", bars, (WIN, TIE, LOSS), "no verdict that counts", NO_DIFFERENCE)
        panels.append(Bars(title, *words))
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
    places = [(rater.rater, rater.position) for rater in raters if rater.position is not None]
    tables = [
        Table(
            ["rater", "items", "verdicts", "counted", "win", "tie", "loss", "invalid", "skipped"],
            _cells(
                [r.rater, r.items, r.rates.tally.given, r.rates.tally.counted, *astuple(r.rates.tally)] for r in raters
            ),
            heading=f"{first} against {second}{dataset}: {section.items} items",
            caption=f"win: {first} is better; loss: {second} is better",
        ),
        Table(
            ["in %", "win", "tie", "loss", "win + ½ tie", "at equal length"],
            [[r.rater, *_shares(r.rates), _rate(r.length_controlled.rate)] for r in raters],
            note="\n".join(remarks),
        ),
        _means(section),
        Table(
            ["by criterion, in %", "counted", "win", "tie", "loss", "win + ½ tie"],
            _cells([name, rates.tally.counted, *_shares(rates)] for name, rates in aspects),
        ),
        Table(
            ["place, in %", "items in both orders", "same verdict in both", "wins by place", "of first place"],
            _cells([n, p.both_orders, _rate(p.consistent), p.decided, _rate(p.first_place)] for n, p in places),
        ),
        _agreements(section),
        _groups(section),
    ]
    return [table for table in tables if table.rows]


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


def _agreements(section: SectionResult) -> Table:
    """Where there are several people, their majority stands for them beside judges and the reward model."""
    people = {rater.rater for rater in section.raters if rater.kind == "human" and not rater.pooled}
    shown = [one for one in section.agreement if len(people) < 2 or len(people.intersection(one.raters)) != 1]
    rows = []
    for one in shown:
        decided = NONE if one.same_decided is None else f"{100 * one.same_decided.value:.1f} of {one.decided}"
        rows.append([" – ".join(one.raters), one.items, _rate(one.same), _kappa(one.kappa), decided])
    less = "Each person by themselves against judges and reward model: report.json."
    head = ["agreement, in %", "common items", "same verdict", "Cohen's κ", "same where decided"]
    return Table(head, _cells(rows), note=less if len(shown) < len(section.agreement) else "")


def _groups(section: SectionResult) -> Table:
    rows = []
    for group in section.group_agreement:
        same = None if group.same is None else Rate(group.same)
        kappa = None if group.kappa is None else MeanInterval(group.kappa)
        rows.append([f"{group.name} ({len(group.raters)})", group.items, _rate(same), _kappa(kappa)])
    return Table(["agreement of groups, in %", "common items", "same verdict", "Fleiss' κ"], _cells(rows))


def _means(section: SectionResult) -> Table:
    rows = []
    for name, means in section.means.items():
        if means is not None:
            digits = 3 if name == "reward" else 1
            estimates = (means.first, means.second, means.difference)
            rows.append([name, *(estimate.text(digits) for estimate in estimates), means.items])
    return Table(["mean ± standard error", *section.names, "difference", "items"], _cells(rows))


def _shares(rates: WinRates) -> list[str]:
    return [_rate(rate) for rate in (rates.win, rates.tie, rates.loss, rates.half)]


def _rate(rate: Rate | None) -> str:
    return NONE if rate is None else rate.text()


def _kappa(kappa: MeanInterval | None) -> str:
    return NONE if kappa is None else kappa.text(2)


def _counts(rates: WinRates | None) -> str:
    if rates is None:
        return NONE
    tally = rates.tally
    return f"{tally.wins} – {tally.ties} – {tally.losses} – {tally.invalid}"


def _cells(rows: Iterable[Sequence[object]]) -> list[list[str]]:
    return [list(map(str, row)) for row in rows]
