# SPDX-License-Identifier: Apache-2.0
"""Step 1: supervised fine-tuning. `python main.py --help` lists the flags."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from dschat.config.supervised import SFTConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: SFTConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.data import check_lengths, load_step_data
    from dschat.builders.engines import build_policy
    from dschat.data.encoding import warn_of_turn_end
    from dschat.data.examples import SFTExample, sft_examples
    from dschat.models.load import warn_without_classifier
    from dschat.models.tokenizer import end_token_id, load_tokenizer
    from dschat.run.model_folders import SavedModel
    from dschat.trainers.loop import loop_of, total_updates
    from dschat.trainers.sft import SFTTask
    from dschat.trainers.supervised import Supervised

    base = config.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, "--model_name_or_path", may_add_pad=True)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    make = partial(
        sft_examples,
        tokenizer=tokenizer,
        max_seq_len=config.max_seq_len,
        eos_id=end_id,
        all_turns=config.train_on == "all",
    )
    validate = partial(warn_of_turn_end, tokenizer, end_id=end_id)
    data = load_step_data(config, SFTExample, make, validate, config.sft_on_prompt)
    run.describe_data(data, **data.dropped)
    updates = total_updates(len(data.train), config, run.plan)
    run.announce(updates, len(data.train))
    warn_without_classifier(base)
    engine = build_policy(config, run.plan, tokenizer, updates)
    width = config.max_seq_len if config.packing else None
    options = (config.sft_on_prompt, config.label_smoothing, width, config.max_tokens_per_micro_batch is not None)
    task = SFTTask(data.train, data.eval, tokenizer.pad_token_id, *options)
    algorithm = Supervised(engine, task, config, run)
    loop_of(algorithm, {"policy": engine}, [SavedModel(engine, "policy", base)], tokenizer, config, run).fit()


if __name__ == "__main__":
    sys.exit(run_main("sft", SFTConfig, train))
