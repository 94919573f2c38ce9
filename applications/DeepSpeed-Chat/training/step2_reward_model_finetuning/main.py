# SPDX-License-Identifier: Apache-2.0
"""Step 2: the reward model. `python main.py --help` lists the flags."""

import sys
from typing import TYPE_CHECKING

from dschat.config.reward import RewardConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: RewardConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.lengths import check_lengths
    from dschat.builders.supervised import build_reward_model
    from dschat.data.examples import pair_examples
    from dschat.data.shares import load_share
    from dschat.models.tokenizer import end_token_id, load_tokenizer
    from dschat.run.checkpoint import Checkpoints
    from dschat.run.identity import identity_of
    from dschat.run.model_folders import ModelFolders, SavedModel
    from dschat.run.records import warn_unless_made_by
    from dschat.trainers.supervised.reward import RewardTask
    from dschat.trainers.supervised.trainer import SupervisedTrainer, total_updates

    base = config.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, "--model_name_or_path")
    warn_unless_made_by("sft", base, "--model_name_or_path")
    share, end_id = load_share(config), end_token_id(tokenizer, config.end_of_conversation_token)
    limits, key = (tokenizer, config.max_seq_len, end_id), config.margin_key
    examples, dropped = pair_examples(share.train, *limits, margin_key=key)
    held_out, dropped_eval = pair_examples(share.eval, *limits, held_out=True, margin_key=key)
    run.describe_data(share, train=dropped, eval=dropped_eval)
    updates = total_updates(len(examples), config, run.plan)
    run.announce(updates, len(examples))
    engine = build_reward_model(config, run.plan, tokenizer, updates)
    folders = ModelFolders([SavedModel(engine, "reward model", base)], tokenizer, config, run)
    centering = config.center_rewards_coefficient
    task = RewardTask(examples, held_out, tokenizer.pad_token_id, config.reward_loss, centering)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    checkpoints = Checkpoints({"reward": engine}, config, run, identity)
    SupervisedTrainer(engine, task, config, run, folders, checkpoints).fit()


if __name__ == "__main__":
    sys.exit(run_main("reward", RewardConfig, train))
