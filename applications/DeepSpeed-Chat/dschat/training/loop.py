# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs, evaluations, saved models, checkpoints and signals. What is trained is an algorithm."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.jsonl import write_rows
from dschat.base.progress import Bar, progress
from dschat.data.collate import update_batches
from dschat.models.engines import Trained
from dschat.run.checkpoint import Checkpoints
from dschat.run.distributed import is_main, rank, world_size
from dschat.run.identity import check_same_everywhere, identity_of
from dschat.run.model_folders import ModelFolders, SavedModel, evaluation_after_saving
from dschat.run.output import Run, RunOutput, due
from dschat.run.state import Progress, random_states, set_random_states
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.training import rehearsal
from dschat.training.evaluation import Sample
from dschat.training.iteration import Metrics
from dschat.training.nonfinite import NonFinite

Work = Sequence[Sequence[int]]  # of one iteration, on this rank: batches of numbers of training examples


class Algorithm(Protocol):
    """What the loop trains. Algorithms inherit what they do not say themselves."""

    name: str  # of the progress bar
    lengths: Sequence[int]  # of the training examples, in tokens
    work_batch: int  # examples of a batch of `Work`
    shown: Mapping[str, str]  # what the progress bar shows: label → metric
    checks_trained: bool  # whether `self_check` holds of trained weights, too, not only of those at the start
    nonfinite: NonFinite  # what happens to numbers that are not finite

    def prepare(self) -> None:
        """What needs the weights that training starts from: called before a checkpoint takes their place."""
        return None

    @abstractmethod
    def self_check(self) -> None:
        """A few forward passes, before anything is trained or measured; UserError if a model is computed wrongly."""

    def rehearse(self) -> None:
        """The longest possible micro-batch, forward and backward once without effect, see
        `dschat.training.rehearsal`. Raises UserError where memory ends.
        """
        return None

    @abstractmethod
    def iterate(self, work: Work, iteration: int) -> Metrics:
        """The optimiser updates of one iteration, those that are left of it; its metrics."""

    def why_stop(self, metrics: Metrics, update: int, may_stop: bool) -> str | None:
        """Why the run must end after an iteration; None if it may go on. `may_stop`: there is more to come."""
        return None

    @abstractmethod
    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Metrics of the held-out examples, the same on every rank, and samples; {} without such examples."""

    def conclude(self, result: Metrics) -> None:
        """Warns about the trained models at the end of the run; `result` is the last evaluation, which may be {}."""
        return None

    def state_dict(self) -> Progress:
        """What the algorithm must know to go on, beside models and optimisers."""
        return Progress(0, {}, {})

    def load_state_dict(self, state: Progress) -> None:
        """Takes up what `state_dict` gave."""
        return None


class Loop:
    """Trains an algorithm; everything it needs is handed in."""

    def __init__(
        self, algorithm: Algorithm, config: CommonConfig, run: Run, folders: ModelFolders, checkpoints: Checkpoints
    ) -> None:
        self.algorithm, self.config, self.run, self.folders = algorithm, config, run, folders
        self.checkpoints = checkpoints
        self.updates_per_iteration = run.plan.updates_per_iteration
        self.iteration = 0  # those that are finished
        self.evaluated = -1  # after how many updates the last evaluation was
        # The global random states after the last iteration or evaluation; users' functions may draw from them.
        self.random = random_states()

    @property
    def update(self) -> int:
        """Optimiser updates of the finished iterations."""
        return self.iteration * self.updates_per_iteration

    def fit(self) -> Metrics:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        total = total_updates(len(self.algorithm.lengths), self.config, self.run.plan)
        resumes = self.config.output.resume_from_checkpoint is not None
        self.random = random_states()
        if not resumes:  # a run that is refused writes nothing
            self.self_check()
            self.rehearse()
        self.run.begin()
        self.algorithm.prepare()
        self.random = random_states()
        self.load_state_dict(self.checkpoints.load())
        if resumes:  # beside the optimiser states of the checkpoint
            self.rehearse()
        if self.config.engine.self_checks:
            for engine in self.checkpoints.engines.values():
                engine.check_reduction()
        with self.checkpoints.stopping(self.state_dict):
            if resumes and (self.algorithm.checks_trained or self.state_dict().update == 0):
                self.self_check()
            with progress(total, self.algorithm.name, self.update, not is_main(), "update") as bar:
                self.evaluate_if_due(total)
                while self.update < total:
                    self.train_epoch(total, bar)
            if self.config.output.save_steps:
                self.checkpoints.save(self.state_dict())
            self.folders.save_final()
            with evaluation_after_saving(self.config.output.output_dir):
                if self.algorithm.checks_trained:  # trained weights show more than those at the start
                    self.self_check()
                result = self.evaluate()
        self.folders.describe_final()
        self.algorithm.conclude(result)
        return result

    def train_epoch(self, total: int, bar: Bar) -> None:
        """The iterations that are left of an epoch, or of the run."""
        per_epoch = len(self.algorithm.lengths) // self.run.plan.iteration_size
        epoch, done = divmod(self.iteration, per_epoch)
        left = (total - self.update) // self.updates_per_iteration
        for work in work_of_epoch(self.algorithm, self.config, self.run.plan, epoch)[done : done + left]:
            self.train_once(work, total, bar)

    def train_once(self, work: Work, total: int, bar: Bar) -> None:
        """One iteration, and what is due after it."""
        before, config = self.update, self.config
        metrics = self.iterate(work)
        bar.set_postfix({label: f"{metrics.get(name, math.nan):.4f}" for label, name in self.algorithm.shown.items()})
        bar.update(self.update - before)
        why_stop = self.algorithm.why_stop(metrics, self.update, may_stop=self.update < total)
        if why_stop or due(config.output.save_models, before, self.update):
            self.folders.save_after(self.update)
        if (why_stop or due(config.output.save_steps, before, self.update)) and self.update < total:
            self.checkpoints.save(self.state_dict())
        if why_stop:
            raise UserError(why_stop)
        self.evaluate_if_due(total)

    def iterate(self, work: Work) -> Metrics:
        """One iteration of the algorithm, counted and logged."""
        metrics = self.algorithm.iterate(work, self.iteration)
        self.iteration, self.random = self.iteration + 1, random_states()
        self.run.record.layers = {name: engine.layers for name, engine in self.checkpoints.engines.items()}
        self._log(metrics)
        return metrics

    def evaluate_if_due(self, total: int) -> None:
        """Before the first update, and every --eval_interval; the evaluation of the end is not this one's business."""
        is_due = self.update == 0 or due(
            self.config.output.eval_interval, self.update - self.updates_per_iteration, self.update
        )
        if is_due and self.evaluated < self.update < total and not self.algorithm.state_dict().update:
            self.evaluate()

    def evaluate(self) -> Metrics:
        """Metrics of the held-out examples, logged, and samples, written down."""
        metrics, samples = self.algorithm.evaluate()
        if not metrics:
            return {}
        self._log(metrics)
        self.run.record.measured(metrics, self.update)
        self.evaluated, self.random = self.update, random_states()
        if samples and is_main():
            write_rows(self.run.folder / "samples" / f"update-{self.update:06d}.jsonl", samples)
            self.run.metrics.show_samples(self.update, samples)
        self.algorithm.nonfinite.in_evaluation(metrics, self.update)
        return metrics

    def self_check(self) -> None:
        """The algorithm's, unless --no_self_checks; it leaves the random states as they were."""
        if self.config.engine.self_checks:
            self.algorithm.self_check()
            set_random_states(self.random)

    def rehearse(self) -> None:
        """The algorithm's longest micro-batch, on a GPU."""
        if rehearsal.is_due():
            self.algorithm.rehearse()

    def state_dict(self) -> Progress:
        """Where the run is. An iteration that is under way goes on with the random states of its beginning."""
        state = self.algorithm.state_dict()
        numbers = state.numbers | {"evaluated": self.evaluated}
        return Progress(self.update + state.update, numbers, state.random or self.random, state.tensors)

    def load_state_dict(self, progress: Progress | None) -> None:
        """Takes the run up where it was; None leaves it at its beginning."""
        if progress is None:
            return
        self.iteration = progress.update // self.updates_per_iteration
        self.evaluated, self.random = progress.numbers["evaluated"], progress.random
        self.algorithm.load_state_dict(progress)

    def _log(self, metrics: Metrics) -> None:
        plan = self.run.plan
        self.run.metrics.log(self.update, self.iteration * (plan.global_responses or plan.global_batch), metrics)


def loop_of(
    algorithm: Algorithm,
    engines: Mapping[str, Trained],
    saved: Sequence[SavedModel],
    tokenizer: PreTrainedTokenizerBase,
    config: CommonConfig,
    run: RunOutput,
    average: dict[str, Tensor] | None = None,
) -> Loop:
    """The loop of a run, with its folders of models and of checkpoints. Raises UserError where processes have other
    files or flags than the main one.

    Checkpoints hold the engines by name and `average`, this process's parts of the moving average.
    """
    folders = ModelFolders(saved, tokenizer, config, run)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    check_same_everywhere(identity)
    return Loop(algorithm, config, run, folders, Checkpoints(engines, config, run, identity, average))


def work_of_epoch(algorithm: Algorithm, config: CommonConfig, plan: BatchPlan, epoch: int) -> Sequence[Work]:
    """What the iterations of an epoch train on, on this rank."""
    return update_batches(
        algorithm.lengths,
        plan.iteration_size,
        algorithm.work_batch,
        config.optimisation.seed,
        epoch,
        rank=rank(),
        world_size=world_size(),
        balance_tokens=config.spreads_lengths,
    )


def work_of(algorithm: Algorithm, config: CommonConfig, plan: BatchPlan, iteration: int) -> Work | None:
    """What an iteration trains on, on this rank; None after the last."""
    examples = len(algorithm.lengths)
    if iteration * plan.updates_per_iteration >= total_updates(examples, config, plan):
        return None
    epoch, number = divmod(iteration, examples // plan.iteration_size)
    return work_of_epoch(algorithm, config, plan, epoch)[number]


def total_updates(num_examples: int, config: CommonConfig, plan: BatchPlan) -> int:
    """Optimiser updates of the whole run, see `CommonConfig.total_updates`. Raises UserError for fewer examples than
    one iteration takes.
    """
    size = plan.iteration_size
    if num_examples < size:
        raise UserError(f"--data_path: {num_examples} {config.too_few_examples.format(size=size)}")
    return config.total_updates(num_examples, plan)
