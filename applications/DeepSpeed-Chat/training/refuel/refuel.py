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
    from dschat.builders import build_policy, check_lengths
    from dschat.data.regression import load_regression_data
    from dschat.models.tokenizer import load_tokenizer
    from dschat.run.checkpoint import Checkpoints
    from dschat.run.identity import identity_of, model_hash
    from dschat.run.model_folders import ModelFolders, SavedModel
    from dschat.trainers.supervised.pairs import describe_reference, reference_logprobs
    from dschat.trainers.supervised.refuel import RefuelTask, reference_file, with_logprobs
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

    pairs, pad_id, temperature = [*data.train, *data.eval], tokenizer.pad_token_id, config.temperature
    dtype = next(engine.module.parameters()).dtype
    described = describe_reference(pairs, model_hash(base), dtype, temperature)
    file = reference_file(config, run.folder)
    size = config.per_device_eval_batch_size
    logprobs = reference_logprobs(engine, pairs, pad_id, size, temperature, file, described)
    known = with_logprobs(pairs, logprobs)
    count = len(data.train)
    task = RefuelTask(known[:count], known[count:], pad_id, config.eta, temperature)
    if config.self_checks:
        task.check_start(engine, task.train[:2])

    folders = ModelFolders([SavedModel(engine, "policy", base)], tokenizer, config, run)
    identity = identity_of(config, run.plan, tokenizer, run.record.data)
    checkpoints = Checkpoints({"refuel": engine}, config, run, identity)
    SupervisedTrainer(engine, task, config, run, folders, checkpoints).fit()


if __name__ == "__main__":
    sys.exit(run_main("refuel", RefuelConfig, train))
