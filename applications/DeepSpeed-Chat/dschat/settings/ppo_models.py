# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3's models, and of their memory."""

from dataclasses import dataclass

from dschat.settings.common import ZeroStage
from dschat.settings.flags import AT_LEAST_0, FREE, NOT_EMPTY, flag


@dataclass(kw_only=True)
class PPOModelFlags:
    """Models."""

    section = "models"

    actor_model_name_or_path: str = flag(
        "model of step 1: the actor starts from it, the frozen reference is it",
        range=NOT_EMPTY,
        on_resume=FREE,
        path=True,
    )
    critic_model_name_or_path: str | None = flag(
        "reward model of step 2, which the critic starts from; if another source of scores is named, the default is"
        " the actor with a zero value head",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
    )


@dataclass(kw_only=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    section = "memory of actor, critic and reference"

    actor_gradient_checkpointing: bool | None = flag(
        "recompute the actor's activations; gradient_checkpointing if not given",
        None,
        on_resume=FREE,
        nargs="?",
        const=True,
    )
    critic_gradient_checkpointing: bool | None = flag(
        "recompute the critic's activations; gradient_checkpointing if not given",
        None,
        on_resume=FREE,
        nargs="?",
        const=True,
    )
    actor_zero_stage: ZeroStage | None = flag("ZeRO stage of the actor; zero_stage if not given", None)
    critic_zero_stage: ZeroStage | None = flag("ZeRO stage of the critic; zero_stage if not given", None)
    offload_reference_model: bool = flag("keep the reference and the reward model in CPU memory", False)
    actor_lora_dim: int | None = flag("rank of the actor's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    critic_lora_dim: int | None = flag("rank of the critic's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    share_base: bool = flag(
        "with LoRA: one frozen base in memory, the actor's, for actor, critic and reference, and for a reward model"
        " that is an adapter over it",
        False,
    )
    enable_ema: bool = flag("also keep and save a moving average of the actor", False)
