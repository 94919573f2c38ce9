# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data (its setting two). `python online.py --help` lists the flags."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from dschat.config.refuel import RefuelOnlineConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: RefuelOnlineConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.data import check_lengths
    from dschat.builders.engines import build_refuel_models
    from dschat.builders.scores import build_dialogue_scores
    from dschat.data.dialogues import DialogueLimits, dialogue_examples
    from dschat.data.encoding import turn_end
    from dschat.data.sources import load_share
    from dschat.models.tokenizer import load_tokenizer
    from dschat.run.distributed import device
    from dschat.run.model_folders import SavedModel
    from dschat.trainers.loop import loop_of, total_updates
    from dschat.trainers.refuel import Refuel

    check_lengths(config)
    tokenizer = load_tokenizer(config.model_name_or_path, "--model_name_or_path", may_add_pad=True)
    end_id = turn_end(tokenizer).token_id
    share = load_share(config)
    limits = DialogueLimits(config.max_turns, config.max_prompt_seq_len, config.max_answer_seq_len, config.max_seq_len)
    dialogues, dropped = dialogue_examples(share.train, tokenizer, limits)
    held_out, dropped_eval = dialogue_examples(share.eval, tokenizer, limits, held_out=True)
    run.describe_data(share, train=dropped, eval=dropped_eval)
    updates = total_updates(len(dialogues), config, run.plan)
    run.announce(updates, len(dialogues))
    reward = build_dialogue_scores(config, device())
    report = partial(setattr, run.record, "decoding")
    models = build_refuel_models(config, run.plan, tokenizer, end_id, updates, reward, report)
    saved = [SavedModel(models.policy, "policy", config.model_name_or_path)]
    algorithm = Refuel(models, dialogues, held_out, tokenizer, config, run)
    loop_of(algorithm, {"policy": models.policy}, saved, tokenizer, config, run).fit()


if __name__ == "__main__":
    sys.exit(run_main("refuel_online", RefuelOnlineConfig, train))
