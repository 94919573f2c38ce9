# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs, evaluations, saved models, checkpoints and stops. What is trained is an algorithm."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.jsonl import write_rows
from dschat.base.progress import Bar, is_interactive, progress
from dschat.data.batches import update_batches
from dschat.models.engines import Trained
from dschat.models.finetuning import describe_trained
from dschat.run.checkpoint import Checkpoints
from dschat.run.distributed import is_main, rank, world_size
from dschat.run.identity import check_same_everywhere, identity_of
from dschat.run.metrics import evaluation_line, few_rows_warning
from dschat.run.model_folders import ModelFolders, SavedModel, evaluation_after_saving
from dschat.run.output import Run, RunOutput, due
from dschat.run.state import Progress, random_states, set_random_states
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.training import rehearsal
from dschat.training.evaluation import Sample
from dschat.training.iteration import Metrics
from dschat.training.nonfinite import NonFinite

if TYPE_CHECKING:
    from dschat.run.evaluation_table import EvaluationTable

logger = logging.getLogger(__name__)

Work = Sequence[Sequence[int]]  # work of an iteration on this rank: batches of numbers of training examples


class Algorithm(Protocol):
    """An algorithm that the loop runs. Methods that are not abstract have a default.

    Attributes:
        name: name of the progress bar.
        lengths: lengths of the training examples, in tokens.
        work_batch: examples in a batch of `Work`.
        shown: what the progress bar shows: label → metric.
        columns: metrics of the updates that the table of evaluations shows: heading → metric.
        checks_trained: whether `self_check` holds for trained weights, too, not only at the start.
        nonfinite: what happens to numbers that are not finite.
    """

    name: str
    lengths: Sequence[int]
    work_batch: int
    shown: Mapping[str, str]
    columns: Mapping[str, str]
    checks_trained: bool
    nonfinite: NonFinite

    def prepare(self) -> None:
        """Computes what depends on the weights that training starts from, before a checkpoint replaces them."""
        return None

    @abstractmethod
    def self_check(self) -> None:
        """A few forward passes before anything is trained. Raises UserError if a model is computed wrongly."""

    def rehearse(self) -> None:
        """Trains once on the longest possible micro-batch, without effect; see `dschat.training.rehearsal`.

        Raises:
            UserError: the device's memory does not suffice.
        """
        return None

    @abstractmethod
    def iterate(self, work: Work, iteration: int) -> Metrics:
        """Runs the optimiser updates of an iteration that are left; returns the iteration's metrics."""

    def why_stop(self, metrics: Metrics, update: int, may_stop: bool) -> str | None:
        """Why the run must end after an iteration; None if it may continue. `may_stop`: it is not the last one."""
        return None

    @abstractmethod
    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Metrics of the held-out examples, the same on every rank, and samples; {} without such examples."""

    def conclude(self, result: Metrics) -> None:
        """Warns about the trained models at the end of the run; `result` is the last evaluation, which may be {}."""
        return None

    def state_dict(self) -> Progress:
        """State that a checkpoint must hold in addition to models and optimisers."""
        return Progress(0, {}, {})

    def load_state_dict(self, state: Progress) -> None:
        """Restores what `state_dict` returned."""
        return None


class Loop:
    """Trains an algorithm; everything it needs is handed in."""

    def __init__(
        self, algorithm: Algorithm, config: CommonConfig, run: Run, folders: ModelFolders, checkpoints: Checkpoints
    ) -> None:
        self.algorithm = algorithm
        self.config = config
        self.run = run
        self.folders = folders
        self.checkpoints = checkpoints
        self.updates_per_iteration = run.plan.updates_per_iteration
        self.iteration = 0  # finished iterations
        self.evaluated = -1  # updates before the last evaluation
        # The global random states after the last iteration or evaluation; users' functions may use them.
        self.random = random_states()
        self.table: EvaluationTable | None = None
        if config.output.log == "table" or (config.output.log is None and is_interactive()):
            from dschat.run.evaluation_table import EvaluationTable

            self.table = EvaluationTable(run.record.step, algorithm.columns)

    @property
    def update(self) -> int:
        """Optimiser updates of the finished iterations."""
        return self.iteration * self.updates_per_iteration

    @property
    def is_untrained(self) -> bool:
        """Whether no optimiser has made a step."""
        state = self.state_dict()
        return state.update == 0 and not state.is_inside_rollout

    def fit(self) -> Metrics:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        total = self.config.total_updates(len(self.algorithm.lengths), self.run.plan)
        resumes = self.config.output.resume_from_checkpoint is not None

        # 1. Check before anything is written; a resumed run has optimiser states only after its checkpoint is loaded.
        self.random = random_states()
        if not resumes:
            self.self_check()
            self.rehearse()
        self.run.begin()
        self.algorithm.prepare()
        self.random = random_states()
        self.load_state_dict(self.checkpoints.load())
        if resumes:
            self.rehearse()
        if self.config.engine.self_checks:
            for engine in self.checkpoints.engines.values():
                engine.check_reduction()

        # 2. Train. A signal, or the end of --max_time, writes a checkpoint and ends the run.
        with self.checkpoints.stopping(self.state_dict):
            if resumes and (self.algorithm.checks_trained or self.is_untrained):
                self.self_check()
            with progress(total, self.algorithm.name, self.update, not is_main(), "update") as bar:
                self.evaluate_if_due(total)
                while self.update < total:
                    self.train_epoch(total, bar)

            # 3. Save, then evaluate.
            if self.config.output.saves_checkpoints:
                self.checkpoints.save(self.state_dict())
            self.folders.save_final()
            with evaluation_after_saving(self.config.output.output_dir):
                if self.algorithm.checks_trained:  # trained weights show more than those at the start
                    self.self_check()
                result = self.evaluate()
        self.folders.describe_final()
        if self.config.output.saves_checkpoints:  # one that a stop wrote is best of nothing
            self.checkpoints.name_best()
        self.algorithm.conclude(result)
        return result

    def train_epoch(self, total: int, bar: Bar) -> None:
        """The iterations that are left of an epoch, or of the run."""
        iterations_per_epoch = len(self.algorithm.lengths) // self.run.plan.iteration_size
        epoch, done = divmod(self.iteration, iterations_per_epoch)
        remaining = (total - self.update) // self.updates_per_iteration
        epoch_work = work_of_epoch(self.algorithm, self.config, self.run.plan, epoch)
        for work in epoch_work[done : done + remaining]:
            self.train_once(work, total, bar)

    def train_once(self, work: Work, total: int, bar: Bar) -> None:
        """Runs one iteration, and the evaluation and saving that are due after it."""
        update_before = self.update
        metrics = self.iterate(work)
        shown = {}
        for label, name in self.algorithm.shown.items():
            shown[label] = f"{metrics.get(name, math.nan):.4f}"
        bar.set_postfix(shown)
        bar.update(self.update - update_before)

        output = self.config.output
        why_stop = self.algorithm.why_stop(metrics, self.update, may_stop=self.update < total)
        if why_stop or due(output.save_models, update_before, self.update):
            self.folders.save_after(self.update)
        saves = why_stop or due(output.save_steps, update_before, self.update) or self.checkpoints.is_overdue()
        if saves and self.update < total:
            self.checkpoints.save(self.state_dict())
        if why_stop:
            raise UserError(why_stop)
        self.evaluate_if_due(total)

    def iterate(self, work: Work) -> Metrics:
        """Runs one iteration of the algorithm, counts its updates and logs its metrics."""
        metrics = self.algorithm.iterate(work, self.iteration)
        self.iteration += 1
        self.random = random_states()
        self.run.record.layers = {name: engine.layers for name, engine in self.checkpoints.engines.items()}
        self._log(metrics)
        if self.table:
            self.table.add_updates(metrics)
        return metrics

    def evaluate_if_due(self, total: int) -> None:
        """Evaluates before the first update and every --eval_interval; `fit` evaluates at the end."""
        update_before = self.update - self.updates_per_iteration
        is_due = self.update == 0 or due(self.config.output.eval_interval, update_before, self.update)
        if not is_due or not self.evaluated < self.update < total:
            return
        # Asked last: the state of a rollout that servers sample ahead is known only once they have finished it.
        if not self.algorithm.state_dict().is_inside_rollout:
            self.evaluate()

    def evaluate(self) -> Metrics:
        """Metrics of the held-out examples, which are logged; samples are written down."""
        metrics, samples = self.algorithm.evaluate()
        if not metrics:
            return {}
        self._log(metrics)
        self._show(metrics)
        self.run.record.record_evaluation(metrics, self.update)
        self.evaluated = self.update
        self.random = random_states()
        if samples and is_main():
            write_rows(self.run.folder / "samples" / f"update-{self.update:06d}.jsonl", samples)
            self.run.metrics.show_samples(self.update, samples)
        self.algorithm.nonfinite.check_evaluation(metrics, self.update)
        return metrics

    def self_check(self) -> None:
        """The algorithm's self-check, unless --no_self_checks; it leaves the random states as they were."""
        if self.config.engine.self_checks:
            self.algorithm.self_check()
            set_random_states(self.random)

    def rehearse(self) -> None:
        """The algorithm's rehearsal of its longest micro-batch, on a GPU."""
        if rehearsal.is_due():
            self.algorithm.rehearse()

    def state_dict(self) -> Progress:
        """State of the run. An interrupted iteration continues with the random states of its rollout."""
        state = self.algorithm.state_dict()
        return Progress(
            update=self.update + state.update,
            numbers={**state.numbers, "evaluated": self.evaluated},
            random=state.random or self.random,
            tensors=state.tensors,
            rollout=state.rollout,
        )

    def load_state_dict(self, progress: Progress | None) -> None:
        """Restores a run; None leaves it at its start."""
        if progress is None:
            return
        self.iteration = progress.update // self.updates_per_iteration
        self.evaluated = progress.numbers["evaluated"]
        self.random = progress.random
        self.algorithm.load_state_dict(progress)

    def _show(self, metrics: Metrics) -> None:
        """Shows an evaluation to the user: as a row of the table, or in a line of its own."""
        record = self.run.record
        warning = few_rows_warning(metrics)
        if warning and not record.metrics and is_main():
            logger.warning("%s", warning)
        if self.table:
            logger.info("%s", self.table.row(self.update, metrics))
        else:
            logger.info("%s", evaluation_line(self.update, metrics, record.metrics, record.first_metrics))

    def _log(self, metrics: Metrics) -> None:
        plan = self.run.plan
        samples = self.iteration * (plan.global_responses or plan.global_batch)
        self.run.metrics.log(self.update, samples, metrics)


def loop_of(
    algorithm: Algorithm,
    engines: Mapping[str, Trained],
    saved: Sequence[SavedModel],
    tokenizer: PreTrainedTokenizerBase,
    config: CommonConfig,
    run: RunOutput,
    average: dict[str, Tensor] | None = None,
) -> Loop:
    """The loop of a run, with its folders of models and of checkpoints.

    Args:
        algorithm: what is trained.
        engines: the engines by name, which checkpoints hold.
        saved: models that are saved at the end.
        tokenizer: saved with them.
        config: the flags.
        run: the output folder.
        average: this process's parts of the moving average, which checkpoints hold, too.

    Raises:
        UserError: processes have other files or flags than the main one.
    """
    for model in saved:
        if model.weights is None:  # a moving average is of a model that another line is about
            logger.info("the %s starts from %s: %s", model.role, model.base, describe_trained(model.engine.module))
    folders = ModelFolders(saved, tokenizer, config, run)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    check_same_everywhere(identity)
    return Loop(algorithm, config, run, folders, Checkpoints(engines, config, run, identity, average))


def work_of_epoch(algorithm: Algorithm, config: CommonConfig, plan: BatchPlan, epoch: int) -> Sequence[Work]:
    """The work of all iterations of an epoch on this rank."""
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
    """The work of an iteration on this rank; None after the last."""
    examples = len(algorithm.lengths)
    if iteration * plan.updates_per_iteration >= config.total_updates(examples, plan):
        return None
    epoch, number = divmod(iteration, examples // plan.iteration_size)
    return work_of_epoch(algorithm, config, plan, epoch)[number]
