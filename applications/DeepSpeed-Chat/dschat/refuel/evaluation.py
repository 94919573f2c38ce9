# SPDX-License-Identifier: Apache-2.0
"""Evaluations that roll out held-out dialogues and score them after each turn."""

from collections.abc import Callable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from dschat.data.dialogues import DialogueExample
from dschat.refuel.scores import DialogueScores
from dschat.run.distributed import device, largest_over_ranks, rank, world_size
from dschat.run.metrics import RowMeans
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
    replies = [conversation.in_order for conversation in conversations]
    scores = _scores_by_turn(conversations[:count], local_dialogues, reward)

    eos_rates = []
    lengths = []
    for dialogue_replies in replies[:count]:
        eos_rates.append([float(reply.finished) for reply in dialogue_replies])
        lengths.append([float(len(reply.ids)) for reply in dialogue_replies])

    means = RowMeans()
    _add_scores(means, scores, max(example.num_turns for example in held_out))
    _add_by_dialogue(means, "eos_rate", eos_rates)
    _add_by_dialogue(means, "length", lengths)
    if kl is not None:
        reply_kl = _kl_of_replies(replies, kl)[:count]
        _add_by_dialogue(means, "kl", reply_kl)
        means.add("kl_per_token", _sums(reply_kl), _sums(lengths))

    samples = {}
    for example, conversation, dialogue_scores in zip(local_dialogues, conversations[:count], scores, strict=True):
        samples[example.index] = {
            "number": example.index,
            "messages": conversation.messages,
            "scores": dialogue_scores,
            "finished": conversation.finished,
        }
    return gather_evaluation(means, samples)


def _add_scores(means: RowMeans, scores: Sequence[Sequence[float]], most_turns: int) -> None:
    """Adds the scores of whole dialogues, and after each turn; a shorter dialogue has none after later turns."""
    last_scores = [dialogue_scores[-1:] for dialogue_scores in scores]
    _add_by_dialogue(means, "scores", last_scores)
    for turn in range(most_turns):
        turn_scores = [dialogue_scores[turn : turn + 1] for dialogue_scores in scores]
        _add_by_dialogue(means, f"scores_turn_{turn + 1}", turn_scores)


def _kl_of_replies(
    replies: Sequence[Sequence[AssistantTurn]], kl: Callable[[Sequence[AssistantTurn]], Tensor]
) -> list[list[float]]:
    """KL of the replies of each dialogue of this rank; for `kl` see `evaluate_dialogues`.

    A rank with fewer replies than others repeats its first one, so that all ranks compute equally many.
    """
    all_replies = list(chain.from_iterable(replies))
    padding = all_replies[:1] * (largest_over_ranks(len(all_replies)) - len(all_replies))
    values = iter(kl(all_replies + padding).tolist())
    return [list(islice(values, len(dialogue_replies))) for dialogue_replies in replies]


def _add_by_dialogue(means: RowMeans, name: str, values: Sequence[Sequence[float]]) -> None:
    """Adds the mean of values that are grouped by dialogue; a dialogue is one row, since its values are dependent."""
    counts = [float(len(dialogue_values)) for dialogue_values in values]
    means.add(name, _sums(values), torch.tensor(counts, device=device()))


def _sums(values: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each dialogue's values, shape (n,), float64."""
    return torch.tensor(list(map(sum, values)), dtype=torch.float64, device=device())


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
