# SPDX-License-Identifier: Apache-2.0
"""Does PPO learn faster with macro actions? Small runs of step 3's trainer, with the controls that tell why.

What is run is a file, trials/matrix.toml. Finished runs stay: the same command goes on where it was stopped.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders.tables import origin, write_section
from machine import machine
from trials.figures import Row, rows_of
from trials.plan import Group, read_matrix, runs_of
from trials.pool import Results, run_all
from trials.quickstart import SEEDS, quickstart_table, run_seeds
from trials.report import draw, kl_table, learning_table

PARTS = ("core", "quickstart", "around", "search")
# Picture → the groups side by side in it.
PICTURES = {
    "learning-critics": ("fresh critic", "faster critic", "regressed critic"),
    "learning-lengths": ("32 tokens", "fresh critic", "128 tokens"),
    "learning-tasks": ("opener", "reviews", "learned reward model"),
    "learning-ideas": ("ideas",),
}


def main() -> int:
    """Runs what the flags ask for; tables and pictures of all that is finished."""
    settings = parse()
    parts = PARTS if settings.all else settings.parts or PARTS[:1]
    groups = [group for group in read_matrix(settings.matrix) if group.part in parts]
    results = Results(settings.output_dir)
    begun = time.perf_counter()
    if not settings.no_runs:
        run_all(runs_of(groups, 1 if settings.quick else None), results, settings.jobs)
        if "quickstart" in parts:
            run_seeds(settings.output_dir, SEEDS[:1] if settings.quick else SEEDS, settings.jobs)
    rows = {group.name: rows_of(group, results) for group in groups}
    rows = {name: found for name, found in rows.items() if found}
    seconds = [result["seconds"] for result in map(results.read, runs_of(groups)) if result is not None]
    spent = f"{len(seconds)} finished runs, {sum(seconds) / 3600:.1f} hours of one core"
    publish([group for group in groups if group.name in rows], rows, results, settings, spent)
    print(f"{time.perf_counter() - begun:.0f} s now; {spent}")
    return 0


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"), help="folder of all that is made")
    parser.add_argument("--matrix", type=Path, default=Path(__file__).parent / "trials" / "matrix.toml")
    parser.add_argument("--quick", action="store_true", help="one seed of everything that is asked for")
    parser.add_argument("--all", action="store_true", help="every part of the matrix, not its core alone")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="some parts of the matrix")
    parser.add_argument("--no_runs", action="store_true", help="tables and pictures of what is finished")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--markdown", type=Path, help="document whose sections are written anew, as docs/results.md")
    return parser.parse_args()


def publish(
    groups: Sequence[Group],
    rows: dict[str, list[Row]],
    results: Results,
    settings: argparse.Namespace,
    spent: str,
) -> None:
    """Tables, pictures and figures into the output folder, and into the document if there is one."""
    folder: Path = settings.output_dir
    texts = {name: f"{learning_table(found)}\n\n{kl_table(found)}" for name, found in rows.items()}
    if (quickstarts := quickstart_table(folder)) is not None:
        texts["quickstart"] = quickstarts
    (folder / "tables.md").write_text(
        "\n\n".join(f"## {name}\n\n{text}" for name, text in texts.items()) + "\n", "utf-8"
    )
    figures: dict[str, Any] = {name: [asdict(row) for row in found] for name, found in rows.items()}
    (folder / "figures.json").write_text(
        json.dumps({"machine": machine(), "groups": figures}, indent=1) + "\n", "utf-8"
    )
    by_name = {group.name: group for group in groups}
    places = [folder] if settings.markdown is None else [folder, settings.markdown.parent]
    for picture, names in PICTURES.items():
        chosen = [by_name[name] for name in names if name in by_name]
        for place in places if chosen else ():
            (place / f"{picture}.svg").write_bytes(draw(chosen, results))
    print("\n\n".join(f"{name}\n{text}" for name, text in texts.items()))
    if settings.markdown is not None:
        for name, text in texts.items():
            write_section(settings.markdown, f"learning {name}", text)
        write_section(settings.markdown, "learning", f"{origin(machine())} {spent[0].upper()}{spent[1:]}.")


if __name__ == "__main__":
    sys.exit(main())
