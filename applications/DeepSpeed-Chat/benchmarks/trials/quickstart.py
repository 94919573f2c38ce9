# SPDX-License-Identifier: Apache-2.0
"""The quickstart itself with one seed after another: do its runs agree on what its report says?"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from contenders.tables import table
from tqdm import tqdm

from dschat.run_report.build import read_runs
from dschat.run_report.data import RunData
from dschat.run_report.summary import judges_of, levels_of, updates_to
from trials.measures import over_seeds

MAIN = Path(__file__).resolve().parents[2] / "training" / "quickstart" / "main.py"
SEEDS = range(10)


def run_seeds(folder: Path, seeds: Sequence[int], jobs: int) -> None:
    """Runs the quickstart with every seed that is not finished, so many at a time.

    Raises:
        RuntimeError: one failed; the message names its log.
    """
    left = [seed for seed in seeds if not (place_of(folder, seed) / "report.html").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in tqdm(pool.map(lambda seed: _run(place_of(folder, seed), seed), left), "quickstarts", len(left)):
            pass


def place_of(folder: Path, seed: int) -> Path:
    """Output folder of a seed."""
    return folder / "quickstart" / f"seed-{seed}"


def _run(place: Path, seed: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(MAIN), "--output_dir", str(place), "--seed", str(seed)]
    with open(place / "log.txt", "w", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    if status:
        raise RuntimeError(f"the quickstart ended with status {status}: see {place / 'log.txt'}")


def quickstart_table(folder: Path) -> str | None:
    """Every run beside the first, over the finished seeds; None if there is none."""
    places = {name: place for name, (place, _) in runpy.run_path(str(MAIN.with_name("inputs.py")))["RUNS"].items()}
    finished = [seed for seed in SEEDS if (place_of(folder, seed) / "report.html").exists()]
    if not finished:
        return None
    found = [read_runs({name: place_of(folder, seed) / place for name, place in places.items()}) for seed in finished]
    judges = judges_of(found[0][1])
    by_seed = [runs for runs, _ in found]
    head = ["", "seeds"]
    for label in judges.values():
        head += [f"{label} at the end", f"updates to where {by_seed[0][0].name} ends", "times fewer", "fewer on"]
    rows = [
        _row([runs[i] for runs in by_seed], [runs[0] for runs in by_seed], list(judges)) for i in range(len(places))
    ]
    return table([*head, "KL"], rows)


def _row(runs: Sequence[RunData], baselines: Sequence[RunData], judges: Sequence[str]) -> list[str]:
    cells = [runs[0].name, str(len(runs))]
    for name in judges:
        levels = [levels_of(baseline, [name])[name] for baseline in baselines]
        theirs = [updates_to(run, name, level) for run, level in zip(baselines, levels, strict=True)]
        needed = [updates_to(run, name, level) for run, level in zip(runs, levels, strict=True)]
        # A run that does not come there is set down as one that needs twice the baseline's updates.
        times = [0.5 if n is None else t / n for t, n in zip(theirs, needed, strict=True) if t is not None]
        ends = over_seeds([run.last.mean(name) for run in runs])
        updates = over_seeds([float(n) for n in needed if n is not None], np.median)
        ratio = over_seeds(times, np.median)
        assert ends is not None and ratio is not None
        reached = sum(n is not None for n in needed)
        note = "" if reached == len(runs) else f" ({reached}/{len(runs)})"
        cells += [
            ends.text(3),
            ("–" if updates is None else updates.text(0)) + note,
            ratio.text(2),
            f"{sum(time > 1 for time in times)}/{len(runs)}",
        ]
    kl = over_seeds([run.last.mean("kl") for run in runs])
    return [*cells, "–" if kl is None else kl.text(1)]
