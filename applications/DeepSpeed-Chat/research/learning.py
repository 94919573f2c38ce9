# SPDX-License-Identifier: Apache-2.0
"""Does PPO learn faster with macro actions? Small runs of step 3, with the controls that explain the answer.

The runs are those of a file, trials.toml; with --all also the quickstart with one seed after another
(quickstarts.py): do its runs agree with its report? --quickstarts runs these alone. Finished runs are kept:
the same command continues where it was stopped.
"""

import argparse
import logging
import multiprocessing
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from dschat.base.atomic import write_file
from limit import limit_table, load_scores
from quickstarts import SEEDS, quickstart_tables, run_quickstarts
from run_trial import run_trial
from starts import Starts
from tables import compare_runs, draw, kl_table, learning_table, write_sections
from tasks import TASKS
from trials import TRIALS, Group, Trial, read_groups, trials_of

# Picture → the groups side by side in it.
PICTURES = {
    "learning-critics": ("lagging critic", "higher learning rate", "critic trained beforehand"),
    "learning-lengths": ("32 tokens", "lagging critic", "128 tokens"),
    "learning-tasks": ("opener", "reviews", "learned reward model"),
    "learning-programs": ("programs",),
    "learning-groups": ("without a critic",),
    "learning-ratios": ("ratios of responses",),
    "learning-critic-updates": ("1 or 16 critic updates", "1 or 16 critic updates, programs"),
}
# Groups of one task whose curves are beside the document, and the columns of that file, which has none for the task.
CURVES_OF = ("1 or 16 critic updates", "size of the steps")
CURVE_COLUMNS = ["setting", "seed", "update", "gold", "kl", "explained_variance", "explained_variance_middle"]
# Groups whose limit is computed.
LIMITS = ("without a critic", "values sampled", "rewards inside", "opener", "reviews", "programs")


def read_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"), help="folder of all results")
    parser.add_argument("--trials", type=Path, default=TRIALS, help="file of the groups")
    parser.add_argument("--quick", action="store_true", help="one seed of everything that is asked for")
    parser.add_argument("--all", action="store_true", help="all groups, not only the core, and the quickstart")
    parser.add_argument("--quickstarts", type=int, default=0, help="seeds of the quickstart, and no trials")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--limit", type=int, default=0, help="seeds whose limit is computed, from 131,072 responses")
    parser.add_argument("--markdown", type=Path, help="document whose tables are replaced: docs/results-tables.md")
    return parser.parse_args()


def main() -> None:
    """Runs what the flags ask for, then writes tables and pictures of everything that is finished."""
    options = read_options()
    quickstarts = options.output_dir / "quickstart"
    if options.quickstarts:
        run_quickstarts(quickstarts, SEEDS[: options.quickstarts], options.jobs)
        publish(quickstart_tables(quickstarts), options)
        return

    # Trials.
    groups = [group for group in read_groups(options.trials) if options.all or group.part == "core"]
    run_all(trials_of(groups, 1 if options.quick else None), options.output_dir, options.jobs)
    if options.all:
        run_quickstarts(quickstarts, SEEDS[:1] if options.quick else SEEDS, options.jobs)

    # Tables and pictures.
    tables = {}
    for group in groups:
        curves = group.curves(options.output_dir)
        if not curves.empty:
            runs = compare_runs(group, curves)
            tables[group.name] = f"{learning_table(runs)}\n\n{kl_table(group, runs)}"
    for group in groups:
        if options.limit and group.name in LIMITS and group.name in tables:
            tables[f"limit, {group.name}"] = limit_of(group, options.limit, options.output_dir)
    publish(tables | quickstart_tables(quickstarts), options)
    draw_pictures(groups, options)
    if options.markdown is not None:
        write_curves(groups, options.output_dir, options.markdown.with_name("learning-curves.csv"))


def run_all(trials: Sequence[Trial], folder: Path, jobs: int, run: Callable[[Trial, Path], None] = run_trial) -> None:
    """Makes the runs that are not finished, several at a time.

    Raises:
        RuntimeError: a run failed; runs that have started are finished first.
    """
    unfinished = [trial for trial in trials if not trial.file(folder).exists()]
    # A process makes one run, since DeepSpeed's process groups cannot be made twice in one process. Each is a copy of
    # a process that has imported everything, which takes longer than some runs; CUDA does not allow such copies.
    context = multiprocessing.get_context("forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(["run_trial", "dschat.training.steps.ppo", "deepspeed"])
    with ProcessPoolExecutor(jobs, context, _prepare_process, max_tasks_per_child=1) as pool:
        trials_by_future = {}
        for trial in unfinished:
            trials_by_future[pool.submit(run, trial, folder)] = trial
        for future in tqdm(as_completed(trials_by_future), "runs", len(unfinished)):
            if future.exception() is not None:
                pool.shutdown(wait=True, cancel_futures=True)
                raise RuntimeError(f"{trials_by_future[future]} failed") from future.exception()


def _prepare_process() -> None:
    """Limits a run to one thread: the models are small, and threads would wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("dschat").setLevel(logging.ERROR)


def limit_of(group: Group, seeds: int, folder: Path) -> str:
    """The table of a group's limit, over its first seeds."""
    task = TASKS[group.task]
    starts = Starts(folder / "starts")
    scores = {}
    for seed in tqdm(range(min(seeds, group.seeds)), f"limit of {group.name}"):
        scores[seed] = load_scores(folder / "limit", task, starts.sft(task, seed), seed)
    return limit_table(group, task, group.curves(folder), scores)


def publish(tables: dict[str, str], options: argparse.Namespace) -> None:
    """Prints the tables, and writes them to tables.md and to those sections of the document that are there."""
    text = "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items())
    print(text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "tables.md").write_text(f"{text}\n", encoding="utf-8")
    if options.markdown is not None:
        document = options.markdown.read_text(encoding="utf-8")
        sections = {f"learning {name}": table for name, table in tables.items()}
        sections = {name: table for name, table in sections.items() if f"<!-- {name} -->" in document}
        write_sections(options.markdown, sections | {"learning": origin()})


def origin() -> str:
    """The machine and the day of the tables."""
    versions = f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({platform.machine()}); {versions}; {date.today().isoformat()}."


def draw_pictures(groups: Sequence[Group], options: argparse.Namespace) -> None:
    """Writes the pictures into the output folder, and beside the document."""
    folders = [options.output_dir]
    if options.markdown is not None:
        folders.append(options.markdown.parent)
    for picture, names in PICTURES.items():
        finished = []
        for group in groups:
            if group.name in names and not group.curves(options.output_dir).empty:
                finished.append(group)
        if not finished:
            continue
        finished.sort(key=lambda group: names.index(group.name))
        content = draw(finished, options.output_dir)
        for folder in folders:
            (folder / f"{picture}.svg").write_bytes(content)


def write_curves(groups: Sequence[Group], folder: Path, file: Path) -> None:
    """Writes the curves of the groups CURVES_OF, a row for each rollout of each run; no file if no run is finished."""
    curves = [group.curves(folder) for group in groups if group.name in CURVES_OF]
    if not curves or pd.concat(curves).empty:
        return
    rows = pd.concat(curves)[CURVE_COLUMNS].drop_duplicates(["setting", "seed", "update"])
    write_file(file, rows.to_csv(index=False, float_format="%.4g"))


if __name__ == "__main__":
    main()
