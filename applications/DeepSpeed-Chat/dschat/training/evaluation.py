# SPDX-License-Identifier: Apache-2.0
"""What evaluations have in common: batches of held-out examples, and results of all ranks."""

import logging
from collections.abc import Sequence, Sized

import numpy as np

from dschat.data.batches import eval_batches
from dschat.data.tokenised import lengths_of
from dschat.models.layout import PassSize, group_by_length
from dschat.run.distributed import gather_objects, largest_over_ranks, rank, world_size
from dschat.run.metrics import EVALUATION, ROWS, RowMeans

logger = logging.getLogger(__name__)

PRINTED_SAMPLES = 2

Sample = dict[str, object]  # a row of a sample file


def local_eval_batches(examples: Sequence[Sized], size: PassSize, sequences: int) -> list[list[int]]:
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


def show_samples(samples: Sequence[Sample]) -> None:
    """Logs a few responses (--print_answers)."""
    for sample in samples[:PRINTED_SAMPLES]:
        score = sample["score"]
        score_text = "none" if score is None else f"{score:.3f}"
        logger.info("prompt: %r\nresponse: %r\nscore: %s", sample["prompt"], sample["response"], score_text)


def gather_evaluation(means: RowMeans, samples: dict[int, Sample]) -> tuple[dict[str, float], list[Sample]]:
    """The means over all ranks as metrics, and the samples of all ranks in the order of their indices."""
    all_samples: dict[int, Sample] = {}
    for rank_samples in gather_objects(samples):
        all_samples |= rank_samples
    metrics = {}
    for name, mean in means.reduce().items():
        metrics[EVALUATION + name] = mean
    metrics[EVALUATION + ROWS] = float(len(all_samples))
    return metrics, [all_samples[index] for index in sorted(all_samples)]
