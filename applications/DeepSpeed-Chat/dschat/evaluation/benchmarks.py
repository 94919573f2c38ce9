# SPDX-License-Identifier: Apache-2.0
"""`dschat evaluate`: benchmarks of EleutherAI's lm-evaluation-harness (lm_eval), and the report that compares models.

`run_benchmarks` loads the tasks, opens the model as every other command does, lets the harness ask and score, and
writes a row per task and metric. `benchmarks_report` reads such files.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows, json_value, text_of, write_rows
from dschat.base.statistics import Estimate
from dschat.evaluation.generate_options import BenchmarkOptions, model_name
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Report, Table, write_report
from dschat.evaluation.policy import Compute, locate_policy
from dschat.evaluation.responses import FILE_FLAG, model_names, number_of
from dschat.evaluation.runner import begin, enough_memory
from dschat.models.load import load_causal_lm
from dschat.models.tokenizer import load_tokenizer, own_end_ids

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

MODEL = "MODEL"  # how messages name the positional model
BOOTSTRAPS = 10_000  # resamples for standard errors that have no formula; the harness draws them by thousands
NO_FILTER = "none"  # the harness's name of answers that no filter has changed
ARROWS = {True: " ↑", False: " ↓", None: ""}  # whether a higher value is better
HEADERS = ("task", "version", "metric", "shots", "prompts", "rows")
REMARK = (
    "± is the harness's standard error over rows. ↑: higher is better. Models share a line only where task, version,"
    " number of solved examples, format of the prompts and number of rows are the same."
)

Row = Mapping[str, Any]  # of a file of results, see `result_rows`


def run_benchmarks(options: BenchmarkOptions) -> str:
    """Evaluates a model on benchmarks; writes OUTPUT_DIR/MODEL.jsonl, and returns a table.

    Raises:
        UserError: there is no such task, its packages or data are missing, or the model cannot be opened.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    flags = options.benchmarks
    name = model_name(flags.model)
    path = flags.output_dir / f"{name}.jsonl"
    begin(path, options.result.overwrite, "--output_dir")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings repeat the flags

    task_names = ",".join(flags.tasks).split(",")
    manager = TaskManager(include_path=flags.include_path)
    tasks = load_tasks(manager, task_names)
    model = open_model(flags.model, flags.batch_size, Compute.chosen(options.compute))
    with enough_memory(f"--batch_size {flags.batch_size}: the GPU's memory does not hold it", "a smaller one"):
        results = simple_evaluate(
            model,
            tasks=tasks,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            apply_chat_template=flags.apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=BOOTSTRAPS,
        )
    rows = result_rows(name, results, flags.apply_chat_template)
    write_rows(path, rows)
    return f"{Report('', [benchmark_table({name: rows})], [REMARK]).text()}\n{path}"


def load_tasks(manager: "TaskManager", names: Sequence[str]) -> "list[Task | Group]":
    """The tasks and groups that names or patterns (`mmlu_*`) select, with their data.

    Raises:
        UserError: no task has such a name, a task cannot be loaded or runs programs, or is selected twice.
    """
    for name in names:
        if not manager.match_tasks([name]):
            near = " or ".join(get_close_matches(name, manager.all_tasks, 3))
            hint = f"Did you mean {near}?" if near else "`lm-eval ls tasks` lists the harness's."
            raise UserError(f"--tasks {name}: there is no such task. {hint} For your own, give --include_path.")
    tasks: list[Task | Group] = []
    for name in manager.match_tasks([*names]):
        with task_errors(name):
            loaded = manager.load([name])
        group = loaded.get("groups", {}).get(name)
        tasks += loaded["tasks"].values() if group is None else [group]
        if any(task.config.unsafe_code for task in loaded["tasks"].values()):
            raise UserError(
                f"--tasks {name}: it would run the model's programs on this machine without a sandbox. Leave it out;"
                " `dschat programs` runs programs in one."
            )
    try:
        manager.load(tasks)
    except ValueError as error:
        raise UserError(f"--tasks: {error}. Give one of the two.") from error
    return tasks


@contextmanager
def task_errors(name: str) -> Iterator[None]:
    """Reports errors while a task is loaded as UserErrors: a missing package, data that cannot be read."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"--tasks {name}: {error}. Install what is missing; some tasks have an extra of the harness, such as pip"
            " install 'lm_eval[ifeval]'."
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"--tasks {name}: the task's data cannot be read: {reason}. They come from the Hugging Face hub unless the"
            " task's file names others. Without a connection, load them once on a machine that has one and copy its"
            " folder HF_HOME here; or give your own task with --include_path."
        ) from error


def open_model(path: str, batch_size: int, where: Compute) -> "HFLM":
    """The model for the harness, opened as a policy: adapters are merged, ids without a token have no probability."""
    from lm_eval.models.huggingface import HFLM

    folder = locate_policy(path)
    tokenizer = load_tokenizer(folder, MODEL)
    with enough_memory(f"{MODEL}: the GPU's memory does not hold {folder}"):
        causal_lm = load_causal_lm(folder, MODEL, where.dtype, tokenizer, own_end_ids=own_end_ids(folder))
        causal_lm = causal_lm.to(where.device).eval()
    return HFLM(causal_lm, tokenizer=tokenizer, batch_size=batch_size)


def result_rows(model: str, results: Mapping[str, Any], chat_template: bool) -> list[dict[str, Any]]:
    """A row for each task, or group of tasks, and metric.

    Args:
        model: its name.
        results: from the harness.
        chat_template: whether prompts were messages of a chat template.

    Returns:
        Rows with `model`, `task`, `version` of the task, `metric`, `filter` of answers, `value`, `standard_error`,
        number of `rows`, number of solved examples `shots`, `chat_template`, `higher_is_better`, the group that the
        task is `part_of`, and version of the `harness`. Numbers that the harness does not know are None.
    """
    group_of_task: dict[str, str] = {}
    for group in results.get("groups", {}):
        for task in results["group_subtasks"][group]:
            group_of_task[task] = group
    rows = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "model": model,
                    "task": task,
                    "version": str(results["versions"].get(task, "")),
                    "metric": metric,
                    "filter": filter_name,
                    "value": _number(value),
                    "standard_error": _number(values.get(f"{metric}_stderr,{filter_name}")),
                    "rows": values.get("sample_count", {}).get(key, values["sample_len"]),
                    "shots": results["n-shot"].get(task),
                    "chat_template": chat_template,
                    "higher_is_better": results["higher_is_better"].get(task, {}).get(metric),
                    "part_of": group_of_task.get(task, ""),
                    "harness": f"lm_eval {results['lm_eval_version']}",
                }
            )
    return rows


def _number(value: object) -> float | None:
    """A finite number; None for anything else, such as the harness's N/A."""
    number: float | None = json_value(float(value)) if isinstance(value, int | float) else None
    return number


def benchmark_table(rows_of_model: Mapping[str, Sequence[Row]]) -> Table:
    """Value ± standard error with a column per model, without the tasks of groups that have a value of their own."""
    cells: dict[tuple[object, ...], dict[str, Estimate]] = defaultdict(dict)
    for model, rows in rows_of_model.items():
        for row in rows:
            if row["part_of"] or row["value"] is None:
                continue
            metric = row["metric"] if row["filter"] == NO_FILTER else f"{row['metric']} ({row['filter']})"
            metric += ARROWS[row["higher_is_better"]]
            prompts = "chat" if row["chat_template"] else "plain"
            key = (row["task"], row["version"], metric, row["shots"], prompts, row["rows"])
            cells[key][model] = Estimate(row["value"], row["standard_error"])
    lines: list[list[object]] = []
    for measured, estimates in cells.items():
        lines.append([*measured, *map(estimates.get, rows_of_model)])
    return Table([*HEADERS, *rows_of_model], lines)


def benchmarks_report(files: Sequence[Path], output_dir: Path) -> str:
    """Writes report.json and report.md about the results of several models; returns the table.

    Raises:
        UserError: a file is not one of `dschat evaluate`; names file and line.
    """
    rows_of_model: dict[str, list[Row]] = {}
    for name, file in zip(model_names(files), files, strict=True):
        rows_of_model[name] = []
        for origin, row in iterate_rows(file, FILE_FLAG):
            for column in ("task", "version", "metric", "filter", "part_of"):
                text_of(row, column, origin)
            for column in ("value", "standard_error", "rows"):
                number_of(row, column, origin)
            is_complete = row.keys() >= {"shots", "chat_template", "higher_is_better"}
            if not is_complete or row["higher_is_better"] not in (True, False, None):
                raise UserError(f"{origin}: not a row of `dschat evaluate`, which gave all of its columns.")
            rows_of_model[name].append(row)
    report = Report("", [benchmark_table(rows_of_model)], [REMARK])
    return write_report(output_dir, REPORT_NAME, {"models": rows_of_model}, report, flag=OUTPUT).rstrip("\n")
