# SPDX-License-Identifier: Apache-2.0
"""The quickstart with one seed after another, and its reward model and PPO again with the kernels of other processors.

Finished runs stay: the same command goes on where it was stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from dschat.lab.run_data import RunData
from dschat.lab.run_summary import levels_of, updates_to
from dschat.lab.runs import read_runs
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    MISSING_EOS_PENALTY,
    REWARD_LOSS,
    RUNS,
    critic_flags,
    ppo_flags,
    reward_model_flags,
)
from dschat.quickstart.subcommands import ONE, TRAINING
from harness import table
from trials.figures import over_seeds, updates_text, usual_updates

SCRIPT = TRAINING / "quickstart" / "main.py"
SEEDS = range(10)
GOLD, EXPLAINED = "gold_scores", "val/explained_variance"
MEANS = ((GOLD, 3), ("kl", 1))  # of an evaluation, with their digits
BASELINE = next(iter(RUNS))  # updates are counted to where this run ends
# Name → variables that choose the kernels of torch and of oneDNN. They round otherwise, and training makes another
# model of that.
KERNELS: Mapping[str, Mapping[str, str]] = {
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "2"},
}
NATIVE = {"OMP_NUM_THREADS": "1"}


def run_quickstarts(folder: Path, seeds: Sequence[int], jobs: int) -> None:
    """Runs the quickstart with every seed that is not finished, so many at a time.

    Raises:
        RuntimeError: one failed; the message names its log.
    """

    def run(seed: int) -> None:
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, SCRIPT, "--output_dir", place, "--seed", seed, "--jobs", 1]
        call([str(word) for word in words], place / "log.txt", NATIVE)

    left = [seed for seed in seeds if not is_finished(folder, seed)]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in tqdm(pool.map(run, left), "quickstarts", len(left)):
            pass


def is_finished(folder: Path, seed: int) -> bool:
    """Whether the quickstart of a seed has come to its end."""
    return (folder / f"seed-{seed}" / "report.html").exists()


def run_kernels(folder: Path, seeds: Sequence[int], jobs: int) -> None:
    """Step 2 and PPO (n = 1) of every finished seed again, from its SFT model, with the kernels of other processors.

    Raises:
        RuntimeError: one failed; the message names its log.
    """
    cases = [(seed, kernels) for seed in seeds for kernels in KERNELS if is_finished(folder, seed)]
    left = [(seed, kernels) for seed, kernels in cases if not ends_of(other_run(folder, seed, kernels))]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in tqdm(pool.map(lambda case: run_other(folder, *case), left), "other kernels", len(left)):
            pass


def run_other(folder: Path, seed: int, kernels: str) -> None:
    """Step 2 and PPO (n = 1) of a seed with some kernels."""
    start, output = folder / f"seed-{seed}", other_run(folder, seed, kernels)
    output.parent.mkdir(parents=True, exist_ok=True)
    data, sft, reward = start / "data", start / "step1-sft", output.parent / "step2-reward"
    common = [*COMMON, "--seed", str(seed)]
    step2 = [*reward_model_flags(data / "comparisons", sft, reward, FULL, ONE), *REWARD_LOSS, *common]
    step3 = ppo_flags(data, sft, reward, output, FULL, ONE, MISSING_EOS_PENALTY) + critic_flags(reward)
    step3 += [*RUNS["PPO (n = 1)"].flags, "--termination_condition", "fixed", *common]
    for name, flags in (("reward", step2), ("ppo", step3)):
        call(ONE.command(name, flags), output.parent / f"{name}.txt", {**NATIVE, **KERNELS[kernels]})


def other_run(folder: Path, seed: int, kernels: str) -> Path:
    """Folder of step 3 of a seed with some kernels."""
    return folder / f"{kernels}-{seed}" / "step3-ppo"


def call(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
    """Runs a command, whose output goes to a file. Raises RuntimeError, which names the file."""
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=os.environ | variables)
    if done.returncode:
        raise RuntimeError(f"{command[1]} ended with status {done.returncode}: see {log}")


def runs_of_seeds(folder: Path) -> list[dict[str, RunData]]:
    """The runs of every finished seed, by name."""
    places = [folder / f"seed-{seed}" for seed in SEEDS if is_finished(folder, seed)]
    found = [read_runs({name: place / one.folder for name, one in RUNS.items()})[0] for place in places]
    return [{run.name: run for run in runs} for runs in found]


def quickstart_tables(folder: Path) -> dict[str, str]:
    """Name → table, of every run of the finished seeds, and of the ends of responses with other kernels; none if no
    seed is finished.
    """
    seeds = runs_of_seeds(folder)
    if not seeds:
        return {}
    head = ["", "seeds", "gold score at the end", "KL to SFT", "explained variance, mean", "ended by EOS, lowest"]
    head += [f"updates to where “{BASELINE}” ends", "times fewer", "on"]
    rows = [start_row(seeds), *(quickstart_row(name, seeds) for name in RUNS)]
    return {"quickstart": table(head, rows), "quickstart kernels": ends_table(folder, seeds)}


def start_row(seeds: Sequence[Mapping[str, RunData]]) -> list[str]:
    """The SFT model of every seed."""
    starts = [seed[BASELINE].first for seed in seeds]
    means = [over_seeds([start.mean(key) for start in starts]).text(digits) for key, digits in MEANS]
    lowest = min(start.mean("eos_rate") for start in starts)
    return ["SFT", str(len(starts)), *means, "", f"{lowest:.3f}", "", "", ""]


def quickstart_row(name: str, seeds: Sequence[Mapping[str, RunData]]) -> list[str]:
    """One run of the quickstart with every seed, beside the baseline."""
    runs = [seed[name] for seed in seeds]
    levels = [levels_of(seed[BASELINE], [GOLD])[GOLD] for seed in seeds]
    theirs = [updates_to(seed[BASELINE], GOLD, level) for seed, level in zip(seeds, levels, strict=True)]
    needed = [updates_to(run, GOLD, level) for run, level in zip(runs, levels, strict=True)]
    # A run that does not come there is set down as one that needs twice the baseline's updates.
    times = [0.5 if n is None else t / n for t, n in zip(theirs, needed, strict=True) if t is not None]
    means = [over_seeds([run.last.mean(key) for run in runs]).text(digits) for key, digits in MEANS]
    curves = [run.train[EXPLAINED].tolist() for run in runs]
    explained = over_seeds([fmean(curve) for curve in curves])
    lowest = min(run.last.mean("eos_rate") for run in runs)
    cells = [name, str(len(runs)), *means, explained.text(2), f"{lowest:.3f}"]
    cells += [updates_text(usual_updates(needed), len(runs)), over_seeds(times, median=True).text(2)]
    return [*cells, f"{sum(time > 1 for time in times)}/{len(times)}"]


def ends_table(folder: Path, seeds: Sequence[Mapping[str, RunData]]) -> str:
    """How many runs end how many of their responses, with each set of kernels."""
    rates = {"this processor's": [run.last.mean("eos_rate") for seed in seeds for run in seed.values()]}
    models = {"this processor's": len(seeds)}
    for kernels in KERNELS:
        found = [rate for seed in SEEDS for rate in ends_of(other_run(folder, seed, kernels))]
        rates[kernels], models[kernels] = found, len(found)
    rows = [
        [name, str(models[name]), str(len(found)), f"{min(found):.3f}", f"{sum(rate > 0.9 for rate in found)}"]
        for name, found in rates.items()
        if found
    ]
    head = ["kernels", "reward models", "runs of step 3", "lowest share ended by EOS", "runs above .9"]
    return table(head, rows)


def ends_of(run: Path) -> list[float]:
    """The share of responses that ended by EOS in the last evaluation of a finished run; [] of another."""
    if not (run / "actor" / "config.json").exists():
        return []
    (data,), _ = read_runs({run.name: run})
    return [data.last.mean("eos_rate")]
