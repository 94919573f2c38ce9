# SPDX-License-Identifier: Apache-2.0
"""Step 3's evaluation: responses to held-out prompts, their scores, and a file of samples."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.jsonl import write_rows
from dschat.data.examples import PromptExample
from dschat.rl.types import PPOBatch, Trajectory
from dschat.rollouts.engine import Generation
from dschat.run.distributed import gather_objects, rank, world_size
from dschat.run.metrics import Means
from dschat.scoring.source import Measured, ResponseTexts
from dschat.trainers.ppo.metrics import token_table
from dschat.trainers.ppo.models import Beside

logger = logging.getLogger(__name__)

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
PRINTED_SAMPLES = 2
OF_TOKENS = ("kl", "length", "eos_rate")

Sample = dict[str, object]  # a row of a sample file


@torch.no_grad()
def evaluate(
    prompts: Sequence[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    sample: Callable[[Sequence[PromptExample]], tuple[Generation, ResponseTexts]],
    score: Callable[[Generation, ResponseTexts], tuple[Trajectory, Beside, Measured]],
    assign_credit: Callable[[Trajectory], PPOBatch],
) -> tuple[dict[str, float], list[Sample]]:
    """Answers the prompts, each rank its share.

    Args:
        prompts: held out.
        tokenizer: the actor's.
        sample: prompts → their responses.
        score: responses → a trajectory; the numbers beside the scores; what scoring measured.
        assign_credit: a trajectory → its advantages.

    Returns:
        Means over the prompts of all ranks: eval/scores, kl, length, eos_rate and the names of further numbers; and a
        sample for each prompt, in their order.
    """
    by_length = sorted(prompts, key=len)
    own, most = by_length[rank() :: world_size()], len(prompts[:: world_size()])
    # All ranks go through equally many forward passes: one with a prompt less answers another without counting it.
    examples = own + by_length[: most - len(own)]
    drawn, texts = sample(examples)
    trajectory, beside, measured = score(drawn, texts)
    batch = assign_credit(trajectory)
    means = Means()
    everybody = torch.ones_like(batch.response_mask[:, 0])
    for name, of_rows in _numbers(batch, beside).items():
        # A response without a score has no token left, and counts in no mean of tokens.
        counted = batch.response_mask.any(1) if name in OF_TOKENS else everybody
        means.add(name, of_rows.double()[: len(own)][counted[: len(own)]].sum(), counted[: len(own)].sum())
    for name, (total, count) in measured.items():
        means.add(name, total, count)
    detailed = {prompt.index for prompt in prompts[:DETAILED_SAMPLES]}
    samples: dict[int, Sample] = {}
    responses = drawn.rollout.response_rows()  # in the trajectory, those without a score have no token left
    for row, example in enumerate(own):
        samples[example.index] = example.columns | _sample(batch, texts, row, beside)
        samples[example.index] |= {"prompt_ids": example.prompt_ids, "response_ids": responses[row]}
        if example.index in detailed:
            samples[example.index]["tokens"] = token_table(batch, row, tokenizer)
    metrics = {f"eval/{key}": value for key, value in means.reduce().items()}
    everywhere = {index: sample for part in gather_objects(samples) for index, sample in part.items()}
    return metrics, [everywhere[index] for index in sorted(everywhere)]


def write_samples(folder: Path, update: int, samples: Sequence[Sample]) -> None:
    """Writes samples/update-N.jsonl of a run."""
    write_rows(folder / "samples" / f"update-{update:06d}.jsonl", samples)


def show_samples(samples: Sequence[Sample]) -> None:
    """Logs a few responses (--print_answers)."""
    for sample in samples[:PRINTED_SAMPLES]:
        logger.info("prompt: %r\nresponse: %r\nscore: %.3f", *(sample[k] for k in ("prompt", "response", "score")))


def _sample(batch: PPOBatch, texts: ResponseTexts, row: int, beside: Beside) -> Sample:
    trajectory = batch.trajectory
    sample: Sample = {
        "response": texts.responses[row],
        "score": float(trajectory.scores[row]),
        "finished": bool(trajectory.rollout.finished[row]),
        "kl": float(batch.kl[row].sum()),
        "length": int(batch.response_mask[row].sum()),
    }
    return sample | {name: float(numbers[row]) for name, numbers in beside.items()}


def _numbers(batch: PPOBatch, beside: Beside) -> dict[str, Tensor]:
    """What is averaged, of each row."""
    trajectory = batch.trajectory
    return {
        "scores": trajectory.scores,
        "kl": torch.where(batch.response_mask, batch.kl, 0.0).sum(1),
        "length": batch.response_mask.sum(1),
        "eos_rate": trajectory.rollout.finished,
        **beside,
    }
