# SPDX-License-Identifier: Apache-2.0
"""What is known before models are opened: the examples of a step, and texts longer than a model can read.

One process of a machine makes the examples, the others read what it made.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from dschat.training.build.engines import ACTOR, BASE, CRITIC
from dschat.training.build.ppo import check_heads
from dschat.training.build.shared_base import check_shared_base, is_on_base
from dschat.data.examples import PromptExample
from dschat.data.loading import ExampleLoader, Make, StepData, Validate
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.rows import Row
from dschat.data.sources import load_share
from dschat.models.limits import check_length
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, rank, world_size
from dschat.scoring.programs.blocks import ProgramBlock
from dschat.scoring.programs.run import ProgramPool
from dschat.scoring.programs.scores import has_tests, run_solutions
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import OneModelConfig

E = TypeVar("E")
# Why a row is left out.
NO_TESTS = "no tests"
UNSOLVED = "its own solution fails its tests"


def load_step_data(
    config: CommonConfig, kind: type[E], make: Make[E], validate: Validate | None = None, on_prompt: bool | None = None
) -> StepData[E]:
    """The examples of a step; for `make` and `validate` see `dschat.data.loading.ExampleLoader`. Every rank must call
    it.

    `on_prompt`: in step 1, prompts are learnt from, too. Raises UserError: no data, a bad row, or no example is left.
    """
    loader = ExampleLoader(config, kind, make, validate, on_prompt)
    made_from = broadcast_object(loader.made_from if is_main() else {})
    data = None
    if is_main():
        data = loader.open(made_from, show=True)
        data = loader.make(show=True) if data is None else data
    barrier()
    # The first process of another machine, which may have a disk of its own.
    if data is None:
        data = loader.open(made_from)
        if data is None and os.environ.get("LOCAL_RANK") == "0":
            data = loader.make()
    barrier()
    if data is None:
        data = loader.open(made_from)
    return loader.read() if data is None else data


def check_lengths(config: CommonConfig) -> None:
    """Refuses texts longer than a model can read, before anything is loaded. Raises UserError."""
    if isinstance(config, OneModelConfig):
        check_length(config.model.model_name_or_path, BASE, config.model.max_seq_len, "--max_seq_len")
    elif isinstance(config, PPOConfig):
        tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
        check_shared_base(config)
        check_heads(config)
        # What the reward model reads depends on its tokenizer, see `load_ppo_tokenizer`.
        for flag, path in (
            (ACTOR, config.models.actor_model_name_or_path),
            (CRITIC, config.models.critic_model_name_or_path),
        ):
            if path and not is_on_base(config, path):
                check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")


def load_problems(
    config: PPOConfig,
    make: partial[tuple[list[PromptExample], Counter[str]]],
    pool: ProgramPool,
    validate: Validate,
) -> StepData[PromptExample]:
    """The problems of a step's share, encoded in this process; see `rows_with_tests`.

    `validate` is given the training rows, to warn of what is odd in them.
    """
    share = load_share(config, show=is_main())
    if is_main():
        validate(share.train)
        warn_of_plain_prompts(share.train, make.keywords["tokenizer"], config.columns.apply_chat_template)
    rows, left_out = rows_with_tests(share.train, pool, config.programs.drop_unsolvable, config.programs.program_block)
    held_out_rows, left_out_eval = rows_with_tests(
        share.eval, pool, config.programs.drop_unsolvable, config.programs.program_block
    )
    prompts, dropped = make(rows)
    held_out, dropped_eval = make(held_out_rows, held_out=True)
    counts = {"train": left_out + dropped, "eval": left_out_eval + dropped_eval}
    return StepData(prompts, held_out, share.sources, share.files, counts)


def rows_with_tests(
    rows: Sequence[Row], pool: ProgramPool, drop_unsolvable: bool = False, program_block: ProgramBlock = "last"
) -> tuple[list[Row], Counter[str]]:
    """Rows that have a test in their column `input_output` and, if asked for, whose first reference solution passes;
    one without any counts as such.

    The processes share the solutions. Returns the rows in their order, and reason → number of the others. Raises
    UserError where a row's tests are of another form.
    """
    tested = [row for row in rows if has_tests(row)]
    dropped = Counter({NO_TESTS: len(rows) - len(tested)})
    if drop_unsolvable:
        own = list(range(len(tested)))[rank() :: world_size()]
        outcomes = run_solutions([tested[number] for number in own], pool, program_block)
        failed = {own[i] for i, found in outcomes.items() if found.status not in ("passed", "invalid")}
        everywhere = set().union(*gather_objects(failed))
        dropped[UNSOLVED] = len(everywhere)
        tested = [row for number, row in enumerate(tested) if number not in everywhere]
    return tested, +dropped
