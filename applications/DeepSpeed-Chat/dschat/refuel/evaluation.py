# SPDX-License-Identifier: Apache-2.0
"""Evaluations that roll out held-out dialogues and score them after each turn."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from dschat.data.dialogues import DialogueExample
from dschat.run.distributed import device, rank, world_size
from dschat.run.metrics import RowMeans
from dschat.scoring.source import DialogueScores
from dschat.training.evaluation import Sample, gather_evaluation
from dschat.turns.dialogues import AssistantTurn, DialogueRollout


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
    eos_rates, lengths = _ends_and_lengths(replies[:count])
    _add_by_dialogue(means, "eos_rate", eos_rates)
    _add_by_dialogue(means, "length", lengths)
    if kl is not None:
        reply_kl = _kl_of_replies(replies, _largest_reply_count(by_length), kl)[:count]
        _add_by_dialogue(means, "kl", reply_kl)
        means.add("kl_per_token", _sums(reply_kl), _sums(lengths))

    samples = {}
    for example, conversation, dialogue_scores in zip(local_dialogues, conversations[:count], scores, strict=True):
        samples[example.index] = _dialogue_sample(example, conversation, dialogue_scores)
    return gather_evaluation(means, samples)


def _add_scores(means: RowMeans, scores: Sequence[Sequence[float]], most_turns: int) -> None:
    """Adds the scores of whole dialogues, and after each turn; a shorter dialogue has none after later turns."""
    last_scores = [dialogue_scores[-1:] for dialogue_scores in scores]
    _add_by_dialogue(means, "scores", last_scores)
    for turn in range(most_turns):
        turn_scores = [dialogue_scores[turn : turn + 1] for dialogue_scores in scores]
        _add_by_dialogue(means, f"scores_turn_{turn + 1}", turn_scores)


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
    replies: Sequence[Sequence[AssistantTurn]], most_replies: int, kl: Callable[[Sequence[AssistantTurn]], Tensor]
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


def _ends_and_lengths(replies: Sequence[Sequence[AssistantTurn]]) -> tuple[list[list[float]], list[list[float]]]:
    """For the replies of each dialogue, whether they ended with an end token (1 or 0), and their tokens."""
    ends: list[list[float]] = []
    lengths: list[list[float]] = []
    for dialogue_replies in replies:
        ends.append([float(reply.finished) for reply in dialogue_replies])
        lengths.append([float(len(reply.ids)) for reply in dialogue_replies])
    return ends, lengths


def _add_by_dialogue(means: RowMeans, name: str, values: Sequence[Sequence[float]]) -> None:
    """Adds the mean of values that are grouped by dialogue; a dialogue is one row, since its values are dependent."""
    counts = [float(len(dialogue_values)) for dialogue_values in values]
    means.add(name, _sums(values), torch.tensor(counts, device=device()))


def _sums(values: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each dialogue's values, shape (n,), float64."""
    sums = list(map(sum, values))
    return torch.tensor(sums, dtype=torch.float64, device=device())


def _scores_by_turn(
    conversations: Sequence[DialogueRollout], examples: Sequence[DialogueExample], reward: DialogueScores
) -> list[list[float]]:
    """Scores of each dialogue after one turn, after two, and so on."""
    prefixes = []
    finished = []
    owners = []  # for each prefix the index of its dialogue
    for index, conversation in enumerate(conversations):
        for turn in range(len(conversation.messages) // 2):  # each a user message and its reply
            prefixes.append(conversation.messages[: 2 * turn + 2])
            owners.append(index)
        finished += conversation.finished
    scores: list[list[float]] = [[] for _ in conversations]
    if not prefixes:
        return scores
    prefix_scores = reward(prefixes, [examples[index].row for index in owners], finished).tolist()
    for index, score in zip(owners, prefix_scores, strict=True):
        scores[index].append(score)
    return scores


def _dialogue_sample(example: DialogueExample, conversation: DialogueRollout, scores: list[float]) -> Sample:
    return {
        "number": example.index,
        "messages": conversation.messages,
        "scores": scores,
        "finished": conversation.finished,
    }
