# SPDX-License-Identifier: Apache-2.0
"""Does PPO learn faster with macro actions? Small runs of step 3's trainer, with the controls that tell why.

What is run is a file, trials/matrix.toml; with --all also the quickstart itself with one seed after another
(trials/quickstarts.py): do its runs agree on what its report says? --quickstarts runs these alone, and --kernels its
reward model and PPO again with the kernels of other processors: do responses still end? Finished runs stay: the same
command goes on where it was stopped.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from harness import machine, origin, settings_parser, write_section
from trials.figures import ComparisonRow, draw, kl_table, learning_table, read_group, rows_of
from trials.matrix import MATRIX, Group, Results, read_matrix, runs_of
from trials.pool import run_all
from trials.quickstarts import SEEDS, quickstart_tables, run_kernels, run_quickstarts

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


def main() -> None:
    """Runs what the flags ask for; tables and pictures of all that is finished."""
    parser = settings_parser(__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"), help="folder of all that is made")
    parser.add_argument("--matrix", type=Path, default=MATRIX)
    parser.add_argument("--quick", action="store_true", help="one seed of everything that is asked for")
    parser.add_argument("--all", action="store_true", help="the whole matrix, not its core alone, and the quickstart")
    parser.add_argument(
        "--quickstarts", type=int, default=0, help="seeds of the quickstart, and nothing of the matrix"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="seeds of the same with the kernels of other processors"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--limit", type=int, default=0, help="seeds whose limit is drawn: 131,072 responses of each")
    parser.add_argument("--markdown", type=Path, help="document whose sections are written anew, as docs/results.md")
    settings = parser.parse_args()
    if settings.quickstarts or settings.kernels:
        measure_quickstarts(settings)
        return
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


def measure_quickstarts(settings: argparse.Namespace) -> None:
    """Runs the quickstart with its first seeds, as many as asked for, and writes those tables that the document has a
    section for.
    """
    folder = settings.output_dir / "quickstart"
    run_quickstarts(folder, SEEDS[: settings.quickstarts], settings.jobs)
    run_kernels(folder, SEEDS[: settings.kernels], settings.jobs)
    document = "" if settings.markdown is None else settings.markdown.read_text(encoding="utf-8")
    for name, text in quickstart_tables(folder).items():
        print(f"{name}\n{text}\n")
        if f"<!-- learning {name} -->" in document:
            write_section(settings.markdown, f"learning {name}", f"{origin()}\n\n{text}")


def publish(
    groups: Sequence[Group],
    rows: dict[str, list[ComparisonRow]],
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
    texts |= quickstart_tables(folder / "quickstart")
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


if __name__ == "__main__":
    main()
