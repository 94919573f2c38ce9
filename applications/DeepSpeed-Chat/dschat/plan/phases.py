# SPDX-License-Identifier: Apache-2.0
"""What one process holds in each phase of a run, in the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig, SupervisedConfig
from dschat.config.ppo import PPOConfig
from dschat.plan.logits import kept_gradient, sampling_logits, scoring_logits, training_logits
from dschat.plan.models import Role, score_pass, shape, train_pass
from dschat.plan.passes import Pass
from dschat.plan.states import effective_stage, gathering, passing, reducing, states, stepping

NOTHING = Pass(0)


@dataclass(frozen=True)
class Phase:
    """Bytes at the worst moment of a phase.

    Attributes:
        name: generate, score, evaluate, train or update.
        kept: what all models keep between phases.
        parts: what the phase adds, by name.
    """

    name: str
    kept: int
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + sum(self.parts.values())


def kept_bytes(roles: Sequence[Role], processes: int) -> int:
    """What models keep between phases. Below ZeRO 3, gradients are there only while training."""
    return sum(_kept(role, processes) for role in roles)


def phases_of(config: CommonConfig, plan: BatchPlan, roles: Sequence[Role], cuda: bool) -> list[Phase]:
    """The phases of a run.

    Args:
        config: the flags.
        plan: its batch sizes.
        roles: its models.
        cuda: on GPUs.
    """
    n = plan.world_size
    kept = kept_bytes(roles, n)
    trained = [role for role in roles if role.weights.trained]
    gradients = sum(states(role.weights, n).gradients for role in trained if not _always_has_gradients(role))
    update = max(stepping(role.weights, n, fused=cuda) for role in trained)
    if isinstance(config, PPOConfig):
        parts = _ppo_parts(config, plan, roles, cuda)
    else:
        assert isinstance(config, SupervisedConfig)
        parts = _supervised_parts(config, plan, roles[0], cuda)
    parts["train"] |= {"gradients": gradients}
    parts["update"] = {"gradients": gradients, "optimiser": update}
    return [Phase(name, kept, {part: size for part, size in of.items() if size}) for name, of in parts.items()]


def _supervised_parts(config: SupervisedConfig, plan: BatchPlan, role: Role, cuda: bool) -> dict[str, dict[str, int]]:
    per_example = 2 if config.step == 2 else 1  # chosen and rejected
    rows, evaluated = per_example * plan.micro_batch, per_example * config.per_device_eval_batch_size
    tokens, n = config.max_seq_len, plan.world_size
    positions = tokens if role.model.kind == "policy" else 0
    moments = _moments(role, rows, tokens, rows * positions, cuda)
    return {
        "evaluate": _scored(role, evaluated, tokens, evaluated * positions, n, cuda),
        "train": _worst(moments) | _zero([role], n),
    }


def _ppo_parts(config: PPOConfig, plan: BatchPlan, roles: Sequence[Role], cuda: bool) -> dict[str, dict[str, int]]:
    actor, critic = roles[0], roles[1]
    n, rows, answer = plan.world_size, plan.micro_batch, config.max_answer_seq_len
    tokens = config.max_prompt_seq_len + answer
    together = plan.updates_per_rollout == 1
    scorers = [role for role in roles if not together or not role.weights.trained]
    if together:
        moments = _moments_together(actor, critic, rows, tokens, rows * answer, cuda)
        buffers = _zero([actor, critic], n)
    else:
        both = (_moments(actor, rows, tokens, rows * answer, cuda), _moments(critic, rows, tokens, 0, cuda))
        moments = [moment for one in both for moment in one]
        buffers = max(_zero([actor], n), _zero([critic], n), key=lambda parts: sum(parts.values()))
    scored = [_scored(role, rows, tokens, rows * answer, n, cuda) for role in scorers]
    slots = config.per_device_generation_batch_size
    own = shape(actor.model)
    return {
        "generate": {
            "gathered weights": gathering(actor.weights, n),
            "KV cache": slots * tokens * own.cached * actor.model.width,
            "activations": score_pass(actor.model, slots, config.max_prompt_seq_len).forward,
            "logits": sampling_logits(own.vocab, slots),
        },
        "score": max(scored, key=lambda parts: sum(parts.values()), default={}),
        "train": _worst(moments) | buffers,
    }


def _scored(role: Role, rows: int, tokens: int, positions: int, processes: int, cuda: bool) -> dict[str, int]:
    policy = role.model.kind == "policy"
    return {
        "activations": score_pass(role.model, rows, tokens).forward,
        "logits": scoring_logits(shape(role.model).vocab, positions, cuda) if policy and positions else 0,
        "ZeRO": passing(role.weights, processes),
    }


def _moments(role: Role, rows: int, tokens: int, positions: int, cuda: bool) -> list[tuple[int, int]]:
    """Activations and logits at the moments of one micro-batch."""
    return _moments_of(_passes(role, rows, tokens, positions, cuda), NOTHING)


def _moments_together(
    actor: Role, critic: Role, rows: int, tokens: int, positions: int, cuda: bool
) -> list[tuple[int, int]]:
    """Where both models go forward on a micro-batch before either goes backward."""
    other = train_pass(critic.model, rows, tokens, critic.checkpointing)
    return _moments_of(_passes(actor, rows, tokens, positions, cuda), other)


def _passes(role: Role, rows: int, tokens: int, positions: int, cuda: bool) -> tuple[Pass, Pass, int]:
    """Of the model without its head, of its log-probs, and what of the head's gradient is kept after those."""
    body = train_pass(role.model, rows, tokens, role.checkpointing)
    if role.model.kind != "policy":
        return body, NOTHING, 0
    return body, training_logits(role.head, positions, cuda), kept_gradient(role.head)


def _moments_of(passes: tuple[Pass, Pass, int], other: Pass) -> list[tuple[int, int]]:
    body, logits, kept = passes
    return [
        (body.forward, 0),
        (body.held, logits.forward),
        (body.held + other.forward, logits.held),
        (body.held + other.held, logits.backward),
        (body.backward + other.held, kept),
        (other.backward, 0),
    ]


def _worst(moments: Sequence[tuple[int, int]]) -> dict[str, int]:
    activations, logits = max(moments, key=sum)
    return {"activations": activations, "logits": logits}


def _zero(roles: Sequence[Role], processes: int) -> dict[str, int]:
    whole = sum(passing(role.weights, processes) for role in roles)
    return {"ZeRO": whole + max(reducing(role.weights, processes) for role in roles)}


def _always_has_gradients(role: Role) -> bool:
    return effective_stage(role.weights.stage, role.weights.width) == 3


def _kept(role: Role, processes: int) -> int:
    kept = states(role.weights, processes)
    return kept.total - (0 if _always_has_gradients(role) else kept.gradients)
