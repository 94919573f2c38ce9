# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on one machine: corpus, model, step 1, step 2, step 3 with and without macro actions, report.

Runs the same mains as any training, as processes of their own, on a synthetic corpus and a small Gemma.
"""

import sys
import time
from pathlib import Path

from dschat.common.launch import Processes, run_step
from inputs import (
    COMMON,
    FULL,
    RUNS,
    SMALL,
    Scale,
    critic_flags,
    example_flags,
    make_inputs,
    ppo_flags,
    run_example,
    train_reward_model,
    train_sft,
)

REGIME = (
    "Regime: 64 tokens, a score at the end, a critic that starts from nothing, whitened advantages. With seeds 0 to 9,"
    " MA-PPO reached PPO's last gold score in fewer updates on 9 of 10 (1.5 times fewer at the median), and PPO with"
    " λ = .99 on 10 of 10 (1.6 times): it is how far back the score reaches that counts, not the macro action."
)


def main() -> int:
    """Parses the flags and runs everything; returns the exit status."""
    parser = example_flags(__doc__, "runs/quickstart", seed_of="corpus, model and training")
    parser.add_argument(
        "--num_gpus", type=int, choices=(1, 2, 4, 8), default=1, help="processes, each on a GPU or CPU"
    )
    parser.add_argument("--zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage of every model")
    args = parser.parse_args()
    scale, processes = SMALL if args.small else FULL, Processes(args.num_gpus, args.zero_stage)
    return run_example(lambda: quickstart(args.output_dir, args.seed, scale, processes))


def quickstart(folder: Path, seed: int, scale: Scale, processes: Processes) -> None:
    """Makes the data and the model, runs the three steps and writes the report."""
    from dschat.reports.runs import build_report

    start = time.perf_counter()
    data, model = make_inputs(folder, seed, scale)
    sft, reward = folder / "step1-sft", folder / "step2-reward"
    common = [*COMMON, "--seed", str(seed), "--zero_stage", str(processes.zero_stage)]
    train_sft(data, model, sft, scale, common, processes)
    train_reward_model(data / "comparisons", sft, reward, scale, common, processes)
    for place, own in RUNS.values():
        flags = [*ppo_flags(data, sft, reward, folder / place, scale, processes), *critic_flags(sft), *own]
        run_step("step3_rlhf_finetuning", [*flags, "--termination_condition", "fixed", *common], processes)
    summary = build_report(
        {name: folder / place for name, (place, _) in RUNS.items()},
        folder,
        title="Quickstart: PPO and MA-PPO on the synthetic reviews",
        notes=[
            "Gold score: counts complaints in the first half of a review and praise in the second; never trained on.",
            REGIME,
        ],
    )
    print(summary.text())
    print(f"\nreport: {folder / 'report.html'} ({time.perf_counter() - start:.0f} s in all)")


if __name__ == "__main__":
    sys.exit(main())
