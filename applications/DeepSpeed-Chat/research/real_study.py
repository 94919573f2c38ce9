# SPDX-License-Identifier: Apache-2.0
"""Compares PPO and MA-PPO on a real language model, over seeds.

All runs of step 3 of a seed start from the same SFT and reward model. Writes into --output_dir: study.md (the table),
responses.md (answers to held-out instructions, unedited) and seed-N/report.html with the curves. With --scores program
they are study-program.md, responses-program.md and seed-N/program/report.html. Finished runs are kept: the same
command continues where it stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch

from dschat.base.atomic import write_file
from dschat.base.jsonl import iterate_rows
from dschat.base.statistics import MeanInterval, mean_interval
from dschat.evaluation.run_data import HeldOut, RunData, column_of, read_run
from dschat.evaluation.runs import build_report
from dschat.quickstart.options import QuickstartOptions
from dschat.quickstart.real import gold, package_model
from dschat.quickstart.real.instructions import held_out_instructions
from dschat.quickstart.real.pipeline import (
    FULL,
    GOLD_NOTE,
    REWARD_MODEL_NOTE,
    RealModel,
    RealScale,
    best_of_n,
    open_pipeline,
    ppo_flags,
    train_first_steps,
    train_policies,
)
from dschat.quickstart.real.samples import Answers
from tables import final, markdown, median_updates, over_seeds, smooth

CPU = RealScale(
    instructions=256,
    held_out=48,
    samples=4,
    batch=16,
    reward_epochs=3,
    micro_batch=32,
    rollout=32,
    max_answer=48,
    updates=20,
    actor_rate=4e-5,
    eval_interval=10,
    save_steps=10,
)
PROGRAM_NOTE = "Step 3 trains on the gold score itself."
GOLD = "gold_scores"
HELD_OUT = "held-out"  # name of the data set of best of N, in the results folder
SHOWN_INSTRUCTIONS = 20  # held-out instructions whose answers responses.md shows
BEST_OF_SIZES = (4, 8)
# Name of a run → its folder and flags.
RUNS: Mapping[str, tuple[str, Sequence[str]]] = {
    "PPO, λ = .95": ("ppo", ["--ngram", "1"]),
    "PPO, λ = .99": ("ppo-99", ["--ngram", "1", "--lam", "0.99"]),
    "MA-PPO, n = 5, first": ("ma-first", ["--ngram", "5", "--value_function", "first"]),
    "MA-PPO, n = 5, equal": ("ma-equal", ["--ngram", "5"]),
}
RunsByName = Mapping[str, Sequence[RunData]]  # name of a run → its data, one for each seed


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study that the flags ask for."""
    arguments = parse_arguments(argv)
    scale = FULL if torch.cuda.is_available() else CPU
    if arguments.updates is not None:
        scale = replace(scale, updates=arguments.updates)

    by_program = arguments.scores == "program"
    finished: dict[str, list[RunData]] = {name: [] for name in arguments.runs}
    best: list[pd.DataFrame] = []
    for seed in range(1, arguments.seeds + 1):
        folder = arguments.output_dir / f"seed-{seed}"
        options = QuickstartOptions(model=arguments.model, output_dir=folder, seed=seed, jobs=arguments.jobs)
        real = open_pipeline(options, scale)
        title = f"Credit on {arguments.model}, seed {seed}"
        for name, output in run_seed(real, arguments.runs, by_program, arguments.jobs, title).items():
            finished[name].append(read_run(name, output))
        if not by_program:
            best.append(best_of_table(real, best_of_samples(real)))
    table = study_table(finished, best)
    suffix = "-program" if by_program else ""
    first_seed = {name: output_of(arguments.output_dir / "seed-1", name, by_program) for name in arguments.runs}
    write_file(arguments.output_dir / f"study{suffix}.md", table)
    write_file(arguments.output_dir / f"responses{suffix}.md", responses_page(first_seed))
    print(table)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=package_model.NAME, help="smollm2, a folder or a hub id")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/real-study"))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds: 1, 2, … up to it")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME")
    parser.add_argument(
        "--scores",
        choices=["reward_model", "program"],
        default="reward_model",
        help="what step 3 trains on: the reward model of step 2, or the gold score itself (then all critics start from"
        " the SFT model, and there is no best of N)",
    )
    parser.add_argument("--updates", type=int, help="updates of step 3; if not given, 100 on a GPU and 20 on a CPU")
    parser.add_argument("--jobs", type=int, default=2, help="runs of step 3 at a time")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: give at least 1")
    return arguments


def run_seed(real: RealModel, names: Sequence[str], by_program: bool, jobs: int, title: str) -> dict[str, Path]:
    """Trains what is not there yet of one seed and writes its report; name of a run → its output folder.

    Args:
        real: the pipeline of the seed.
        names: names of runs.
        by_program: step 3 trains on the gold score.
        jobs: runs of step 3 at a time.
        title: heading of the report.
    """
    train_first_steps(real, with_reward_model=not by_program)
    train_policies(real, steps_of(real, names, by_program), jobs)
    outputs = {name: output_of(real.folder, name, by_program) for name in names}
    build_report(
        outputs,
        real.folder / "program" if by_program else real.folder,
        title=title,
        about=[GOLD_NOTE, PROGRAM_NOTE if by_program else REWARD_MODEL_NOTE],
    )
    return outputs


def steps_of(real: RealModel, names: Sequence[str], by_program: bool = False) -> dict[str, tuple[Path, list[str]]]:
    """Name of a run → its output folder and flags.

    Args:
        real: the pipeline.
        names: names of runs.
        by_program: step 3 trains on the gold score; critics start from the SFT model.
    """
    critic = real.sft if by_program else real.reward
    scores = ["--reward_model_name_or_path", str(real.reward)]
    if by_program:
        scores = ["--reward_function", f"{gold.__file__}:gold_scores"]
    steps = {}
    for name in names:
        _, flags = RUNS[name]
        steps[name] = (output_of(real.folder, name, by_program), [*ppo_flags(real, critic, scores), *flags])
    return steps


def output_of(folder: Path, name: str, by_program: bool) -> Path:
    """Output folder of a run."""
    name_of_folder, _ = RUNS[name]
    return folder / (f"program-{name_of_folder}" if by_program else name_of_folder)


# -- Best of N


def best_of_samples(real: RealModel) -> list[Answers]:
    """Answers of the SFT model to the held-out instructions, with scores of the reward model."""
    instructions = real.data / "instructions"
    scorer = {"--reward_model": real.reward}
    return best_of_n(real, str(real.sft), instructions, HELD_OUT, real.scale.held_out, max(BEST_OF_SIZES), scorer)


def best_of_table(real: RealModel, samples: Sequence[Answers]) -> pd.DataFrame:
    """Mean gold score of the answer that the reward model prefers among the first N: a row for each N."""
    instructions = {item.text: item for item in held_out_instructions(real.scale.held_out, real.seed)}
    rows = []
    for n in BEST_OF_SIZES:
        golds = []
        for sample in samples:
            instruction = instructions[sample.messages[-1]["content"]]
            preferred = max(sample.answers[:n], key=lambda answer: answer.score)
            golds.append(gold.gold_score(preferred.text, instruction.topic, instruction.sentences))
        rows.append({"n": n, "gold": fmean(golds)})
    return pd.DataFrame(rows)


def largest_kl(n: int) -> float:
    """Upper bound of the KL of best of N to its model in nats, log N − (N − 1) / N (Beirami et al. 2024).

    It is rounded up to hundredths, so that it is still a bound.
    """
    return math.ceil(100 * (math.log(n) - (n - 1) / n)) / 100


# -- Tables


def study_table(finished: RunsByName, best: Sequence[pd.DataFrame]) -> str:
    """The table in Markdown: a row for the SFT model, for each best of N and for each run.

    Cells are means over seeds with intervals; of one seed, means over instructions.
    """
    baseline = next(iter(finished.values()))
    starts = [run.first for run in baseline]
    rows = [{"": "SFT", **policy_columns(starts)}]
    if best:
        for n, seeds in pd.concat(best).groupby("n"):
            columns = {"gold score": over_seeds(seeds["gold"]).text(3), "KL to SFT": f"≤ {largest_kl(int(n)):.2f}"}
            rows.append({"": f"best of {n} by the reward model", **columns})
    for name, runs in finished.items():
        row = {"": name, **policy_columns([run.last for run in runs])}
        explained = [run.train_mean("val/explained_variance") for run in runs]
        row["explained variance, mean"] = over_seeds(explained).text(2)
        row[f"updates to the final score of “{next(iter(finished))}”"] = updates_text(runs, baseline)
        rows.append(row)
    return markdown(pd.DataFrame(rows).fillna("")) + "\n"


def policy_columns(evaluations: Sequence[HeldOut]) -> dict[str, str]:
    """Numbers of a policy on held-out instructions, from one evaluation per seed."""
    columns = {}
    names = {GOLD: "gold score", "scores": "reward-model score", "kl": "KL to SFT", "length": "tokens"}
    for name, title in names.items():
        digits = 3 if name == GOLD else 1
        columns[title] = mean_over(evaluations, name).text(digits)
    ended = [evaluation.mean("eos_rate") for evaluation in evaluations]
    columns["ended by EOS"] = f"{fmean(ended):.2f}"
    return columns


def mean_over(evaluations: Sequence[HeldOut], name: str) -> MeanInterval:
    """Mean with its interval: over seeds, by a bootstrap; of one seed, over its instructions, by Student's t."""
    if len(evaluations) > 1:
        return over_seeds([evaluation.mean(name) for evaluation in evaluations])
    values = evaluations[0].values(name)
    return MeanInterval(evaluations[0].mean(name)) if values is None else mean_interval(values)


def updates_text(runs: Sequence[RunData], baseline: Sequence[RunData]) -> str:
    """Median number of updates until the gold score on training instructions reaches the baseline's final one."""
    updates = []
    for run, reference in zip(runs, baseline, strict=True):
        level = final(gold_of(reference))
        means = smooth(gold_of(run))
        reached = means.index[means >= level - 1e-9 * means.abs().max()]  # up to rounding
        updates.append(reached[0] if len(reached) else math.nan)
    return median_updates(pd.Series(updates, dtype=float))


def gold_of(run: RunData) -> pd.Series[float]:
    """Gold score on training instructions, by update."""
    return pd.Series(column_of(run.train, f"objective/{GOLD}"), index=run.train["update"]).dropna()


def responses_page(outputs: Mapping[str, Path]) -> str:
    """Answers of the SFT model and of every run to the first held-out instructions, unedited, with gold scores.

    Args:
        outputs: name of a run → its output folder.
    """
    first_output = next(iter(outputs.values()))
    answers = {"SFT": sampled_answers(first_output, 0)}
    for name, output in outputs.items():
        answers[name] = sampled_answers(output, -1)
    parts = ["# Answers to held-out instructions, as they were sampled"]
    shown = list(answers["SFT"])[:SHOWN_INSTRUCTIONS]
    for number, instruction in enumerate(shown, start=1):
        parts.append(f"## {number}. {instruction}")
        for name, answers_of_model in answers.items():
            parts.append(f"**{name}**, {answers_of_model[instruction]}")
    return "\n\n".join(parts) + "\n"


def sampled_answers(output: Path, evaluation: int) -> dict[str, str]:
    """Instruction → gold score and answer, of one of a run's evaluations: 0 is the first, −1 the last."""
    file = sorted((output / "samples").glob("*.jsonl"))[evaluation]
    answers = {}
    for _, row in iterate_rows(file, "--output_dir"):
        instruction = row["prompt_messages"][-1]["content"]
        answers[instruction] = f"{row[GOLD]:.2f}:\n\n```\n{row['response']}\n```"
    return answers


if __name__ == "__main__":
    main()
