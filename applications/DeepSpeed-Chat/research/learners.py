# SPDX-License-Identifier: Apache-2.0
"""DPO, estimators of step 3 and best-of-16 side by side on the quickstart's reviews; REFUEL on dialogues.

Trains with the same commands as any run, on data and models made in code. Each gold score is compared with the limit:
the best score that any policy can have at the same KL.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from dialogues import train_refuel
from dschat.data.examples import prompt_examples
from dschat.data.sources import load_source
from dschat.data.splits import split_part
from dschat.evaluation.text import run_models
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
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
from learner_page import Learner, PolicyPoint, draw_learners, learner_table, write_page
from measuring import Answer, best_of, measure

PROMPT_TOKENS = 128
RESPONSE_TOKENS = 64
ROWS = 64  # sequences of a forward pass
BEST_OF = (2, 4, 8, 16)
SFT_SAMPLES = 64  # responses of the SFT model to each prompt, which give the limit
FEWEST = 8  # least effective number of responses behind a point of the limit
SAVED_MODELS = 4  # models that each run saves, the final one included
GROUP_SIZE = 4  # responses to a prompt, for estimators that compare them
NOTE = (
    "Seconds are those of the learner's own run with its evaluations, beside another run, without the models that it"
    " starts from; best of 16 generates 16 responses for every answer instead. The limit is the gold score of the"
    f" best policy at each KL, π ∝ π_SFT · exp(gold / β), from {SFT_SAMPLES} of the SFT model's responses to each"
    f" prompt, up to where its effective sample size falls below {FEWEST}."
)
# Learner → the folder of its run.
TRAINED = {
    "DPO": "dpo",
    "RLOO, K = 4": "rloo",
    "GRPO, K = 4": "grpo",
    "GSPO, K = 4": "gspo",
    "TEMPO, K = 4, n = 5": "tempo",
    "segment values, 2 of 2": "segment-mc",
    "PPO, n = 1": "ppo",
    "MA-PPO, n = 5": "ma-ppo",
}


def main() -> None:
    """Makes data and models, trains every learner, measures all on the same prompts and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learners"), help="folder of all results")
    parser.add_argument("--small", action="store_true", help="a few updates only: shows that every part runs")
    parser.add_argument("--seed", type=int, default=1234, help="seed of data, model and training")
    options = parser.parse_args()
    folder = options.output_dir
    scale = SMALL if options.small else FULL
    start_time = time.perf_counter()

    # Learners on the reviews.
    pairs = train_learners(folder, options.seed, scale)
    learners = measure_learners(folder, pairs, options.seed, scale)
    draw_learners(learners, folder / "gold-against-kl.png")
    table = learner_table(learners)
    print(table, flush=True)

    # REFUEL on dialogues.
    refuel = train_refuel(folder / "dialogues", options.seed, options.small)

    table_of_page = learner_table(learners, as_page=True)
    parts = {
        "Learners on the reviews": f"{table_of_page}\n\n{NOTE}\n\n![Gold score](gold-against-kl.png)\n",
        "REFUEL on dialogues": refuel,
    }
    page = write_page(folder, "Learners side by side", parts)
    print(f"\n{table}\n\npage: {page} ({time.perf_counter() - start_time:.0f} s in all)")


def train_learners(folder: Path, seed: int, scale: ReviewScale) -> Path:
    """Trains the models of steps 1 and 2, then every learner. Returns the comparisons."""
    data, model = make_inputs(folder, seed, scale)
    pairs = data / "comparisons"
    sft = folder / "sft"
    reward = folder / "reward"
    common = [*COMMON, "--seed", str(seed)]
    train_sft(data, model, sft, scale, common, ONE)
    train_reward_model(pairs, sft, reward, scale, common, ONE)

    commands = [("dpo", [*dpo_flags(pairs, sft, folder / "dpo", scale), *common])]
    for name, flags in step3_runs(sft, scale).items():
        shared = ppo_flags(data, sft, reward, folder / name, scale, ONE)
        commands.append(("ppo", [*shared, *flags, *common]))
    print("== eight learners, two at a time", flush=True)
    run_steps(commands)
    return pairs


def dpo_flags(pairs: Path, sft: Path, output: Path, scale: ReviewScale) -> list[str]:
    """DPO on the comparisons that the reward model learns from."""
    batch = 2 * scale.batch
    flags = {"--learning_rate": 2e-4, "--beta": 0.3, "--save_models": max(1, scale.pairs // batch // SAVED_MODELS)}
    return [*supervised_flags(pairs, scale.data_split, sft, output, 1, batch), *as_arguments(flags)]


def step3_runs(sft: Path, scale: ReviewScale) -> dict[str, list[str]]:
    """Folder → flags of each run of step 3; groups see fewer prompts, and as many responses as the others."""
    interval = max(1, scale.iterations // SAVED_MODELS)
    groups = scale.rollout // GROUP_SIZE
    prompts = groups * scale.iterations
    group = {
        "--samples_per_prompt": GROUP_SIZE,
        "--per_device_generation_batch_size": groups,
        "--data_split": f"0,{scale.pairs + scale.prompts - prompts},{prompts}",
    }
    rloo = {**group, "--advantage_estimator": "rloo"}
    grpo = {
        **group,
        "--advantage_estimator": "grpo",
        "--kl_in": "loss",
        "--kl_estimator": "k3",
        "--loss_mean": "response",
    }
    # Four updates per rollout, since with one update every ratio is 1, each with a quarter of the learning rate.
    gspo = {
        **grpo,
        "--policy_ratio": "sequence_mean",
        "--cliprange": 3e-4,
        "--cliprange_high": 4e-4,
        "--per_device_training_batch_size": groups,
        "--global_batch_size": groups,
        "--actor_learning_rate": 2.5e-4,
    }
    # A response of two macro actions with two completions of each has as many tokens as about four responses.
    segment_mc = {
        **group,
        "--samples_per_prompt": 1,
        "--per_device_training_batch_size": groups,
        "--advantage_estimator": "segment_mc",
        "--ngram": 5,
        "--mc_samples": 2,
        "--mc_max_segments": 2,
    }
    tempo = {**group, "--advantage_estimator": "tempo", "--ngram": 5}
    saved = ["--save_models", str(interval)]
    saved_gspo = ["--save_models", str(max(1, 4 * scale.iterations // SAVED_MODELS))]
    return {
        "ppo": [*saved, *critic_flags(sft), "--ngram", "1"],
        "ma-ppo": [*saved, *critic_flags(sft), "--ngram", "5"],
        "rloo": [*saved, *as_arguments(rloo)],
        "grpo": [*saved, *as_arguments(grpo)],
        "gspo": [*saved_gspo, *as_arguments(gspo)],
        "segment-mc": [*saved, *as_arguments(segment_mc)],
        "tempo": [*saved, *as_arguments(tempo)],
    }


def measure_learners(folder: Path, pairs: Path, seed: int, scale: ReviewScale) -> list[Learner]:
    """Every learner's models answer the same held-out prompts with the same random numbers."""
    print("== every model answers the held-out prompts", flush=True)
    meter = PolicyMeter(folder / "sft", folder / "reward", pairs, scale.data_split, seed)
    sft, best, limit = meter.measure_sft(BEST_OF)
    learners = [Learner("SFT", [sft])]
    for name, run in TRAINED.items():
        points = [meter.measure(Path(model.path)) for model in run_models(folder / run)]
        learners.append(Learner(name, points, read_seconds(folder / run)))
    learners.append(Learner(f"best of {max(BEST_OF)} of SFT", best, bound=True))
    learners.append(Learner("limit", limit))
    return learners


def read_seconds(run: Path) -> float:
    """How long a run took, evaluations included."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["seconds"])


class PolicyMeter:
    """Measures policies on the same held-out prompts with the same random numbers."""

    def __init__(self, sft: Path, reward: Path, pairs: Path, data_split: str, seed: int) -> None:
        """Loads the models and the prompts.

        Args:
            sft: the model of step 1, reference of the KL.
            reward: the model of step 2.
            pairs: comparisons; the held-out rows of step 3's share are answered.
            data_split: shares of the steps.
            seed: seed of the split and of sampling.
        """
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)  # the models are small: threads would wait for each other
        self._seed = seed
        tokenizer = load_tokenizer(str(sft), "sft")
        self._tokenizer = tokenizer
        source = load_source(pairs, None, seed)
        rows = split_part(source.eval, data_split, 2, seed, source.prompt_of)
        self._prompts, _ = prompt_examples(rows, tokenizer, PROMPT_TOKENS)
        end_ids = (tokenizer.eos_token_id,)
        self._sampling = Sampling(RESPONSE_TOKENS, end_ids, tokenizer.pad_token_id, tokenizer.bos_token_id)
        self._reference = self._load(sft)
        classifier = load_scalar(str(reward), "reward", torch.float32, tokenizer)
        self._score = RewardModelScores(ScalarModel(classifier).eval(), ROWS)  # type: ignore[arg-type]

    def measure(self, model: Path) -> PolicyPoint:
        """Measures a model by one answer to each prompt."""
        answers = self._answers(self._load(model), 1)
        return _point([answers_to_prompt[0] for answers_to_prompt in answers])

    def measure_sft(self, counts: Sequence[int]) -> tuple[PolicyPoint, list[PolicyPoint], list[PolicyPoint]]:
        """The SFT model's first answers; the best of its first N, for each count; the limit at some KLs."""
        answers = self._answers(self._reference, SFT_SAMPLES)
        best = []
        for count in counts:
            best.append(_point([best_of(answers_to_prompt, count) for answers_to_prompt in answers]))
        return _point([answers_to_prompt[0] for answers_to_prompt in answers]), best, limit_points(answers)

    def _answers(self, policy: PolicyModel, samples: int) -> list[list[Answer]]:
        return measure(
            policy,
            self._reference,
            self._score,
            self._tokenizer,
            self._prompts,
            self._sampling,
            self._seed,
            samples,
            ROWS,
        )

    def _load(self, model: Path) -> PolicyModel:
        policy = load_causal_lm(str(model), "model", torch.float32, self._tokenizer)
        return PolicyModel(policy).eval()


def limit_points(answers: Sequence[Sequence[Answer]]) -> list[PolicyPoint]:
    """The best policy at some KLs: π ∝ π_SFT · exp(s · gold) for s = 1, √2, 2, …

    The SFT model's responses to each prompt are weighted so, while their effective number 1 / Σ w² is at least FEWEST
    in the mean over the prompts.
    """
    points = [_point(answers_to_prompt) for answers_to_prompt in answers]
    gold = torch.tensor([point.gold for point in points], dtype=torch.float64)
    scores = torch.tensor([point.score for point in points], dtype=torch.float64)
    tokens = torch.tensor([point.tokens for point in points], dtype=torch.float64)
    limit: list[PolicyPoint] = []
    for exponent in range(24):
        steepness = 2.0 ** (exponent / 2)
        weights = (steepness * gold).softmax(1)
        if float((1 / weights.square().sum(1)).mean()) < FEWEST:
            break
        kl = (weights * (weights * gold.shape[1]).clamp(min=1e-300).log()).sum(1)
        means = []
        for numbers in (gold, scores, tokens):
            means.append((weights * numbers).sum(1).tolist())
        limit.append(PolicyPoint(gold=means[0], score=means[1], kl=kl.tolist(), tokens=means[2]))
    return limit


def _point(answers: Sequence[Answer]) -> PolicyPoint:
    return PolicyPoint(
        gold=[gold_score(answer.text) for answer in answers],
        score=[answer.score for answer in answers],
        kl=[answer.kl for answer in answers],
        tokens=[float(answer.tokens) for answer in answers],
    )


if __name__ == "__main__":
    main()
