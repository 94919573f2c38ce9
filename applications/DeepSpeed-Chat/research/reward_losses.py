# SPDX-License-Identifier: Apache-2.0
"""Compares the four losses of step 2 on the quickstart's pairs: how often each ranks held-out pairs correctly.

Runs step 1 once, then step 2 with each seed and loss. With the same seed, all losses see the same pairs in the same
order.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pandas as pd

from dschat.base.atomic import write_file
from dschat.quickstart.inputs import COMMON, FULL, SMALL, ReviewScale, make_inputs, train_reward_model, train_sft
from dschat.quickstart.subcommands import ONE
from dschat.settings.supervised import RewardLoss

# Column of the table → metric of an evaluation. A loss may compare means over tokens while the reward model reports
# one token's value as the score.
COLUMNS = {
    "accuracy of the quantity in the loss": "eval/mean_accuracy",
    "accuracy of the reported score": "eval/accuracy",
    "accuracy of the value at the last token, which step 3 reads": "eval/end_accuracy",
}
SEEDS = [1234, 1235, 1236]


def main() -> None:
    """Trains all reward models and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/reward-losses"), help="folder for all results")
    parser.add_argument("--small", action="store_true", help="run only a few updates, to see that every part works")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=SEEDS, help="random seeds of step 2; the first is also that of step 1"
    )
    options = parser.parse_args()

    start_time = time.perf_counter()
    scale = SMALL if options.small else FULL
    evaluations, num_pairs = compare_losses(options.output_dir, options.seeds, scale)
    table = loss_table(evaluations)
    write_file(options.output_dir / "reward-losses.md", f"{table}\n")
    seconds = time.perf_counter() - start_time
    print(f"\n{num_pairs} held-out pairs, {seconds:.0f} s in total\n\n{table}")


def compare_losses(folder: Path, seeds: Sequence[int], scale: ReviewScale) -> tuple[pd.DataFrame, int]:
    """Trains a reward model with each seed and loss.

    Args:
        folder: folder for data and models.
        seeds: random seeds of step 2; the first is also that of step 1.
        scale: sizes of data and models, and number of updates.

    Returns:
        Metrics of the last evaluations, one row per run with its `loss`; the number of held-out pairs.
    """
    data, model = make_inputs(folder, seeds[0], scale)
    sft = folder / "sft"
    train_sft(data, model, sft, scale, [*COMMON, "--seed", str(seeds[0])], ONE)

    rows = []
    num_pairs = 0
    for seed in seeds:
        for loss in get_args(RewardLoss):
            output = folder / f"{loss}-{seed}"
            flags = [*COMMON, "--reward_loss", loss, "--seed", str(seed), "--eval_iters", "0"]
            train_reward_model(data / "comparisons", sft, output, scale, flags, ONE)
            record = json.loads((output / "run.json").read_text(encoding="utf-8"))
            rows.append({"loss": loss, **record["metrics"]})
            num_pairs = sum(source["eval"] for source in record["data"]["sources"])
    return pd.DataFrame(rows), num_pairs


def loss_table(evaluations: pd.DataFrame) -> str:
    """Markdown table of the losses: means over the seeds ± standard errors of the mean."""
    evaluations = evaluations.reindex(columns=["loss", *COLUMNS.values()])
    # A loss that reports the value at the last token has no separate accuracy for it.
    evaluations["eval/end_accuracy"] = evaluations["eval/end_accuracy"].fillna(evaluations["eval/accuracy"])
    lines = [f"| `--reward_loss` | {' | '.join(COLUMNS)} |", "|---|---|---|---|"]
    for loss, runs in evaluations.groupby("loss", sort=False):
        cells = [mean_text(runs[metric]) for metric in COLUMNS.values()]
        lines.append(f"| `{loss}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_text(numbers: "pd.Series[float]") -> str:
    """Mean in per cent, with its standard error if there are several numbers; empty if a number is missing."""
    if numbers.isna().any():
        return ""
    mean = f"{100 * numbers.mean():.1f}"
    if len(numbers) < 2:
        return f"{mean} %"
    error = numbers.std() / math.sqrt(len(numbers))
    return f"{mean} ± {100 * error:.1f} %"


if __name__ == "__main__":
    main()
