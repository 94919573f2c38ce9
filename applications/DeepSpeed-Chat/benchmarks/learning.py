# SPDX-License-Identifier: Apache-2.0
"""Does PPO learn faster with macro actions? Small runs of step 3's trainer, with the controls that tell why.

What is run is a file, trials/matrix.toml; with --all also the quickstart itself with one seed after another: do its
runs agree on what its report says? Finished runs stay: the same command goes on where it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from dschat.common.launch import TRAINING
from dschat.quickstart.inputs import RUNS
from dschat.reports.run_data import RunData
from dschat.reports.run_summary import judges_of, levels_of, updates_to
from dschat.reports.runs import read_runs
from harness import machine, origin, settings_parser, table, write_section
from trials.figures import (
    Row,
    draw,
    kl_table,
    learning_table,
    over_seeds,
    read_group,
    rows_of,
    updates_text,
    usual_updates,
)
from trials.matrix import MATRIX, Group, Results, read_matrix, run_all, runs_of

# Picture → the groups side by side in it.
PICTURES = {
    "learning-critics": ("fresh critic", "faster critic", "regressed critic"),
    "learning-lengths": ("32 tokens", "fresh critic", "128 tokens"),
    "learning-tasks": ("opener", "reviews", "learned reward model"),
    "learning-ideas": ("ideas",),
    "learning-programs": ("programs",),
    "learning-groups": ("without a critic",),
    "learning-ratios": ("ratios of responses",),
}
# Groups of which the limit is drawn.
LIMITS = ("without a critic", "values sampled", "rewards inside", "opener", "reviews", "programs")
QUICKSTART = TRAINING / "quickstart"
SEEDS = range(10)  # of the quickstart


def main() -> None:
    """Runs what the flags ask for; tables and pictures of all that is finished."""
    parser = settings_parser(__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"), help="folder of all that is made")
    parser.add_argument("--matrix", type=Path, default=MATRIX)
    parser.add_argument("--quick", action="store_true", help="one seed of everything that is asked for")
    parser.add_argument("--all", action="store_true", help="the whole matrix, not its core alone, and the quickstart")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--limit", type=int, default=0, help="seeds whose limit is drawn: 131,072 responses of each")
    parser.add_argument("--markdown", type=Path, help="document whose sections are written anew, as docs/results.md")
    settings = parser.parse_args()
    groups = [group for group in read_matrix(settings.matrix) if settings.all or group.part == "core"]
    results = Results(settings.output_dir)
    begun = time.perf_counter()
    run_all(runs_of(groups, 1 if settings.quick else None), results, settings.jobs)
    if settings.all:
        run_quickstarts(settings.output_dir / "quickstart", SEEDS[:1] if settings.quick else SEEDS, settings.jobs)
    rows = {group.name: found for group in groups if (found := rows_of(group, results))}
    seconds = [result.seconds for result in map(results.read, runs_of(groups)) if result is not None]
    spent = f"{len(seconds)} finished runs, {sum(seconds) / 3600:.1f} hours of one core"
    limits = {
        f"limit, {group.name}": limit_of(group, settings.limit, results)
        for group in groups
        if settings.limit and group.name in rows and group.name in LIMITS
    }
    publish([group for group in groups if group.name in rows], rows, results, settings.markdown, spent, limits)
    print(f"{time.perf_counter() - begun:.0f} s now; {spent}")


def publish(
    groups: Sequence[Group],
    rows: dict[str, list[Row]],
    results: Results,
    document: Path | None,
    spent: str,
    limits: dict[str, str],
) -> None:
    """Tables, pictures and figures into the output folder, and into the document if there is one."""
    folder = results.folder
    levels = {group.name: group.kl_levels for group in groups}
    texts = {
        name: f"{learning_table(found)}\n\n{kl_table(found, levels[name])}" for name, found in rows.items()
    } | limits
    if (quickstarts := quickstart_table(folder / "quickstart")) is not None:
        texts["quickstart"] = quickstarts
    sections = "\n\n".join(f"## {name}\n\n{text}" for name, text in texts.items())
    (folder / "tables.md").write_text(sections + "\n", "utf-8")
    figures = {name: [asdict(row) for row in found] for name, found in rows.items()}
    found = {"machine": machine(), "groups": figures}
    (folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for picture, names in PICTURES.items():
        if chosen := [group for name in names for group in groups if group.name == name]:
            for place in [folder] if document is None else [folder, document.parent]:
                (place / f"{picture}.svg").write_bytes(draw(chosen, results))
    print("\n\n".join(f"{name}\n{text}" for name, text in texts.items()))
    if document is not None:
        for name, text in texts.items():
            write_section(document, f"learning {name}", text)
        write_section(document, "learning", f"{origin()} {spent[0].upper()}{spent[1:]}.")


def limit_of(group: Group, seeds: int, results: Results) -> str:
    """The table of a group's limit, over its first seeds."""
    from trials.limit import kept_scores, limit_table
    from trials.starts import Starts
    from trials.tasks import TASKS

    task, starts = TASKS[group.task], Starts(results.folder / "starts")
    scores = {
        seed: kept_scores(results.folder / "limit", task, starts.sft(task, seed), seed)
        for seed in tqdm(range(min(seeds, group.seeds)), f"limit of {group.name}")
    }
    return limit_table(task, read_group(group, results), scores)


def run_quickstarts(folder: Path, seeds: Sequence[int], jobs: int) -> None:
    """Runs the quickstart with every seed that is not finished, so many at a time.

    Raises:
        RuntimeError: one failed; the message names its log.
    """

    def run(seed: int) -> None:
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(QUICKSTART / "main.py"), "--output_dir", str(place), "--seed", str(seed)]
        with open(place / "log.txt", "w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"the quickstart ended with status {done.returncode}: see {place / 'log.txt'}")

    left = [seed for seed in seeds if not finished_quickstart(folder, seed)]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in tqdm(pool.map(run, left), "quickstarts", len(left)):
            pass


def finished_quickstart(folder: Path, seed: int) -> bool:
    """Whether that of a seed has come to its end."""
    return (folder / f"seed-{seed}" / "report.html").exists()


def quickstart_table(folder: Path) -> str | None:
    """Every run beside the first, over the finished seeds; None if there is none."""
    places = [folder / f"seed-{seed}" for seed in SEEDS if finished_quickstart(folder, seed)]
    found = [read_runs({name: place / own for name, (own, _) in RUNS.items()}) for place in places]
    if not found:
        return None
    judges, by_seed = judges_of(found[0][1]), [of_seed for of_seed, _ in found]
    head = ["", "seeds"]
    for label in judges.values():
        head += [f"{label} at the end", f"updates to where {by_seed[0][0].name} ends", "times fewer", "fewer on"]
    baselines = [of_seed[0] for of_seed in by_seed]
    rows = [quickstart_row([of_seed[i] for of_seed in by_seed], baselines, list(judges)) for i in range(len(RUNS))]
    return table([*head, "KL"], rows)


def quickstart_row(runs: Sequence[RunData], baselines: Sequence[RunData], judges: Sequence[str]) -> list[str]:
    """One run of the quickstart with every seed, beside the first one."""
    cells = [runs[0].name, str(len(runs))]
    for name in judges:
        levels = [levels_of(baseline, [name])[name] for baseline in baselines]
        theirs = [updates_to(run, name, level) for run, level in zip(baselines, levels, strict=True)]
        needed = [updates_to(run, name, level) for run, level in zip(runs, levels, strict=True)]
        # A run that does not come there is set down as one that needs twice the baseline's updates.
        times = [0.5 if n is None else t / n for t, n in zip(theirs, needed, strict=True) if t is not None]
        ends = over_seeds([run.last.mean(name) for run in runs])
        cells += [ends.text(3), updates_text(usual_updates(needed), len(runs)), over_seeds(times, median=True).text(2)]
        cells.append(f"{sum(time > 1 for time in times)}/{len(runs)}")
    return [*cells, over_seeds([run.last.mean("kl") for run in runs]).text(1)]


if __name__ == "__main__":
    main()
