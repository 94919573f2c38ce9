# SPDX-License-Identifier: Apache-2.0
"""What the runs of a seed start from, made once: an SFT model, and where wanted a critic or a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dschat.base.atomic import write_file, writing_folder
from dschat.data.examples import PairExample, pair_examples, prompt_examples, sft_examples
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tiny import make_gemma
from dschat.models.tokenizer import load_tokenizer
from dschat.rollouts.generate import sample
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.training.supervised.reward import RewardTask
from dschat.training.supervised.sft import SFTTask
from macro_actions.losses import value_loss
from macro_actions.types import Rollout, select_rows
from trials.matrix import BATCH
from trials.tasks import LearningTask, gold_scores, tldr_rows

T = TypeVar("T")
SFT_RATE = 5e-3
SAMPLES = 512  # whose scores give the mean and the spread of the gold score
DRAWN = 4096  # responses, or pairs of the quickstart's, that a critic or a reward model learns from
EPOCHS, RATE = 2, 2e-3  # of the same
SLOTS = 256
MAX_PAIR = 192  # tokens of a prompt and a response of `reviews`


@dataclass(frozen=True)
class Start:
    """An SFT model and how its responses score."""

    sft: str  # its folder
    mean: float  # gold score of its responses
    spread: float  # standard deviation of the same


@dataclass(frozen=True)
class Starts:
    """Makes them in a folder where they are not there yet; several processes may ask at the same time."""

    folder: Path

    def sft(self, task: LearningTask, seed: int) -> Start:
        """The SFT model of a task and a seed."""
        place = self.folder / f"{task.name}-seed{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not (place / "scores.json").exists():
                _make_sft(task, seed, place)
        return Start(str(place / "sft"), **json.loads((place / "scores.json").read_text(encoding="utf-8")))

    def scalar(self, kind: str, task: LearningTask, seed: int) -> str:
        """Folder of a critic (`regressed` on the SFT model's scores) or of a `reward` model."""
        start = self.sft(task, seed)
        place = Path(start.sft).parent / kind
        with FileLock(f"{place}.lock"):
            if not place.exists():
                _make_scalar(kind, task, seed, start, place)
        return str(place)


def _make_sft(task: LearningTask, seed: int, place: Path) -> None:
    tokenizer = task.tokenizer()
    model = make_model(task, tokenizer, seed)
    rows = task.rows(task.sft_steps * BATCH, seed, "sft")
    examples, _ = sft_examples(rows, tokenizer, task.length + task.max_prompt, tokenizer.eos_token_id)
    learner, policy = SFTTask(examples, [], tokenizer.pad_token_id), PolicyModel(model)
    fit(policy, examples, lambda part: learner.loss(policy, part, learner.count(part))[0], SFT_RATE)  # type: ignore[arg-type]
    gold = draw(task, model, tokenizer, SAMPLES, seed, "start")[1]
    save(place / "sft", model, tokenizer)
    scores = {"mean": float(gold.mean()), "spread": float(gold.std())}
    write_file(place / "scores.json", json.dumps(scores) + "\n")


def make_model(task: LearningTask, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A random decoder, 64 wide, with 2 layers: the quickstart's Gemma, or OPT, which is faster, for fixed lengths."""
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


def _make_scalar(kind: str, task: LearningTask, seed: int, start: Start, place: Path) -> None:
    tokenizer = load_tokenizer(start.sft, "sft")
    policy = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    rollout, gold = draw(task, policy, tokenizer, DRAWN, seed, kind)
    scores = (gold - start.mean) / start.spread
    model = ScalarModel(load_scalar(start.sft, "sft", torch.float32, tokenizer))
    if kind == "regressed":
        fit(model, EPOCHS * list(range(DRAWN)), partial(_critic_loss, model, rollout, scores), RATE)
    else:
        if task.kind == "reviews":  # those that the quickstart's reward model learns from
            rows = tldr_rows(DRAWN, seed, "comparisons")
            pairs = pair_examples(rows, tokenizer, MAX_PAIR, tokenizer.eos_token_id)[0]
        else:
            pairs = pairs_of(rollout, scores)
        learner = RewardTask(pairs, [], tokenizer.pad_token_id)
        fit(model, EPOCHS * pairs, lambda part: learner.loss(model, part, len(part))[0], RATE)  # type: ignore[arg-type]
    save(place, model.inner, tokenizer)


def _critic_loss(model: ScalarModel, rollout: Rollout, scores: Tensor, rows: Sequence[int]) -> Tensor:
    """Every token's value learns the score of the whole response."""
    part, width = select_rows(rollout, torch.tensor(rows)), rollout.response_mask.shape[1]
    values = model(part.input_ids, part.attention_mask)[:, -width - 1 : -1]
    returns = scores[rows, None].expand(-1, width)
    return value_loss(values, values.detach(), returns, part.response_mask, torch.inf)[0]


def pairs_of(rollout: Rollout, scores: Tensor) -> list[PairExample]:
    """Neighbouring responses of a rollout, the better one chosen."""
    rows = [ids[mask].tolist() for ids, mask in zip(rollout.input_ids, rollout.attention_mask, strict=True)]
    order = [(a, b) if scores[a] > scores[b] else (b, a) for a, b in torch.arange(DRAWN).view(-1, 2).tolist()]
    return [PairExample(rows[a], rows[b]) for a, b in order if scores[a] != scores[b]]


def draw(
    task: LearningTask, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, count: int, seed: int, split: str
) -> tuple[Rollout, Tensor]:
    """Responses of a model to new prompts, and their gold scores (count,)."""
    prompts, _ = prompt_examples(task.rows(count, seed, split), tokenizer, task.max_prompt)
    seeds = [row_seed(seed, *split.encode(), prompt.index) for prompt in prompts]
    rollout = sample(model, [prompt.prompt_ids for prompt in prompts], sampling(task, tokenizer), seeds, SLOTS).rollout
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rollout.response_rows()]
    return rollout, gold_scores(task, [prompt.prompt_text for prompt in prompts], texts)


def sampling(task: LearningTask, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """At temperature 1; no token ends a response of fixed length."""
    ends = (tokenizer.eos_token_id,) if task.ends else ()
    return Sampling(task.length, ends, tokenizer.pad_token_id, tokenizer.bos_token_id)


def fit(model: nn.Module, examples: Sequence[T], loss: Callable[[Sequence[T]], Tensor], rate: float) -> None:
    """One AdamW step for each batch of examples; the learning rate falls to zero in a straight line."""
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    adam = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, len(batches))
    for batch in batches:
        adam.zero_grad()
        loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """An ordinary folder, which is there when it is whole."""
    with writing_folder(folder) as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
