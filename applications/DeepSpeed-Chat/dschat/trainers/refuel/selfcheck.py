# SPDX-License-Identifier: Apache-2.0
"""Checks before the first update: replies are drawn as they should be, and the regression starts at D = 0."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from dschat.data.dialogue_examples import DialogueExample
from dschat.data.dialogues import encode_states
from dschat.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.rl.losses import regression_loss
from dschat.rl.refuel import PairBatch
from dschat.rl.types import Trajectory
from dschat.rollouts.sampling import row_seed
from dschat.run.seeds import SeedKind
from dschat.trainers.ppo.models import response_logprobs
from dschat.trainers.refuel.models import RefuelModels, pair_layouts, reply_logprobs
from dschat.trainers.refuel.sampler import DialogueSampler
from dschat.trainers.refuel.update import RefuelSettings
from dschat.trainers.selfcheck import TOLERANCE, check_rollout


def check_drawing(
    models: RefuelModels,
    sampler: DialogueSampler,
    examples: Sequence[DialogueExample],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> None:
    """See `dschat.trainers.selfcheck.check_rollout`, with replies to the first messages of dialogues.

    Args:
        models: of the run.
        sampler: of the run.
        examples: one or two dialogues.
        tokenizer: the policy's.
        seed: of the run.

    Raises:
        UserError: log-probs are not what they should be, or tokens were drawn that should not be.
    """
    states = encode_states(tokenizer, [example.messages[:1] for example in examples], "the self-check")
    drawn = sampler.first_replies(states, [row_seed(seed, SeedKind.SELF_CHECK, e.index) for e in examples])
    temperature, count = sampler.sampling.temperature, len(states)
    logprobs = response_logprobs(models.policy, drawn.rollout, temperature, count)
    ref_logprobs = logprobs
    if models.reference is not None:
        ref_logprobs = response_logprobs(models.reference, drawn.rollout, temperature, count)
    nothing = torch.zeros_like(logprobs)
    trajectory = Trajectory(drawn.rollout, logprobs, ref_logprobs, nothing, nothing[:, 0])
    check_rollout(models.policy, trajectory, sampler.sampling, drawn.logprobs)


def check_pairs(policy: TrainedPolicy, batch: PairBatch, settings: RefuelSettings) -> None:
    """At π = π_t, log-ratios are 0 and the loss is the mean of (η ΔR)².

    Args:
        policy: its engine, in evaluation mode.
        batch: the first pairs.
        settings: of the updates.

    Raises:
        UserError: it is not so.
    """
    again = reply_logprobs(policy, pair_layouts(batch.rollout, settings.micro_batch), settings.temperature)
    first, second = (again - batch.logprobs).chunk(2)
    finite = batch.reward_differences.isfinite()  # others are met later, as --on_nonfinite says
    if not bool(finite.any()):
        return
    first, second, differences = first[finite], second[finite], batch.reward_differences[finite]
    loss, _ = regression_loss(first, second, differences, settings.eta)
    expected = (settings.eta * differences).double().square().mean()
    tolerance = TOLERANCE[next(policy.module.parameters()).dtype] * max(1.0, float(batch.logprobs.abs().max()))
    gap = float((first - second).abs().max())
    allowed = tolerance * (tolerance + 2 * settings.eta * float(differences.abs().max())) + 1e-6
    if not gap <= tolerance or not abs(float(loss) - float(expected)) <= allowed + 1e-5 * float(expected):
        raise UserError(
            f"self-check: before the first update the log-ratios of a pair differ by {gap:.3g} (rounding explains "
            f"{tolerance:.3g}) and the loss is {float(loss):.6g} where the rewards alone give {float(expected):.6g}: "
            "the model does not give the same numbers twice. Please report it; --no_self_checks skips this check."
        )
