# SPDX-License-Identifier: Apache-2.0
"""Evaluations that sample: responses to held-out prompts, or whole held-out dialogues; their scores and samples."""

import logging
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from itertools import chain, islice

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
from dschat.scoring.source import DialogueScores, EpisodeRecords, ResponseTexts
from dschat.training.ppo.metrics import token_table
from dschat.training.ppo.score import AuxiliaryScores, ExternalStats
from macro_actions.types import PPOBatch, Rollout

logger = logging.getLogger(__name__)

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
PRINTED_SAMPLES = 2
TEACHER_KL = "teacher_kl"
TOKEN_METRICS = ("kl", "length", "eos_rate", TEACHER_KL)  # a response without tokens counts in none of them

Sample = dict[str, object]  # a row of a sample file


def shares(
    examples: Sequence[Sized],
    size: PassSize,
    sequences: int,
) -> list[list[int]]:
    """Numbers of this rank's examples, in batches for forward passes. Every rank must call it.

    Every rank gets equally many batches: where its examples do not suffice, its list ends with empty ones.

    Args:
        examples: examples of all ranks.
        size: size of a forward pass.
        sequences: sequences per example in one forward pass (2 for a preference pair).
    """
    lengths = lengths_of(examples)
    if size.tokens is None:
        return eval_batches(lengths, size.rows, rank=rank(), world_size=world_size())
    tokens = sequences * np.array(lengths)
    local_numbers = tokens.argsort(kind="stable")[rank() :: world_size()]
    batches: list[list[int]] = []
    for group in group_by_length(tokens[local_numbers], size):
        batches.append(local_numbers[group].tolist())
    missing = largest_over_ranks(len(batches)) - len(batches)
    return batches + [[] for _ in range(missing)]


@torch.no_grad()
def evaluate_responses(
    prompts: Sequence[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    sample: Callable[[Sequence[PromptExample]], tuple[Generation, ResponseTexts]],
    score: Callable[[Generation, ResponseTexts], tuple[PPOBatch, ExternalStats]],
) -> tuple[dict[str, float], list[Sample]]:
    """Answers held-out prompts, each rank its share.

    Args:
        prompts: prompts of all ranks.
        tokenizer: the policy's.
        sample: gives responses to prompts.
        score: gives their scores and advantages, and what else was measured.

    Returns:
        Means over the prompts of all ranks: eval/scores, kl, kl_per_token, length, eos_rate and the names of auxiliary
        numbers, with standard errors (`RowMeans`), and eval/rows; and a sample for each prompt, in their order.
    """
    # All ranks must run equally many forward passes: a rank with one prompt less answers another without counting it.
    by_length = sorted(prompts, key=len)
    local_prompts = by_length[rank() :: world_size()]
    largest_share = len(prompts[:: world_size()])
    generation, texts = sample(local_prompts + by_length[: largest_share - len(local_prompts)])
    count = len(local_prompts)
    batch, stats = score(generation, replace(texts, counted=count))

    means = RowMeans()
    numbers = _numbers_of_rows(batch, stats.auxiliary)
    has_tokens = batch.response_mask.any(1)
    for name, of_rows in numbers.items():
        counted = has_tokens if name in TOKEN_METRICS else torch.ones_like(has_tokens)
        counted = counted[:count]
        totals = torch.where(counted, of_rows[:count].double(), 0.0)
        means.add(name, totals, counted)
    means.add("kl_per_token", numbers["kl"][:count], numbers["length"][:count])
    for name, (total, weight) in stats.measured.items():
        means.add_mean(name, total, weight)

    detailed = {prompt.index for prompt in prompts[:DETAILED_SAMPLES]}
    samples: dict[int, Sample] = {}
    response_ids = generation.rollout.response_rows()  # in the batch, responses without a score have no token left
    for row, example in enumerate(local_prompts):
        sample_row = example.columns | _response_sample(batch, texts, row, stats.auxiliary)
        sample_row["prompt_ids"] = example.prompt_ids
        sample_row["response_ids"] = response_ids[row]
        if texts.episodes is not None:
            sample_row |= _episode_columns(generation.rollout, texts, texts.episodes, row)
        if example.index in detailed:
            sample_row["tokens"] = token_table(batch, row, tokenizer)
        samples[example.index] = sample_row
    return _over_ranks(means, samples)


def show_samples(samples: Sequence[Sample]) -> None:
    """Logs a few responses (--print_answers)."""
    for sample in samples[:PRINTED_SAMPLES]:
        message = "prompt: %r\nresponse: %r\nscore: %.3f"
        logger.info(message, sample["prompt"], sample["response"], sample["score"])


@torch.no_grad()
def evaluate_dialogues(
    held_out: Sequence[DialogueExample],
    answer: Callable[[Sequence[DialogueExample]], list[DialogueRollout]],
    reward: DialogueScores,
    kl: Callable[[Sequence[AssistantTurn]], Tensor] | None,
) -> tuple[dict[str, float], list[Sample]]:
    """Rolls out held-out dialogues with the users' messages of the data, each rank its share.

    Args:
        held_out: dialogues of all ranks.
        answer: rolls out dialogues.
        reward: scores a dialogue after each of its turns.
        kl: replies → the KL of each to the reference, shape ``(B,)``. Every rank must call it equally often, with
            equally many replies; None if there is no reference.

    Returns:
        Means over all ranks, with standard errors over dialogues (`RowMeans`): eval/scores of whole dialogues,
        eval/scores_turn_1 and so on after each turn, over replies eval/eos_rate, length, kl and kl_per_token; and
        eval/rows. Then a sample for each dialogue, in their order.
    """
    # This rank's dialogues. A rank without any rolls out one that does not count.
    by_length = sorted(held_out, key=len)
    local_dialogues = by_length[rank() :: world_size()]
    conversations = answer(local_dialogues or by_length[:1])
    scores = _scores_by_turn(conversations[: len(local_dialogues)], local_dialogues, reward)
    replies = list(map(_replies_of, conversations))
    counted_replies = replies if local_dialogues else []

    # Scores of whole dialogues and after each turn.
    means = RowMeans()
    last_scores = [dialogue_scores[-1:] for dialogue_scores in scores]
    _add_by_dialogue(means, "scores", last_scores)
    most_turns = max(example.num_turns for example in held_out)
    for turn in range(most_turns):
        turn_scores = [dialogue_scores[turn : turn + 1] for dialogue_scores in scores]
        _add_by_dialogue(means, f"scores_turn_{turn + 1}", turn_scores)

    # Lengths and ends of replies.
    eos_rates = []
    lengths = []
    for dialogue_replies in counted_replies:
        eos_rates.append([float(reply.finished) for reply in dialogue_replies])
        lengths.append([float(len(reply.ids)) for reply in dialogue_replies])
    _add_by_dialogue(means, "eos_rate", eos_rates)
    _add_by_dialogue(means, "length", lengths)

    # KL of replies. All ranks compute as many numbers as the one with the most replies.
    if kl is not None:
        most_replies = 0
        for number in range(world_size()):
            dialogues_of_rank = by_length[number :: world_size()]
            most_replies = max(most_replies, sum(example.num_turns for example in dialogues_of_rank))
        numbers = iter(_padded_kl(replies, most_replies, kl))
        kl_by_dialogue = []
        for dialogue_replies in counted_replies:
            kl_by_dialogue.append(list(islice(numbers, len(dialogue_replies))))
        _add_by_dialogue(means, "kl", kl_by_dialogue)
        means.add("kl_per_token", _sums(kl_by_dialogue), _sums(lengths))

    samples = {}
    for example, conversation, dialogue_scores in zip(local_dialogues, conversations, scores, strict=False):
        samples[example.index] = _dialogue_sample(example, conversation, dialogue_scores)
    return _over_ranks(means, samples)


def _padded_kl(
    replies: Sequence[Sequence[AssistantTurn]],
    most_replies: int,
    kl: Callable[[Sequence[AssistantTurn]], Tensor],
) -> list[float]:
    """KL of all replies of this rank, dialogue by dialogue.

    A rank with fewer replies than another one repeats its first reply, so that all ranks compute equally many.

    Args:
        replies: the replies of each dialogue.
        most_replies: the largest number of replies of a rank.
        kl: see `evaluate_dialogues`.
    """
    all_replies = list(chain.from_iterable(replies))
    padding = all_replies[:1] * (most_replies - len(all_replies))
    numbers: list[float] = kl(all_replies + padding).tolist()
    return numbers


def _replies_of(conversation: DialogueRollout) -> list[AssistantTurn]:
    """The replies of a dialogue, turn after turn."""
    return [reply for _, reply in sorted(conversation.replies.items())]


def _add_by_dialogue(
    means: RowMeans,
    name: str,
    numbers: Sequence[Sequence[float]],
) -> None:
    """Adds the mean of numbers that are grouped by dialogue; a dialogue is one row, since they are dependent."""
    counts = [float(len(of_dialogue)) for of_dialogue in numbers]
    means.add(name, _sums(numbers), torch.tensor(counts, device=device()))


def _sums(numbers: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each dialogue's numbers, (n,) float64."""
    sums = list(map(sum, numbers))
    return torch.tensor(sums, dtype=torch.float64, device=device())


def _over_ranks(means: RowMeans, samples: dict[int, Sample]) -> tuple[dict[str, float], list[Sample]]:
    """The means as metrics, and the samples of all ranks in the order of their numbers."""
    all_samples: dict[int, Sample] = {}
    for of_rank in gather_objects(samples):
        all_samples |= of_rank
    metrics = {}
    for name, number in means.reduce().items():
        metrics[f"eval/{name}"] = number
    metrics[EVALUATION + ROWS] = float(len(all_samples))
    in_order = sorted(all_samples)
    return metrics, [all_samples[index] for index in in_order]


def _response_sample(
    batch: PPOBatch,
    texts: ResponseTexts,
    row: int,
    auxiliary: AuxiliaryScores,
) -> Sample:
    trajectory = batch.trajectory
    sample: Sample = {
        "response": texts.responses[row],
        "score": float(trajectory.scores[row]),
        "finished": bool(trajectory.rollout.finished[row]),
        "kl": float(batch.kl[row].sum()),
        "length": int(batch.response_mask[row].sum()),
    }
    for name, numbers in auxiliary.items():
        sample[name] = float(numbers[row])
    return sample


def _episode_columns(
    rollout: Rollout,
    texts: ResponseTexts,
    episodes: EpisodeRecords,
    row: int,
) -> Sample:
    """Columns of an episode, whose prompt comes from the environment and whose ids are those of both sides.

    `response_mask` marks the ids that the policy sampled.
    """
    is_prompt = rollout.attention_mask[row, : rollout.prompt_width]
    length = int(rollout.attention_mask[row, rollout.prompt_width :].sum())
    columns: Sample = {
        "prompt": texts.prompts[row],
        "prompt_messages": texts.rows[row].messages,
        "prompt_ids": rollout.input_ids[row, : rollout.prompt_width][is_prompt].tolist(),
        "response_ids": rollout.response_ids[row, :length].tolist(),
        "response_mask": rollout.response_mask[row, :length].tolist(),
    }
    return columns | episodes.columns(row)


def _numbers_of_rows(batch: PPOBatch, auxiliary: AuxiliaryScores) -> dict[str, Tensor]:
    """Numbers that an evaluation averages over responses, (B,) each."""
    trajectory = batch.trajectory
    numbers = {
        "scores": trajectory.scores,
        "kl": torch.where(batch.response_mask, batch.kl, 0.0).sum(1),
        "length": batch.response_mask.sum(1),
        "eos_rate": trajectory.rollout.finished,
    }
    if trajectory.teacher_logprobs is not None:
        numbers[TEACHER_KL] = -trajectory.teacher_log_ratios.sum(1)
    return numbers | dict(auxiliary)


def _scores_by_turn(
    conversations: Sequence[DialogueRollout], examples: Sequence[DialogueExample], reward: DialogueScores
) -> list[list[float]]:
    """Scores of each dialogue after one turn, after two, and so on."""
    prefixes = []
    dialogue_numbers = []
    for number, conversation in enumerate(conversations):
        for turn in range(len(conversation.messages) // 2):
            prefixes.append(conversation.messages[: 2 * turn + 2])
            dialogue_numbers.append(number)
    if not prefixes:
        return []
    rows = [examples[number].row for number in dialogue_numbers]
    prefix_scores = reward(prefixes, rows).tolist()
    scores: list[list[float]] = [[] for _ in conversations]
    for number, score in zip(dialogue_numbers, prefix_scores, strict=True):
        scores[number].append(score)
    return scores


def _dialogue_sample(
    example: DialogueExample,
    conversation: DialogueRollout,
    scores: list[float],
) -> Sample:
    finished = [reply.finished for reply in _replies_of(conversation)]
    return {"number": example.index, "messages": conversation.messages, "scores": scores, "finished": finished}
