# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a policy that talks: held-out dialogues, scored turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dschat.data.dialogue_examples import DialogueExample
from dschat.rollouts.dialogues import AssistantTurn, DialogueRollout
from dschat.run.distributed import gather_objects, rank, world_size
from dschat.run.metrics import Means
from dschat.scoring.source import DialogueScores

Sample = dict[str, object]  # a row of a sample file


@torch.no_grad()
def evaluate(
    held_out: Sequence[DialogueExample],
    answer: Callable[[Sequence[DialogueExample]], list[DialogueRollout]],
    reward: DialogueScores,
    kl: Callable[[Sequence[AssistantTurn]], Tensor] | None,
) -> tuple[dict[str, float], list[Sample]]:
    """Talks with the users of held-out dialogues, each rank with its share.

    Args:
        held_out: dialogues.
        answer: dialogues → the same with the policy's replies.
        reward: scores the dialogue as it stands after each turn.
        kl: replies → the KL of each to the reference, (B,); None without one. Every rank calls it equally often, with
            as many replies.

    Returns:
        Means over all ranks: eval/scores of whole dialogues, eval/scores_turn_1 and so on of the dialogues as they
        stand after that turn, and over replies eval/eos_rate, length and kl; and a sample for each dialogue, in their
        order.
    """
    by_length = sorted(held_out, key=len)
    shares = [by_length[number :: world_size()] for number in range(world_size())]
    own = shares[rank()]
    # A rank without a dialogue of its own answers one without counting it.
    conversations = answer(own or by_length[:1])
    scores = _scores_by_turn(conversations[: len(own)], own, reward)
    replies = [reply for talk in conversations for _, reply in sorted(talk.replies.items())]
    counted = replies if own else []
    means = Means()
    means.add("scores", sum(of_dialogue[-1] for of_dialogue in scores), len(scores))
    for turn in range(max(example.num_turns for example in held_out)):
        reached = [of_dialogue[turn] for of_dialogue in scores if turn < len(of_dialogue)]
        means.add(f"scores_turn_{turn + 1}", sum(reached), len(reached))
    means.add("eos_rate", sum(reply.finished for reply in counted), len(counted))
    means.add("length", sum(len(reply.ids) for reply in counted), len(counted))
    if kl is not None:
        most = max(sum(example.num_turns for example in share) for share in shares)
        numbers = kl(replies + replies[:1] * (most - len(replies)))
        means.add("kl", numbers[: len(counted)].double().sum(), len(counted))
    metrics = {f"eval/{name}": number for name, number in means.reduce().items()}
    samples = {
        example.index: _sample(example, talk, of_dialogue)
        for example, talk, of_dialogue in zip(own, conversations, scores, strict=False)
    }
    everywhere = {index: sample for part in gather_objects(samples) for index, sample in part.items()}
    return metrics, [everywhere[index] for index in sorted(everywhere)]


def _scores_by_turn(
    conversations: Sequence[DialogueRollout], examples: Sequence[DialogueExample], reward: DialogueScores
) -> list[list[float]]:
    """Of each dialogue, its scores after one turn, after two, and so on."""
    places = [
        (number, 2 * turn + 2) for number, talk in enumerate(conversations) for turn in range(len(talk.messages) // 2)
    ]
    if not places:
        return []
    prefixes = [conversations[number].messages[:end] for number, end in places]
    found = reward(prefixes, [examples[number].row for number, _ in places]).tolist()
    scores: list[list[float]] = [[] for _ in conversations]
    for (number, _), score in zip(places, found, strict=True):
        scores[number].append(score)
    return scores


def _sample(example: DialogueExample, talk: DialogueRollout, scores: list[float]) -> Sample:
    finished = [reply.finished for _, reply in sorted(talk.replies.items())]
    return {"number": example.index, "messages": talk.messages, "scores": scores, "finished": finished}
