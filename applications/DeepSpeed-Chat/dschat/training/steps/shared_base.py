# SPDX-License-Identifier: Apache-2.0
"""One frozen base in memory for the models of step 3 (--share_base): which models share it, and how.

1. settings/ppo_loss.py has the flag, settings/ppo.py its rules: every trained model needs adapters, and all engines
   are at ZeRO 3 or none is.
2. `check_shared_base` looks at the folders before anything is loaded. A critic that is given must be an adapter over
   the actor's base; a reward model may be one, else it is opened whole and has its own weights.
3. training/steps/ppo.py opens the actor. Before it gets adapters, `beside_actor` makes critic and reward model of it:
   `classifier_beside` copies the modules and keeps the tensors, `load_adapter` (models/lora.py) adds a saved adapter
   with its score head. A critic that starts from no adapter gets a head of zeros and, as the actor, new adapters.
4. The reference is the actor with its adapters off, as always with LoRA (engine/adapters_off.py).

Only adapters and heads are trained, so the base stays what it is. Each model has an engine of its own: below ZeRO 3,
DeepSpeed leaves frozen weights alone; at ZeRO 3, an engine takes weights that another has cut into parts as they are.
"""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat.base.errors import UserError
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import frozen_engine
from dschat.models.adapters import adapter_settings, find_adapter
from dschat.models.classifiers import classifier_class, drop_eos_as_pad
from dschat.models.heads import zero_head
from dschat.models.lora import load_adapter
from dschat.models.pretrained import open_config
from dschat.models.scalar import ScalarModel, warn_of_reward_loss
from dschat.scoring.reward_model import RewardModelScores
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.training.iteration import pass_size
from dschat.training.steps.step3 import ACTOR, CRITIC, REWARD, is_on_base

logger = logging.getLogger(__name__)


def check_shared_base(config: PPOConfig) -> None:
    """Checks the folders that --share_base reads, before anything is loaded.

    Raises:
        UserError: the critic is a whole model or has another rank, or the reward model is neither a whole model nor an
            adapter over the base.
    """
    actor = config.models.actor_model_name_or_path
    critic = config.models.critic_model_name_or_path
    reward = config.rewards.reward_model_name_or_path
    if critic is not None:
        folder = find_adapter(critic)
        if folder is None or not is_on_base(config, critic):
            raise UserError(
                f"--share_base: {CRITIC} {critic} {_why_not(folder)}. Train step 2 with --lora_dim from {ACTOR} "
                f"{actor}; or give the reward model as {REWARD}, without {CRITIC}: then the critic starts from the "
                "base with a value head of zeros."
            )
        rank = adapter_settings(folder)["r"]
        if rank != config.memory.critic_lora_dim:
            raise UserError(
                f"--critic_lora_dim {config.memory.critic_lora_dim}: the critic starts from the adapter {folder},"
                f" which has rank {rank}. Give --critic_lora_dim {rank}."
            )
    if config.memory.offload_reference_model and (reward is None or is_on_base(config, reward)):
        raise UserError(
            "--offload_reference_model: with --share_base, reference and reward model are the actor's base, which "
            "stays where the actor is. Drop the flag."
        )
    if reward is None:
        return
    if is_on_base(config, reward):
        if config.rewards.rm_template:
            raise UserError(
                f"--rm_template: with --share_base, {REWARD} {reward} reads the actor's own ids. Drop one of the two."
            )
    elif (adapter := find_adapter(reward)) is not None and not (Path(reward) / "config.json").is_file():
        raise UserError(
            f"--share_base: {REWARD} {reward} is an adapter alone, and it {_why_not(adapter)}. Give the whole model, "
            f"or one that step 2 trained from {ACTOR} {actor}."
        )
    else:
        logger.info("%s %s is not an adapter over the actor's base: it is opened as a whole model", REWARD, reward)


def _why_not(folder: Path | None) -> str:
    if folder is None:
        return "holds no LoRA adapter"
    base = adapter_settings(folder).get("base_model_name_or_path")
    return f"was trained on another base, {base} as it was then"


def beside_actor(config: PPOConfig, actor: PreTrainedModel) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """Critic and reward model over the weights of the actor, which has no adapters yet.

    `check_shared_base` has accepted the flags.

    Returns:
        The critic, without adapters if it starts from none; None without a critic. The reward model; None if there is
        none, or if it is a whole model.
    """
    base = config.models.actor_model_name_or_path
    critic: PreTrainedModel | None = None
    reward: PreTrainedModel | None = None
    if config.advantages.needs.critic:
        critic = classifier_beside(actor, CRITIC)
        folder = find_adapter(config.models.critic_model_name_or_path)
        if folder is not None:
            load_adapter(critic, folder, CRITIC, base)
    if is_on_base(config, config.rewards.reward_model_name_or_path):
        folder = find_adapter(config.rewards.reward_model_name_or_path)
        assert folder is not None  # it is on the base
        reward = classifier_beside(actor, REWARD)
        load_adapter(reward, folder, REWARD, base)
        warn_of_reward_loss(open_config(str(folder), REWARD), f"{REWARD} {folder}")
    return critic, reward


def classifier_beside(causal_lm: Any, flag: str) -> Any:
    """A sequence classifier with one label on the weights of a causal LM without adapters; its head is zero.

    These weights must not be trained: a change of them would change the classifier.

    Raises:
        UserError: the family's classifiers have another backbone, or no ``score`` layer.
    """
    shared = [*causal_lm.base_model.parameters(), *causal_lm.base_model.buffers()]
    backbone = copy.deepcopy(causal_lm.base_model, {id(tensor): tensor for tensor in shared})
    config = backbone.config
    config.num_labels = 1
    drop_eos_as_pad(config)
    with torch.device("meta"):
        classifier: Any = classifier_class(config)(config)
    prefix = classifier.base_model_prefix
    head = getattr(classifier, "score", None)
    if type(getattr(classifier, prefix, None)) is not type(backbone) or not isinstance(head, nn.Linear):
        raise UserError(
            f"{flag}: a {type(classifier).__name__} cannot stand on the base of a {type(causal_lm).__name__}. Leave "
            "--share_base out."
        )
    setattr(classifier, prefix, backbone)
    weight = next(causal_lm.parameters())
    classifier.score = nn.Linear(head.in_features, 1, head.bias is not None, device=weight.device, dtype=weight.dtype)
    zero_head(classifier.score)
    return classifier


def shared_scores(plan: BatchPlan, settings: EngineSettings, reward: PreTrainedModel) -> RewardModelScores:
    """Scores of a reward model of `beside_actor`; its weights are sharded as those of the actor's engine are."""
    stage = 3 if settings.zero_stage == 3 else 0
    settings = replace(settings, gradient_checkpointing=False, zero_stage=stage)
    size = pass_size(plan).without_gradient
    return RewardModelScores(frozen_engine(ScalarModel(reward), settings), size.rows, size.tokens)
