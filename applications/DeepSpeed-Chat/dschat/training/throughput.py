# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of an iteration, and the share of the GPUs' peaks that they come to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from dschat.models.engines import Trained
from dschat.models.layout import Integers, Lengths
from dschat.models.operations import ModelCost, cost_of, decoding_bytes
from dschat.run.distributed import device, is_main, sum_over_ranks, world_size
from dschat.run.peaks import Gpu
from dschat.training.iteration import Metrics

logger = logging.getLogger("dschat")

# Tokens per second that the table of evaluations shows, of steps that sample: heading → metric.
ROLLOUT_SPEEDS = {"sampled/s": "time/sampled_per_second", "trained/s": "time/trained_per_second"}


class Throughput:
    """Measures what the trained models of a run do per second. Every rank must call its methods."""

    def __init__(self, engines: Iterable[Trained], gpu: Gpu | None = None, slots: int | None = None) -> None:
        """Prepares the measurement of throughput.

        Args:
            engines: engines of the models, which are trained on the same texts; the first one's model samples.
            gpu: this process's GPU; without one only tokens per second are measured.
            slots: rows that are sampled together on this GPU; None if servers sample.
        """
        self._gpu = gpu
        self._slots = slots
        self._engines = list(engines)
        self._costs: list[ModelCost] = []
        if gpu is not None:
            self._costs = _costs_of([engine.module.inner for engine in self._engines])

    def trained(self, lengths: Sequence[Integers], seconds: float) -> Metrics:
        """Metrics of updates: tokens per second of all ranks, and MFU.

        Tokens are those of the engine that was trained on most.

        MFU (model FLOPs utilisation) is operations / (seconds × peak × GPUs), see `dschat.models.operations`.

        Args:
            lengths: for each engine the tokens of the texts that this rank's updates trained it on, shape ``(n,)``.
            seconds: seconds of the updates.
        """
        operations = 0.0
        for cost, trained in zip(self._costs, lengths, strict=False):  # no costs, or that of each engine
            operations += cost.training_operations(trained)
        most = max(float(trained.sum()) for trained in lengths)
        tokens, operations = _sum_over_ranks(most, operations)
        metrics = {"time/trained_per_second": tokens / seconds}
        if self._gpu is not None and self._costs:
            peak = self._gpu.operations_per_second * world_size()
            metrics["time/mfu"] = operations / (seconds * peak)
        return metrics

    def sampled(self, samplings: Sequence[Lengths], seconds: float) -> Metrics:
        """Metrics of one or more samplings one after another.

        Tokens of responses per second of all ranks, and the bytes that must be read for them (`decoding_bytes`) over
        what the memory could have delivered in that time.
        """
        tokens = 0.0
        read = 0.0
        for lengths in samplings:
            tokens += float(lengths.responses.sum())
            if self._slots is not None and self._costs:
                read += decoding_bytes(self._costs[0], lengths, self._slots)
        tokens, read = _sum_over_ranks(tokens, read)
        metrics = {"time/sampled_per_second": tokens / seconds}
        if self._gpu is not None and read:
            peak = self._gpu.bytes_per_second * world_size()
            metrics["time/bandwidth"] = read / (seconds * peak)
        return metrics


def _costs_of(models: Sequence[PreTrainedModel]) -> list[ModelCost]:
    """The costs of all models; [] and a line in the log if one is not known."""
    costs = []
    for model in models:
        cost = cost_of(model)
        if cost is None:
            if is_main():
                model_type = model.config.model_type
                logger.info("time/mfu is not given: the operations of a %s model are not known", model_type)
            return []
        costs.append(cost)
    return costs


def _sum_over_ranks(*numbers: float) -> list[float]:
    """Each number added up over all ranks."""
    sums: list[float] = sum_over_ranks(torch.tensor(numbers, dtype=torch.float64, device=device())).tolist()
    return sums
