# SPDX-License-Identifier: Apache-2.0
"""Learning from given texts: one optimiser update per iteration, on a task with a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dschat.data.tokenised import lengths_of
from dschat.models.engines import Trained
from dschat.models.operations import Peaks
from dschat.run.distributed import device, sum_over_ranks, world_size
from dschat.run.metrics import ROWS, STANDARD_ERROR, Means, RowMeans, with_variances
from dschat.run.output import Run
from dschat.run.stop import raise_if_stopped
from dschat.settings.supervised import SupervisedConfig
from dschat.training.evaluation import Sample, shares
from dschat.training.iteration import Clock, Metrics, eval_size, micro_batches, pass_size
from dschat.training.loop import Algorithm, Work
from dschat.training.nonfinite import SKIPPED_NONFINITE, NonFinite
from dschat.training.rehearsal import rehearsal, rows_of
from dschat.training.throughput import Throughput, TrainedTexts

Example = TypeVar("Example", bound=Sized)
EngineT = TypeVar("EngineT", bound=Trained)
AnyEngine = TypeVar("AnyEngine", contravariant=True)


@dataclass(frozen=True)
class RowStatistics:
    """What an evaluation measures on n examples, by example."""

    counts: Tensor  # (n,) what the loss is a mean over: 1, or an example's response tokens
    sums: dict[str, Tensor]  # (n,) each: the loss, and statistics, summed over that


class Task(Protocol[Example, AnyEngine]):
    """What is learnt: examples, a loss and an evaluation. Tasks inherit what most of them do."""

    name: str  # of the loss in the metrics
    train: Sequence[Example]
    eval: Sequence[Example]

    def prepare(self, engine: AnyEngine) -> None:
        """What needs the weights that training starts from: called before a checkpoint takes their place."""
        return None

    def count(self, examples: Sequence[Example]) -> int:
        """What the loss is a mean over: examples, or response tokens."""
        return len(examples)

    def texts(self, examples: Sequence[Example]) -> list[tuple[int, int]]:
        """Tokens of each text of the examples, and how many of them the loss needs log-probs of."""
        return [(len(example), 0) for example in examples]

    def with_placeholders(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Examples that a loss can be computed of before `prepare`, whose numbers are of no matter."""
        return examples

    def padded_tokens(self, examples: Sequence[Example]) -> int:
        """Tokens of each text of a micro-batch of these examples, padding included."""
        return max(len(example) for example in examples)

    @abstractmethod
    def loss(
        self, engine: AnyEngine, examples: Sequence[Example], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over the micro-batch divided by ``count``; statistics divided likewise."""

    @abstractmethod
    def row_statistics(self, engine: AnyEngine, examples: Sequence[Example]) -> RowStatistics:
        """The loss and its statistics of each example, in any order, as `loss` computes them."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """What the engine reads of a micro-batch."""

    @abstractmethod
    def self_check(self, engine: AnyEngine, examples: Sequence[Example]) -> None:
        """Raises UserError if the model is computed wrongly."""

    def conclude(self, metrics: Mapping[str, float]) -> None:
        """Warns about what was trained. The metrics have no prefix; they are those of the last evaluation, or of the
        last update where nothing is held out.
        """
        return None

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Evaluation metrics from the evaluation's mean loss and statistics."""
        return means


class Supervised(Algorithm, Generic[Example, EngineT]):
    """Trains one engine on one task."""

    checks_trained = True

    def __init__(
        self,
        engine: EngineT,
        task: Task[Example, EngineT],
        config: SupervisedConfig,
        run: Run,
        *,
        peaks: Peaks | None = None,
    ) -> None:
        """Takes the engine of a PolicyModel (step 1, DPO, REFUEL on pairs) or ScalarModel (the reward model), the
        task, and the peaks of this process's GPU.
        """
        self.engine, self.task, self.config = engine, task, config
        self.nonfinite = NonFinite(config.optimisation.on_nonfinite, run)
        self.name, self.work_batch = task.name, run.plan.micro_batch
        self.shown: Mapping[str, str] = {"loss": f"loss/{task.name}"}
        self.lengths: Sequence[int] = lengths_of(task.train)
        self.plan = run.plan
        self.size = pass_size(run.plan)
        self.throughput = Throughput([engine], peaks)
        self.last_update: Metrics = {}

    def prepare(self) -> None:
        self.task.prepare(self.engine)

    def self_check(self) -> None:
        """The task's, on two examples."""
        self.engine.eval()
        self.task.self_check(self.engine, self.task.train[:2])

    def rehearse(self) -> None:
        """A pass over the longest examples that may meet in a micro-batch."""
        numbers = self.longest_micro_batch()
        rows, flag = self.config.sequences_per_example * len(numbers), "per_device_train_batch_size"
        examples = self.task.with_placeholders([self.task.train[number] for number in numbers])
        tokens = self.task.padded_tokens(examples)
        with rehearsal({"model": self.engine}, rows, tokens, flag):
            loss, _ = self.task.loss(self.engine, examples, float(self.task.count(examples)))
            self.engine.backward(loss)

    def longest_micro_batch(self) -> list[int]:
        """Numbers of the longest training examples that may be in one micro-batch, the longest first.

        Processes deal out the examples of an update by length, as do the micro-batches of packed ones.
        """
        longest_first = np.argsort(-np.asarray(self.lengths), kind="stable")
        apart = self.plan.world_size
        if self.config.spreads_lengths:
            apart *= self.plan.accumulation
        tokens = self.config.sequences_per_example * int(self.lengths[longest_first[0]])
        numbers: list[int] = longest_first[::apart].tolist()
        return numbers[: rows_of(self.size, tokens)]

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One optimiser update on micro-batches of example numbers."""
        clock = Clock()
        self.engine.train()
        batches = [[self.task.train[number] for number in rows] for rows in self._micro_batches(work)]
        own_count = torch.tensor(float(sum(self.task.count(batch) for batch in batches)), device=device())
        count = sum_over_ranks(own_count)
        sums, learning_rate = Means(), self.engine.learning_rate
        for batch in batches:
            raise_if_stopped()
            loss, stats = self.task.loss(self.engine, batch, count)
            self.engine.backward(loss)
            self.engine.step()
            sums.add_sum(f"loss/{self.task.name}", loss)
            sums.add_sums({f"train/{name}": value for name, value in stats.items()})
        if self.nonfinite.in_update({"model": self.engine}, iteration, lambda: self._tensors(batches)):
            return {SKIPPED_NONFINITE: 1.0, "lr": learning_rate}
        norm = {"skipped": 1.0} if self.engine.skipped else {"grad_norm": self.engine.grad_norm}
        self.last_update = {**with_variances(sums.reduce()), **norm, "lr": learning_rate}
        clock.lap("training")
        texts = TrainedTexts.of(text for batch in batches for text in self.task.texts(batch))
        return self.last_update | clock.seconds | self.throughput.trained(texts, clock.seconds["time/training"])

    def _micro_batches(self, work: Work) -> Work:
        """The example numbers of an update, cut anew where that is by tokens."""
        if self.size.tokens is None:
            return work
        numbers = [number for rows in work for number in rows]
        tokens = self.config.sequences_per_example * np.array([self.lengths[number] for number in numbers])
        return [[numbers[row] for row in group] for group in micro_batches(tokens, self.size, [self.engine])]

    def _tensors(self, batches: list[list[Example]]) -> dict[str, Tensor]:
        parts = [(number, self.task.collate(batch)) for number, batch in enumerate(batches)]
        return {f"{number}.{name}": x for number, part in parts for name, x in part.items()}

    def conclude(self, result: Metrics) -> None:
        """The task's warnings, from the last evaluation or, where nothing is held out, from the last update."""
        prefix, metrics = ("eval/", result) if result else ("train/", self.last_update)
        found = {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}
        if found:
            self.task.conclude(found)

    @torch.no_grad()
    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Loss and statistics on the held-out examples, each rank on its share; {} without such examples."""
        if not self.task.eval:
            return {}, []
        self.engine.eval()
        held_out = self.task.eval[: self.config.num_eval_examples(world_size()) or None]
        means = RowMeans()
        for rows in shares(held_out, eval_size(self.config), self.config.sequences_per_example):
            raise_if_stopped()
            # A rank that has run out of examples takes part in every forward pass all the same, without weight.
            examples = [held_out[number] for number in rows or [0]]
            measured = self.task.row_statistics(self.engine, examples)
            is_counted = float(bool(rows))
            for name, totals in measured.sums.items():
                means.add(name, totals * is_counted, measured.counts * is_counted)
        metrics = {name: x for name, x in means.reduce().items() if not name.endswith(f"_squared{STANDARD_ERROR}")}
        summary = self.task.summary(with_variances(metrics)) | {ROWS: float(len(held_out))}
        return {f"eval/{name}": value for name, value in summary.items()}, []


def statistics_of_rows(losses: Sequence[tuple[Tensor, dict[str, Tensor]]], counts: Sequence[int]) -> RowStatistics:
    """Statistics of n examples from the loss of each, computed alone and divided by 1."""
    each = [{"loss": loss, **stats} for loss, stats in losses]
    sums = {name: torch.stack([row[name] for row in each]) for name in each[0]}
    return RowStatistics(torch.tensor(counts, device=sums["loss"].device), sums)
