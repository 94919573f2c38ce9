# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of an iteration, and the share of the GPUs' peaks that they come to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from dschat.models.engines import Trained
from dschat.models.layout import Integers, Lengths
from dschat.models.operations import ModelCost, Peaks, cost_of, decoding_bytes
from dschat.run.distributed import device, is_main, sum_over_ranks, world_size
from dschat.training.iteration import Metrics

logger = logging.getLogger("dschat")


@dataclass(frozen=True)
class TrainedTexts:
    """Texts that models go forward and backward on, on this rank."""

    lengths: Integers  # (n,) tokens of each
    targets: int  # tokens whose log-probs the loss needs, in all of them

    @classmethod
    def of(cls, texts: Iterable[tuple[int, int]]) -> TrainedTexts:
        """From the tokens of each text and the number of its targets."""
        both = np.array(list(texts), dtype=np.int64).reshape(-1, 2)
        return cls(both[:, 0], int(both[:, 1].sum()))


class Throughput:
    """What the trained models of a run do in a second. Every rank must call its methods."""

    def __init__(self, engines: Iterable[Trained], peaks: Peaks | None = None, slots: int | None = None) -> None:
        """Takes the engines of the models, which are trained on the same texts.

        Args:
            engines: the first one's model samples.
            peaks: of this process's GPU; without them there are tokens per second alone.
            slots: rows that are sampled together on this GPU; None where others sample.
        """
        self._peaks, self._slots = peaks, slots
        self._costs: list[ModelCost] = []
        if peaks is not None:
            self._costs = _known_costs([engine.module.inner for engine in engines])

    def trained(self, texts: TrainedTexts, seconds: float) -> Metrics:
        """Metrics of updates on these texts that took so long: tokens per second of all ranks, and MFU.

        MFU (model FLOPs utilisation) is operations / (seconds × peak × GPUs), see `dschat.models.operations`.
        """
        operations = sum(cost.training_operations(texts.lengths, texts.targets) for cost in self._costs)
        tokens, operations = _sums(float(texts.lengths.sum()), operations)
        metrics = {"time/trained_per_second": tokens / seconds}
        if self._peaks is not None and self._costs:
            peak = self._peaks.operations_per_second * world_size()
            metrics["time/mfu"] = operations / (seconds * peak)
        return metrics

    def sampled(self, draws: Sequence[Lengths], seconds: float) -> Metrics:
        """Metrics of sampling, in some draws one after another, that took so long.

        Tokens of responses per second of all ranks, and the bytes that must be read for them (`decoding_bytes`) over
        what the memory could have given in that time.
        """
        tokens = float(sum(lengths.responses.sum() for lengths in draws))
        read = self._read(draws)
        tokens, total_read = _sums(tokens, read or 0.0)
        metrics = {"time/sampled_per_second": tokens / seconds}
        if self._peaks is not None and read is not None:
            metrics["time/bandwidth"] = total_read / (seconds * self._peaks.bytes_per_second * world_size())
        return metrics

    def _read(self, draws: Sequence[Lengths]) -> float | None:
        """Bytes that must be read on this rank; None where that is not known, which it is on all ranks or none."""
        if not self._costs or self._slots is None or self._costs[0].step_bytes is None:
            return None
        parts = [decoding_bytes(self._costs[0], lengths, self._slots) for lengths in draws]
        return sum(part for part in parts if part is not None)


def _known_costs(models: Sequence[PreTrainedModel]) -> list[ModelCost]:
    """The costs of all models, or none and a line that says why."""
    costs = []
    for model in models:
        cost = cost_of(model)
        if cost is None:
            if is_main():
                kind = model.config.model_type
                logger.info("time/mfu is not given: the operations of a %s model are not known", kind)
            return []
        costs.append(cost)
    return costs


def _sums(*numbers: float) -> list[float]:
    """Each added up over all ranks."""
    sums: list[float] = sum_over_ranks(torch.tensor(numbers, dtype=torch.float64, device=device())).tolist()
    return sums
