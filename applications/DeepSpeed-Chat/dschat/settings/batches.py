# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: how micro-batches, accumulation, processes and rollouts make up an optimiser update.

Sizes that do not fit together are refused with a flag that makes them fit.
"""

import math
from dataclasses import asdict, dataclass, replace

from dschat.base.errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """The flags that decide the batch sizes, by their names but for the micro-batch.

    Attributes:
        micro_flag: name of the flag that sets `micro_batch`.
        micro_batch: examples per forward pass and process.
        gradient_accumulation_steps: forward passes per update; None to let `global_batch_size` decide, or for 1.
        global_batch_size: examples per update on all processes; None to let the others decide.
        per_device_generation_batch_size: prompts that a process answers at a time; 0 in steps without rollouts.
        generation_batches: how many times as many prompts a rollout has.
        samples_per_prompt: responses to each prompt.
    """

    micro_flag: str
    micro_batch: int
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    per_device_generation_batch_size: int = 0
    generation_batches: int = 1
    samples_per_prompt: int = 1

    @property
    def rollout(self) -> int:
        """Prompts per rollout and process."""
        return self.per_device_generation_batch_size * self.generation_batches

    @property
    def responses(self) -> int:
        """Responses per rollout and process."""
        return self.rollout * self.samples_per_prompt

    def update(self, world_size: int) -> int:
        """Examples per update and process."""
        if self.global_batch_size is not None:
            return self.global_batch_size // world_size
        return self.micro_batch * (self.gradient_accumulation_steps or 1)

    def flags(self) -> dict[str, int | None]:
        """The values by the names of their flags."""
        values = asdict(self)
        del values["micro_flag"]
        return {self.micro_flag: values.pop("micro_batch"), **values}

    def changes(self, other: "BatchSizes") -> str:
        """The flags that make the `other` sizes of these, as on a command line."""
        values = self.flags()
        changed = [f"--{name} {value}" for name, value in other.flags().items() if value != values[name]]
        return " ".join(changed)


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of a run, counted in examples (responses in step 3, pairs in step 2).

    Attributes:
        world_size: number of processes.
        micro_batch: examples per forward pass and process.
        accumulation: forward passes per optimiser update.
        update_per_rank: examples per optimiser update and process.
        global_batch: examples per optimiser update on all processes.
        rollout_per_rank: prompts per rollout and process; 0 outside step 3.
        updates_per_rollout: optimiser updates per rollout; 0 outside step 3.
        samples_per_prompt: responses to each prompt of a rollout.
        max_tokens: most tokens of a micro-batch in training, padding included; None = no limit.
    """

    world_size: int
    micro_batch: int
    accumulation: int
    update_per_rank: int
    global_batch: int
    rollout_per_rank: int = 0
    updates_per_rollout: int = 0
    samples_per_prompt: int = 1
    max_tokens: int | None = None

    @property
    def global_rollout(self) -> int:
        """Prompts per rollout on all processes."""
        return self.rollout_per_rank * self.world_size

    @property
    def global_responses(self) -> int:
        """Responses per rollout on all processes."""
        return self.global_rollout * self.samples_per_prompt

    @property
    def iteration_size(self) -> int:
        """Examples per iteration, which is a rollout or, in steps without rollouts, an update; on all processes."""
        return self.global_rollout or self.global_batch

    @property
    def updates_per_iteration(self) -> int:
        """Optimiser updates per iteration; 1 in steps without rollouts."""
        return self.updates_per_rollout or 1

    def split(self, parts: int) -> "BatchPlan":
        """The plan of an optimiser whose updates take a part of an update's examples, in micro-batches that fit."""
        update = self.update_per_rank // parts
        micro_batch = largest_part(update, self.micro_batch)
        return replace(
            self,
            micro_batch=micro_batch,
            accumulation=update // micro_batch,
            update_per_rank=update,
            global_batch=update * self.world_size,
        )

    def check_whole_rollouts(self, flag: str, updates: int, least: int) -> None:
        """Raise UserError if a number of updates, `least` rollouts or more, would end between two of one rollout."""
        per_rollout = self.updates_per_iteration
        if updates % per_rollout:
            nearest = max(updates // per_rollout, least) * per_rollout
            raise UserError(
                f"{flag} {updates}: a rollout makes {per_rollout} optimiser updates, and all of them are made: make it"
                f" {nearest}."
            )

    def check_actor_updates(self, updates: int, critic_warmup_updates: int) -> None:
        """Raise UserError if a run with this number of updates would train the critic alone."""
        if critic_warmup_updates >= updates:
            raise UserError(
                f"--critic_warmup_updates {critic_warmup_updates}: the run makes {updates} updates, so the actor would"
                f" never be trained: make it {updates - self.updates_per_iteration} or less, or give --max_steps"
                f" {critic_warmup_updates + self.updates_per_iteration} or more."
            )


def plan_batches(sizes: BatchSizes, world_size: int, ppo_epochs: int = 1, max_tokens: int | None = None) -> BatchPlan:
    """Plan the updates of a run; the responses of an update must divide those of a rollout, where there is one.

    Args:
        sizes: the flags.
        world_size: number of processes.
        ppo_epochs: passes over one rollout.
        max_tokens: `--max_tokens_per_micro_batch`.

    Raises:
        UserError: the sizes do not fit together; the message names a flag that helps.
    """
    problem = _problem(sizes, world_size)
    if problem:
        raise UserError(problem)
    update = sizes.update(world_size)
    return BatchPlan(
        world_size,
        sizes.micro_batch,
        update // sizes.micro_batch,
        update_per_rank=update,
        global_batch=update * world_size,
        rollout_per_rank=sizes.rollout,
        updates_per_rollout=ppo_epochs * sizes.responses // update,
        samples_per_prompt=sizes.samples_per_prompt,
        max_tokens=max_tokens,
    )


def smaller_sizes(sizes: BatchSizes, world_size: int, examples: int) -> str:
    """Flags for a run on so few examples that they do not fill an iteration: updates of one micro-batch.

    Args:
        sizes: the flags of a run that needs more.
        world_size: number of processes.
        examples: training examples; in step 3, prompts.

    Returns:
        The flags as on a command line; empty if no flags help.
    """
    share = examples // world_size
    if share == 0:
        return ""
    prompts = min(sizes.per_device_generation_batch_size, share)
    responses = prompts * sizes.samples_per_prompt or share
    micro_batch = largest_part(responses, min(sizes.micro_batch, responses))
    smaller = replace(
        sizes,
        micro_batch=micro_batch,
        gradient_accumulation_steps=None if sizes.gradient_accumulation_steps is None else 1,
        global_batch_size=None if sizes.global_batch_size is None else micro_batch * world_size,
        per_device_generation_batch_size=prompts,
        generation_batches=1,
    )
    return sizes.changes(smaller)


def largest_part(size: int, limit: int) -> int:
    """The largest divisor of `size` that does not exceed `limit`."""
    return max(divisor for divisor in range(1, min(size, limit) + 1) if size % divisor == 0)


def _problem(sizes: BatchSizes, world_size: int) -> str:
    """What does not fit together, and what to change; empty if everything fits."""
    intended = sizes.global_batch_size
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    micro_batch = f"--{sizes.micro_flag} {sizes.micro_batch}"
    accumulation = sizes.gradient_accumulation_steps
    per_pass = sizes.micro_batch * world_size
    if intended is not None and intended % per_pass:
        nearest = max(1, round(intended / per_pass)) * per_pass
        return (
            f"--global_batch_size {intended} is not a multiple of {micro_batch} on {processes}: give"
            f" --global_batch_size {nearest}, or a smaller micro-batch."
        )
    if intended is not None and accumulation is not None and accumulation * per_pass != intended:
        return (
            f"--gradient_accumulation_steps {accumulation} makes a global batch of {accumulation * per_pass} with"
            f" {micro_batch} on {processes}, but --global_batch_size is {intended}: give --gradient_accumulation_steps"
            f" {intended // per_pass}, or only one of the two."
        )
    update = sizes.update(world_size)
    if sizes.responses % update == 0:
        return ""
    cause = f"{micro_batch} x --gradient_accumulation_steps {accumulation or 1}"
    if intended is not None:
        cause = f"--global_batch_size {intended}"
    per_batch = sizes.per_device_generation_batch_size * sizes.samples_per_prompt
    return (
        f"{cause}: an update of {update} responses per process does not divide its rollout of {sizes.responses}"
        " (--per_device_generation_batch_size x --generation_batches x --samples_per_prompt): give"
        f" --generation_batches {update // math.gcd(update, per_batch)}, or smaller updates."
    )
