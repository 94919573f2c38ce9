# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the machine that it begins on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import SupervisedConfig
from dschat.errors import UserError
from dschat.models.limits import open_decoder_config
from dschat.plan.machine import GB, Machine
from dschat.plan.models import roles_of
from dschat.plan.phases import kept_bytes
from dschat.plan.plan import make_plan
from dschat.plan.remedies import in_words, remedies, what_else
from dschat.plan.states import states

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """Bytes that a process holds from the first update on, whatever the batches are.

    Attributes:
        main: of main memory: on a CPU all models and optimiser states, else what is offloaded.
        gpu: of its GPU; 0 without one.
    """

    main: int
    gpu: int


def needs_of(config: CommonConfig, processes: int, device: torch.device) -> Needs | None:
    """What a run surely needs; None where it is not known.

    That is so where a model cannot be opened, which the run itself will say better, and in steps that are not planned.

    Args:
        config: its flags.
        processes: N.
        device: of a process; only its kind matters.
    """
    if not isinstance(config, SupervisedConfig | PPOConfig):
        return None
    try:
        roles = roles_of(config, open_decoder_config, device)
    except UserError:
        return None
    kept = kept_bytes(roles, processes)
    offloaded = sum(states(role.weights, processes).host for role in roles)
    return Needs(kept + offloaded, 0) if device.type == "cpu" else Needs(offloaded, kept)


def warn_of_gpu_memory(config: CommonConfig, processes: int, free: int) -> None:
    """Says that a GPU may be too small for the longest batch, and which flags would help.

    Args:
        config: the run's flags.
        processes: N.
        free: bytes of a GPU.
    """
    try:
        plan = make_plan(config, Machine(processes, free), open_decoder_config)
        tried = remedies(plan, open_decoder_config) if not plan.fits else []
        helps = [in_words(change) for change, changed in tried if changed.fits]
    except UserError as error:
        logger.warning("the memory of this run could not be planned: %s", error)
        return
    if not plan.fits:
        logger.warning(
            "a GPU would hold up to %.1f GB with the longest batch (phase %r), of which %.1f GB are free. What helps: "
            "%s; `python -m dschat.plan` shows more.",
            plan.peak / GB,
            plan.worst.name,
            free / GB,
            ", or ".join(helps) or what_else(plan),
        )
