# SPDX-License-Identifier: Apache-2.0
"""The flags that name models, for messages."""

BASE = "--model_name_or_path"
ACTOR, CRITIC, REWARD = "--actor_model_name_or_path", "--critic_model_name_or_path", "--reward_model_name_or_path"
