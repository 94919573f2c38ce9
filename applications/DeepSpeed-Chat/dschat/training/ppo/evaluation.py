# SPDX-License-Identifier: Apache-2.0
"""Evaluations that sample a response to each held-out prompt and score it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.examples import PromptExample
from dschat.rollouts.engine import Generation
from dschat.run.distributed import rank, world_size
from dschat.run.metrics import RowMeans
from dschat.scoring.source import ResponseTexts
from dschat.training.evaluation import Sample, gather_evaluation
from dschat.training.ppo.metrics import token_table
from dschat.training.ppo.score import AuxiliaryScores, ExternalStats
from macro_actions.types import PPOBatch, Rollout

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
TEACHER_KL = "teacher_kl"
# Metrics in which a response without tokens does not count: a failed episode, or a response without a score, whose
# tokens are masked. It does not count in the parts of the score either.
TOKEN_METRICS = frozenset({"scores", "kl", "length", "eos_rate", TEACHER_KL})


@torch.no_grad()
def evaluate_responses(
    prompts: Sequence[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    sample: Callable[[Sequence[PromptExample]], tuple[Generation, ResponseTexts]],
    score: Callable[[Generation, ResponseTexts], tuple[PPOBatch, ExternalStats]],
) -> tuple[dict[str, float], list[Sample]]:
    """Samples and scores responses to held-out prompts, which are spread over the ranks.

    Args:
        prompts: prompts of all ranks.
        tokenizer: the policy's.
        sample: gives responses to prompts.
        score: gives scores and advantages of responses, and the statistics that score sources report.

    Returns:
        Means over the prompts of all ranks: eval/scores, kl, kl_per_token, length, eos_rate and the auxiliary scores,
        with standard errors (`RowMeans`), and eval/rows; and a sample for each prompt, in their order.
    """
    # All ranks must run equally many forward passes: a rank with one prompt fewer answers the shortest one again. That
    # response is not counted.
    by_length = sorted(prompts, key=len)
    local_prompts = by_length[rank() :: world_size()]
    padded_prompts = list(local_prompts)
    if len(local_prompts) < math.ceil(len(prompts) / world_size()):
        padded_prompts.append(by_length[0])
    generation, texts = sample(padded_prompts)
    batch, stats = score(generation, replace(texts, counted=len(local_prompts)))

    detailed_indices = {prompt.index for prompt in prompts[:DETAILED_SAMPLES]}
    row_values = _values_of_rows(batch, stats.auxiliary)
    samples: dict[int, Sample] = {}
    # The rollout's ids, because the batch masks responses without a score completely.
    response_ids = generation.rollout.response_rows()
    for row, example in enumerate(local_prompts):
        sample_row = example.columns | _response_sample(batch, texts, row, row_values["kl"], stats)
        sample_row["prompt_ids"] = example.prompt_ids
        sample_row["response_ids"] = response_ids[row]
        if texts.episodes is not None:
            sample_row |= _episode_columns(generation.rollout, texts, row)
        if example.index in detailed_indices:
            sample_row["tokens"] = token_table(batch, row, tokenizer)
        samples[example.index] = sample_row
    return gather_evaluation(_response_means(batch, stats, row_values, len(local_prompts)), samples)


def _response_means(batch: PPOBatch, stats: ExternalStats, row_values: dict[str, Tensor], count: int) -> RowMeans:
    """Means over the first `count` responses of this rank."""
    means = RowMeans()
    has_tokens = batch.response_mask.any(1)
    for name, values in row_values.items():
        has_value = torch.ones_like(has_tokens)
        if name in TOKEN_METRICS | stats.score_parts:
            has_value = has_tokens
        totals = torch.where(has_value, values.double(), 0.0)
        means.add(name, totals[:count], has_value[:count])
    means.add("kl_per_token", row_values["kl"][:count], row_values["length"][:count])
    for name, (total, weight) in stats.measured.items():
        means.add_mean(name, total, weight)
    return means


def _response_sample(batch: PPOBatch, texts: ResponseTexts, row: int, kl: Tensor, stats: ExternalStats) -> Sample:
    """Columns of a response in sample files. What a response without a score does not have is None.

    `kl` is summed over each response, shape ``(B,)``.
    """
    trajectory = batch.trajectory
    length = int(batch.response_mask[row].sum())
    sample: Sample = {
        "response": texts.responses[row],
        "score": float(trajectory.scores[row]) if length else None,
        "finished": bool(trajectory.rollout.finished[row]),
        "kl": float(kl[row]) if length else None,
        "length": length or None,
    }
    for name, scores in stats.auxiliary.items():
        sample[name] = float(scores[row])
        if name in stats.score_parts and not length:
            sample[name] = None
    return sample


def _episode_columns(rollout: Rollout, texts: ResponseTexts, row: int) -> Sample:
    """Columns of an episode, whose prompt comes from the environment and whose ids are those of both sides.

    `response_mask` marks the ids that the policy sampled.
    """
    assert texts.episodes is not None  # the caller checked
    is_prompt = rollout.attention_mask[row, : rollout.prompt_width]
    length = int(rollout.attention_mask[row, rollout.prompt_width :].sum())
    columns: Sample = {
        "prompt": texts.prompts[row],
        "prompt_messages": texts.rows[row].messages,
        "prompt_ids": rollout.input_ids[row, : rollout.prompt_width][is_prompt].tolist(),
        "response_ids": rollout.response_ids[row, :length].tolist(),
        "response_mask": rollout.response_mask[row, :length].tolist(),
    }
    return columns | texts.episodes.columns(row)


def _values_of_rows(batch: PPOBatch, auxiliary: AuxiliaryScores) -> dict[str, Tensor]:
    """Values that an evaluation averages over responses, shape (B,) each."""
    trajectory = batch.trajectory
    values = {
        "scores": trajectory.scores,
        "kl": torch.where(batch.response_mask, batch.kl, 0.0).sum(1),
        "length": batch.response_mask.sum(1),
        "eos_rate": trajectory.rollout.finished,
    }
    if trajectory.teacher_logprobs is not None:
        values[TEACHER_KL] = -trajectory.teacher_log_ratios.sum(1)
    return values | dict(auxiliary)
