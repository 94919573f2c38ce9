# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: talk, talk again from one turn on, score, and regress the pair on its rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.progress import Bar, progress
from dschat.config.batches import BatchPlan
from dschat.config.refuel import RefuelOnlineConfig
from dschat.data.collate import update_batches
from dschat.data.dialogue_examples import DialogueExample
from dschat.errors import UserError
from dschat.models.layout import layouts
from dschat.rl.masked import masked_moments
from dschat.rl.refuel import PairBatch, reply_rewards, whiten_rewards
from dschat.rl.rewards import kl_controller
from dschat.rl.types import tensors_of
from dschat.rollouts.dialogues import Reply
from dschat.run.checkpoint import Checkpoints
from dschat.run.distributed import device, is_main, rank, sum_over_ranks, world_size
from dschat.run.metrics import Means
from dschat.run.model_folders import ModelFolders, evaluation_after_saving
from dschat.run.output import Run, due
from dschat.run.progress import Json, Progress
from dschat.run.random_states import random_states, set_random_states
from dschat.trainers.checks import COUNTED, NonFinite
from dschat.trainers.ppo.clock import Clock
from dschat.trainers.ppo.evaluation import write_samples
from dschat.trainers.refuel.evaluation import evaluate
from dschat.trainers.refuel.iteration import Round
from dschat.trainers.refuel.models import RefuelModels, pair_layouts, reply_logprobs
from dschat.trainers.refuel.sampler import DialogueSampler, DrawnPair, dialogue_sampling
from dschat.trainers.refuel.selfcheck import check_drawing, check_pairs
from dschat.trainers.refuel.update import RefuelSettings, refuel_update


class RefuelTrainer:
    """Trains a policy on dialogues of its own; everything it needs is handed in."""

    def __init__(
        self,
        models: RefuelModels,
        dialogues: Sequence[DialogueExample],
        held_out: Sequence[DialogueExample],
        tokenizer: PreTrainedTokenizerBase,
        config: RefuelOnlineConfig,
        run: Run,
        folders: ModelFolders,
        checkpoints: Checkpoints,
    ) -> None:
        """Takes the parts of a run.

        Args:
            models: engines and the source of scores.
            dialogues: of training.
            held_out: of evaluation.
            tokenizer: the policy's.
            config: the flags.
            run: batch sizes, record and metrics.
            folders: saves the model.
            checkpoints: saves what the run needs to go on, and gives it back.
        """
        self.models, self.dialogues, self.tokenizer = models, dialogues, tokenizer
        self.config, self.run, self.folders = config, run, folders
        flag = "reward_model_name_or_path" if config.reward_function is None else "reward_function"
        remedies = {"scores": f"--{flag} {getattr(config, flag)} must give finite numbers."}
        self.checkpoints, self.nonfinite = checkpoints, NonFinite(config.on_nonfinite, run, remedies)
        self.held_out = held_out[: config.eval_prompts or None]
        sampling = dialogue_sampling(config, tokenizer)
        self.sampler = DialogueSampler(models.policy, tokenizer, sampling, config.seed, models.rollouts)
        self.settings = RefuelSettings.from_config(config, run.plan)
        self.update = self.round = 0  # those of finished rounds
        self.current: Round | None = None  # the one that is under way, from its first update on
        self.evaluated = -1  # after how many updates the last evaluation was
        # The global random states when `current` or `evaluated` last changed; users' functions may draw from them.
        self.random: dict[str, Tensor] = {}
        self.kl = kl_controller(config.kl_coef, config.adaptive_kl_target, config.adaptive_kl_horizon)

    def fit(self) -> dict[str, float]:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        total = total_updates(len(self.dialogues), self.config, self.run.plan)
        self.random = random_states()
        self.go_on(self.checkpoints.load())
        with self.checkpoints.stopping(self.progress):
            if self.config.self_checks and self.progress().update == 0:
                self.self_check()
                set_random_states(self.random)
            with progress(total, "refuel", self.update, not is_main(), "update") as bar:
                self._train_all(total, bar)
            if self.config.save_steps:
                self.checkpoints.save(self.progress())
            self.folders.save_final()
            with evaluation_after_saving(self.config.output_dir):
                result = self.evaluate()
        self.folders.describe_final()
        return result

    def progress(self) -> Progress:
        """Where the run is."""
        numbers: Json = {"round": self.round, "evaluated": self.evaluated, "kl": self.kl.value}
        if self.current is None:
            return Progress(self.update, numbers, self.random)
        state, tensors = self.current.state()
        return Progress(self.update + self.current.updates.done, numbers | {"current": state}, self.random, tensors)

    def go_on(self, progress: Progress | None) -> None:
        """Takes the run up where it was; None leaves it at its beginning."""
        if progress is None:
            return
        numbers, self.random = progress.numbers, progress.random
        self.update, self.round, self.evaluated = progress.update, numbers["round"], numbers["evaluated"]
        self.kl = replace(self.kl, value=numbers["kl"])
        if "current" in numbers:
            self.current = Round.from_state(numbers["current"], progress.tensors)
            self.update -= self.current.updates.done

    def self_check(self) -> None:
        """A few forward passes on two dialogues, before anything is trained or measured. Raises UserError."""
        check_drawing(self.models, self.sampler, self.dialogues[:2], self.tokenizer, self.config.seed)
        examples = self.dialogues[:2]
        batch = self.score(self.sampler.pairs(examples, iteration=0), examples)
        check_pairs(self.models.policy, batch, self.settings)

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out dialogues; {} without such dialogues."""
        if not self.held_out:
            return {}
        kl = None if self.models.reference is None else self._kl_of_replies
        temperature = self.config.eval_temperature
        metrics, samples = evaluate(
            self.held_out, lambda examples: self.sampler.answers(examples, temperature), self.models.reward, kl
        )
        self.run.metrics.log(self.update, self.round * self.run.plan.global_rollout, metrics)
        self.run.record.measured(metrics, self.update)
        self.evaluated, self.random = self.update, random_states()
        if is_main():
            write_samples(self.run.folder, self.update, samples)
            self.run.metrics.show_samples(self.update, samples)
        self.nonfinite.in_evaluation(metrics, self.update)
        return metrics

    def _kl_of_replies(self, replies: Sequence[Reply]) -> Tensor:
        """log π − log π_ref of each reply, (B,)."""
        assert self.models.reference is not None
        rollout = self.sampler.rollout_of(replies, [0] * len(replies))
        rows = list(layouts(rollout, 2 * self.run.plan.micro_batch))
        own = reply_logprobs(self.models.policy, rows, self.config.temperature)
        return own - reply_logprobs(self.models.reference, rows, self.config.temperature)

    def _train_all(self, total: int, bar: Bar) -> None:
        config, plan = self.config, self.run.plan
        per_epoch = len(self.dialogues) // plan.global_rollout
        self._evaluate_if_due(total)
        while self.update < total:
            batches = update_batches(
                [len(dialogue) for dialogue in self.dialogues],
                plan.global_rollout,
                plan.micro_batch,
                config.seed,
                self.round // per_epoch,
                rank=rank(),
                world_size=world_size(),
            )
            for numbers in batches[self.round % per_epoch :]:
                if self.update == total:
                    break
                before = self.update
                metrics = self.iterate([i for rows in numbers for i in rows])
                shown = {name: metrics.get(f"objective/{name}", math.nan) for name in ("scores", "kl")}
                bar.set_postfix({name: f"{number:.3f}" for name, number in shown.items()})
                bar.update(self.update - before)
                if due(config.save_models, before, self.update):
                    self.folders.save_after(self.update)
                if due(config.save_steps, before, self.update) and self.update < total:
                    self.checkpoints.save(self.progress())
                self._evaluate_if_due(total)

    def _evaluate_if_due(self, total: int) -> None:
        """Before the first update, and every --eval_interval; the evaluation of the end is not this one's business."""
        before = self.update - self.run.plan.updates_per_rollout
        is_due = self.update == 0 or due(self.config.eval_interval, before, self.update)
        if is_due and self.current is None and self.update < total and self.evaluated < self.update:
            self.evaluate()

    def iterate(self, numbers: Sequence[int]) -> dict[str, float]:
        """One round: on the dialogues of these numbers, of this rank."""
        if self.current is None:
            self.current, self.random = self.collect(numbers), random_states()
        clock, updates = Clock(), self.run.plan.updates_per_rollout
        if self.current is None:
            metrics = {COUNTED: float(updates)}
        else:
            metrics = self.current.metrics | self.train(self.current)
            clock.lap("training")
        if "objective/kl" in metrics:
            self.kl = self.kl.update(metrics["objective/kl"], self.run.plan.global_rollout)
        self.update += updates
        self.round += 1
        self.current = None
        metrics |= clock.seconds
        self.run.metrics.log(self.update, self.round * self.run.plan.global_rollout, metrics)
        return metrics

    def collect(self, numbers: Sequence[int]) -> Round | None:
        """Draws and scores; a round without updates so far. None if it must be left out."""
        clock = Clock()
        learning_rate = self.models.policy.learning_rate
        examples = [self.dialogues[i] for i in numbers]
        pairs = self.sampler.pairs(examples, self.round)
        clock.lap("generation")
        batch = self.score(pairs, examples)
        checked = {name: getattr(batch, name) for name in ("logprobs", "ref_logprobs", "scores", "rewards")}
        found = [(name, ~torch.isfinite(x)) for name, x in checked.items()]
        if self.nonfinite.in_rows(found, self.update, lambda: tensors_of(batch)):
            return None
        metrics = pair_metrics(batch, pairs, has_reference=self.models.reference is not None)
        if self.config.whiten_rewards:
            moments = torch.stack(masked_moments(batch.rewards, torch.ones_like(batch.rewards, dtype=torch.bool)))
            count, total, squares = sum_over_ranks(moments).unbind()
            batch = replace(batch, rewards=whiten_rewards(batch.rewards, (count, total, squares)))
        clock.lap("scoring")
        metrics |= {"lr": learning_rate, "objective/kl_coef": self.kl.value}
        return Round(batch, metrics | clock.seconds)

    def score(self, pairs: Sequence[DrawnPair], examples: Sequence[DialogueExample]) -> PairBatch:
        """Scores of whole dialogues, log-probs of the compared replies, and their rewards."""
        models, temperature = self.models, self.config.temperature
        replies = [pair.replies[side] for side in (0, 1) for pair in pairs]
        rollout = self.sampler.rollout_of(replies, [example.index for example in examples] * 2)
        rows = pair_layouts(rollout, self.run.plan.micro_batch)
        talks = [*(pair.first for pair in pairs), *(pair.second for pair in pairs)]
        scores = models.reward([talk.messages for talk in talks], [example.row for example in examples] * 2)
        scores = scores.float().to(device())
        models.policy.eval()
        logprobs = reply_logprobs(models.policy, rows, temperature)
        ref_logprobs = logprobs
        if models.reference is not None:
            ref_logprobs = reply_logprobs(models.reference, rows, temperature)
        penalty = self.config.penalty_reward_value
        rewards = reply_rewards(scores, rollout.finished, logprobs - ref_logprobs, self.kl.value, penalty)
        return PairBatch(rollout, logprobs, ref_logprobs, scores, rewards)

    def train(self, current: Round) -> dict[str, float]:
        """The optimiser updates of a round, those that are left."""
        policy, batch = self.models.policy, current.batch
        policy.train()

        def left_out(done: int) -> bool:
            return self.nonfinite.in_update({"policy": policy}, self.update + done, lambda: tensors_of(batch))

        return refuel_update(policy, batch, self.settings, current.updates, left_out)


def total_updates(num_dialogues: int, config: RefuelOnlineConfig, plan: BatchPlan) -> int:
    """Optimiser updates of the whole run; an incomplete last round is dropped, of the run and of every epoch.

    Raises:
        UserError: fewer dialogues than one round.
    """
    per_epoch = num_dialogues // plan.global_rollout
    if per_epoch == 0:
        raise UserError(
            f"--data_path: {num_dialogues} dialogues are fewer than one round of {plan.global_rollout}. Lower "
            "--per_device_train_batch_size or --gradient_accumulation_steps, or give more data."
        )
    rounds = per_epoch * config.num_train_epochs
    if config.total_episodes is not None:
        rounds = config.total_episodes // plan.global_rollout
    if rounds == 0:
        raise UserError(
            f"--total_episodes {config.total_episodes} is less than one round of {plan.global_rollout} dialogues: "
            "raise it, or lower --per_device_train_batch_size or --gradient_accumulation_steps."
        )
    return rounds * plan.updates_per_rollout


def pair_metrics(batch: PairBatch, pairs: Sequence[DrawnPair], has_reference: bool) -> dict[str, float]:
    """Means over the compared replies of all ranks; one synchronisation.

    Args:
        batch: this rank's pairs.
        pairs: the same with their turns.
        has_reference: else there is no KL to it.

    Returns:
        objective/… (KL and entropy in nats per reply; rlhf_reward is R, reward_gap the mean of |ΔR|), response/length
        and eos_rate, and dialogue/turn, the mean number of the compared turn, from 1.
    """
    rows, mask = len(batch.scores), batch.rollout.response_mask
    means = Means()
    if has_reference:
        means.add("objective/kl", batch.kl.sum(), rows)
    means.add("objective/entropy", -batch.logprobs.sum(), rows)
    means.add("objective/scores", batch.scores.sum(), rows)
    means.add("objective/rlhf_reward", batch.rewards.sum(), rows)
    means.add("objective/reward_gap", batch.reward_differences.abs().sum(), len(pairs))
    means.add("response/length", mask.sum(), rows)
    means.add("response/eos_rate", batch.rollout.finished.sum(), rows)
    means.add("dialogue/turn", sum(pair.turn + 1 for pair in pairs), len(pairs))
    return means.reduce()
