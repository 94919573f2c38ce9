# SPDX-License-Identifier: Apache-2.0
"""Reports on evaluations: the best of N, win rates by turn, pass@k, text metrics; files and tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows, read_rows
from dschat.base.pictures import GREY, legend_label, short
from dschat.base.statistics import BOOTSTRAP, MeanInterval, Tally
from dschat.data.hub import compared_set, find_known
from dschat.lab import pass_at_k as programs
from dschat.lab.best_of import BestOf, Sweep, best_of_n, published_numbers, sweep_of
from dschat.lab.chart import INK, Chart, Curve, Look, draw_charts, look_of, place_of
from dschat.lab.comparisons import build_evaluation_report
from dschat.lab.judge.run import judge_turns
from dschat.lab.options import PassOptions, ReportOptions, TurnOptions
from dschat.lab.page import NAME, OUTPUT, Report, Table, write_report
from dschat.lab.pass_at_k import PassRates, pass_rates
from dschat.lab.responses import FILE, model_names
from dschat.lab.text_metrics import PolicyResult, RewardResult, without_nan
from dschat.lab.turns import Published, TurnRates, published_mean, published_rates, rates_by_turn

# Of rows of programs that were run, of sweeps, and of verdicts by turn.
COLUMNS = ({"samples"}, {"temperature", "responses", "rewards"}, {"verdict", "number", "turn"})
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
REWARD = "mean reward, 95 % interval over prompts"
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
DASHES = ("--", ":", "-.")
# How far lines stand apart, along the axis.
APART_IN_DOUBLINGS, APART_IN_TEMPERATURE, APART_IN_TURNS = 0.05, 0.012, 0.06


def report(options: ReportOptions) -> str:
    """Writes the report of whatever the files hold; returns its tables."""
    files, output = options.files, options.output
    rows = [next(iterate_rows(file, FILE))[1] for file in files]  # the first ones tell what the files hold
    of_programs, sweeps, turns = ([columns <= set(row) for row in rows] for columns in COLUMNS)
    if all(of_programs):
        return f"{write_pass_report(files, output, options.dataset)}\nreport: {output / 'report.json'}"
    if all(sweeps):
        tables = best_of_report(files, options.best_of, output)
    elif all(turns):
        tables = turns_report(files, output, options.dataset)
    elif any(of_programs + sweeps + turns):
        kinds = "Files of programs, of sweeps, of verdicts by turn, and of verdicts or rewards"
        raise UserError(f"{kinds}: give each kind in a report of its own.")
    else:
        dataset = compared_set(options.dataset, own=True) if options.dataset else ""
        tables = build_evaluation_report(files, output, options.reward_margin, dataset).text()
    return f"{tables}\nreport: {output / 'report.json'}, {output / 'report.png'}"


def run_pass_at_k(options: PassOptions) -> str:
    """The table."""
    return pass_table(pass_rates(options.files, options.k))


def best_of_report(files: Sequence[Path], numbers: Sequence[int] | None, output_dir: Path) -> str:
    """Writes `report.json`, `report.md` and `report.png` on finished sweeps, one file per model; returns the tables.

    `numbers` of responses to choose from are the published ones that were drawn, and all, where they are None. Raises
    UserError where a file holds something else, other prompts than the first, or fewer responses than they say.
    """
    sweeps = [sweep_of(name, iterate_rows(file, FILE)) for file, name in zip(files, model_names(files), strict=True)]
    for file, sweep in zip(files, sweeps, strict=True):
        if sweep.prompts != sweeps[0].prompts:
            shared = len(set(sweep.prompts) & set(sweeps[0].prompts))
            raise UserError(
                f"{file} holds other prompts than {files[0]}: {shared} of its {len(sweep.prompts)} are among the "
                f"{len(sweeps[0].prompts)} of that file. Compare sweeps of the same prompts (--dataset, --data_path, "
                "--num_samples of dschat best-of-n)."
            )
        if numbers is not None and 1 < sweep.most_draws < max(numbers):
            problem = f"{file} holds {sweep.most_draws} responses to a prompt"
            raise UserError(f"--best_of {max(numbers)}: {problem}; give at most that number.")
    return write_best_of(sweeps, numbers or published_numbers(sweeps), output_dir, NAME)


def write_best_of(sweeps: Sequence[Sweep], numbers: Sequence[int], folder: Path, name: str) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    found = [each for sweep in sweeps for each in best_of_n(sweep, numbers)]
    content = {"intervals": {"level": 0.95, "method": "Student's t over prompts"}, "rows": list(map(asdict, found))}
    report = Report("", _best_of_tables(found), remarks=[BEST_OF])
    return write_report(folder, name, content, report, draw_best_of(found))


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
    return write_report(folder, name, content, report, draw_turns(found, published))


def run_turns(options: TurnOptions) -> str:
    """Judges dialogues turn by turn and reports on it; returns the table, or a dry run's estimate."""
    found, output, line = judge_turns(options)
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
    picture = draw_texts(policies, rewards)
    return write_report(folder, NAME, without_nan(content), report, picture, OUTPUT).rstrip("\n")


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
    rows = [[each.model, each.difficulty, each.problems, *each.rates.values()] for each in found]
    tables = [Table(["model", "difficulty", "problems", *(f"pass@{k}, %" for k in ks)], rows)]
    if all(each.dataset == programs.APPS for each in found):
        numbers = programs.NUMBERS | {"all": sum(programs.NUMBERS.values())}
        published = [
            [model, difficulty, numbers[difficulty], *(f"{rates[k][difficulty]:.2f}" for k in (1, 5))]
            for model, rates in programs.PUBLISHED.items()
            for difficulty in numbers
        ]
        title = "published by the paper, not measured here"
        tables.append(Table([title, "difficulty", "problems", "pass@1, %", "pass@5, %"], published))
    return Report("", tables).text().rstrip("\n")


def _best_of_tables(found: Sequence[BestOf]) -> list[Table]:
    """Both estimators: a row for each model and temperature, a column for each N."""
    numbers = sorted({each.n for each in found})
    head = ["model", "temperature", "prompts", "drawn", *(f"N = {n}" for n in numbers)]
    rows: dict[tuple[str, float], list[BestOf]] = {}
    for each in found:
        rows.setdefault((each.model, each.temperature), []).append(each)

    def table(caption: str, mean: Callable[[BestOf], MeanInterval]) -> Table:
        cells = []
        for (model, temperature), row in rows.items():
            means = {each.n: mean(each) for each in row}
            cells.append([model, f"{temperature:g}", row[0].prompts, row[0].draws, *map(means.get, numbers)])
        return Table(head, cells, caption=caption)

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
        lines.append(Curve(places, [each.expected for each in cells], look_of(i, legend_label(model))))
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
            lines.append(Curve(places, [each.expected for each in cells], look))
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
        rates.append([each.title, *(one and one.half for one in columns)])
        counts.append([each.title, *(one and _counts(one.tally) for one in columns)])
    last = [*(f"turn {turn}" for turn in range(1, 6)), "mean"]
    others = [
        [title, *(f"{rate:.1f}" for rate in row), f"{published_mean(row):.2f}"] for title, row in published.items()
    ]
    tables = [Table(["win rate of the first, in %", *head], rates)]
    tables.append(Table(["wins – ties – losses – invalid", *head], counts))
    title = "published, against Llama-3-8B-it; not measured here"
    return [*tables, *([Table([title, *last], others)] if others else [])]


def draw_turns(found: Sequence[TurnRates], published: Published) -> bytes:
    """A line for each comparison with its intervals, thin grey ones for published rates, as PNG."""
    lines = []
    for i, each in enumerate(found):
        shown = {turn: rates.half.per_cent for turn, rates in each.turns.items() if rates.half is not None}
        places = [turn + APART_IN_TURNS * place_of(i, found) for turn in shown]
        lines.append(Curve(places, list(shown.values()), look_of(i, legend_label(each.title))))
    for dash, (title, rates) in zip(DASHES, published.items(), strict=False):
        look = {"color": GREY, "linestyle": dash, "linewidth": 1.1, "zorder": 1}
        look["label"] = f"published, against Llama-3-8B-it: {title}"
        lines.append(Curve(range(1, len(rates) + 1), rates, look))
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
        cells = [each.rows, each.tokens, each.loss.text(4), each.perplexity.text(2)]
        rows.append([*cells, *([*each.rouge.values(), f"{each.length:.1f}"] if drawn else [])])
    return _of_models("policy", results, head, rows)


def _reward_table(results: Sequence[RewardResult]) -> Table:
    rows = [[each.rows, each.loss.text(4), each.accuracy] for each in results]
    return _of_models("reward model", results, ["pairs", "loss", "accuracy, %"], rows)


def _of_models(
    kind: str, results: Sequence[PolicyResult | RewardResult], head: Sequence[str], rows: Sequence[Sequence[object]]
) -> Table:
    """Names before the cells, and updates where they are known of a model."""
    known = any(each.update is not None for each in results)
    starts = [[each.model, each.update] if known else [each.model] for each in results]
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
    lines = [Curve(places, of, {**look_of(n, label), **look}) for n, (label, of) in enumerate(estimates.items())]
    axes = (title, "optimiser updates" if along else "", f"{unit}, 95 % interval over texts")
    scale, legend = ("linear" if along else "names"), ("inside" if len(lines) > 1 else "")
    return Chart(*axes, lines, ticks=ticks, scale=scale, legend=legend)  # type: ignore[arg-type]


def _turns_row(rates: TurnRates) -> dict[str, Any]:
    first, second = rates.models
    turns = {str(turn): asdict(each) for turn, each in rates.turns.items()}
    return {"model_a": first, "model_b": second, "rater": rates.rater, "turns": turns, "all": asdict(rates.overall)}


def _counts(tally: Tally) -> str:
    return f"{tally.wins} – {tally.ties} – {tally.losses} – {tally.invalid}"
