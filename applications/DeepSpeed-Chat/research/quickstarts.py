# SPDX-License-Identifier: Apache-2.0
"""The quickstart with one seed after another.

Finished runs are kept: the same command continues where it was stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from dschat.quickstart.inputs import RUNS, SFT_CRITIC_RUNS
from tables import final, markdown, median_updates, over_seeds, updates_to

SEEDS = range(10)
ALL_RUNS = SFT_CRITIC_RUNS | RUNS
BASELINE = next(iter(ALL_RUNS))  # updates are counted to the final score of this run
NATIVE = {"OMP_NUM_THREADS": "1"}
# Run → its name in the table, where other runs have the SFT model's critic.
LABELS = {"PPO": "PPO, RM critic", "MA-PPO": "MA-PPO, RM critic"}


def run_quickstarts(folder: Path, seeds: Sequence[int], jobs: int) -> None:
    """Runs the quickstart with every seed that is not finished, several at a time.

    Raises:
        RuntimeError: one failed; the message names its log.
    """
    unfinished = [seed for seed in seeds if not is_finished(folder, seed)]
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(partial(_run_quickstart, folder), unfinished)
        for _ in tqdm(results, "quickstarts", len(unfinished)):
            pass


def _run_quickstart(folder: Path, seed: int) -> None:
    output = folder / f"seed-{seed}"
    output.mkdir(parents=True, exist_ok=True)
    flags = ["--output_dir", str(output), "--seed", str(seed), "--jobs", "1", "--all"]
    run_logged([sys.executable, "-m", "dschat", "quickstart", *flags], output / "log.txt", NATIVE)


def is_finished(folder: Path, seed: int) -> bool:
    """Whether the quickstart of a seed is finished."""
    return (folder / f"seed-{seed}" / "report.html").exists()


def is_run_finished(run: Path) -> bool:
    """Whether a run of step 3 has saved its actor."""
    return (run / "actor" / "config.json").exists()


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
    """Runs a command, with its output in a file. Raises RuntimeError, which names the file."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.run(command, stdout=file, stderr=file, env=os.environ | variables)
    if process.returncode:
        raise RuntimeError(f"{command[3]} ended with status {process.returncode}: see {log}")


# ---- Tables ----


def read_run(run: Path) -> dict[str, float]:
    """The numbers of a finished run that the tables show; those of the SFT model begin with "sft "."""
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    evaluations = metrics.dropna(subset=["eval/gold_scores"])
    numbers = {"explained_variance": metrics["val/explained_variance"].mean()}
    for prefix, row in (("sft ", evaluations.iloc[0]), ("", evaluations.iloc[-1])):
        for name in ("gold_scores", "kl", "eos_rate"):
            numbers[prefix + name] = row[f"eval/{name}"]
    return numbers


def read_gold(run: Path) -> pd.Series[float]:
    """The gold score of each rollout of a run."""
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    return metrics["objective/gold_scores"].dropna()


def read_seed(folder: Path, seed: int) -> pd.DataFrame:
    """The runs of a quickstart: one row each, with `read_run`, updates and speed-up over the baseline."""
    folder = folder / f"seed-{seed}"
    golds = {name: read_gold(folder / run.folder) for name, run in ALL_RUNS.items()}
    numbers = [read_run(folder / run.folder) for run in ALL_RUNS.values()]
    return pd.DataFrame(numbers, index=list(ALL_RUNS)).join(count_updates(golds)).assign(seed=seed)


def count_updates(golds: Mapping[str, pd.Series[float]]) -> pd.DataFrame:
    """Updates to the baseline's final score, and how many times fewer than the baseline's: a row for each run.

    A run that does not reach the score counts as one that needs twice the baseline's updates.
    """
    level = final(golds[BASELINE])
    updates = pd.Series({name: updates_to(gold, level) for name, gold in golds.items()})
    times = (updates[BASELINE] / updates).fillna(0.5)
    return pd.DataFrame({"updates": updates, "times": times})


def quickstart_tables(folder: Path) -> dict[str, str]:
    """The table of all finished seeds; none if no seed is finished."""
    finished = [seed for seed in SEEDS if is_finished(folder, seed)]
    if not finished:
        return {}
    runs = pd.concat([read_seed(folder, seed) for seed in finished])
    return {"quickstart": quickstart_table(runs)}


def quickstart_table(runs: pd.DataFrame) -> str:
    """The SFT model and every run, over seeds; `runs` has the rows of `read_seed` for each seed."""
    baseline = runs.loc[[BASELINE]]
    rows = [
        {
            "": "SFT",
            "seeds": str(len(baseline)),
            "final gold score": over_seeds(baseline["sft gold_scores"]).text(3),
            "KL to SFT": over_seeds(baseline["sft kl"]).text(1),
            "explained variance, mean": "",
            "ended by EOS, lowest": f"{baseline['sft eos_rate'].min():.3f}",
        }
    ]
    for name in ALL_RUNS:
        if name not in runs.index:
            continue
        seeds = runs.loc[[name]]
        rows.append(
            {
                "": LABELS.get(name, name),
                "seeds": str(len(seeds)),
                "final gold score": over_seeds(seeds["gold_scores"]).text(3),
                "KL to SFT": over_seeds(seeds["kl"]).text(1),
                "explained variance, mean": over_seeds(seeds["explained_variance"]).text(2),
                "ended by EOS, lowest": f"{seeds['eos_rate'].min():.3f}",
                f"updates to the final score of “{BASELINE}”": median_updates(seeds["updates"]),
                "speed-up": over_seeds(seeds["times"], median=True).text(2),
                "seeds faster": f"{(seeds['times'] > 1).sum()}/{len(seeds)}",
            }
        )
    return markdown(pd.DataFrame(rows).fillna(""))
