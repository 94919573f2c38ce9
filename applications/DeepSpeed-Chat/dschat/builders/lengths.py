# SPDX-License-Identifier: Apache-2.0
"""Texts longer than a model can read, refused before anything is loaded."""

from dschat.builders.names import ACTOR, BASE, CRITIC
from dschat.builders.shared_base import check_shared_base, is_on_base
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelOnlineConfig
from dschat.config.supervised import SupervisedConfig
from dschat.models.limits import check_length


def check_lengths(config: CommonConfig) -> None:
    """Refuses texts longer than a model can read, before anything is loaded. Raises UserError."""
    if isinstance(config, SupervisedConfig):
        check_length(config.model_name_or_path, BASE, config.max_seq_len, "--max_seq_len")
    elif isinstance(config, PPOConfig):
        tokens = config.max_prompt_seq_len + config.max_answer_seq_len
        check_shared_base(config)
        # What the reward model reads depends on its tokenizer, see `load_ppo_tokenizer`.
        for flag, path in ((ACTOR, config.actor_model_name_or_path), (CRITIC, config.critic_model_name_or_path)):
            if path and not is_on_base(config, path):
                check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")
    elif isinstance(config, RefuelOnlineConfig):
        check_length(config.model_name_or_path, BASE, config.max_seq_len, "--max_seq_len")
