# SPDX-License-Identifier: Apache-2.0
"""The four losses of step 2 on the quickstart's comparisons: how often each ranks held-out pairs right.

Runs the same commands as any training, as processes of their own: step 1 once, then step 2 with each seed and loss.
With one seed, all losses see the same pairs in the same order.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from dschat.base.atomic import write_file
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    SMALL,
    ReviewScale,
    make_inputs,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.options import RewardLossesOptions
from dschat.quickstart.subcommands import ONE
from dschat.settings.supervised import RewardLoss

END, OWN, MEANS = "eval/end_accuracy", "eval/accuracy", "eval/mean_accuracy"
LOSSES: tuple[RewardLoss, ...] = get_args(RewardLoss)
Figures = dict[str, list[dict[str, float]]]  # loss → the last evaluation of each seed


def run(options: RewardLossesOptions) -> str:
    """Runs everything; the table."""
    folder, seeds, scale = options.output_dir, options.seeds, SMALL if options.small else FULL
    start = time.perf_counter()
    figures, pairs = compare(folder, seeds, scale)
    text = table(figures)
    write_file(folder / "reward-losses.md", text + "\n")
    return f"\n{pairs} held-out pairs, {time.perf_counter() - start:.0f} s in all\n\n{text}"


def compare(folder: Path, seeds: Sequence[int], scale: ReviewScale) -> tuple[Figures, int]:
    """Trains a reward model with each loss and seed; their last evaluations, and the pairs of each."""
    data, model = make_inputs(folder, seeds[0], scale)
    sft = folder / "sft"
    train_sft(data, model, sft, scale, [*COMMON, "--seed", str(seeds[0])], ONE)
    figures: Figures = {loss: [] for loss in LOSSES}
    pairs = 0
    for seed in seeds:
        for loss in LOSSES:
            output = folder / f"{loss}-{seed}"
            own = ["--reward_loss", loss, "--seed", str(seed), "--eval_iters", "0"]
            train_reward_model(data / "comparisons", sft, output, scale, [*COMMON, *own], ONE)
            record = json.loads((output / "run.json").read_text(encoding="utf-8"))
            figures[loss].append(record["metrics"])
            pairs = sum(source["eval"] for source in record["data"]["sources"])
    return figures, pairs


def table(figures: Figures) -> str:
    """Means over the seeds ± their standard errors, as Markdown."""
    lines = [
        "| `--reward_loss` | accuracy of the means it compares | of the score it reports"
        " | of the number at the last token, which step 3 reads |",
        "|---|---|---|---|",
    ]
    for loss, runs in figures.items():
        end = [run.get(END, run[OWN]) for run in runs]
        means = _mean([run[MEANS] for run in runs]) if all(MEANS in run for run in runs) else ""
        lines.append(f"| `{loss}` | {means} | {_mean([run[OWN] for run in runs])} | {_mean(end)} |")
    return "\n".join(lines)


def _mean(numbers: Sequence[float]) -> str:
    """In per cent, with the standard error where there is one."""
    mean = f"{100 * statistics.fmean(numbers):.1f}"
    if len(numbers) < 2:
        return f"{mean} %"
    return f"{mean} ± {100 * statistics.stdev(numbers) / math.sqrt(len(numbers)):.1f} %"
