# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: talk, talk again from one turn on, score, and regress the pair on its rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.dialogues import DialogueExample, encode_states
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import Layout, Lengths, PassSize, layouts
from dschat.models.operations import Peaks
from dschat.rollouts.dialogues import AssistantTurn
from dschat.rollouts.sampling import row_seed
from dschat.run.distributed import device, largest_over_ranks, sum_over_ranks
from dschat.run.metrics import Means
from dschat.run.output import Run
from dschat.run.state import Progress, SeedKind, random_states
from dschat.run.stop import raise_if_stopped
from dschat.settings.batches import BatchPlan
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.training.evaluation import Sample, evaluate_dialogues
from dschat.training.iteration import (
    Clock,
    Iteration,
    Metrics,
    UpdateProgress,
    pass_size,
    run_updates,
    state_with,
)
from dschat.training.loop import Algorithm, Work
from dschat.training.nonfinite import SKIPPED_NONFINITE, NonFinite
from dschat.training.ppo.models import response_logprobs
from dschat.training.refuel.models import (
    DialogueSampler,
    DrawnPair,
    RefuelModels,
    dialogue_sampling,
    draws_of,
    pair_layouts,
    reply_logprobs,
    summed_logprobs,
)
from dschat.training.rehearsal import decoding_bytes, filled_rollout, rehearsal, rows_of
from dschat.training.selfcheck import TOLERANCE, check_rollout
from dschat.training.throughput import Throughput, TrainedTexts
from macro_actions.losses import regression_loss
from macro_actions.masked import masked_moments
from macro_actions.refuel import PairBatch, reply_rewards, whiten_rewards
from macro_actions.rewards import kl_controller
from macro_actions.types import Trajectory, tensors_of

# Statistics of the loss → metrics; log-ratios are log π − log π_t of whole replies.
NAMES = {
    "kl": "policy/log_ratio",
    "kl_better": "policy/log_ratio_better",
    "kl_worse": "policy/log_ratio_worse",
    "agreement": "policy/agreement",
    "ratio": "val/ratio",
    "ratio_squared": "val/ratio_variance",  # less the square of the ratio's mean, in the end
}


class Refuel(Algorithm):
    """Trains a policy on dialogues of its own; everything it needs is handed in."""

    name = "refuel"
    shown: Mapping[str, str] = {"scores": "objective/scores", "kl": "objective/kl"}
    checks_trained = False

    def __init__(
        self,
        models: RefuelModels,
        dialogues: Sequence[DialogueExample],
        held_out: Sequence[DialogueExample],
        tokenizer: PreTrainedTokenizerBase,
        config: RefuelOnlineConfig,
        run: Run,
        *,
        peaks: Peaks | None = None,
    ) -> None:
        """Takes the parts of a run; the peaks are those of this process's GPU."""
        self.models, self.dialogues, self.tokenizer = models, dialogues, tokenizer
        self.config, self.plan = config, run.plan
        flag = "reward_model_name_or_path" if config.dialogues.reward_function is None else "reward_function"
        remedies = {"scores": f"--{flag} {config.flat()[flag]} must give finite numbers."}
        self.nonfinite = NonFinite(config.optimisation.on_nonfinite, run, remedies)
        self.lengths: Sequence[int] = [len(dialogue) for dialogue in dialogues]
        self.work_batch = run.plan.micro_batch
        self.held_out = held_out[: config.sampling.eval_prompts or None]
        sampling = dialogue_sampling(config, tokenizer)
        self.sampler = DialogueSampler(models.policy, tokenizer, sampling, config.optimisation.seed, models.rollouts)
        self.throughput = Throughput([models.policy], peaks, config.sampling.per_device_generation_batch_size)
        self.current: Iteration[PairBatch] | None = None  # under way, from its first update on
        self.kl = kl_controller(config.kl.kl_coef, config.kl.adaptive_kl_target, config.kl.adaptive_kl_horizon)

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One round: collect → score → update."""
        clock, updates = Clock(), self.plan.updates_per_rollout
        if self.current is None:
            examples = [self.dialogues[number] for rows in work for number in rows]
            pairs = self.sampler.pairs(examples, iteration)
            clock.lap("generation")
            clock.draws += draws_of(pairs)
            self.current = self.accepted(self.score(pairs, examples), pairs, iteration * updates, clock)
        if self.current is None:
            return {SKIPPED_NONFINITE: float(updates)}
        trained = self.texts_left(self.current)
        metrics = self.current.metrics | self.update(self.current, iteration * updates)
        clock.lap("training")
        metrics |= self.throughput.trained(trained, clock.seconds["time/training"])
        if "objective/kl" in metrics:
            self.kl = self.kl.update(metrics["objective/kl"], self.plan.global_rollout)
        self.current = None
        return metrics | clock.seconds

    def score(self, pairs: Sequence[DrawnPair], examples: Sequence[DialogueExample]) -> PairBatch:
        """Scores of whole dialogues, log-probs of the compared replies, and their rewards."""
        models, temperature = self.models, self.config.sampling.temperature
        replies = [pair.replies[side] for side in (0, 1) for pair in pairs]
        rollout = self.sampler.rollout_of(replies, [example.index for example in examples] * 2)
        rows = pair_layouts(rollout, pass_size(self.plan))
        talks = [*(pair.first for pair in pairs), *(pair.second for pair in pairs)]
        scores = models.reward([talk.messages for talk in talks], [example.row for example in examples] * 2)
        scores = scores.float().to(device())
        models.policy.eval()
        logprobs = reply_logprobs(models.policy, rows, temperature)
        ref_logprobs = logprobs
        if models.reference is not None:
            ref_logprobs = reply_logprobs(models.reference, rows, temperature)  # the same passes: KL begins at 0
        penalty = self.config.rounds.penalty_reward_value
        rewards = reply_rewards(scores, rollout.finished, logprobs - ref_logprobs, self.kl.value, penalty)
        return PairBatch(rollout, logprobs, ref_logprobs, scores, rewards)

    def accepted(
        self, batch: PairBatch, pairs: Sequence[DrawnPair], update: int, clock: Clock
    ) -> Iteration[PairBatch] | None:
        """A round without updates so far; None if numbers of its pairs are not finite."""
        checked = {name: getattr(batch, name) for name in ("logprobs", "ref_logprobs", "scores", "rewards")}
        found = [(name, ~torch.isfinite(x)) for name, x in checked.items()]
        if self.nonfinite.in_rows(found, update, lambda: tensors_of(batch)):
            return None
        metrics = pair_metrics(batch, pairs, has_reference=self.models.reference is not None)
        if self.config.rounds.whiten_rewards:
            moments = torch.stack(masked_moments(batch.rewards, torch.ones_like(batch.rewards, dtype=torch.bool)))
            count, total, squares = sum_over_ranks(moments).unbind()
            batch = replace(batch, rewards=whiten_rewards(batch.rewards, (count, total, squares)))
        clock.lap("scoring")
        if clock.draws:
            metrics |= self.throughput.sampled(clock.draws, clock.seconds["time/generation"])
        metrics |= {"lr": self.models.policy.learning_rate, "objective/kl_coef": self.kl.value}
        return Iteration(batch, metrics | clock.seconds, random_states())

    def update(self, current: Iteration[PairBatch], before: int) -> Metrics:
        """The optimiser updates of a round, those that are left; there were so many before it."""
        policy, batch = self.models.policy, current.batch
        policy.train()

        def left_out(done: int) -> bool:
            return self.nonfinite.in_update({"policy": policy}, before + done, lambda: tensors_of(batch))

        return refuel_update(policy, batch, self.config, self.plan, current.updates, left_out)

    def texts_left(self, current: Iteration[PairBatch]) -> TrainedTexts:
        """What the updates that are left of a round train on: each on all replies with their states."""
        lengths, left = Lengths.of(current.batch.rollout), self.plan.updates_per_rollout - current.updates.done
        return TrainedTexts(np.tile(lengths.totals, left), left * int(lengths.responses.sum()))

    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Means over the held-out dialogues; {} without such dialogues."""
        if not self.held_out:
            return {}, []
        kl = None if self.models.reference is None else self._kl_of_replies
        temperature = self.config.dialogues.eval_temperature
        return evaluate_dialogues(
            self.held_out, lambda examples: self.sampler.answers(examples, temperature), self.models.reward, kl
        )

    def _kl_of_replies(self, replies: Sequence[AssistantTurn]) -> Tensor:
        """log π − log π_ref of each reply, (B,)."""
        assert self.models.reference is not None
        rollout = self.sampler.rollout_of(replies, [0] * len(replies))
        size = pass_size(self.plan).without_gradient
        rows = list(layouts(rollout, replace(size, rows=2 * size.rows), largest_over_ranks))
        own = reply_logprobs(self.models.policy, rows, self.config.sampling.temperature)
        return own - reply_logprobs(self.models.reference, rows, self.config.sampling.temperature)

    def self_check(self) -> None:
        """A few forward passes on two dialogues. Raises UserError."""
        examples = self.dialogues[:2]
        check_drawing(self.models, self.sampler, examples, self.tokenizer, self.config.optimisation.seed)
        batch = self.score(self.sampler.pairs(examples, iteration=0), examples)
        check_pairs(self.models.policy, batch, self.config, self.plan)

    def rehearse(self) -> None:
        """A micro-batch of pairs of the longest dialogue that the data can come to."""
        longest = max(range(len(self.dialogues)), key=self.lengths.__getitem__)
        tokens, reply = self.lengths[longest], self.config.sampling.max_answer_seq_len
        size = pass_size(self.plan)
        pairs = rows_of(PassSize(size.rows, size.tokens and size.tokens // 2), tokens)
        (ids,) = encode_states(self.tokenizer, [self.dialogues[longest].messages[:1]], "the longest micro-batch")
        nothing = torch.zeros(2 * pairs, device=device())
        batch = PairBatch(filled_rollout(ids, 2 * pairs, tokens - reply, reply), *[nothing] * 4)
        plan, flag = replace(self.plan, updates_per_rollout=1), "per_device_train_batch_size"
        policy = self.models.policy
        memory = decoding_bytes(self.models.rollouts, policy, self.plan.rollout_per_rank, tokens)
        with rehearsal({"policy": policy}, 2 * pairs, tokens, flag, memory):
            refuel_update(policy, batch, self.config, plan, UpdateProgress())

    def state_dict(self) -> Progress:
        return state_with({"kl": self.kl.value}, self.current)

    def load_state_dict(self, state: Progress) -> None:
        self.kl = replace(self.kl, value=state.numbers["kl"])
        if "current" in state.numbers:
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

    Every update takes all pairs, so that their order is of no matter; micro-batches hold pairs of similar length. The
    loss is divided by the number of pairs of all ranks.

    For `progress`, `left_out` and what is returned see `dschat.training.iteration.run_updates`; the means are
    loss/refuel, policy/… and val/…. Raises Stopped, see `dschat.run.stop`.
    """
    layouts = pair_layouts(batch.rollout, pass_size(plan))

    def update(number: int, means: Means) -> None:
        _one_update(policy, batch, layouts, config, plan, means)

    def is_left_out(done: int, number: int) -> bool:
        return left_out(done)

    numbers, engines = range(plan.updates_per_rollout), {"policy": policy}
    metrics = run_updates(numbers, progress, update, is_left_out, engines, "grad_norm")
    if "val/ratio_variance" in metrics:
        metrics["val/ratio_variance"] -= metrics["val/ratio"] ** 2
    return metrics


def _one_update(
    policy: TrainedPolicy,
    batch: PairBatch,
    layouts: Sequence[Layout],
    config: RefuelOnlineConfig,
    plan: BatchPlan,
    means: Means,
) -> None:
    if plan.max_tokens is not None:
        policy.begin_update(len(layouts))
    for rows in layouts:
        raise_if_stopped()
        log_ratios = summed_logprobs(policy, rows, config.sampling.temperature) - batch.logprobs[rows.rows]
        first, second = log_ratios.chunk(2)
        differences = batch.reward_differences[rows.rows[: len(first)]]
        loss, stats = regression_loss(first, second, differences, config.regression.eta, plan.global_batch)
        policy.backward(loss)
        policy.step()
        means.add_sum("loss/refuel", loss)
        means.add_sums({NAMES[name]: number for name, number in stats.items()})


def pair_metrics(batch: PairBatch, pairs: Sequence[DrawnPair], has_reference: bool) -> dict[str, float]:
    """Means over the compared replies of all ranks; one synchronisation. Without a reference there is no KL.

    objective/… (KL and entropy in nats per reply; rlhf_reward is R, reward_gap the mean of |ΔR|), response/length and
    eos_rate, and dialogue/turn, the mean number of the compared turn, from 1.
    """
    rows, mask = len(batch.scores), batch.rollout.response_mask
    means = Means()
    if has_reference:
        means.add("objective/kl", batch.kl.sum(), rows)
        means.add("objective/kl_per_token", batch.kl.sum(), mask.sum())
    means.add("objective/entropy", -batch.logprobs.sum(), rows)
    means.add("objective/scores", batch.scores.sum(), rows)
    means.add("objective/rlhf_reward", batch.rewards.sum(), rows)
    means.add("objective/reward_gap", batch.reward_differences.abs().sum(), len(pairs))
    means.add("response/length", mask.sum(), rows)
    means.add("response/eos_rate", batch.rollout.finished.sum(), rows)
    means.add("dialogue/turn", sum(pair.turn + 1 for pair in pairs), len(pairs))
    return means.reduce()


def check_drawing(
    models: RefuelModels,
    sampler: DialogueSampler,
    examples: Sequence[DialogueExample],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> None:
    """See `dschat.training.selfcheck.check_rollout`, with replies to the first messages of one or two dialogues.
    Raises UserError.
    """
    states = encode_states(tokenizer, [example.messages[:1] for example in examples], "the self-check")
    drawn = sampler.first_replies(states, [row_seed(seed, SeedKind.SELF_CHECK, e.index) for e in examples])
    temperature, size = sampler.sampling.temperature, PassSize(len(states))
    logprobs = response_logprobs(models.policy, drawn.rollout, temperature, size)
    ref_logprobs = logprobs
    if models.reference is not None:
        ref_logprobs = response_logprobs(models.reference, drawn.rollout, temperature, size)
    nothing = torch.zeros_like(logprobs)
    trajectory = Trajectory(drawn.rollout, logprobs, ref_logprobs, nothing, nothing[:, 0])
    check_rollout(models.policy, trajectory, sampler.sampling, drawn.logprobs)


def check_pairs(policy: TrainedPolicy, batch: PairBatch, config: RefuelOnlineConfig, plan: BatchPlan) -> None:
    """At π = π_t, in evaluation mode, log-ratios of the first pairs are 0 and the loss is the mean of (η ΔR)²; else
    UserError.
    """
    layouts = pair_layouts(batch.rollout, pass_size(plan))
    again = reply_logprobs(policy, layouts, config.sampling.temperature)
    first, second = (again - batch.logprobs).chunk(2)
    eta = config.regression.eta
    finite = batch.reward_differences.isfinite()  # others are met later, as --on_nonfinite says
    if not bool(finite.any()):
        return
    first, second, differences = first[finite], second[finite], batch.reward_differences[finite]
    loss, _ = regression_loss(first, second, differences, eta)
    expected = (eta * differences).double().square().mean()
    tolerance = TOLERANCE[next(policy.module.parameters()).dtype] * max(1.0, float(batch.logprobs.abs().max()))
    gap = float((first - second).abs().max())
    allowed = tolerance * (tolerance + 2 * eta * float(differences.abs().max())) + 1e-6
    if not gap <= tolerance or not abs(float(loss) - float(expected)) <= allowed + 1e-5 * float(expected):
        raise UserError(
            f"self-check: before the first update the log-ratios of a pair differ by {gap:.3g} (rounding explains "
            f"{tolerance:.3g}) and the loss is {float(loss):.6g} where the rewards alone give {float(expected):.6g}: "
            "the model does not give the same numbers twice. Please report it; --no_self_checks skips this check."
        )
