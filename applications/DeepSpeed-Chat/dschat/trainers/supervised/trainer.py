# SPDX-License-Identifier: Apache-2.0
"""The loop of steps 1 and 2: epochs × updates × micro-batches, with evaluation and saved models in between."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dschat.common.progress import Bar, progress
from dschat.config.batches import BatchPlan
from dschat.config.supervised import SupervisedConfig
from dschat.data.collate import eval_batches, update_batches
from dschat.data.stored import lengths_of
from dschat.errors import UserError
from dschat.models.engines import Trained
from dschat.run.checkpoint import Checkpoints
from dschat.run.distributed import device, is_main, rank, sum_over_ranks, world_size
from dschat.run.metrics import Means, with_variances
from dschat.run.model_folders import ModelFolders, evaluation_after_saving
from dschat.run.output import Run, due
from dschat.run.progress import Progress
from dschat.run.random_states import random_states
from dschat.run.stop import raise_if_stopped
from dschat.trainers.checks import COUNTED, NonFinite

Example = TypeVar("Example", bound=Sized)
EngineT = TypeVar("EngineT", bound=Trained)
AnyEngine = TypeVar("AnyEngine", contravariant=True)


class Task(Protocol[Example, AnyEngine]):
    """What is learnt: examples, a loss and an evaluation."""

    name: str  # of the loss in the metrics
    train: Sequence[Example]
    eval: Sequence[Example]

    def prepare(self, engine: AnyEngine) -> None:
        """What needs the weights that training starts from: called before a checkpoint takes their place."""

    def count(self, examples: Sequence[Example]) -> int:
        """What the loss is a mean over: response tokens, or pairs."""

    def loss(
        self, engine: AnyEngine, examples: Sequence[Example], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over the micro-batch divided by ``count``; statistics divided likewise."""

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """What the engine reads of a micro-batch."""

    def self_check(self, engine: AnyEngine, examples: Sequence[Example]) -> None:
        """Raises UserError if the model is computed wrongly."""

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Evaluation metrics from the evaluation's mean loss and statistics."""


class SupervisedTrainer(Generic[Example, EngineT]):
    """Trains one engine on one task."""

    def __init__(
        self,
        engine: EngineT,
        task: Task[Example, EngineT],
        config: SupervisedConfig,
        run: Run,
        folders: ModelFolders,
        checkpoints: Checkpoints,
    ) -> None:
        """Takes the parts of a run.

        Args:
            engine: of a PolicyModel (step 1, DPO) or ScalarModel (the reward model).
            task: what is learnt.
            config: the flags.
            run: batch sizes, record and metrics.
            folders: saves the model.
            checkpoints: saves what the run needs to go on, and gives it back.
        """
        self.engine, self.task, self.config, self.run, self.folders = engine, task, config, run, folders
        self.checkpoints, self.nonfinite = checkpoints, NonFinite(config.on_nonfinite, run)
        self.lengths = lengths_of(task.train)
        self.update = 0
        self.evaluated = -1  # after how many updates the last evaluation was

    def fit(self) -> dict[str, float]:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        total = total_updates(len(self.task.train), self.config, self.run.plan)
        self.task.prepare(self.engine)
        self.go_on(self.checkpoints.load())
        with self.checkpoints.stopping(self.progress):
            self._self_check()
            with progress(total, self.task.name, self.update, not is_main(), "update") as bar:
                self._train_all(total, bar)
            if self.config.save_steps:
                self.checkpoints.save(self.progress())
            self.folders.save_final()
            with evaluation_after_saving(self.config.output_dir):
                self._self_check()  # before training, a reward head of zeros passes whatever the model computes
                result = self.evaluate()
        self.folders.describe_final()
        return result

    def progress(self) -> Progress:
        """Where the run is."""
        return Progress(self.update, {"evaluated": self.evaluated}, random_states())

    def go_on(self, progress: Progress | None) -> None:
        """Takes the run up where it was; None leaves it at its beginning."""
        if progress is not None:
            self.update, self.evaluated = progress.update, progress.numbers["evaluated"]

    def _self_check(self) -> None:
        if self.config.self_checks:
            self.engine.eval()
            self.task.self_check(self.engine, self.task.train[:2])

    def _train_all(self, total: int, bar: Bar) -> None:
        config, plan = self.config, self.run.plan
        per_epoch = len(self.lengths) // plan.global_batch
        self._evaluate_if_due(total)
        for epoch in range(self.update // per_epoch, math.ceil(total / per_epoch)):
            updates = update_batches(
                self.lengths,
                plan.global_batch,
                plan.micro_batch,
                config.seed,
                epoch,
                rank=rank(),
                world_size=world_size(),
                balance_tokens=config.spreads_lengths,
            )
            for micro_batches in updates[self.update % per_epoch : total - epoch * per_epoch]:
                metrics = self.train_once(micro_batches)
                bar.set_postfix(loss=f"{metrics.get(f'loss/{self.task.name}', math.nan):.4f}")
                bar.update()
                if due(config.save_models, self.update - 1, self.update):
                    self.folders.save_after(self.update)
                if due(config.save_steps, self.update - 1, self.update) and self.update < total:
                    self.checkpoints.save(self.progress())
                self._evaluate_if_due(total)

    def _evaluate_if_due(self, total: int) -> None:
        """Before the first update, and every --eval_interval; the evaluation of the end is not this one's business."""
        is_due = self.update == 0 or due(self.config.eval_interval, self.update - 1, self.update)
        if is_due and self.update < total and self.evaluated < self.update:
            self.evaluate()

    def train_once(self, micro_batches: list[list[int]]) -> dict[str, float]:
        """One optimiser update on micro-batches of example numbers."""
        self.engine.train()
        batches = [[self.task.train[i] for i in rows] for rows in micro_batches]
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
        self.update += 1
        if self.nonfinite.in_update({"model": self.engine}, self.update - 1, lambda: self._tensors(batches)):
            metrics = {COUNTED: 1.0}
        else:
            skipped, norm = self.engine.skipped, self.engine.grad_norm
            metrics = {**with_variances(sums.reduce()), **({"skipped": 1.0} if skipped else {"grad_norm": norm})}
        metrics["lr"] = learning_rate
        self.run.metrics.log(self.update, self.update * self.run.plan.global_batch, metrics)
        return metrics

    def _tensors(self, batches: list[list[Example]]) -> dict[str, Tensor]:
        """What an update's micro-batches are made of, by number and name."""
        parts = [(number, self.task.collate(batch)) for number, batch in enumerate(batches)]
        return {f"{number}.{name}": x for number, part in parts for name, x in part.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and statistics on the held-out examples, each rank on its share; {} without such examples."""
        if not self.task.eval:
            return {}
        self.engine.eval()
        size, most = self.config.per_device_eval_batch_size, self.config.num_eval_examples(world_size())
        held_out = self.task.eval[: most or None]
        batches = eval_batches(lengths_of(held_out), size, rank=rank(), world_size=world_size())
        means = Means()
        for rows in batches:
            raise_if_stopped()
            # A rank that has run out of examples takes part in every forward pass all the same, without weight.
            examples = [held_out[i] for i in rows or [0]]
            loss, stats = self.task.loss(self.engine, examples, 1.0)
            totals = {"loss": loss, **stats}
            means.add_all(totals if rows else dict.fromkeys(totals, 0), self.task.count(examples) if rows else 0)
        metrics = {f"eval/{name}": value for name, value in self.task.summary(with_variances(means.reduce())).items()}
        self.run.metrics.log(self.update, self.update * self.run.plan.global_batch, metrics)
        self.run.record.measured(metrics, self.update)
        self.evaluated = self.update
        self.nonfinite.in_evaluation(metrics, self.update)
        return metrics


def total_updates(num_examples: int, config: SupervisedConfig, plan: BatchPlan) -> int:
    """Optimiser updates of the whole run.

    Raises:
        UserError: fewer examples than one global batch.
    """
    per_epoch = num_examples // plan.global_batch
    if per_epoch == 0:
        raise UserError(
            f"--data_path: {num_examples} training examples are fewer than one global batch of {plan.global_batch}. "
            "Lower --global_batch_size (or --per_device_train_batch_size and --gradient_accumulation_steps), or give "
            "more data; --data_split says which part of them this step gets."
        )
    return config.total_updates(per_epoch, plan.global_batch)
