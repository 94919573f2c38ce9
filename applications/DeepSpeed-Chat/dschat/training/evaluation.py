# SPDX-License-Identifier: Apache-2.0
"""Evaluations that sample responses to held-out prompts, or whole held-out dialogues, and score them."""

import logging
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import eval_batches
from dschat.data.dialogues import DialogueExample
from dschat.data.examples import PromptExample
from dschat.data.tokenised import lengths_of
from dschat.models.layout import PassSize, group_by_length
from dschat.rollouts.dialogues import AssistantTurn, DialogueRollout
from dschat.rollouts.engine import Generation
from dschat.run.distributed import device, gather_objects, largest_over_ranks, rank, world_size
from dschat.run.metrics import EVALUATION, ROWS, RowMeans
from dschat.scoring.source import DialogueScores, ResponseTexts
from dschat.training.ppo.metrics import token_table
from dschat.training.ppo.score import AuxiliaryScores, ExternalStats
from macro_actions.types import PPOBatch, Rollout

logger = logging.getLogger(__name__)

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
PRINTED_SAMPLES = 2
TEACHER_KL = "teacher_kl"
# Metrics in which a response without tokens does not count: a failed episode, or a response without a score, whose
# tokens are masked. It does not count in the parts of the score either.
TOKEN_METRICS = frozenset({"scores", "kl", "length", "eos_rate", TEACHER_KL})

Sample = dict[str, object]  # a row of a sample file


def local_eval_batches(
    examples: Sequence[Sized],
    size: PassSize,
    sequences: int,
) -> list[list[int]]:
    """Indices of this rank's examples, in batches for forward passes. Every rank must call it.

    Every rank gets equally many batches; shorter lists are padded with empty batches.

    Args:
        examples: examples of all ranks.
        size: size of a forward pass.
        sequences: sequences per example in one forward pass (2 for a preference pair).
    """
    lengths = lengths_of(examples)
    if size.tokens is None:
        return eval_batches(lengths, size.rows, rank=rank(), world_size=world_size())
    tokens = sequences * np.array(lengths)
    local_indices = tokens.argsort(kind="stable")[rank() :: world_size()]
    batches: list[list[int]] = []
    for group in group_by_length(tokens[local_indices], size):
        batches.append(local_indices[group].tolist())
    missing = largest_over_ranks(len(batches)) - len(batches)
    return batches + [[] for _ in range(missing)]


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
    is_short = len(local_prompts) < len(by_length[:: world_size()])
    padded_prompts = local_prompts + by_length[:1] if is_short else local_prompts
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
    return _over_ranks(_response_means(batch, stats, row_values, len(local_prompts)), samples)


def _response_means(
    batch: PPOBatch,
    stats: ExternalStats,
    row_values: dict[str, Tensor],
    count: int,
) -> RowMeans:
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


def show_samples(samples: Sequence[Sample]) -> None:
    """Logs a few responses (--print_answers)."""
    for sample in samples[:PRINTED_SAMPLES]:
        score = sample["score"]
        score_text = "none" if score is None else f"{score:.3f}"
        logger.info("prompt: %r\nresponse: %r\nscore: %s", sample["prompt"], sample["response"], score_text)


@torch.no_grad()
def evaluate_dialogues(
    held_out: Sequence[DialogueExample],
    answer: Callable[[Sequence[DialogueExample]], list[DialogueRollout]],
    reward: DialogueScores,
    kl: Callable[[Sequence[AssistantTurn]], Tensor] | None,
) -> tuple[dict[str, float], list[Sample]]:
    """Rolls out held-out dialogues with the users' messages of the data; the dialogues are spread over the ranks.

    Args:
        held_out: dialogues of all ranks.
        answer: rolls out dialogues. Every rank must call it.
        reward: scores a dialogue after each of its turns. It must not communicate between ranks: they call it with
            different numbers of dialogues, and a rank without any does not call it.
        kl: replies → the KL of each to the reference, shape ``(B,)``. Every rank must call it equally often, with
            equally many replies; None if there is no reference.

    Returns:
        Means over all ranks, with standard errors over dialogues (`RowMeans`): eval/scores of whole dialogues,
        eval/scores_turn_1 and so on after each turn, over replies eval/eos_rate, length, kl and kl_per_token; and
        eval/rows. Then a sample for each dialogue, in their order.
    """
    # A rank without any dialogues rolls out one that does not count.
    by_length = sorted(held_out, key=len)
    local_dialogues = by_length[rank() :: world_size()]
    count = len(local_dialogues)
    conversations = answer(local_dialogues or by_length[:1])
    replies = [_replies_of(conversation) for conversation in conversations]
    scores = _scores_by_turn(conversations[:count], local_dialogues, reward)

    means = RowMeans()
    most_turns = max(example.num_turns for example in held_out)
    _add_scores(means, scores, most_turns)
    _add_ends_and_lengths(means, replies[:count])
    if kl is not None:
        reply_kl = _kl_of_replies(replies, _largest_reply_count(by_length), kl)
        _add_kl(means, reply_kl[:count], replies[:count])

    samples = {}
    for example, conversation, dialogue_scores in zip(local_dialogues, conversations[:count], scores, strict=True):
        samples[example.index] = _dialogue_sample(example, conversation, dialogue_scores)
    return _over_ranks(means, samples)


def _add_scores(means: RowMeans, scores: Sequence[Sequence[float]], most_turns: int) -> None:
    """Adds the scores of whole dialogues, and after each turn; a shorter dialogue has none after later turns."""
    last_scores = [dialogue_scores[-1:] for dialogue_scores in scores]
    _add_by_dialogue(means, "scores", last_scores)
    for turn in range(most_turns):
        turn_scores = [dialogue_scores[turn : turn + 1] for dialogue_scores in scores]
        _add_by_dialogue(means, f"scores_turn_{turn + 1}", turn_scores)


def _add_ends_and_lengths(means: RowMeans, replies: Sequence[Sequence[AssistantTurn]]) -> None:
    eos_rates = []
    for dialogue_replies in replies:
        eos_rates.append([float(reply.finished) for reply in dialogue_replies])
    _add_by_dialogue(means, "eos_rate", eos_rates)
    _add_by_dialogue(means, "length", _lengths(replies))


def _add_kl(
    means: RowMeans,
    reply_kl: Sequence[Sequence[float]],
    replies: Sequence[Sequence[AssistantTurn]],
) -> None:
    _add_by_dialogue(means, "kl", reply_kl)
    means.add("kl_per_token", _sums(reply_kl), _sums(_lengths(replies)))


def _lengths(replies: Sequence[Sequence[AssistantTurn]]) -> list[list[float]]:
    """Tokens of the replies of each dialogue."""
    lengths = []
    for dialogue_replies in replies:
        lengths.append([float(len(reply.ids)) for reply in dialogue_replies])
    return lengths


def _largest_reply_count(by_length: Sequence[DialogueExample]) -> int:
    """The most replies that a rank can have.

    Args:
        by_length: dialogues of all ranks; each rank has every world_size-th of them.
    """
    counts = []
    for rank_number in range(world_size()):
        counts.append(sum(example.num_turns for example in by_length[rank_number :: world_size()]))
    return max(counts)


def _kl_of_replies(
    replies: Sequence[Sequence[AssistantTurn]],
    most_replies: int,
    kl: Callable[[Sequence[AssistantTurn]], Tensor],
) -> list[list[float]]:
    """KL of the replies of each dialogue of this rank.

    A rank with fewer replies than `most_replies` repeats its first reply, so that all ranks compute equally many.

    Args:
        replies: the replies of each dialogue.
        most_replies: the largest number of replies of a rank.
        kl: see `evaluate_dialogues`.
    """
    all_replies = list(chain.from_iterable(replies))
    padding = all_replies[:1] * (most_replies - len(all_replies))
    values: list[float] = kl(all_replies + padding).tolist()
    by_dialogue = []
    start = 0
    for dialogue_replies in replies:
        end = start + len(dialogue_replies)
        by_dialogue.append(values[start:end])
        start = end
    return by_dialogue


def _replies_of(conversation: DialogueRollout) -> list[AssistantTurn]:
    """The replies of a dialogue, turn after turn."""
    return [reply for _, reply in sorted(conversation.replies.items())]


def _add_by_dialogue(
    means: RowMeans,
    name: str,
    values: Sequence[Sequence[float]],
) -> None:
    """Adds the mean of values that are grouped by dialogue; a dialogue is one row, since its values are dependent."""
    counts = [float(len(dialogue_values)) for dialogue_values in values]
    means.add(name, _sums(values), torch.tensor(counts, device=device()))


def _sums(values: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each dialogue's values, shape (n,), float64."""
    sums = list(map(sum, values))
    return torch.tensor(sums, dtype=torch.float64, device=device())


def _over_ranks(means: RowMeans, samples: dict[int, Sample]) -> tuple[dict[str, float], list[Sample]]:
    """The means as metrics, and the samples of all ranks in the order of their indices."""
    all_samples: dict[int, Sample] = {}
    for rank_samples in gather_objects(samples):
        all_samples |= rank_samples
    metrics = {}
    for name, mean in means.reduce().items():
        metrics[EVALUATION + name] = mean
    metrics[EVALUATION + ROWS] = float(len(all_samples))
    return metrics, [all_samples[index] for index in sorted(all_samples)]


def _response_sample(
    batch: PPOBatch,
    texts: ResponseTexts,
    row: int,
    kl: Tensor,
    stats: ExternalStats,
) -> Sample:
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


def _episode_columns(
    rollout: Rollout,
    texts: ResponseTexts,
    row: int,
) -> Sample:
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


def _scores_by_turn(
    conversations: Sequence[DialogueRollout], examples: Sequence[DialogueExample], reward: DialogueScores
) -> list[list[float]]:
    """Scores of each dialogue after one turn, after two, and so on; a dialogue without replies has none."""
    prefixes = []
    owners = []  # for each prefix the index of its dialogue
    for index, conversation in enumerate(conversations):
        for turn in range(len(conversation.messages) // 2):
            prefixes.append(conversation.messages[: 2 * turn + 2])
            owners.append(index)
    scores: list[list[float]] = [[] for _ in conversations]
    if not prefixes:
        return scores
    prefix_scores = reward(prefixes, [examples[index].row for index in owners]).tolist()
    for index, score in zip(owners, prefix_scores, strict=True):
        scores[index].append(score)
    return scores


def _dialogue_sample(
    example: DialogueExample,
    conversation: DialogueRollout,
    scores: list[float],
) -> Sample:
    finished = [reply.finished for reply in _replies_of(conversation)]
    return {"number": example.index, "messages": conversation.messages, "scores": scores, "finished": finished}
