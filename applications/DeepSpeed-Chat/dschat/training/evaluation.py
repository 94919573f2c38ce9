# SPDX-License-Identifier: Apache-2.0
"""Evaluations that draw: responses to held-out prompts, or whole held-out dialogues; their scores and samples."""

import logging
from collections.abc import Callable, Sequence, Sized
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
from dschat.training.ppo.models import AuxiliaryScores
from dschat.training.ppo.rollout_metrics import Outside, token_table
from macro_actions.types import PPOBatch

logger = logging.getLogger(__name__)

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
PRINTED_SAMPLES = 2
OF_TOKENS = ("kl", "length", "eos_rate")

Sample = dict[str, object]  # a row of a sample file


def shares(examples: Sequence[Sized], size: PassSize, sequences: int) -> list[list[int]]:
    """Numbers of this rank's examples, of those of all ranks, in batches for forward passes of so many `sequences` an
    example.

    Every rank must call it, and gets equally many batches: where its examples do not suffice, its list ends with empty
    ones.
    """
    lengths = lengths_of(examples)
    if size.tokens is None:
        return eval_batches(lengths, size.rows, rank=rank(), world_size=world_size())
    tokens = sequences * np.array(lengths)
    own = tokens.argsort(kind="stable")[rank() :: world_size()]
    batches: list[list[int]] = [own[group].tolist() for group in group_by_length(tokens[own], size)]
    return batches + [[] for _ in range(largest_over_ranks(len(batches)) - len(batches))]


@torch.no_grad()
def evaluate_responses(
    prompts: Sequence[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    sample: Callable[[Sequence[PromptExample]], tuple[Generation, ResponseTexts]],
    judge: Callable[[Generation, ResponseTexts], tuple[PPOBatch, Outside]],
) -> tuple[dict[str, float], list[Sample]]:
    """Answers held-out prompts, each rank its share.

    `sample` draws responses; `judge` makes a batch of them, and says what else was measured.

    Returns means over the prompts of all ranks: eval/scores, kl, kl_per_token, length, eos_rate and the names of
    further numbers, with standard errors (`RowMeans`), and eval/rows; and a sample for each prompt, in their order.
    """
    by_length = sorted(prompts, key=len)
    own, most = by_length[rank() :: world_size()], len(prompts[:: world_size()])
    # All ranks go through equally many forward passes: one with a prompt less answers another without counting it.
    examples = own + by_length[: most - len(own)]
    drawn, texts = sample(examples)
    batch, outside = judge(drawn, texts)
    auxiliary = outside.auxiliary
    means = RowMeans()
    everybody = torch.ones_like(batch.response_mask[:, 0])
    numbers = _numbers(batch, auxiliary)
    for name, of_rows in numbers.items():
        # A response without a score has no token left, and counts in no mean of tokens.
        counted = (batch.response_mask.any(1) if name in OF_TOKENS else everybody)[: len(own)]
        means.add(name, torch.where(counted, of_rows[: len(own)].double(), 0.0), counted)
    means.add("kl_per_token", numbers["kl"][: len(own)], numbers["length"][: len(own)])
    for name, (total, count) in outside.measured.items():
        means.add_mean(name, total, count)
    detailed = {prompt.index for prompt in prompts[:DETAILED_SAMPLES]}
    samples: dict[int, Sample] = {}
    responses = drawn.rollout.response_rows()  # in the trajectory, those without a score have no token left
    for row, example in enumerate(own):
        samples[example.index] = example.columns | _response_sample(batch, texts, row, auxiliary)
        samples[example.index] |= {"prompt_ids": example.prompt_ids, "response_ids": responses[row]}
        if example.index in detailed:
            samples[example.index]["tokens"] = token_table(batch, row, tokenizer)
    return _of_all_ranks(means, samples)


def show_samples(samples: Sequence[Sample]) -> None:
    """Logs a few responses (--print_answers)."""
    for sample in samples[:PRINTED_SAMPLES]:
        logger.info("prompt: %r\nresponse: %r\nscore: %.3f", *(sample[k] for k in ("prompt", "response", "score")))


@torch.no_grad()
def evaluate_dialogues(
    held_out: Sequence[DialogueExample],
    answer: Callable[[Sequence[DialogueExample]], list[DialogueRollout]],
    reward: DialogueScores,
    kl: Callable[[Sequence[AssistantTurn]], Tensor] | None,
) -> tuple[dict[str, float], list[Sample]]:
    """Talks with the users of held-out dialogues, each rank with its share.

    `reward` scores the dialogue as it stands after each turn. `kl`: replies → the KL of each to the reference, (B,);
    every rank calls it equally often, with as many replies.

    Returns means over all ranks: eval/scores of whole dialogues, eval/scores_turn_1 and so on of the dialogues as they
    stand after that turn, and over replies eval/eos_rate, length, kl and kl_per_token, with standard errors over
    dialogues (`RowMeans`), and eval/rows; and a sample for each dialogue, in their order.
    """
    by_length = sorted(held_out, key=len)
    shares = [by_length[number :: world_size()] for number in range(world_size())]
    own = shares[rank()]
    # A rank without a dialogue of its own answers one without counting it.
    conversations = answer(own or by_length[:1])
    scores = _scores_by_turn(conversations[: len(own)], own, reward)
    replies = [[reply for _, reply in sorted(talk.replies.items())] for talk in conversations]
    counted = replies if own else []  # by dialogue
    means = RowMeans()
    _add(means, "scores", [of_dialogue[-1:] for of_dialogue in scores])
    for turn in range(max(example.num_turns for example in held_out)):
        _add(means, f"scores_turn_{turn + 1}", [of_dialogue[turn : turn + 1] for of_dialogue in scores])
    _add(means, "eos_rate", [[float(reply.finished) for reply in of_dialogue] for of_dialogue in counted])
    lengths = [[float(len(reply.ids)) for reply in of_dialogue] for of_dialogue in counted]
    _add(means, "length", lengths)
    if kl is not None:
        every_reply = list(chain.from_iterable(replies))
        most = max(sum(example.num_turns for example in share) for share in shares)
        numbers = iter(kl(every_reply + every_reply[:1] * (most - len(every_reply))).tolist())
        kl_of_replies = [[next(numbers) for _ in of_dialogue] for of_dialogue in counted]
        _add(means, "kl", kl_of_replies)
        means.add("kl_per_token", _sums(kl_of_replies), _sums(lengths))
    samples = {
        example.index: _dialogue_sample(example, talk, of_dialogue)
        for example, talk, of_dialogue in zip(own, conversations, scores, strict=False)
    }
    return _of_all_ranks(means, samples)


def _add(means: RowMeans, name: str, numbers: Sequence[Sequence[float]]) -> None:
    """Adds the mean of numbers, given by dialogue: those of one dialogue depend on each other, and are one row."""
    counts = torch.tensor([float(len(of_dialogue)) for of_dialogue in numbers], device=device())
    means.add(name, _sums(numbers), counts)


def _sums(numbers: Sequence[Sequence[float]]) -> Tensor:
    """The sum of each dialogue's numbers, (n,) float64."""
    return torch.tensor([sum(of_dialogue) for of_dialogue in numbers], dtype=torch.float64, device=device())


def _of_all_ranks(means: RowMeans, samples: dict[int, Sample]) -> tuple[dict[str, float], list[Sample]]:
    """The means as metrics, and the samples of all ranks in the order of their numbers."""
    everywhere = {index: sample for part in gather_objects(samples) for index, sample in part.items()}
    metrics = {f"eval/{name}": number for name, number in means.reduce().items()}
    metrics[EVALUATION + ROWS] = float(len(everywhere))
    return metrics, [everywhere[index] for index in sorted(everywhere)]


def _response_sample(batch: PPOBatch, texts: ResponseTexts, row: int, auxiliary: AuxiliaryScores) -> Sample:
    trajectory = batch.trajectory
    sample: Sample = {
        "response": texts.responses[row],
        "score": float(trajectory.scores[row]),
        "finished": bool(trajectory.rollout.finished[row]),
        "kl": float(batch.kl[row].sum()),
        "length": int(batch.response_mask[row].sum()),
    }
    return sample | {name: float(numbers[row]) for name, numbers in auxiliary.items()}


def _numbers(batch: PPOBatch, auxiliary: AuxiliaryScores) -> dict[str, Tensor]:
    trajectory = batch.trajectory
    return {
        "scores": trajectory.scores,
        "kl": torch.where(batch.response_mask, batch.kl, 0.0).sum(1),
        "length": batch.response_mask.sum(1),
        "eos_rate": trajectory.rollout.finished,
        **auxiliary,
    }


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


def _dialogue_sample(example: DialogueExample, talk: DialogueRollout, scores: list[float]) -> Sample:
    finished = [reply.finished for _, reply in sorted(talk.replies.items())]
    return {"number": example.index, "messages": talk.messages, "scores": scores, "finished": finished}
