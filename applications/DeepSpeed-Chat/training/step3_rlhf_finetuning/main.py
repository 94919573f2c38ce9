# SPDX-License-Identifier: Apache-2.0
"""Step 3: PPO with macro actions. `python main.py --help` lists the flags."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from dschat.config.ppo import PPOConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: PPOConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.data import check_lengths, load_problems, load_step_data
    from dschat.builders.ppo import build_ppo_models, load_ppo_tokenizer
    from dschat.builders.scores import build_program_pool
    from dschat.conditions.termination import TerminationCondition
    from dschat.data.encoding import warn_of_turn_end
    from dschat.data.examples import PromptExample, prompt_examples
    from dschat.models.tokenizer import end_token_id
    from dschat.run.model_folders import SavedModel
    from dschat.trainers.loop import loop_of, total_updates
    from dschat.trainers.ppo import PPO
    from dschat.trainers.ppo_models import MovingAverage

    check_lengths(config)
    tokenizer = load_ppo_tokenizer(config)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    condition = TerminationCondition(config, tokenizer, end_id, config.seed)
    run.record.parser = condition.parser
    programs = build_program_pool(config) if config.reward_source == "programs" else None
    make = partial(prompt_examples, tokenizer=tokenizer, max_prompt_seq_len=config.max_prompt_seq_len)
    if programs is not None:
        run.record.sandbox = programs.level
        data = load_problems(config, make, programs, config.drop_unsolvable)
    else:
        validate = partial(warn_of_turn_end, tokenizer, end_id=end_id)
        data = load_step_data(config, PromptExample, make, validate)
    run.describe_data(data, **data.dropped)
    updates = total_updates(len(data.train), config, run.plan)
    run.announce(updates, len(data.train))
    report = partial(setattr, run.record, "decoding")
    models = build_ppo_models(config, run.plan, tokenizer, updates, programs, report)
    average = MovingAverage(models.actor) if config.enable_ema else None

    actor_base = config.actor_model_name_or_path
    critic_base = config.critic_model_name_or_path or actor_base
    saved = [SavedModel(models.actor, "policy", actor_base, "actor")]
    if average is not None:
        role = "policy (moving average)"
        saved.append(SavedModel(models.actor, role, actor_base, "actor_ema", average.whole_weights))
    if models.critic is not None:
        saved.append(SavedModel(models.critic, "critic", critic_base, "critic"))
    parts = None if average is None else average.parts
    algorithm = PPO(models, data.train, data.eval, tokenizer, condition, config, run, average)
    loop_of(algorithm, models.trained, saved, tokenizer, config, run, parts).fit()


if __name__ == "__main__":
    sys.exit(run_main("ppo", PPOConfig, train))
