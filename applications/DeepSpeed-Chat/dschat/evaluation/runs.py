# SPDX-License-Identifier: Apache-2.0
"""`dschat report RUN RUN …`: runs of one step side by side: settings, evaluations, curves and sample responses.

run_data.py reads the folders, run_comparison.py makes tables and sentences of them, and run_page.py what only the page
shows: curves and responses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.base.steps import STEPS
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Details, Report, write_report
from dschat.evaluation.responses import model_names
from dschat.evaluation.run_comparison import (
    Labels,
    Runs,
    compare_runs,
    evaluation_table,
    first_score,
    flag_table,
    headline,
    is_scored_alike,
    labels_of,
    numbers_of,
    results_table,
    training_table,
)
from dschat.evaluation.run_data import METRICS, read_log
from dschat.evaluation.run_page import curves, examples

RESULTS_REMARK = "± is the standard error over held-out rows, not over seeds: runs of other seeds may differ by more."
SCORERS_REMARK = "The runs have scores of different models or functions, which are not compared."
BEST_REMARK = "The best evaluation is the one by which a checkpoint is the best."
TRAINING_REMARK = (
    "SFT is the model before the first update; the runs are compared at their last evaluation. Macro length"
    " and λ_eff = λ^(1/macro length) are means over the run; explained variance is the mean of its last tenth."
)


def build_report(
    runs: Mapping[str, Path],
    output_dir: Path,
    title: str = "PPO with macro actions",
    about: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Write `report.json`, `report.md` and `report.html` about runs of one step; `.text()` is for the terminal.

    Runs of step 3 that were evaluated before and after training are also compared by their responses.

    Args:
        runs: the name to show → output folder; at least one. Runs of step 3 start from the same SFT model.
        output_dir: folder of the files; made where it is missing.
        title: heading of the page.
        about: what was done, one paragraph each.
        notes: remarks of the caller for those who read on.

    Raises:
        UserError: runs are of different steps, or a file of a run is missing or malformed; names it.
    """
    logs = [read_log(name, Path(folder)) for name, folder in runs.items()]
    _require_one_step(logs)
    lacks = [f"{log.name}: {log.lack}." for log in logs if log.step == "ppo" and log.lack]
    is_compared = logs[0].step == "ppo" and not lacks
    labels = labels_of(logs) if is_compared else {}
    lead = headline(logs, labels) if is_compared else ""
    details = _comparison_details(logs, labels) if is_compared else []
    details.append(Details("All evaluations", [evaluation_table(logs)], [BEST_REMARK]))
    if notes:
        details.append(Details("Notes", sentences=notes))
    different_flags = flag_table(logs, only_different=True)
    flags = [Details("Flags that differ", [different_flags])] if different_flags.cells else []
    all_flags = Details("All flags, those that differ first", [flag_table(logs)])

    # The numbers are in their files before anything is drawn.
    tables = [results_table(logs, labels)]
    remarks = _remarks(logs, lacks)
    if is_compared and not is_scored_alike(logs, first_score(labels)[0]):
        remarks.append(SCORERS_REMARK)
    text = Report(title, tables, remarks, lead, about, details=[*details, *flags])
    write_report(output_dir, REPORT_NAME, numbers_of(logs), text, flag=OUTPUT)
    sections = [curves(logs, labels)]
    if is_compared:
        sections.append(examples(logs, labels))
    page = replace(text, sections=sections, details=[*details, all_flags])
    write_file(output_dir / f"{REPORT_NAME}.html", page.html())
    return text


def _comparison_details(logs: Runs, labels: Labels) -> list[Details]:
    """Differences between the runs, and how they were trained."""
    training = Details("Training", [training_table(logs)], [TRAINING_REMARK])
    differences = compare_runs(logs, labels)
    if not differences:
        return [training]
    return [Details("Differences between the runs", sentences=differences), training]


def _remarks(logs: Runs, lacks: Sequence[str]) -> list[str]:
    """How to read the results, and what they are not about."""
    remarks = [RESULTS_REMARK]
    if lacks:
        remarks.append(f"Responses are not compared. {' '.join(lacks)}")
    for log in logs:
        if not log.finished:
            remarks.append(f"{log.name} has not finished: update {log.largest('update'):.0f} is its last so far.")
    return remarks


def runs_report(paths: Sequence[Path], output_dir: Path) -> str:
    """`build_report` of output folders, named after them; returns its tables. A metrics.jsonl is its folder."""
    folders = [(path.parent if path.name == METRICS else path).resolve() for path in paths]
    names = model_names(folders)
    runs = dict(zip(names, folders, strict=True))
    if len(runs) < len(folders):
        raise UserError("A run is given twice: give each output folder once.")
    for folder in folders:
        if not (folder / METRICS).exists():
            runs_inside = sorted(file.parent.name for file in folder.glob(f"*/{METRICS}"))
            remedy = f" Give the runs in it: {', '.join(runs_inside[:5])}." if runs_inside else ""
            raise UserError(f"{folder} holds no {METRICS}, so it is no output folder of a run.{remedy}")
    return build_report(runs, output_dir, title=f"Runs: {', '.join(names)}").text().rstrip("\n")


def _require_one_step(logs: Runs) -> None:
    """Raises UserError if the runs are of different steps."""
    first = logs[0]
    for log in logs:
        if log.step != first.step:
            raise UserError(
                f"{first.name} ({STEPS[first.step].label}) and {log.name} ({STEPS[log.step].label}) are runs of"
                " different steps: their numbers cannot be compared. Give the runs of each step in a report of their"
                " own."
            )
