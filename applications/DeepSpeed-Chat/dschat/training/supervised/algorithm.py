# SPDX-License-Identifier: Apache-2.0
"""Supervised training: one optimiser update per iteration, on a task with a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dschat.data.tokenised import lengths_of
from dschat.engine.process_group import training_dtype
from dschat.models.engines import Trained
from dschat.run.distributed import device, sum_over_ranks
from dschat.run.metrics import ROWS, STANDARD_ERROR, Means, RowMeans, with_variances
from dschat.run.output import Run
from dschat.run.peaks import own_gpu
from dschat.run.stop import raise_if_stopped
from dschat.settings.supervised import SupervisedConfig
from dschat.training.evaluation import Sample, local_eval_batches
from dschat.training.iteration import Clock, Metrics, eval_size, micro_batches, pass_size
from dschat.training.loop import Algorithm, Work
from dschat.training.nonfinite import SKIPPED_NONFINITE, NonFinite
from dschat.training.rehearsal import rehearsal, rows_of
from dschat.training.throughput import Throughput

Example = TypeVar("Example", bound=Sized)
EngineT = TypeVar("EngineT", bound=Trained)
AnyEngine = TypeVar("AnyEngine", contravariant=True)


@dataclass(frozen=True)
class RowStatistics:
    """Numbers that an evaluation measures, for each of n examples.

    Attributes:
        counts: shape ``(n,)``, what the loss is a mean over: 1, or an example's response tokens.
        sums: shape ``(n,)`` each: the loss and statistics, summed over what is counted.
    """

    counts: Tensor
    sums: dict[str, Tensor]


class Task(Protocol[Example, AnyEngine]):
    """A supervised task: examples, a loss and an evaluation. Methods that are not abstract have a default."""

    name: str  # name of the loss in the metrics
    train: Sequence[Example]
    eval: Sequence[Example]

    def prepare(self, engine: AnyEngine) -> None:
        """Computes what depends on the weights that training starts from, before a checkpoint replaces them."""
        return None

    def count(self, examples: Sequence[Example]) -> int:
        """The loss's denominator: number of examples, or of response tokens."""
        return len(examples)

    def lengths(self, examples: Sequence[Example]) -> list[int]:
        """Tokens of each sequence of the examples."""
        return [len(example) for example in examples]

    def with_placeholders(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Examples whose loss can be computed before `prepare`; its value does not matter."""
        return examples

    def padded_tokens(self, examples: Sequence[Example]) -> int:
        """Tokens of each text of a micro-batch of these examples, padding included."""
        return max(len(example) for example in examples)

    @abstractmethod
    def loss(
        self, engine: AnyEngine, examples: Sequence[Example], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over the micro-batch divided by ``count``; the statistics are divided by it, too."""

    @abstractmethod
    def row_statistics(self, engine: AnyEngine, examples: Sequence[Example]) -> RowStatistics:
        """The loss and its statistics of each example, in any order, as `loss` computes them."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Tensors of a micro-batch that the engine reads."""

    @abstractmethod
    def self_check(self, engine: AnyEngine, examples: Sequence[Example]) -> None:
        """Raises UserError if the model is computed wrongly."""

    def conclude(self, metrics: Mapping[str, float]) -> None:
        """Warns about what was trained.

        The metrics, without prefix, are those of the last evaluation, or of the last update if nothing is held out.
        """
        return None

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Evaluation metrics from the evaluation's mean loss and statistics."""
        return means


class Supervised(Algorithm, Generic[Example, EngineT]):
    """Trains one engine on one task."""

    columns: Mapping[str, str] = {"tokens/s": "time/trained_per_second"}
    checks_trained = True

    def __init__(self, engine: EngineT, task: Task[Example, EngineT], config: SupervisedConfig, run: Run) -> None:
        """Connects the parts of a run.

        Args:
            engine: engine of a PolicyModel (step 1, DPO, REFUEL on pairs) or a ScalarModel (the reward model).
            task: what is learnt.
            config: the flags.
            run: batch sizes and the output folder.
        """
        self.engine = engine
        self.task = task
        self.config = config
        self.plan = run.plan
        self.nonfinite = NonFinite(config.optimisation.on_nonfinite, run)
        self.name = task.name
        self.work_batch = run.plan.micro_batch
        self.shown: Mapping[str, str] = {"loss": f"loss/{task.name}"}
        self.lengths: Sequence[int] = lengths_of(task.train)
        self.size = pass_size(run.plan)
        self.throughput = Throughput([engine], own_gpu(training_dtype(config.engine.dtype)))
        self.last_update: Metrics = {}

    def prepare(self) -> None:
        self.task.prepare(self.engine)

    def self_check(self) -> None:
        """The task's self-check, on two examples."""
        self.engine.eval()
        self.task.self_check(self.engine, self.task.train[:2])

    def rehearse(self) -> None:
        """Trains without effect on the longest examples that may meet in a micro-batch."""
        numbers = self.longest_micro_batch()
        longest = [self.task.train[number] for number in numbers]
        examples = self.task.with_placeholders(longest)
        sequences = self.config.sequences_per_example * len(numbers)
        tokens = self.task.padded_tokens(examples)
        with rehearsal({"model": self.engine}, sequences, tokens, "per_device_train_batch_size"):
            count = float(self.task.count(examples))
            loss, _ = self.task.loss(self.engine, examples, count)
            self.engine.backward(loss)

    def longest_micro_batch(self) -> list[int]:
        """Numbers of the longest training examples that may be in one micro-batch, the longest first.

        Processes deal out the examples of an update by length, as do the micro-batches of packed ones.
        """
        longest_first = np.argsort(-np.asarray(self.lengths), kind="stable")
        step = self.plan.world_size
        if self.config.spreads_lengths:
            step *= self.plan.accumulation
        tokens = self.config.sequences_per_example * int(self.lengths[longest_first[0]])
        numbers: list[int] = longest_first[::step].tolist()
        return numbers[: rows_of(self.size, tokens)]

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One optimiser update on micro-batches of example numbers."""
        clock = Clock()
        task = self.task
        self.engine.train()
        learning_rate = self.engine.learning_rate

        # What the loss is a mean over, on all ranks.
        batches = []
        for numbers in self._micro_batches(work):
            batches.append([task.train[number] for number in numbers])
        local_count = float(sum(task.count(batch) for batch in batches))
        count = sum_over_ranks(torch.tensor(local_count, device=device()))

        # Forward and backward.
        sums = Means()
        for batch in batches:
            raise_if_stopped()
            loss, stats = task.loss(self.engine, batch, count)
            self.engine.backward(loss)
            self.engine.step()
            sums.add_sum(f"loss/{task.name}", loss)
            sums.add_sums({f"train/{name}": value for name, value in stats.items()})
        if self.nonfinite.check_update({"model": self.engine}, iteration, lambda: self._tensors(batches)):
            return {SKIPPED_NONFINITE: 1.0, "lr": learning_rate}

        # Metrics.
        metrics = with_variances(sums.reduce())
        if self.engine.skipped:
            metrics["skipped"] = 1.0
        else:
            metrics["grad_norm"] = self.engine.grad_norm
        metrics["lr"] = learning_rate
        self.last_update = metrics
        clock.record("training")
        lengths: list[int] = []
        for batch in batches:
            lengths += task.lengths(batch)
        throughput = self.throughput.trained([np.array(lengths)], clock.seconds["time/training"])
        return metrics | clock.seconds | throughput

    def _micro_batches(self, work: Work) -> Work:
        """Example numbers of an update's micro-batches, which --max_tokens_per_micro_batch cuts anew."""
        if self.size.tokens is None:
            return work
        numbers = list(chain.from_iterable(work))
        lengths = [self.lengths[number] for number in numbers]
        tokens = self.config.sequences_per_example * np.array(lengths)
        batches = []
        for group in micro_batches(tokens, self.size, [self.engine]):
            batches.append([numbers[row] for row in group])
        return batches

    def _tensors(self, batches: list[list[Example]]) -> dict[str, Tensor]:
        """Tensors of an update by number of the micro-batch and name."""
        tensors = {}
        for number, batch in enumerate(batches):
            for name, tensor in self.task.collate(batch).items():
                tensors[f"{number}.{name}"] = tensor
        return tensors

    def conclude(self, result: Metrics) -> None:
        """The task's warnings, from the last evaluation or, if nothing is held out, from the last update."""
        prefix = "eval/" if result else "train/"
        metrics = {}
        for name, number in (result or self.last_update).items():
            if name.startswith(prefix):
                metrics[name.removeprefix(prefix)] = number
        if metrics:
            self.task.conclude(metrics)

    @torch.no_grad()
    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Loss and statistics on the held-out examples, each rank on its share; {} without such examples."""
        if not self.task.eval:
            return {}, []
        self.engine.eval()
        limit = self.config.num_eval_examples or None
        held_out = self.task.eval[:limit]
        means = RowMeans()
        for numbers in local_eval_batches(held_out, eval_size(self.config), self.config.sequences_per_example):
            raise_if_stopped()
            # A rank that has run out of examples takes part in every forward pass all the same, without weight.
            examples = [held_out[number] for number in numbers or [0]]
            statistics = self.task.row_statistics(self.engine, examples)
            weight = float(bool(numbers))
            for name, totals in statistics.sums.items():
                means.add(name, totals * weight, statistics.counts * weight)

        metrics = {}
        for name, number in means.reduce().items():
            if not name.endswith(f"_squared{STANDARD_ERROR}"):
                metrics[name] = number
        summary = self.task.summary(with_variances(metrics))
        summary[ROWS] = float(len(held_out))
        evaluation = {}
        for name, number in summary.items():
            evaluation[f"eval/{name}"] = number
        return evaluation, []


def statistics_of_rows(losses: Sequence[tuple[Tensor, dict[str, Tensor]]], counts: Sequence[int]) -> RowStatistics:
    """Statistics of n examples from the loss of each, computed alone and divided by 1."""
    numbers: dict[str, list[Tensor]] = defaultdict(list)
    for loss, stats in losses:
        numbers["loss"].append(loss)
        for name, number in stats.items():
            numbers[name].append(number)
    sums = {name: torch.stack(of_rows) for name, of_rows in numbers.items()}
    return RowStatistics(torch.tensor(counts, device=sums["loss"].device), sums)
