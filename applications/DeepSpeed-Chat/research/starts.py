# SPDX-License-Identifier: Apache-2.0
"""Starting points that the runs of a task and seed share: prompts, an SFT model, a critic and a reward model.

`Starts` makes each of them when it is first asked for. The SFT model comes first: a random decoder (`make_model`) that
step 1 trains on mediocre demonstrations. Gold scores of its responses (`sample_responses`) give the reward function
its scale, a reward model its pairs and a critic its returns.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import dschat
from dschat.base.atomic import write_file, writing_folder
from dschat.base.jsonl import write_rows
from dschat.data.examples import prompt_examples
from dschat.models.classifiers import load_scalar
from dschat.models.load import load_causal_lm
from dschat.models.scalar import ScalarModel
from dschat.models.tiny import make_gemma
from dschat.models.tokenizer import load_tokenizer
from dschat.rollouts.continuous import sample
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.settings.common import CommonConfig
from dschat.settings.supervised import RewardConfig, SFTConfig
from macro_actions.losses import value_loss
from macro_actions.types import Rollout, select_rows
from tasks import LearningTask, TextRow, gold_scores, review_rows
from trials import BATCH

SFT_RATE = 5e-3
SAMPLES = 512  # responses that give the mean and the standard deviation of the gold score
SCALAR_SAMPLES = 4096  # responses (or pairs of the quickstart) that a critic or a reward model learns from
SCALAR_EPOCHS = 2
SCALAR_RATE = 2e-3
SLOTS = 256  # responses that are generated at a time
MAX_PAIR = 192  # tokens of a prompt with a response of `reviews`
EVALUATED_ROWS = 8  # in the file of held-out rows that a data set must have; here they are trained on, too
# Gold scores in standard deviations from the mean of the SFT model's responses.
REWARD_FUNCTION = """import functools

from tasks import standardized_scores

score = functools.partial(standardized_scores, {kind!r}, {mean!r}, {spread!r})
"""


@dataclass(frozen=True)
class SFTModel:
    """A folder with an SFT model, and the gold scores of its responses."""

    folder: Path
    mean: float
    spread: float  # standard deviation

    @property
    def path(self) -> str:
        """The folder of the model."""
        return str(self.folder / "sft")

    @property
    def reward_function(self) -> Path:
        """The file of the run's reward function."""
        return self.folder / "reward_function.py"


@dataclass(frozen=True)
class Policy:
    """A model that writes responses, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


@dataclass(frozen=True)
class Starts:
    """A folder of starting points, which are made when they are first needed; processes may share it."""

    folder: Path

    def sft(self, task: LearningTask, seed: int) -> SFTModel:
        """The SFT model of a task and a seed."""
        folder = self.folder / f"{task.name}-seed{seed}"
        scores = folder / "scores.json"
        _make_once(scores, lambda: _make_sft(task, seed, folder))
        return SFTModel(folder, **json.loads(scores.read_text(encoding="utf-8")))

    def prompts(self, task: LearningTask, seed: int, count: int) -> str:
        """The folder of some prompts for step 3."""
        folder = self.folder / f"{task.name}-seed{seed}" / f"prompts-{count}"
        _make_once(folder, lambda: write_data(folder, task.rows(count, seed, "ppo")))
        return str(folder)

    def scalar(self, kind: str, task: LearningTask, seed: int) -> str:
        """The folder of a critic (`regressed` on the scores of the SFT model) or of a `reward` model."""
        sft = self.sft(task, seed)
        folder = sft.folder / kind
        make = _make_critic if kind == "regressed" else _make_reward_model
        _make_once(folder, lambda: make(task, seed, sft, folder))
        return str(folder)


def _make_once(path: Path, make: Callable[[], None]) -> None:
    """Makes a file or folder unless it exists; other processes that need it wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make()


def train_in_process(config: CommonConfig) -> None:
    """Trains in a process of its own, since DeepSpeed's process groups cannot be made twice in one process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(dschat.train, config).result()


def load_policy(path: str) -> Policy:
    """Reads a model and its tokenizer from a folder."""
    tokenizer = load_tokenizer(path, "sft")
    return Policy(load_causal_lm(path, "sft", torch.float32, tokenizer), tokenizer)


def write_data(folder: Path, rows: Sequence[TextRow]) -> None:
    """Writes a data set."""
    with writing_folder(folder) as unfinished:
        write_rows(unfinished / "train.jsonl", rows)
        write_rows(unfinished / "valid.jsonl", rows[:EVALUATED_ROWS])


def _make_sft(task: LearningTask, seed: int, folder: Path) -> None:
    """Trains a random model on mediocre demonstrations and scores its responses; scores.json comes last."""
    tokenizer = task.tokenizer()
    save_model(folder / "random", Policy(make_model(task, tokenizer, seed), tokenizer))
    write_data(folder / "demonstrations", task.rows(task.sft_steps * BATCH, seed, "sft"))
    config = SFTConfig(
        data_path=[str(folder / "demonstrations")],
        data_split="1,0,0",
        model_name_or_path=str(folder / "random"),
        output_dir=str(folder / "sft"),
        max_seq_len=task.max_prompt + task.length,
        learning_rate=SFT_RATE,
        num_train_epochs=1,
        **_common_flags(seed),
    )
    train_in_process(config)

    policy = load_policy(str(folder / "sft"))
    _, gold = sample_responses(task, policy, task.rows(SAMPLES, seed, "start"), seed, "start")
    scores = {"mean": float(gold.mean()), "spread": float(gold.std())}
    write_file(folder / "reward_function.py", REWARD_FUNCTION.format(kind=task.kind, **scores))
    write_file(folder / "scores.json", json.dumps(scores) + "\n")


def _common_flags(seed: int) -> dict[str, object]:
    """Flags of both steps 1 and 2."""
    return {
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "linear",
        "num_warmup_steps": 0,
        "weight_decay": 0.0,
        "seed": seed,
        "dtype": "fp32",
        "overwrite_output_dir": True,
    }


def make_model(task: LearningTask, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A random decoder with a hidden size of 64 and 2 layers.

    Gemma as in the quickstart where EOS ends responses; otherwise OPT, which is faster.
    """
    if task.ends:
        return make_gemma(tokenizer, seed)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        dropout=0.0,
        max_position_embeddings=task.max_prompt + task.length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = OPTForCausalLM(config).float()
    return model


def _make_reward_model(task: LearningTask, seed: int, sft: SFTModel, folder: Path) -> None:
    """Step 2 on pairs of the SFT model's responses; for `reviews` on those of the quickstart."""
    if task.kind == "reviews":
        rows = review_rows(SCALAR_SAMPLES, seed, "comparisons")
        max_tokens = MAX_PAIR
    else:
        rows = sampled_pairs(task, seed, sft)
        max_tokens = task.max_prompt + task.length
    write_data(sft.folder / "pairs", rows)
    config = RewardConfig(
        data_path=[str(sft.folder / "pairs")],
        data_split="0,1,0",
        model_name_or_path=sft.path,
        output_dir=str(folder),
        max_seq_len=max_tokens,
        learning_rate=SCALAR_RATE,
        num_train_epochs=SCALAR_EPOCHS,
        **_common_flags(seed),
    )
    train_in_process(config)


def sampled_pairs(task: LearningTask, seed: int, sft: SFTModel) -> list[TextRow]:
    """Two responses of the SFT model to each prompt, of which the one with the higher gold score is chosen."""
    policy = load_policy(sft.path)
    rows = []
    for row in task.rows(SCALAR_SAMPLES // 2, seed, "reward"):
        rows += [row, row]
    rollout, gold = sample_responses(task, policy, rows, seed, "reward")
    texts = decode_responses(policy.tokenizer, rollout)
    pairs = []
    for first in range(0, len(rows), 2):
        worse, better = sorted((first, first + 1), key=gold.__getitem__)
        if gold[worse] < gold[better]:
            pairs.append({"prompt": rows[first]["prompt"], "chosen": texts[better], "rejected": texts[worse]})
    return pairs


def _make_critic(task: LearningTask, seed: int, sft: SFTModel, folder: Path) -> None:
    """Teaches the value of every token the score of the whole response."""
    policy = load_policy(sft.path)
    rollout, gold = sample_responses(task, policy, task.rows(SCALAR_SAMPLES, seed, "regressed"), seed, "regressed")
    scores = (gold - sft.mean) / sft.spread
    critic = ScalarModel(load_scalar(sft.path, "sft", torch.float32, policy.tokenizer))
    batches = SCALAR_EPOCHS * list(torch.arange(SCALAR_SAMPLES).split(BATCH))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=SCALAR_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    for rows in batches:
        optimizer.zero_grad()
        _critic_loss(critic, select_rows(rollout, rows), scores[rows]).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    save_model(folder, Policy(critic.inner, policy.tokenizer))


def _critic_loss(critic: ScalarModel, rollout: Rollout, scores: Tensor) -> Tensor:
    """Loss of the values of all tokens, for scores of shape (B,)."""
    width = rollout.response_mask.shape[1]
    values = critic(rollout.input_ids, rollout.attention_mask)[:, -width - 1 : -1]
    returns = scores[:, None].expand(-1, width)
    loss, _ = value_loss(values, values.detach(), returns, rollout.response_mask, torch.inf)
    return loss


def sample_responses(
    task: LearningTask, policy: Policy, rows: Sequence[TextRow], seed: int, split: str
) -> tuple[Rollout, Tensor]:
    """Responses to some rows at temperature 1, and their gold scores (N,); seed and split decide on the draws."""
    tokenizer = policy.tokenizer
    prompts, _ = prompt_examples(task.parse(rows), tokenizer, task.max_prompt)
    seeds = [row_seed(seed, *split.encode(), prompt.index) for prompt in prompts]
    prompt_ids = [prompt.prompt_ids for prompt in prompts]
    end_ids = (tokenizer.eos_token_id,) if task.ends else ()
    sampling = Sampling(task.length, end_ids, tokenizer.pad_token_id, tokenizer.bos_token_id)
    with torch.no_grad():
        rollout = sample(policy.model, prompt_ids, sampling, seeds, SLOTS).rollout
    texts = decode_responses(tokenizer, rollout)
    return rollout, gold_scores(task, [prompt.prompt_text for prompt in prompts], texts)


def decode_responses(tokenizer: PreTrainedTokenizerFast, rollout: Rollout) -> list[str]:
    """The texts of the responses."""
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rollout.response_rows()]


def save_model(folder: Path, policy: Policy) -> None:
    """Saves a model with its tokenizer; the folder appears when it is complete."""
    with writing_folder(folder) as unfinished:
        policy.model.save_pretrained(unfinished)
        policy.tokenizer.save_pretrained(unfinished)
