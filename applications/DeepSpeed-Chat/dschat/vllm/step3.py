# SPDX-License-Identifier: Apache-2.0
"""Rollouts by vLLM, in the training processes or on servers (--rollout_engine vllm)."""

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.engine.engine import Engine
from dschat.models.policy import PolicyModel
from dschat.models.pretrained import open_config
from dschat.models.vocabulary import row_count
from dschat.rollouts.engine import RolloutEngine
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.step3 import ACTOR, has_new_rows
from dschat.vllm.engine import VllmEngine
from dschat.vllm.servers import ServerNeeds, VllmServers


def check_heads(config: PPOConfig) -> None:
    """Raises UserError if the actor's attention heads cannot be split over the ranks that share vLLM."""
    heads: int = open_config(config.models.actor_model_name_or_path, ACTOR).get_text_config().num_attention_heads
    if heads % config.vllm.vllm_tensor_parallel:
        raise UserError(
            f"--vllm_tensor_parallel {config.vllm.vllm_tensor_parallel} does not divide the {heads} attention heads "
            f"of {ACTOR} {config.models.actor_model_name_or_path}."
        )


def build_vllm(config: PPOConfig, actor: Engine[PolicyModel], tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """vLLM on servers with --vllm_url, otherwise in this process.

    Raises:
        UserError: the model's embeddings lack rows, which vLLM would not add.
    """
    if has_new_rows(config, tokenizer):
        raise UserError(
            f"{ACTOR} {config.models.actor_model_name_or_path}: --rollout_engine vllm opens the model as it is,"
            " but its embeddings have fewer rows than its tokenizer has ids. Use --rollout_engine continuous, or a"
            " model of step 1, which adds the rows."
        )
    max_tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
    if config.vllm.vllm_url is not None:
        needs = ServerNeeds(
            row_count(actor.module.inner.config),
            max_tokens,
            config.sampling.temperature or 1.0,
            config.vllm.vllm_timeout,
        )
        return VllmServers(config.vllm.vllm_url, needs)
    return VllmEngine(
        config.models.actor_model_name_or_path,
        max_tokens,
        config.vllm.vllm_gpu_memory,
        config.vllm.vllm_tensor_parallel,
    )
