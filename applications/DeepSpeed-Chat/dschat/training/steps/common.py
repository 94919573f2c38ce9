# SPDX-License-Identifier: Apache-2.0
"""What every training step does before it builds its models: its data, its lengths, the plan of the run.

Each step has a file here: sft.py, reward.py, dpo.py, ppo.py; `dschat.refuel.steps` has two. The way from
a line of a JSON Lines file to a training batch is the same in steps 1, 2 and 3:

1. The function of the step says how its examples are made, and here `load_step_data` which process makes them.
2. data/loading.py: `ExampleLoader` opens the examples in the cache, or reads and encodes the rows.
3. data/sources.py: `load_share` reads every --data_path and takes the step's part of its rows (--data_split).
4. data/files.py: `read_file` yields the lines of a file as objects.
5. data/formats.py: `parse_row` makes a `Row` of the columns of an object: a prompt, and its responses.
6. data/examples.py: `encoded_rows` makes token ids of rows, and `fitted_examples` the step's examples of these. What
   is too long is cut or dropped.
7. data/batches.py: `update_batches` chooses the examples of each update, for the loop (training/loop.py), and
   `collate_sft` or `collate_pairs` of data/collate.py pads them, for the step's task. Prompts of step 3 are sampled
   from (`PPO`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from transformers import PreTrainedTokenizerBase

from dschat.data.loading import ExampleLoader, Make, StepData, Validate
from dschat.data.sources import source_line
from dschat.models.limits import check_length
from dschat.models.tokenizer import load_tokenizer
from dschat.run.distributed import barrier, broadcast_object, is_main
from dschat.run.output import RunOutput
from dschat.settings.common import CommonConfig
from dschat.training.steps.engines import MODEL, RunPlan

if TYPE_CHECKING:
    from dschat.settings.supervised import OneModelConfig

logger = logging.getLogger(__name__)

E = TypeVar("E")


def load_step_data(
    config: CommonConfig,
    kind: type[E],
    make: Make[E],
    validate: Validate | None = None,
    on_prompt: bool | None = None,
    reads_prompts: bool = True,
) -> StepData[E]:
    """The examples of a step. Every rank must call it.

    One process of a machine makes the examples, the others read what it made.

    Args:
        config: the flags.
        kind: the type of the examples.
        make: makes examples from rows, see `dschat.data.loading.ExampleLoader`.
        validate: warns about rows, see there.
        on_prompt: in step 1, prompts are learnt from, too.
        reads_prompts: whether the model reads the rows' prompts, see there.

    Raises:
        UserError: there are no data, a row is bad, or no example is left.
    """
    loader = ExampleLoader(config, kind, make, validate, on_prompt, reads_prompts)
    key = loader.key if is_main() else ""
    barrier()  # reading the files for the key may take longer than a collective waits
    key = broadcast_object(key)
    data = None
    if is_main():
        data = loader.open(key, show=True)
        data = loader.make(show=True) if data is None else data
    barrier()
    # The first process of another machine, which may have a disk of its own.
    if data is None:
        data = loader.open(key)
        if data is None and os.environ.get("LOCAL_RANK") == "0":
            data = loader.make()
    barrier()
    data = data or loader.open(key) or loader.read()
    barrier()
    return data


def open_tokenizer(config: OneModelConfig, for_classifier: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that a step trains; `for_classifier`: it is saved with a classifier.

    Raises:
        UserError: the model reads fewer tokens than --max_seq_len, or has no tokenizer.
    """
    base = config.model.model_name_or_path
    check_length(base, MODEL, config.model.max_seq_len, "--max_seq_len")
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(
        base, MODEL, for_classifier, config.data.end_of_conversation_token
    )
    return tokenizer


def plan_run(config: CommonConfig, run: RunOutput, data: StepData[E]) -> RunPlan:
    """Logs how many rows of each source are used and how long the run is; the run's plan."""
    for source in data.sources:
        logger.info("%s", source_line(source))
    run.describe_data(data, **data.dropped)
    updates = config.total_updates(len(data.train), run.plan)
    run.announce(updates, len(data.train))
    return RunPlan.of(config, run.plan, updates)


def record_decoding(run: RunOutput) -> Callable[[str], None]:
    """A function that writes into the run's record how continuous batching launches its steps."""
    return partial(setattr, run.record, "decoding")
