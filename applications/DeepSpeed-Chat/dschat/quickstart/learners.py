# SPDX-License-Identifier: Apache-2.0
"""DPO, estimators of step 3 and best-of-16 on the quickstart's reviews, beside the limit; REFUEL on dialogues.

Runs the same commands as any training, as processes of their own, on models and data made in code.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from dschat.data.examples import prompt_examples
from dschat.data.sources import load_source, split_part
from dschat.lab.measure import Answer, best_of, measure
from dschat.lab.runs import Learner, PolicyPoint, draw_learners, learner_table, write_page
from dschat.lab.text import run_models
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart import synthetic_dialogues
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    SMALL,
    ReviewScale,
    critic_flags,
    make_folder,
    make_inputs,
    ppo_flags,
    supervised_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.options import LearnersOptions
from dschat.quickstart.subcommands import ONE, as_arguments, run_step, run_steps
from dschat.quickstart.synthetic import gold_score
from dschat.rollouts.sampling import Sampling
from dschat.scoring.reward_model import RewardModelScores

PROMPT_TOKENS, RESPONSE_TOKENS = 128, 64
ROWS = 64  # computed together
DIALOGUE_GOLD = Path(synthetic_dialogues.__file__)
PAIRS = 64  # of a round of REFUEL
BEST_OF = (2, 4, 8, 16)
DRAWN = 64  # responses of the SFT model to each prompt, from which the limit follows
FEWEST = 8  # of these the limit must rest on
SAVED = 4  # models that each run leaves on its way, its end included
SAMPLES = 4  # of a group
NOTE = (
    "Seconds are those of the learner's own run with its evaluations, beside another one, without the models that it"
    " starts from; best of 16 draws 16 responses for every answer instead. The limit is the gold score of the"
    f" best policy of each KL, π ∝ π_SFT · exp(gold / β), from {DRAWN} of the SFT model's responses to each prompt, as"
    f" far as it rests on {FEWEST}."
)
# Name of each learner that trains → its folder.
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


def run(options: LearnersOptions) -> str:
    """Makes data and models, trains every learner, measures all on the same prompts and writes the page."""
    folder, seed, scale = options.output_dir, options.seed, SMALL if options.small else FULL
    start = time.perf_counter()
    data, model = make_inputs(folder, seed, scale)
    sft, reward = folder / "sft", folder / "reward"
    common = [*COMMON, "--seed", str(seed)]
    pairs = data / "comparisons"
    train_sft(data, model, sft, scale, common, ONE)
    train_reward_model(pairs, sft, reward, scale, common, ONE)
    steps = [("dpo", [*dpo_flags(pairs, sft, folder / "dpo", scale), *common])]
    for place, own in step3_runs(sft, scale).items():
        steps.append(("ppo", [*ppo_flags(data, sft, reward, folder / place, scale, ONE), *own, *common]))
    print("== eight learners, two at a time", flush=True)
    run_steps(steps)
    found = measure_all(folder, pairs, seed, scale)
    draw_learners(found, folder / "gold-against-kl.png")
    table = learner_table(found)
    print(table, flush=True)
    rows = learner_table(found, as_page=True)
    parts = {
        "Learners on the reviews": f"{rows}\n\n{NOTE}\n\n![Gold score](gold-against-kl.png)\n",
        "REFUEL on dialogues": refuel_example(
            folder / "dialogues", seed, SMALL_DIALOGUES if scale is SMALL else FULL_DIALOGUES
        ),
    }
    page = write_page(folder, "Learners side by side", parts)
    return f"\n{table}\n\npage: {page} ({time.perf_counter() - start:.0f} s in all)"


def dpo_flags(pairs: Path, sft: Path, output: Path, scale: ReviewScale) -> list[str]:
    """DPO on the share of the comparisons that the reward model learns from."""
    batch = 2 * scale.batch
    own = {"--learning_rate": 2e-4, "--beta": 0.3, "--save_models": max(1, scale.pairs // batch // SAVED)}
    return [*supervised_flags(pairs, scale.data_split, sft, output, 1, batch), *as_arguments(own)]


def step3_runs(sft: Path, scale: ReviewScale) -> dict[str, list[str]]:
    """Folder → flags of each run of step 3. Groups see a part of the prompts, and as many responses as the others."""
    saved = ["--save_models", str(max(1, scale.iterations // SAVED))]
    share = scale.rollout // SAMPLES
    prompts = share * scale.iterations
    group = {
        "--samples_per_prompt": SAMPLES,
        "--per_device_generation_batch_size": share,
        "--data_split": f"0,{scale.pairs + scale.prompts - prompts},{prompts}",
    }
    grpo = {"--advantage_estimator": "grpo", "--kl_in": "loss", "--kl_estimator": "k3", "--loss_mean": "response"}
    # Four updates of a rollout, since with one every ratio is 1; each with a quarter or so of the learning rate.
    gspo = grpo | {"--policy_ratio": "sequence_mean", "--cliprange": 3e-4, "--cliprange_high": 4e-4}
    gspo |= {"--per_device_training_batch_size": share, "--global_batch_size": share, "--actor_learning_rate": 2.5e-4}
    # A response of two macro actions with two completions of each has as many tokens as about four responses.
    values = group | {"--samples_per_prompt": 1, "--per_device_training_batch_size": share}
    values |= {"--advantage_estimator": "segment_mc", "--ngram": 5, "--mc_samples": 2, "--mc_max_segments": 2}
    return {
        "ppo": [*saved, *critic_flags(sft), "--ngram", "1"],
        "ma-ppo": [*saved, *critic_flags(sft), "--ngram", "5"],
        "rloo": [*saved, *as_arguments(group | {"--advantage_estimator": "rloo"})],
        "grpo": [*saved, *as_arguments(group | grpo)],
        "gspo": ["--save_models", str(max(1, 4 * scale.iterations // SAVED)), *as_arguments(group | gspo)],
        "segment-mc": [*saved, *as_arguments(values)],
        "tempo": [*saved, *as_arguments(group | {"--advantage_estimator": "tempo", "--ngram": 5})],
    }


def measure_all(folder: Path, pairs: Path, seed: int, scale: ReviewScale) -> list[Learner]:
    """Every learner's models answer the same held-out prompts with the same draws."""
    print("== every model answers the held-out prompts", flush=True)
    measure = PolicyMeter(folder / "sft", folder / "reward", pairs, scale.data_split, seed)
    first, best, limit = measure.sft(BEST_OF)
    found = [Learner("SFT", [first])]
    for name, place in TRAINED.items():
        points = [measure(Path(model.path)) for model in run_models(folder / place)]
        found.append(Learner(name, points, seconds_of(folder / place)))
    return [*found, Learner(f"best of {max(BEST_OF)} of SFT", best, bound=True), Learner("limit", limit)]


def seconds_of(run: Path) -> float:
    """How long a run took, its evaluations included."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["seconds"])


class PolicyMeter:
    """Measures policies on the same held-out prompts with the same draws."""

    def __init__(self, sft: Path, reward: Path, pairs: Path, data_split: str, seed: int) -> None:
        """Opens what all have in common.

        Args:
            sft: the model of step 1, reference of the KL.
            reward: the model of step 2.
            pairs: comparisons, whose held-out rows of step 3's share are answered.
            data_split: shares of the steps.
            seed: of the split and the draws.
        """
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)  # the models are small: threads would wait for each other
        self._tokenizer, self._seed = load_tokenizer(str(sft), "sft"), seed
        rows = split_part(load_source(pairs, None, seed).eval, data_split, 2, seed)
        self._prompts, _ = prompt_examples(rows, self._tokenizer, PROMPT_TOKENS)
        end, pad, bos = (getattr(self._tokenizer, f"{name}_token_id") for name in ("eos", "pad", "bos"))
        self._sampling = Sampling(RESPONSE_TOKENS, (end,), pad, bos)
        self._reference = self._open(sft)
        classifier = load_scalar(str(reward), "reward", torch.float32, self._tokenizer)
        self._score = RewardModelScores(ScalarModel(classifier).eval(), ROWS)  # type: ignore[arg-type]

    def __call__(self, model: Path) -> PolicyPoint:
        """One answer of the model to each prompt."""
        return _point([answers[0] for answers in self._answers(self._open(model), 1)])

    def sft(self, counts: Sequence[int]) -> tuple[PolicyPoint, list[PolicyPoint], list[PolicyPoint]]:
        """The SFT model's first answers, the best by the reward model of so many, and the limit at some KLs."""
        drawn = self._answers(self._reference, DRAWN)
        best = [_point([best_of(answers, count) for answers in drawn]) for count in counts]
        return _point([answers[0] for answers in drawn]), best, limit_of(drawn)

    def _answers(self, policy: PolicyModel, draws: int) -> list[list[Answer]]:
        return measure(
            policy,
            self._reference,
            self._score,
            self._tokenizer,
            self._prompts,
            self._sampling,
            self._seed,
            draws,
            ROWS,
        )

    def _open(self, model: Path) -> PolicyModel:
        return PolicyModel(load_causal_lm(str(model), "model", torch.float32, self._tokenizer)).eval()


def limit_of(drawn: Sequence[Sequence[Answer]]) -> list[PolicyPoint]:
    """The gold score of the best policy at some KLs: π ∝ π_SFT · exp(s · gold) for s = 1, √2, 2, …

    Responses of the SFT model to each prompt are weighted so, as long as they are `FEWEST` in effect: 1 / Σ w², in the
    mean over the prompts.
    """
    gold = torch.tensor([[gold_score(answer.text) for answer in answers] for answers in drawn], dtype=torch.float64)
    others = torch.tensor([[(answer.score, answer.tokens) for answer in answers] for answers in drawn]).double()
    points: list[PolicyPoint] = []
    for steepness in (2.0 ** (n / 2) for n in range(24)):
        weights = (steepness * gold).softmax(1)
        if float((1 / weights.square().sum(1)).mean()) < FEWEST:
            break
        kl = (weights * (weights * gold.shape[1]).clamp(min=1e-300).log()).sum(1)
        scores, tokens = (weights[:, :, None] * others).sum(1).unbind(1)
        points.append(PolicyPoint((weights * gold).sum(1).tolist(), scores.tolist(), kl.tolist(), tokens.tolist()))
    return points


def _point(answers: Sequence[Answer]) -> PolicyPoint:
    return PolicyPoint(
        [gold_score(answer.text) for answer in answers],
        [answer.score for answer in answers],
        [answer.kl for answer in answers],
        [float(answer.tokens) for answer in answers],
    )


@dataclass(frozen=True)
class DialogueScale:
    """How much of everything on dialogues."""

    demonstrations: int
    dialogues: int
    held_out: int
    sft_epochs: int
    rounds: int  # of sampling
    every: int  # rounds from one evaluation to the next


FULL_DIALOGUES = DialogueScale(4000, 2000, 128, 4, 30, 10)
SMALL_DIALOGUES = DialogueScale(64, 64, 8, 1, 1, 1)  # shows that every part runs; learns nothing


def refuel_example(folder: Path, seed: int, scale: DialogueScale) -> str:
    """Trains on dialogues made by code; what came, as Markdown."""
    data, model = make_dialogues(folder, seed, scale)
    sft, run = folder / "sft", folder / "refuel"
    common = [*COMMON, "--seed", str(seed)]
    run_step("sft", [*dialogue_sft_flags(data, model, sft, scale), *common], ONE)
    run_step("refuel-online", [*refuel_flags(data, sft, run, scale), *common], ONE)
    table = scores_by_round(run)
    samples = sorted((run / "samples").glob("update-*.jsonl"))
    compared = [folder / "refuel.jsonl", folder / "sft.jsonl"]
    for source, place in zip((samples[-1], samples[0]), compared, strict=True):
        shutil.copyfile(source, place)
    names = dict(zip(("--model_name_a", "--model_name_b"), compared, strict=True))
    flags = as_arguments(names | {"--output": folder / "win-rates.jsonl"})
    run_step("judge-turns", [*flags, "--by_scores", "--overwrite"], ONE)
    wins = (folder / "win-rates.md").read_text(encoding="utf-8")
    return f"{table}\n\n{wins}\n![Win rate by turn]({folder.name}/win-rates.png)\n"


def make_dialogues(folder: Path, seed: int, scale: DialogueScale) -> tuple[Path, Path]:
    """The dialogues and a random model with a chat template, as files."""
    from dschat.models.tiny import make_model
    from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE, make_dialogue, texts_of, write_dialogues

    data = make_folder(folder, "dialogues and model")
    write_dialogues(data, scale.demonstrations, scale.dialogues, scale.held_out, seed)
    texts = texts_of([make_dialogue(index, seed) for index in range(1000)])
    return data, make_model(folder / "model", texts, seed, vocab_size=512, chat_template=CHAT_TEMPLATE)


def dialogue_sft_flags(data: Path, model: Path, output: Path, scale: DialogueScale) -> list[str]:
    """Step 1 on demonstrations that name words of the right kind more often than not."""
    flags = {
        "--data_path": data / "demonstrations",
        "--data_split": "1,0,0",
        "--model_name_or_path": model,
        "--output_dir": output,
        "--max_seq_len": 96,
        "--per_device_train_batch_size": 32,
        "--per_device_eval_batch_size": 64,
        "--learning_rate": 4e-3,
        "--num_train_epochs": scale.sft_epochs,
        "--num_warmup_steps": 10,
    }
    return as_arguments(flags)


def refuel_flags(data: Path, sft: Path, output: Path, scale: DialogueScale) -> list[str]:
    """REFUEL, whose users say what the data's users say."""
    batch = min(PAIRS, scale.dialogues)
    flags = {
        "--task.query_dataset": data / "dialogues",
        "--base_model": sft,
        "--reward_function": f"{DIALOGUE_GOLD}:gold_scores",
        "--output_dir": output,
        "--max_prompt_seq_len": 16,
        "--task.response_length": 8,
        "--task.total_length": 64,
        "--per_device_train_batch_size": batch,
        "--per_device_generation_batch_size": 2 * batch,
        "--total_episodes": batch * scale.rounds,
        "--print_sample_output_freq": scale.every,
        "--lr": 1e-3,
        "--refuel.eta": 8,
        "--reward.kl_coef": 0.02,
        "--task.penalty_reward_value": 0,
        "--eval_temperature": 1,
    }
    return as_arguments(flags)


def scores_by_round(run: Path) -> str:
    """The evaluations of a run as a table."""
    from dschat.base.display import markdown_table
    from dschat.base.statistics import mean_interval

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [row for row in map(json.loads, lines) if "eval/scores" in row]
    rows = []
    for row in evaluations:
        place = run / "samples" / f"update-{row['update']:06d}.jsonl"
        samples = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        turns = zip(*(sample["scores"] for sample in samples), strict=True)
        rows.append(
            [f"{row['samples']:.0f}", *(mean_interval(scores).text() for scores in turns), f"{row['eval/kl']:.2f}"]
        )
    return markdown_table(["dialogues drawn", "gold score of turn 1", "of both turns", "KL of a reply"], rows)
