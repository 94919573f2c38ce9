# SPDX-License-Identifier: Apache-2.0
"""The examples of a step, and checks of lengths, before models are opened.

One process of a machine makes the examples, the others read what it made.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

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
from dschat.training.build.engines import ACTOR, BASE, CRITIC
from dschat.training.build.ppo import check_heads
from dschat.training.build.shared_base import check_shared_base, is_on_base

E = TypeVar("E")
# Why a row is left out.
NO_TESTS = "no tests"
UNSOLVED = "its own solution fails its tests"


def load_step_data(
    config: CommonConfig,
    kind: type[E],
    make: Make[E],
    validate: Validate | None = None,
    on_prompt: bool | None = None,
) -> StepData[E]:
    """The examples of a step. Every rank must call it.

    Args:
        config: the flags.
        kind: the type of the examples.
        make: makes examples from rows, see `dschat.data.loading.ExampleLoader`.
        validate: warns about rows, see there.
        on_prompt: in step 1, prompts are learnt from, too.

    Raises:
        UserError: there are no data, a row is bad, or no example is left.
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
    """Checks, before anything is loaded, that models can read texts of the lengths that flags allow.

    Raises:
        UserError: a model reads fewer tokens.
    """
    if isinstance(config, OneModelConfig):
        check_length(config.model.model_name_or_path, BASE, config.model.max_seq_len, "--max_seq_len")
    elif isinstance(config, PPOConfig):
        tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
        check_shared_base(config)
        check_heads(config)
        # What the reward model reads depends on its tokenizer, see `load_ppo_tokenizer`.
        paths = {ACTOR: config.models.actor_model_name_or_path, CRITIC: config.models.critic_model_name_or_path}
        for flag, path in paths.items():
            if path and not is_on_base(config, path):
                check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")


def load_problems(
    config: PPOConfig,
    make: partial[tuple[list[PromptExample], Counter[str]]],
    pool: ProgramPool,
    validate: Validate,
) -> StepData[PromptExample]:
    """The problems of a step's share of the data, encoded in this process; see `rows_with_tests`.

    `validate` gets the training rows and warns about them.
    """
    share = load_share(config, show=is_main())
    if is_main():
        validate(share.train)
        warn_of_plain_prompts(share.train, make.keywords["tokenizer"], config.columns.apply_chat_template)
    flags = config.programs
    rows, without_tests = rows_with_tests(share.train, pool, flags.drop_unsolvable, flags.program_block)
    prompts, dropped = make(rows)
    eval_rows, eval_without_tests = rows_with_tests(share.eval, pool, flags.drop_unsolvable, flags.program_block)
    held_out, eval_dropped = make(eval_rows, held_out=True)
    counts = {"train": without_tests + dropped, "eval": eval_without_tests + eval_dropped}
    return StepData(prompts, held_out, share.sources, share.files, counts)


def rows_with_tests(
    rows: Sequence[Row],
    pool: ProgramPool,
    drop_unsolvable: bool = False,
    program_block: ProgramBlock = "last",
) -> tuple[list[Row], Counter[str]]:
    """Rows with tests and, with `drop_unsolvable`, whose first reference solution passes them.

    A row without a reference solution is kept. The processes share the solutions.

    Args:
        rows: rows of the data; tests are in the column `input_output`.
        pool: runs the solutions.
        drop_unsolvable: leave out rows whose solution fails.
        program_block: which block of a solution is the program.

    Returns:
        The rows in their order, and the number of other rows by reason.

    Raises:
        UserError: a row's tests have another form.
    """
    tested = [row for row in rows if has_tests(row)]
    dropped = Counter({NO_TESTS: len(rows) - len(tested)})
    if drop_unsolvable:
        local_numbers = list(range(len(tested)))[rank() :: world_size()]
        outcomes = run_solutions([tested[number] for number in local_numbers], pool, program_block)
        failed = set()
        for position, outcome in outcomes.items():
            if outcome.status not in ("passed", "invalid"):
                failed.add(local_numbers[position])
        failed_on_any_rank = set().union(*gather_objects(failed))
        dropped[UNSOLVED] = len(failed_on_any_rank)
        tested = [row for number, row in enumerate(tested) if number not in failed_on_any_rank]
    return tested, +dropped
