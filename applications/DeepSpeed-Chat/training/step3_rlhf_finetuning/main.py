# SPDX-License-Identifier: Apache-2.0
"""Step 3: PPO with macro actions. `python main.py --help` lists the flags."""

import sys
from collections import Counter
from typing import TYPE_CHECKING

from dschat.config.ppo import PPOConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: PPOConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.lengths import check_lengths
    from dschat.builders.ppo import build_ppo_models, load_ppo_tokenizer
    from dschat.builders.scores import build_program_pool
    from dschat.conditions.termination import TerminationCondition
    from dschat.data.dialogues import warn_of_turn_end
    from dschat.data.examples import prompt_examples
    from dschat.data.shares import load_share
    from dschat.models.tokenizer import end_token_id
    from dschat.run.checkpoint import Checkpoints
    from dschat.run.distributed import is_main
    from dschat.run.identity import identity_of
    from dschat.run.model_folders import ModelFolders, SavedModel
    from dschat.trainers.ppo.moving_average import MovingAverage
    from dschat.trainers.ppo.problems import rows_with_tests
    from dschat.trainers.ppo.trainer import PPOTrainer
    from dschat.trainers.ppo.update import total_updates

    check_lengths(config)
    tokenizer = load_ppo_tokenizer(config)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    condition = TerminationCondition(config, tokenizer, end_id, config.seed)
    run.record.parser = condition.parser
    programs = build_program_pool(config) if config.reward_source == "programs" else None
    share = load_share(config)
    if is_main():
        warn_of_turn_end(tokenizer, share.train, end_id)
    rows, left_out = share.train, Counter[str]()
    held_out_rows, left_out_eval = share.eval, Counter[str]()
    if programs is not None:
        run.record.sandbox = programs.level
        rows, left_out = rows_with_tests(rows, programs, config.drop_unsolvable)
        held_out_rows, left_out_eval = rows_with_tests(held_out_rows, programs, config.drop_unsolvable)
    prompts, dropped = prompt_examples(rows, tokenizer, config.max_prompt_seq_len)
    held_out, dropped_eval = prompt_examples(held_out_rows, tokenizer, config.max_prompt_seq_len, held_out=True)
    run.describe_data(share, train=left_out + dropped, eval=left_out_eval + dropped_eval)
    updates = total_updates(len(prompts), config, run.plan)
    run.announce(updates, len(prompts))
    models = build_ppo_models(config, run.plan, tokenizer, updates, programs)
    average = MovingAverage(models.actor) if config.enable_ema else None

    actor_base = config.actor_model_name_or_path
    critic_base = config.critic_model_name_or_path or actor_base
    saved = [SavedModel(models.actor, "policy", actor_base, "actor")]
    if average is not None:
        role = "policy (moving average)"
        saved.append(SavedModel(models.actor, role, actor_base, "actor_ema", average.whole_weights))
    if models.critic is not None:
        saved.append(SavedModel(models.critic, "critic", critic_base, "critic"))
    folders = ModelFolders(saved, tokenizer, config, run)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    checkpoints = Checkpoints(models.trained, config, run, identity, average.parts if average is not None else None)
    PPOTrainer(models, prompts, held_out, tokenizer, condition, config, run, folders, checkpoints, average).fit()


if __name__ == "__main__":
    sys.exit(run_main("ppo", PPOConfig, train))
