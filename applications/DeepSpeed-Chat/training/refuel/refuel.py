# SPDX-License-Identifier: Apache-2.0
"""REFUEL on the pairs that tokenize_masks.py wrote. `python refuel.py --help` lists the flags."""

import sys
from typing import TYPE_CHECKING

from dschat.config.refuel import RefuelConfig
from dschat.main import run_main

if TYPE_CHECKING:
    from dschat.run.output import RunOutput


def train(config: RefuelConfig, run: "RunOutput") -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders.data import check_lengths
    from dschat.builders.engines import build_policy
    from dschat.common.fingerprints import model_hash
    from dschat.data.dialogue_pairs import load_regression_data
    from dschat.models.tokenizer import load_tokenizer
    from dschat.run.model_folders import SavedModel
    from dschat.trainers.loop import loop_of, total_updates
    from dschat.trainers.refuel_pairs import Kept, RefuelTask
    from dschat.trainers.supervised import Supervised

    base = config.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, "--model_name_or_path", may_add_pad=True)
    rows = (config.start_idx, config.end_idx)
    data = load_regression_data(config.data_path, config.max_seq_len, len(tokenizer), *rows)
    run.describe_data(data, **data.dropped)
    updates = total_updates(len(data.train), config, run.plan)
    run.announce(updates, len(data.train))
    engine = build_policy(config, run.plan, tokenizer, updates)
    pad_id = tokenizer.pad_token_id
    reference = Kept(config, pad_id, model_hash(base), run)
    rest = (config.eta, config.temperature, reference, config.self_checks)
    task = RefuelTask(data.train, data.eval, pad_id, *rest)
    algorithm = Supervised(engine, task, config, run)
    loop_of(algorithm, {"refuel": engine}, [SavedModel(engine, "policy", base)], tokenizer, config, run).fit()


if __name__ == "__main__":
    sys.exit(run_main("refuel", RefuelConfig, train))
