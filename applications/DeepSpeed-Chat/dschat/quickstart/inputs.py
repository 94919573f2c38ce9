# SPDX-License-Identifier: Apache-2.0
"""Corpus, model and flags of the three steps on the synthetic reviews."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.base.errors import UserError
from dschat.quickstart import synthetic
from dschat.quickstart.subcommands import Processes, as_arguments, run_step

GOLD = Path(synthetic.__file__)
COMMON = ["--dtype", "fp32", "--overwrite_output_dir"]
MAX_PROMPT = 128  # tokens
MAX_RESPONSE = 64  # tokens


@dataclass(frozen=True)
class ReviewScale:
    """Numbers of rows, epochs and iterations."""

    demonstrations: int
    pairs: int  # pairs of step 2
    held_out: int  # held-out rows of each corpus
    sft_epochs: int
    reward_epochs: int
    batch: int  # batch size of steps 1 and 2
    rollout: int  # prompts of one PPO iteration
    iterations: int
    eval_interval: int

    @property
    def prompts(self) -> int:
        """Prompts of step 3."""
        return self.rollout * self.iterations

    @property
    def data_split(self) -> str:
        """`--data_split` of the comparisons: none for step 1, then the rows of steps 2 and 3."""
        return f"0,{self.pairs},{self.prompts}"


FULL = ReviewScale(
    demonstrations=4000,
    pairs=6144,
    held_out=768,
    sft_epochs=3,
    reward_epochs=2,
    batch=16,
    rollout=64,
    iterations=40,
    eval_interval=20,
)
# Shows that every part runs; learns nothing.
SMALL = ReviewScale(
    demonstrations=64,
    pairs=64,
    held_out=48,
    sft_epochs=1,
    reward_epochs=1,
    batch=16,
    rollout=16,
    iterations=3,
    eval_interval=2,
)


@dataclass(frozen=True)
class Step3Run:
    """A run of the quickstart's step 3."""

    folder: str
    critic: Literal["reward", "sft"]  # the model that the critic starts from
    flags: Sequence[str]


# The runs of step 3 by name. Their critic starts from the reward model, as in the paper.
RUNS = {
    "PPO": Step3Run("step3-ppo", "reward", ["--ngram", "1"]),
    "MA-PPO": Step3Run("step3-ma-ppo", "reward", ["--ngram", "5", "--value_function", "first"]),
}
# Runs that are added by --all. Their critic starts from the SFT model with a zero head. The last one shows why MA-PPO
# is faster: with λ = .95^(1/5) = .99, the advantages of token-level PPO reach as far back over tokens.
SFT_CRITIC_RUNS = {
    "PPO, SFT critic": Step3Run("step3-ppo-sft-critic", "sft", ["--ngram", "1"]),
    "MA-PPO, SFT critic": Step3Run("step3-ma-ppo-sft-critic", "sft", ["--ngram", "5"]),
    "PPO, SFT critic, λ = .99": Step3Run("step3-ppo-99-sft-critic", "sft", ["--ngram", "1", "--lam", "0.99"]),
}
# This loss trains a score at every token, so that truncated responses get meaningful scores, and a critic that starts
# from the reward model has meaningful values for unfinished ones.
REWARD_LOSS = ["--reward_loss", "per_sample"]
SMALL_NOTE = (
    "A small run shows that every part works. Its few updates hardly change the model: differences between runs are"
    " noise."
)
# Points that a truncated response loses. Scores of the quickstart's responses differ by about 3 points.
MISSING_EOS_PENALTY = 5


def make_folder(folder: Path, content: str) -> Path:
    """Makes the folder of an example and announces its content. Returns the folder of its data."""
    print(f"== {content}", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be made: {error}") from error
    return folder / "data"


def make_inputs(folder: Path, seed: int, scale: ReviewScale) -> tuple[Path, Path]:
    """Writes the corpus and the random model. Returns their folders."""
    from dschat.models.tiny import make_model

    data = make_folder(folder, "corpus and model")
    synthetic.write_corpus(data, scale.demonstrations, scale.pairs + scale.prompts, scale.held_out, seed)
    texts = synthetic.row_texts(synthetic.make_rows(1000, seed, "demonstrations"))
    return data, make_model(folder / "model", texts, seed)


def supervised_flags(data: Path, split: str, model: Path, output: Path, epochs: int, batch: int) -> list[str]:
    """Flags of step 1 on demonstrations, or of step 2 on the first share of the comparisons."""
    flags = {
        "--data_path": data,
        "--data_split": split,
        "--model_name_or_path": model,
        "--output_dir": output,
        "--per_device_train_batch_size": batch,
        "--per_device_eval_batch_size": 64,
        "--learning_rate": 3e-3,
        "--num_train_epochs": epochs,
        "--warmup_ratio": 0.1,
        "--max_seq_len": 192,
    }
    return as_arguments(flags)


def train_sft(
    data: Path, model: Path, output: Path, scale: ReviewScale, more_flags: Sequence[str], processes: Processes
) -> None:
    """Runs step 1 on the demonstrations."""
    batch = processes.share(scale.batch)
    flags = supervised_flags(data / "demonstrations", "1,0,0", model, output, scale.sft_epochs, batch)
    run_step("sft", [*flags, *more_flags], processes)


def train_reward_model(
    pairs: Path, sft: Path, output: Path, scale: ReviewScale, more_flags: Sequence[str], processes: Processes
) -> None:
    """Runs step 2 on the first share of the comparisons."""
    batch = processes.share(scale.batch)
    flags = supervised_flags(pairs, scale.data_split, sft, output, scale.reward_epochs, batch)
    run_step("reward", [*flags, *more_flags], processes)


def ppo_flags(
    data: Path, sft: Path, reward: Path, output: Path, scale: ReviewScale, processes: Processes, eos_penalty: float
) -> list[str]:
    """Flags of step 3 on the second share of the comparisons; all runs have the same start and the same prompts."""
    flags = {
        "--data_path": data / "comparisons",
        "--data_split": scale.data_split,
        "--actor_model_name_or_path": sft,
        "--reward_model_name_or_path": reward,
        "--metric_function": f"{GOLD}:gold_scores",
        "--output_dir": output,
        "--per_device_generation_batch_size": processes.share(scale.rollout),
        "--per_device_training_batch_size": processes.share(scale.rollout),
        "--per_device_eval_batch_size": 128,
        "--num_train_epochs": 1,
        "--eval_interval": scale.eval_interval,
        "--max_prompt_seq_len": MAX_PROMPT,
        "--max_answer_seq_len": MAX_RESPONSE,
        "--actor_learning_rate": 1e-3,
        "--kl_ctl": 0.05,
        "--missing_eos_penalty": eos_penalty,
        "--warmup_ratio": 0.05,
    }
    return [*as_arguments(flags), "--whiten_advantages"]


def critic_flags(start: Path) -> list[str]:
    """Flags of step 3's critic, which starts from a model.

    A critic that starts from the SFT model has everything to learn, so the reach of the advantages (λ, n) shows most
    clearly with it.
    """
    return as_arguments({"--critic_model_name_or_path": start, "--critic_learning_rate": 2e-3})
