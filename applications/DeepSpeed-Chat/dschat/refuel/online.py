# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: sample pairs of dialogues, score them, regress each pair on its rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.dialogues import DialogueExample, encode_states
from dschat.engine.process_group import training_dtype
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import Integers, Layout, Lengths, PassSize, layouts
from dschat.refuel.evaluation import evaluate_dialogues
from dschat.refuel.models import (
    DialogueSampler,
    RefuelModels,
    dialogue_sampling,
    pair_layouts,
    reply_logprobs,
    sampled_lengths,
    summed_logprobs,
)
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.refuel.start_check import check_start
from dschat.rollouts.continuous import decoding_bytes
from dschat.rollouts.sampling import row_seed
from dschat.run.distributed import device, largest_over_ranks, sum_over_ranks, world_size
from dschat.run.metrics import Means, with_variances
from dschat.run.output import Run
from dschat.run.peaks import own_gpu
from dschat.run.state import Progress, SeedKind, random_states
from dschat.run.stop import raise_if_stopped
from dschat.settings.batches import BatchPlan
from dschat.training.alarms import Alarms
from dschat.training.evaluation import Sample
from dschat.training.iteration import Clock, Iteration, Metrics, UpdateProgress, pass_size, run_updates, state_with
from dschat.training.loop import Algorithm, Work
from dschat.training.nonfinite import SKIPPED_NONFINITE, BadRows, NonFinite
from dschat.training.ppo.models import response_logprobs
from dschat.training.rehearsal import filled_rollout, rehearsal, rows_of
from dschat.training.rollout_check import check_rollout
from dschat.training.throughput import ROLLOUT_SPEEDS, Throughput
from dschat.turns.dialogues import AssistantTurn, DialogueRollout, SampledPair
from macro_actions.masked import masked_moments
from macro_actions.refuel import PairBatch, reply_rewards, whiten_rewards
from macro_actions.rewards import kl_controller
from macro_actions.supervised_losses import regression_loss
from macro_actions.types import Trajectory, tensors_of

# Statistics of the loss → metrics; log-ratios are log π − log π_t of whole replies.
NAMES = {
    "log_ratio": "policy/log_ratio",
    "log_ratio_better": "policy/log_ratio_better",
    "log_ratio_worse": "policy/log_ratio_worse",
    "agreement": "policy/agreement",
    "ratio": "val/ratio",
    "ratio_squared": "val/ratio_squared",  # becomes val/ratio_variance
}


class Refuel(Algorithm):
    """Trains a policy on dialogues of its own; everything it needs is handed in."""

    name = "refuel"
    shown: Mapping[str, str] = {"scores": "objective/scores", "kl": "objective/kl"}
    columns: Mapping[str, str] = ROLLOUT_SPEEDS
    checks_trained = False

    def __init__(
        self,
        models: RefuelModels,
        dialogues: Sequence[DialogueExample],
        held_out: Sequence[DialogueExample],
        tokenizer: PreTrainedTokenizerBase,
        config: RefuelOnlineConfig,
        run: Run,
    ) -> None:
        """Connects the parts of a run."""
        self.models = models
        self.dialogues = dialogues
        self.held_out = held_out[: config.sampling.eval_prompts or None]
        self.tokenizer = tokenizer
        self.config = config
        self.plan = run.plan
        self.lengths: Sequence[int] = [len(dialogue) for dialogue in dialogues]
        self.work_batch = run.plan.micro_batch
        flag = "reward_model_name_or_path" if config.dialogues.reward_function is None else "reward_function"
        remedies = {"scores": f"--{flag} {config.flat()[flag]} must give finite numbers."}
        self.nonfinite = NonFinite(config.optimisation.on_nonfinite, run, remedies)
        sampling = dialogue_sampling(config, tokenizer)
        self.sampler = DialogueSampler(models.policy, tokenizer, sampling, config.optimisation.seed, models.rollouts)
        self.alarms = Alarms(config.flat(), config.output.eval_interval, 2 * run.plan.global_rollout)
        self.throughput = Throughput(
            [models.policy],
            own_gpu(training_dtype(config.engine.dtype)),
            config.sampling.per_device_generation_batch_size,
        )
        self.current: Iteration[PairBatch] | None = None  # between its pairs and its last update
        self.kl = kl_controller(config.kl.kl_coef, config.kl.adaptive_kl_target, config.kl.adaptive_kl_horizon)

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One round: sample pairs of dialogues, score them, update."""
        clock = Clock()
        first_update = iteration * self.plan.updates_per_rollout

        # 1. Sample and score, unless a resumed round has its pairs already.
        if self.current is None:
            examples = [self.dialogues[number] for numbers in work for number in numbers]
            pairs = self.sampler.sample_pairs(examples, iteration)
            clock.record("generation")
            clock.sampled.append(sampled_lengths(pairs))
            batch = self.score_pairs(pairs, examples)
            self.current = self.finish_pairs(batch, pairs, first_update, clock)
            if self.current is None:
                return {SKIPPED_NONFINITE: float(self.plan.updates_per_rollout)}

        # 2. Update the policy.
        trained = self.lengths_left(self.current)
        metrics = self.current.metrics | self.update(self.current, first_update)
        clock.record("training")

        # 3. Throughput, and the next KL coefficient.
        metrics |= self.throughput.trained([trained], clock.seconds["time/training"])
        if "objective/kl" in metrics:
            self.kl = self.kl.update(metrics["objective/kl"], self.plan.global_rollout)
        self.current = None
        return metrics | clock.seconds

    def score_pairs(self, pairs: Sequence[SampledPair], examples: Sequence[DialogueExample]) -> PairBatch:
        """Scores of whole dialogues, log-probs of the compared replies, and their rewards."""
        models = self.models
        temperature = self.config.sampling.temperature
        replies: list[AssistantTurn] = []
        dialogues: list[DialogueRollout] = []
        for side in (0, 1):
            for pair in pairs:
                replies.append(pair.replies[side])
                dialogues.append(pair.dialogues[side])

        scores = models.reward(
            [dialogue.messages for dialogue in dialogues],
            [example.row for example in examples] * 2,
            [dialogue.finished[-1] for dialogue in dialogues],
        )
        scores = scores.float().to(device())
        rollout = self.sampler.rollout_of(replies, [example.index for example in examples] * 2)
        layouts = pair_layouts(rollout, pass_size(self.plan))
        models.policy.eval()
        logprobs = reply_logprobs(models.policy, layouts, temperature)
        ref_logprobs = logprobs
        if models.reference is not None:
            # The same passes as the policy's, so that the KL begins at 0.
            ref_logprobs = reply_logprobs(models.reference, layouts, temperature)
        penalty = self.config.rounds.penalty_reward_value
        rewards = reply_rewards(scores, rollout.finished, logprobs - ref_logprobs, self.kl.value, penalty)
        return PairBatch(rollout, logprobs, ref_logprobs, scores, rewards)

    def finish_pairs(
        self, batch: PairBatch, pairs: Sequence[SampledPair], update: int, clock: Clock
    ) -> Iteration[PairBatch] | None:
        """A round without updates so far; None if numbers of its pairs are not finite.

        Args:
            batch: the scored pairs.
            pairs: their dialogues.
            update: updates before this round.
            clock: clock of the round.
        """
        bad_rows = []
        for name in ("logprobs", "ref_logprobs", "scores", "rewards"):
            bad_rows.append(BadRows(name, ~torch.isfinite(getattr(batch, name))))
        if self.nonfinite.check_rows(bad_rows, update, lambda: tensors_of(batch)):
            return None
        metrics = pair_metrics(batch, pairs, has_reference=self.models.reference is not None)
        if self.config.rounds.whiten_rewards:
            totals = torch.stack(masked_moments(batch.rewards, torch.ones_like(batch.rewards, dtype=torch.bool)))
            count, total, squares = sum_over_ranks(totals).unbind()
            batch = replace(batch, rewards=whiten_rewards(batch.rewards, (count, total, squares)))
        clock.record("scoring")
        if clock.sampled:
            metrics |= self.throughput.sampled(clock.sampled, clock.seconds["time/generation"])
        metrics["lr"] = self.models.policy.learning_rate
        metrics["objective/kl_coef"] = self.kl.value
        return Iteration(batch, metrics | clock.seconds, random_states())

    def update(self, current: Iteration[PairBatch], first_update: int) -> Metrics:
        """The optimiser updates of a round that are left; `first_update` are those before it."""
        policy = self.models.policy
        policy.train()

        def is_left_out(done: int) -> bool:
            return self.nonfinite.check_update(
                {"policy": policy}, first_update + done, lambda: tensors_of(current.batch)
            )

        return refuel_update(policy, current.batch, self.config, self.plan, current.progress, is_left_out)

    def lengths_left(self, current: Iteration[PairBatch]) -> Integers:
        """Lengths (n,) of what the remaining updates of a round train on: each trains on all replies and states."""
        lengths = Lengths.of(current.batch.rollout)
        remaining = self.plan.updates_per_rollout - current.progress.steps
        return np.tile(lengths.totals, remaining)

    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Means over the held-out dialogues; {} without such dialogues."""
        if not self.held_out:
            return {}, []
        temperature = self.config.dialogues.eval_temperature
        # Replies of another temperature are no samples of the policy whose KL this is.
        has_kl = self.models.reference is not None and temperature == self.config.sampling.temperature
        kl = self._kl_of_replies if has_kl else None
        return evaluate_dialogues(
            self.held_out, lambda examples: self.sampler.answers(examples, temperature), self.models.reward, kl
        )

    def _kl_of_replies(self, replies: Sequence[AssistantTurn]) -> Tensor:
        """log π − log π_ref of each reply, (B,)."""
        assert self.models.reference is not None
        rollout = self.sampler.rollout_of(replies, [0] * len(replies))
        size = pass_size(self.plan).without_gradient
        rows = list(layouts(rollout, replace(size, rows=2 * size.rows), largest_over_ranks))
        logprobs = reply_logprobs(self.models.policy, rows, self.config.sampling.temperature)
        return logprobs - reply_logprobs(self.models.reference, rows, self.config.sampling.temperature)

    def self_check(self) -> None:
        """A few forward passes on two dialogues. Raises UserError."""
        examples = self.dialogues[:2]
        check_sampling(self.models, self.sampler, examples, self.tokenizer, self.config.optimisation.seed)
        pairs = self.sampler.sample_pairs(examples, iteration=0)
        batch = self.score_pairs(pairs, examples)
        layouts = pair_layouts(batch.rollout, pass_size(self.plan))
        logprobs = reply_logprobs(self.models.policy, layouts, self.config.sampling.temperature)
        check_start(self.models.policy, logprobs, batch.logprobs, batch.rollout.response_mask.shape[1])

    def rehearse(self) -> None:
        """Trains without effect on a micro-batch of pairs of the longest dialogue that the data can come to."""
        longest = max(range(len(self.dialogues)), key=self.lengths.__getitem__)
        tokens = self.lengths[longest]
        reply = self.config.sampling.max_answer_seq_len
        size = pass_size(self.plan)
        pairs = rows_of(PassSize(size.rows, size.tokens and size.tokens // 2), tokens)
        (ids,) = encode_states(self.tokenizer, [self.dialogues[longest].messages[:1]], "the longest micro-batch")
        zeros = torch.zeros(2 * pairs, device=device())
        rollout = filled_rollout(ids, 2 * pairs, tokens - reply, reply)
        batch = PairBatch(rollout, logprobs=zeros, ref_logprobs=zeros, scores=zeros, rewards=zeros)
        plan = replace(self.plan, updates_per_rollout=1)
        policy = self.models.policy
        memory = decoding_bytes(self.models.rollouts, policy, self.plan.rollout_per_rank, tokens)
        with rehearsal({"policy": policy}, 2 * pairs, tokens, "per_device_train_batch_size", memory):
            refuel_update(policy, batch, self.config, plan, UpdateProgress())

    def why_stop(self, metrics: Metrics, update: int, may_stop: bool) -> str | None:
        return self.alarms.check(metrics, update, may_stop)

    def state_dict(self) -> Progress:
        return state_with({"kl": self.kl.value, "alarms": self.alarms.state_dict()}, self.current)

    def load_state_dict(self, state: Progress) -> None:
        self.kl = replace(self.kl, value=state.numbers["kl"])
        self.alarms.load_state_dict(state.numbers["alarms"])
        if "current" in state.rollout:
            self.current = Iteration.from_state(state, PairBatch)


def refuel_update(
    policy: TrainedPolicy,
    batch: PairBatch,
    config: RefuelOnlineConfig,
    plan: BatchPlan,
    progress: UpdateProgress,
    left_out: Callable[[int], bool] = lambda done: False,
) -> Metrics:
    """Trains the policy, whose engine is in training mode, on this rank's pairs of one round.

    Every update takes all pairs, so that their order does not matter; micro-batches hold pairs of similar length. The
    loss is divided by the number of pairs of all ranks.

    Args:
        policy: the engine.
        batch: this rank's pairs.
        config: the flags.
        plan: batch sizes.
        progress: updates that are done already, see `dschat.training.iteration.run_updates`.
        left_out: gets the number of updates before this one, see `run_updates`.

    Returns:
        Means over the updates, named loss/refuel, policy/… and val/…, and what else `run_updates` returns.

    Raises:
        Stopped: soon after a signal, see `dschat.run.stop`.
    """
    layouts = pair_layouts(batch.rollout, pass_size(plan))

    def update(number: int, means: Means) -> None:
        _one_update(policy, batch, layouts, config, plan, means)

    def is_left_out(done: int, number: int) -> bool:
        return left_out(done)

    updates = range(plan.updates_per_rollout)
    return with_variances(
        run_updates(updates, progress, update, is_left_out, lambda _: {"policy": policy}, "grad_norm")
    )


def _one_update(
    policy: TrainedPolicy,
    batch: PairBatch,
    layouts: Sequence[Layout],
    config: RefuelOnlineConfig,
    plan: BatchPlan,
    means: Means,
) -> None:
    """Runs one optimiser step on all pairs, in micro-batches; adds statistics to the means."""
    if plan.max_tokens is not None:
        policy.begin_update(len(layouts))
    for layout in layouts:
        raise_if_stopped()
        logprobs = summed_logprobs(policy, layout, config.sampling.temperature)
        log_ratios = logprobs - batch.logprobs[layout.rows]
        first, second = log_ratios.chunk(2)
        differences = batch.reward_differences[layout.rows[: len(first)]]
        loss, stats = regression_loss(first, second, differences, config.regression.eta, plan.global_batch)
        policy.backward(loss)
        policy.step()
        shares = {"loss/refuel": loss} | {NAMES[name]: number for name, number in stats.items()}
        means.add_sums(shares)
    means.weigh(shares, 1 / world_size())


def pair_metrics(batch: PairBatch, pairs: Sequence[SampledPair], has_reference: bool) -> Metrics:
    """Means over the compared replies of all ranks; one synchronisation. Without a reference there is no KL.

    objective/… (KL and entropy in nats per reply; rlhf_reward is R, reward_gap the mean of |ΔR|), response/length and
    eos_rate, and dialogue/turn, the mean number of the compared turn, from 1.
    """
    rows = len(batch.scores)
    tokens = batch.rollout.response_mask.sum()
    means = Means()
    if has_reference:
        means.add("objective/kl", batch.kl.sum(), rows)
        means.add("objective/kl_per_token", batch.kl.sum(), tokens)
    means.add("objective/entropy", -batch.logprobs.sum(), rows)
    means.add("objective/scores", batch.scores.sum(), rows)
    means.add("objective/rlhf_reward", batch.rewards.sum(), rows)
    means.add("objective/reward_gap", batch.reward_differences.abs().sum(), len(pairs))
    means.add("response/length", tokens, rows)
    means.add("response/eos_rate", batch.rollout.finished.sum(), rows)
    means.add("dialogue/turn", sum(pair.turn + 1 for pair in pairs), len(pairs))
    return means.reduce()


def check_sampling(
    models: RefuelModels,
    sampler: DialogueSampler,
    examples: Sequence[DialogueExample],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> None:
    """Checks replies to the first messages of one or two dialogues, see `dschat.training.rollout_check.check_rollout`.

    Raises:
        UserError: the policy is computed wrongly, or sampling is not what was asked for.
    """
    states = encode_states(tokenizer, [example.messages[:1] for example in examples], "the self-check")
    seeds = [row_seed(seed, SeedKind.SELF_CHECK, example.index) for example in examples]
    generation = sampler.first_replies(states, seeds)
    rollout = generation.rollout
    temperature = sampler.sampling.temperature
    size = PassSize(len(states))
    logprobs = response_logprobs(models.policy, rollout, temperature, size)
    ref_logprobs = logprobs
    if models.reference is not None:
        ref_logprobs = response_logprobs(models.reference, rollout, temperature, size)
    zeros = torch.zeros_like(logprobs)
    trajectory = Trajectory(rollout, logprobs, ref_logprobs, values=zeros, scores=zeros[:, 0])
    check_rollout(models.policy, trajectory, sampler.sampling, generation.logprobs)
