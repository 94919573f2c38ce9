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
    from dschat.data.regression import load_regression_data
    from dschat.models.tokenizer import load_tokenizer
    from dschat.run.checkpoint import Checkpoints
    from dschat.run.identity import identity_of, model_hash
    from dschat.run.model_folders import ModelFolders, SavedModel
    from dschat.trainers.supervised.refuel import Kept, RefuelTask
    from dschat.trainers.supervised.trainer import SupervisedTrainer, total_updates

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
    folders = ModelFolders([SavedModel(engine, "policy", base)], tokenizer, config, run)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    checkpoints = Checkpoints({"refuel": engine}, config, run, identity)
    SupervisedTrainer(engine, task, config, run, folders, checkpoints).fit()


if __name__ == "__main__":
    sys.exit(run_main("refuel", RefuelConfig, train))
