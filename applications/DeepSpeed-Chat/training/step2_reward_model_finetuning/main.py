# SPDX-License-Identifier: Apache-2.0
"""Step 2: the reward model. `python main.py --help` lists the flags."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from dschat.config.supervised import RewardConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: RewardConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.data import check_lengths, load_step_data
    from dschat.builders.engines import build_reward_model
    from dschat.data.examples import PairExample, pair_examples
    from dschat.models.tokenizer import end_token_id, load_tokenizer
    from dschat.run.model_folders import SavedModel
    from dschat.run.output import warn_unless_made_by
    from dschat.trainers.loop import loop_of, total_updates
    from dschat.trainers.reward import RewardTask
    from dschat.trainers.supervised import Supervised

    base = config.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, "--model_name_or_path")
    warn_unless_made_by("sft", base, "--model_name_or_path")
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    make = partial(
        pair_examples, tokenizer=tokenizer, max_seq_len=config.max_seq_len, eos_id=end_id, margin_key=config.margin_key
    )
    data = load_step_data(config, PairExample, make)
    run.describe_data(data, **data.dropped)
    updates = total_updates(len(data.train), config, run.plan)
    run.announce(updates, len(data.train))
    engine = build_reward_model(config, run.plan, tokenizer, updates)
    centering = config.center_rewards_coefficient
    task = RewardTask(data.train, data.eval, tokenizer.pad_token_id, config.reward_loss, centering)
    algorithm = Supervised(engine, task, config, run)
    loop_of(algorithm, {"reward": engine}, [SavedModel(engine, "reward model", base)], tokenizer, config, run).fit()


if __name__ == "__main__":
    sys.exit(run_main("reward", RewardConfig, train))
