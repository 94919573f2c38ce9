# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on one machine: corpus, model, step 1, step 2, step 3 with and without macro actions, report.

Runs the same commands as any training, as separate processes, on a synthetic corpus and a small Gemma.
"""

import time

from dschat.evaluation.runs import build_report
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    MISSING_EOS_PENALTY,
    REWARD_LOSS,
    RUNS,
    SFT_CRITIC_RUNS,
    SMALL,
    SMALL_NOTE,
    critic_flags,
    make_inputs,
    ppo_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.options import QuickstartOptions
from dschat.quickstart.subcommands import Processes, run_policies

ABOUT = (
    "A small model writes reviews of products. The gold score, 0 to 1, counts complaints in the first half of a review"
    " and praise in the second. PPO does not train on it, but on a reward model that learned from pairs of reviews,"
    " ranked by the gold score. MA-PPO is PPO with macro actions of five tokens. Each is one run, with one seed, and"
    " may be far from the usual one: over four seeds PPO ended at 0.395 on average and MA-PPO at 0.368."
)
CRITIC_NOTE = (
    "Responses have up to 64 tokens, one score at the end, and whitened advantages. The critic starts from the reward"
    " model, as published, and explains part of the returns from the first update on. One that starts from the SFT"
    " model with a zero head (--all) explains none within 40 updates; then it matters how far back a score reaches, by"
    " macro actions or by a larger λ. docs/results-study.md has runs over many seeds."
)


def run(options: QuickstartOptions) -> str:
    """Makes the data and the model, runs the three steps and writes the report; returns its numbers."""
    folder = options.folder
    scale = SMALL if options.small else FULL
    processes = Processes(options.num_gpus, options.zero_stage, threads=2)  # a second core would be idle
    start_time = time.perf_counter()

    # Steps 1 and 2.
    data, model = make_inputs(folder, options.seed, scale)
    sft = folder / "step1-sft"
    reward = folder / "step2-reward"
    common = [*COMMON, "--seed", str(options.seed), "--zero_stage", str(processes.zero_stage)]
    train_sft(data, model, sft, scale, common, processes)
    train_reward_model(data / "comparisons", sft, reward, scale, [*REWARD_LOSS, *common], processes)

    # Step 3.
    critics = {"reward": reward, "sft": sft}
    commands = []
    runs = RUNS | SFT_CRITIC_RUNS if options.all else RUNS
    for step3 in runs.values():
        flags = ppo_flags(data, sft, reward, folder / step3.folder, scale, processes, MISSING_EOS_PENALTY)
        flags += critic_flags(critics[step3.critic])
        commands.append([*flags, *step3.flags, "--termination_condition", "fixed", *common])
    run_policies(commands, options.jobs, processes)

    summary = build_report(
        {name: folder / step3.folder for name, step3 in runs.items()},
        folder,
        title="Quickstart: a model learns to write reviews",
        about=[SMALL_NOTE, ABOUT] if options.small else [ABOUT],
        notes=[CRITIC_NOTE],
    )
    seconds = time.perf_counter() - start_time
    return f"{summary.without_details().text()}\nreport: {folder / 'report.html'} ({seconds:.0f} s in total)"
