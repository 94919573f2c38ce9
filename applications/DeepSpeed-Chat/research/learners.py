# SPDX-License-Identifier: Apache-2.0
"""DPO, estimators of step 3 (learners.toml) and best of 16 on the quickstart's reviews; REFUEL on dialogues.

Trains with the same commands as any run, on data and models made in code. Every model answers the same held-out
prompts with the same random numbers.
"""

import argparse
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from dialogues import train_refuel
from dschat.base.atomic import write_file
from dschat.base.display import markdown_table
from dschat.base.statistics import mean_interval
from dschat.data.examples import prompt_examples
from dschat.data.sources import load_source
from dschat.data.splits import split_part
from dschat.models.classifiers import load_scalar
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    MAX_PROMPT,
    MAX_RESPONSE,
    SMALL,
    ReviewScale,
    critic_flags,
    make_inputs,
    ppo_flags,
    supervised_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.subcommands import ONE, as_arguments, run_steps
from dschat.quickstart.synthetic import gold_score
from dschat.rollouts.sampling import Sampling
from dschat.scoring.reward_model import RewardModelScores
from measuring import Answer, best_of, measure

LEARNERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DPO = "DPO, β = .3"
DPO_FLAGS = ["--learning_rate", "2e-4", "--beta", "0.3"]
HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")
NOTE = (
    "Seconds are those of the learner's own run with its evaluations, beside another run, without the models that it"
    " starts from; best of 16 generates 16 responses for every answer instead, and its KL is an upper bound."
)
EOS_PENALTY = 2  # points that a truncated response loses
BEST_OF = 16
BATCH = 64  # sequences of a forward pass


def main() -> None:
    """Makes data and models, trains every learner, measures all and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learners"), help="folder of all results")
    parser.add_argument("--small", action="store_true", help="a few updates only: shows that every part runs")
    parser.add_argument("--seed", type=int, default=1234, help="seed of data, model and training")
    options = parser.parse_args()
    folder = options.output_dir
    scale = SMALL if options.small else FULL
    start_time = time.perf_counter()

    train_learners(folder, options.seed, scale)
    table = markdown_table(HEADERS, measure_learners(folder, options.seed, scale))
    print(table, flush=True)
    refuel = train_refuel(folder / "dialogues", options.seed, options.small)
    page = folder / "README.md"
    write_file(page, f"# Learners side by side\n\n{table}\n\n{NOTE}\n\n## REFUEL on dialogues\n\n{refuel}")
    print(f"page: {page} ({time.perf_counter() - start_time:.0f} s in all)")


def train_learners(folder: Path, seed: int, scale: ReviewScale) -> None:
    """Trains the models of steps 1 and 2, then every learner into a folder of its name."""
    data, model = make_inputs(folder, seed, scale)
    pairs = data / "comparisons"
    sft = folder / "sft"
    reward = folder / "reward"
    common = [*COMMON, "--seed", str(seed)]
    train_sft(data, model, sft, scale, common, ONE)
    train_reward_model(pairs, sft, reward, scale, common, ONE)

    dpo = supervised_flags(pairs, scale.data_split, sft, folder / DPO, 1, 2 * scale.batch)
    commands = [("dpo", [*dpo, *DPO_FLAGS, *common])]
    for name, flags in LEARNERS.items():
        shared = ppo_flags(data, sft, reward, folder / name, scale, ONE, EOS_PENALTY)
        commands.append(("ppo", [*shared, *step3_flags(flags, sft, scale), *common]))
    print(f"== {len(commands)} learners, two at a time", flush=True)
    run_steps(commands)


def step3_flags(learner: dict[str, str | float], sft: Path, scale: ReviewScale) -> list[str]:
    """Flags of a learner of learners.toml."""
    flags = dict(learner)
    prompts = round(float(flags.pop("prompts", 1)) * scale.rollout)
    batch = round(float(flags.pop("batch", 1)) * scale.rollout)
    all_prompts = prompts * scale.iterations
    sizes: dict[str, str | float] = {
        "per_device_generation_batch_size": prompts,
        "per_device_training_batch_size": batch,
        "global_batch_size": batch,
        "data_split": f"0,{scale.pairs + scale.prompts - all_prompts},{all_prompts}",
    }
    words = as_arguments({f"--{name}": value for name, value in (sizes | flags).items()})
    return words if "advantage_estimator" in flags else [*words, *critic_flags(sft)]


def measure_learners(folder: Path, seed: int, scale: ReviewScale) -> list[list[str]]:
    """A row of the table for every learner, by its answers to the held-out prompts of step 3."""
    print("== every model answers the held-out prompts", flush=True)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are small: threads would wait for each other
    tokenizer = load_tokenizer(str(folder / "sft"), "sft")
    source = load_source(folder / "data" / "comparisons")
    held_out = split_part(source.eval, scale.data_split, 2, source.prompt_of)
    prompts, _ = prompt_examples(held_out, tokenizer, MAX_PROMPT)
    sampling = Sampling(
        max_new_tokens=MAX_RESPONSE,
        end_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
    )
    classifier = load_scalar(str(folder / "reward"), "reward", torch.float32, tokenizer)
    score = RewardModelScores(ScalarModel(classifier).eval(), BATCH)  # type: ignore[arg-type]

    def load(model: Path) -> PolicyModel:
        return PolicyModel(load_causal_lm(str(model), "model", torch.float32, tokenizer)).eval()

    reference = load(folder / "sft")

    def answers_of(policy: PolicyModel, samples: int = 1) -> list[list[Answer]]:
        return measure(policy, reference, score, tokenizer, prompts, sampling, seed, samples, BATCH)

    sft_answers = answers_of(reference, BEST_OF)
    rows = [learner_row("SFT", [of_prompt[0] for of_prompt in sft_answers])]
    for name in (DPO, *LEARNERS):
        model = folder / name if name == DPO else folder / name / "actor"
        answers = [of_prompt[0] for of_prompt in answers_of(load(model))]
        rows.append([*learner_row(name, answers)[:-1], f"{read_seconds(folder / name):.0f}"])
    best = [best_of(of_prompt, BEST_OF) for of_prompt in sft_answers]
    return [*rows, learner_row(f"best of {BEST_OF} of SFT", best)]


def learner_row(name: str, answers: Sequence[Answer]) -> list[str]:
    """Means over the prompts with 95 % intervals; no seconds."""
    gold = mean_interval([gold_score(answer.text) for answer in answers])
    score = mean_interval([answer.score for answer in answers])
    kl = mean_interval([answer.kl for answer in answers])
    length = mean_interval([float(answer.tokens) for answer in answers])
    return [name, gold.text(), score.text(2), kl.text(1), length.text(1), ""]


def read_seconds(run: Path) -> float:
    """How long a run took, evaluations included."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["seconds"])


if __name__ == "__main__":
    main()
