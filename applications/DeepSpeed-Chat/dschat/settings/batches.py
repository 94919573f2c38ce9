# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: how micro-batches, accumulation, processes and rollouts make up an optimiser update."""

from dataclasses import dataclass

from dschat.base.errors import UserError


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

    def check_max_steps(self, max_steps: int | None) -> None:
        """Raise UserError if --max_steps would end the run between two updates of one rollout."""
        updates = self.updates_per_iteration
        if max_steps is None or max_steps % updates == 0:
            return
        lower = max_steps // updates * updates
        nearest = [count for count in (lower, lower + updates) if count]
        raise UserError(
            f"--max_steps {max_steps}: a rollout makes {updates} optimiser updates, and the run ends after a whole"
            f" rollout: make it {_words(nearest)}."
        )

    def check_critic_warmup(self, warmup_updates: int) -> None:
        """Raise UserError if --critic_warmup_updates would end between two updates of one rollout."""
        updates = self.updates_per_iteration
        if warmup_updates % updates == 0:
            return
        lower = warmup_updates // updates * updates
        nearest = [count for count in (lower, lower + updates) if count]
        raise UserError(
            f"--critic_warmup_updates {warmup_updates}: a rollout makes {updates} optimiser updates, and the actor's"
            f" first one begins a rollout: make it {_words(nearest)}."
        )


def check_actor_updates(updates: int, critic_warmup_updates: int) -> None:
    """Raise UserError if a run with this number of updates would train the critic alone (--critic_warmup_updates)."""
    if critic_warmup_updates >= updates:
        raise UserError(
            f"--critic_warmup_updates {critic_warmup_updates}: the run makes {updates} updates, so the actor would"
            " never be trained: lower it, or raise --max_steps or --num_train_epochs."
        )


def plan_batches(
    micro_flag: str,
    micro_batch: int,
    accumulation: int | None,
    global_batch_size: int | None,
    world_size: int,
    max_tokens: int | None = None,
) -> BatchPlan:
    """Plan the updates of a step that has no rollouts.

    Args:
        micro_flag: name of the flag that sets `micro_batch`.
        micro_batch: examples per forward pass and process.
        accumulation: forward passes per update; None to let `global_batch_size` decide, or for 1.
        global_batch_size: examples per update on all processes, or None to let `accumulation` decide.
        world_size: number of processes.
        max_tokens: `--max_tokens_per_micro_batch`.

    Raises:
        UserError: when `global_batch_size` cannot be reached; the message names the nearest that can.
    """
    per_pass = micro_batch * world_size
    if global_batch_size is not None:
        if global_batch_size % per_pass:
            lower = global_batch_size // per_pass * per_pass
            reachable = [size for size in (lower, lower + per_pass) if size]
            raise _unreachable(micro_flag, micro_batch, global_batch_size, world_size, reachable)
        accumulation = _derived_accumulation(accumulation, global_batch_size, per_pass)
    accumulation = accumulation or 1
    update = micro_batch * accumulation
    return BatchPlan(world_size, micro_batch, accumulation, update, update * world_size, max_tokens=max_tokens)


def plan_rollouts(
    micro_batch: int,
    accumulation: int | None,
    global_batch_size: int | None,
    world_size: int,
    rollout: int,
    ppo_epochs: int,
    samples: int = 1,
    max_tokens: int | None = None,
) -> BatchPlan:
    """Plan the updates of step 3, where the responses of an update must divide those of the rollout.

    Args:
        micro_batch: `--per_device_training_batch_size`.
        accumulation: `--gradient_accumulation_steps`; None to let `global_batch_size` decide, or for 1.
        global_batch_size: responses per update on all processes, or None to let `accumulation` decide.
        world_size: number of processes.
        rollout: prompts per rollout and process.
        ppo_epochs: passes over one rollout.
        samples: `--samples_per_prompt`.
        max_tokens: `--max_tokens_per_micro_batch`.

    Raises:
        UserError: when an update does not divide the rollout, or `global_batch_size` cannot be reached.
    """
    responses = rollout * samples
    amount = f"{rollout} prompts"
    flags = "--per_device_generation_batch_size x --generation_batches"
    if samples > 1:
        amount = f"{responses} responses"
        flags += " x --samples_per_prompt"
    if responses % micro_batch:
        sizes = _words(_divisors(responses))
        raise UserError(
            f"--per_device_training_batch_size {micro_batch} does not divide the rollout of {amount} ({flags}): make"
            f" it one of {sizes}, or make the rollout a multiple of {micro_batch}."
        )
    accumulations = _divisors(responses // micro_batch)
    per_pass = micro_batch * world_size
    if global_batch_size is not None:
        reachable = [per_pass * passes for passes in accumulations]
        if global_batch_size not in reachable:
            lower = [size for size in reachable if size < global_batch_size][-1:]
            upper = [size for size in reachable if size > global_batch_size][:1]
            raise _unreachable(
                "per_device_training_batch_size",
                micro_batch,
                global_batch_size,
                world_size,
                lower + upper,
                amount,
            )
        accumulation = _derived_accumulation(accumulation, global_batch_size, per_pass)
    accumulation = accumulation or 1
    update = micro_batch * accumulation
    if responses % update:
        raise UserError(
            f"--gradient_accumulation_steps {accumulation} x --per_device_training_batch_size {micro_batch} makes"
            f" updates of {update}, which do not divide the rollout of {amount} ({flags}): make"
            f" --gradient_accumulation_steps one of {_words(accumulations)}, or make the rollout a multiple of"
            f" {update}."
        )
    return BatchPlan(
        world_size,
        micro_batch,
        accumulation,
        update_per_rank=update,
        global_batch=update * world_size,
        rollout_per_rank=rollout,
        updates_per_rollout=ppo_epochs * responses // update,
        samples_per_prompt=samples,
        max_tokens=max_tokens,
    )


def largest_part(size: int, limit: int) -> int:
    """The largest divisor of `size` that does not exceed `limit`."""
    return max(divisor for divisor in _divisors(size) if divisor <= limit)


def _derived_accumulation(
    accumulation: int | None,
    global_batch_size: int,
    per_pass: int,
) -> int:
    """Forward passes per update that make up the global batch; UserError if the flag says another number."""
    derived = global_batch_size // per_pass
    if accumulation is not None and accumulation != derived:
        raise UserError(
            f"--gradient_accumulation_steps {accumulation} makes a global batch of {accumulation * per_pass}, but"
            f" --global_batch_size is {global_batch_size}: drop --gradient_accumulation_steps (it would be {derived}),"
            " or change one of them."
        )
    return derived


def _unreachable(
    micro_flag: str,
    micro_batch: int,
    wanted: int,
    world_size: int,
    nearest: list[int],
    rollout: str | None = None,
) -> UserError:
    """Error for a global batch that is not a multiple of a forward pass on all processes, or divides no rollout."""
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    within = "" if rollout is None else f" and updates that divide the rollout of {rollout} per process"
    return UserError(
        f"--global_batch_size {wanted} cannot be reached with --{micro_flag} {micro_batch} on {processes}{within}:"
        f" make it {_words(nearest)}, or change --{micro_flag}."
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _words(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    *first, last = [str(number) for number in numbers]
    if not first:
        return last
    return f"{', '.join(first)} or {last}"
