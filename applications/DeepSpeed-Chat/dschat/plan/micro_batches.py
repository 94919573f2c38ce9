# SPDX-License-Identifier: Apache-2.0
"""The largest micro-batches that fit, with gradient checkpointing and without, and which of the two to take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dschat.plan.models import Role
from dschat.plan.phases import CUDA_BYTES, Texts, phases_of
from dschat.plan.plan import Plan
from dschat.plan.states import FLOAT32, Weights

# Operations that a GPU can do while a byte comes from its memory: of an H100, whose data sheet says 989 · 10¹² in bf16
# and 3.35 · 10¹² in a second.
RIDGE = 300


@dataclass(frozen=True)
class Choice:
    """The largest micro-batch that fits."""

    checkpointing: bool  # of all trained models
    tokens: int  # its size, of texts that are all the longest
    rows: int  # their number
    peak: int  # bytes of a GPU
    operations: float  # see `operations`


def choices(plan: Plan) -> list[Choice]:
    """Without gradient checkpointing and with it; only what fits, and nothing for a CPU.

    An update's examples on a process are the most that a micro-batch is given.
    """
    machine, batches, texts = plan.machine, plan.config.plan_batches(plan.machine.processes), Texts.of(plan.config)
    if machine.device_memory is None:
        return []
    most, example = batches.update_per_rank, texts.per_example * texts.tokens
    found = []
    for again in (False, True):
        roles = [replace(role, checkpointing=again) if role.weights.trained else role for role in plan.roles]

        def peak(examples: int, roles: Sequence[Role] = roles) -> int:
            sized = replace(batches, micro_batch=most, max_tokens=examples * example)
            return CUDA_BYTES + max(phase.total for phase in phases_of(plan.config, sized, roles, machine))

        every = peak(most) <= machine.device_memory  # asked first, since each size is a few passes of the model's code
        if examples := most if every else bisect_right(range(1, most), machine.device_memory, key=peak):
            tokens = examples * example
            cost = operations(roles[0].weights, tokens, again)
            found.append(Choice(again, tokens, examples * texts.per_example, peak(examples), cost))
    return found


def operations(weights: Weights, tokens: int, checkpointing: bool) -> float:
    """Time of training on a token of a micro-batch: in operations for each weight, of which a GPU does all it can.

    A token takes 2 operations forward, 2 for the gradient of what came in and, of a weight that is trained, 2 for its
    own; recomputation another 2, a third of these 6. Each micro-batch also reads every weight in every such pass, and
    writes, reads and adds up gradients, however few its tokens are.

    Args:
        weights: of the model.
        tokens: of the micro-batch.
        checkpointing: gradient checkpointing.
    """
    trained, passes = weights.trained / weights.parameters, 2 + checkpointing
    moved = passes * weights.width + trained * 2 * (weights.width + FLOAT32)
    return 2 * passes + 2 * trained + RIDGE * moved / tokens
