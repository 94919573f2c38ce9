# SPDX-License-Identifier: Apache-2.0
"""The learners on the quickstart's reviews: DPO, RLOO, PPO, MA-PPO and best-of-16, side by side; REFUEL on dialogues.

Runs the same mains as any training, as processes of their own, on models and data made in code.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dialogues
from dschat.common.launch import Processes, as_arguments, run_step
from dschat.errors import UserError
from inputs import COMMON, FULL, SMALL, Scale, critic_flags, make_inputs, ppo_flags, supervised_flags

if TYPE_CHECKING:
    from dschat.run_report.build import Learner

ONE = Processes()
BEST_OF = (2, 4, 8, 16)
SAVED = 4  # models that each run leaves on its way, its end included
SAMPLES = 4  # of RLOO to a prompt
NOTE = (
    "Seconds are those of the learner's own run with its evaluations, without the models that it starts from; best of"
    " 16 draws 16 responses for every answer instead."
)
# Name of each learner that trains → its folder, and where the policy lies below it.
TRAINED = {
    "DPO": ("dpo", ""),
    "RLOO, K = 4": ("rloo", "actor"),
    "PPO, n = 1": ("ppo", "actor"),
    "MA-PPO, n = 5": ("ma-ppo", "actor"),
}


def main() -> int:
    """Parses the flags and runs everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learners"), help="folder of everything made")
    parser.add_argument("--seed", type=int, default=1234, help="of data, models and training")
    parser.add_argument("--small", action="store_true", help="a few updates only: shows that every part runs")
    args = parser.parse_args()
    try:
        learners(args.output_dir, args.seed, SMALL if args.small else FULL)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def learners(folder: Path, seed: int, scale: Scale) -> None:
    """Makes data and models, trains every learner, measures all on the same prompts and writes the page."""
    from dschat.run_report.build import draw_learners, learner_table, write_page

    start = time.perf_counter()
    data, model = make_inputs(folder, seed, scale)
    sft, reward = folder / "sft", folder / "reward"
    common = [*COMMON, "--seed", str(seed)]
    flags = supervised_flags(data / "demonstrations", "1,0,0", model, sft, scale.sft_epochs, scale, ONE)
    run_step("step1_supervised_finetuning", [*flags, *common], ONE)
    pairs, split = data / "comparisons", scale.data_split
    flags = supervised_flags(pairs, split, sft, reward, scale.reward_epochs, scale, ONE)
    run_step("step2_reward_model_finetuning", [*flags, *common], ONE)
    run_step("step2_dpo_finetuning", [*dpo_flags(pairs, sft, folder / "dpo", scale), *common], ONE)
    for place, own in step3_runs(sft, scale).items():
        flags = [*ppo_flags(data, sft, reward, folder / place, scale, ONE), *own, *common]
        run_step("step3_rlhf_finetuning", flags, ONE)
    found = measure_all(folder, pairs, seed, scale)
    draw_learners(found, folder / "gold-against-kl.png")
    table = learner_table(found)
    print(table, flush=True)
    rows = learner_table(found, as_page=True)
    parts = {
        "Learners on the reviews": f"{rows}\n\n{NOTE}\n\n![Gold score](gold-against-kl.png)\n",
        "REFUEL on dialogues": dialogues.refuel_example(
            folder / "dialogues", seed, dialogues.SMALL if scale is SMALL else dialogues.FULL
        ),
    }
    page = write_page(folder, "Learners side by side", parts)
    print(f"\n{table}\n\npage: {page} ({time.perf_counter() - start:.0f} s in all)")


def dpo_flags(pairs: Path, sft: Path, output: Path, scale: Scale) -> list[str]:
    """DPO on the share of the comparisons that the reward model learns from."""
    flags = supervised_flags(pairs, scale.data_split, sft, output, 1, scale, ONE)
    batch = 2 * scale.batch
    own = {
        "--learning_rate": 2e-4,
        "--beta": 0.3,
        "--per_device_train_batch_size": batch,
        "--save_models": max(1, scale.pairs // batch // SAVED),
    }
    return [*flags, *as_arguments(own)]


def step3_runs(sft: Path, scale: Scale) -> dict[str, list[str]]:
    """Folder → flags of each run of step 3. RLOO sees a part of the prompts, and as many responses as the others."""
    saved = ["--save_models", str(max(1, scale.iterations // SAVED))]
    share = scale.rollout // SAMPLES
    prompts = share * scale.iterations
    rloo = {
        "--advantage_estimator": "rloo",
        "--samples_per_prompt": SAMPLES,
        "--per_device_generation_batch_size": share,
        "--data_split": f"0,{scale.pairs + scale.prompts - prompts},{prompts}",
    }
    return {
        "ppo": [*saved, *critic_flags(sft), "--ngram", "1"],
        "ma-ppo": [*saved, *critic_flags(sft), "--ngram", "5"],
        "rloo": [*saved, *as_arguments(rloo)],
    }


def measure_all(folder: Path, pairs: Path, seed: int, scale: Scale) -> "list[Learner]":
    """Every learner's models answer the same held-out prompts with the same draws."""
    from dschat.run_report.build import Learner
    from measured import Measure

    print("== every model answers the held-out prompts", flush=True)
    measure = Measure(folder / "sft", folder / "reward", pairs, scale.data_split, seed)
    first, best = measure.best_of(BEST_OF)
    found = [Learner("SFT", [first])]
    for name, (place, below) in TRAINED.items():
        points = [measure(model) for model in saved_models(folder / place, below)]
        found.append(Learner(name, points, seconds_of(folder / place)))
    return [*found, Learner(f"best of {max(BEST_OF)} of SFT", best, bound=True)]


def saved_models(run: Path, below: str) -> list[Path]:
    """The models that a run left on its way, and the one of its end."""
    steps = sorted((run / "models").glob("step-*"), key=lambda step: int(step.name.removeprefix("step-")))
    last = json.loads((run / "run.json").read_text(encoding="utf-8"))["batches"]["total_updates"]
    return [*(step / below for step in steps if step.name != f"step-{last}"), run / below]


def seconds_of(run: Path) -> float:
    """How long a run took, its evaluations included."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["seconds"])


if __name__ == "__main__":
    sys.exit(main())
