# SPDX-License-Identifier: Apache-2.0
"""Programming problems (--reward_source programs): rows with tests, whose solutions may be run first; their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import cast

from dschat.data.examples import PromptExample
from dschat.data.loading import StepData, Validate
from dschat.data.notes import warn_of_plain_prompts
from dschat.data.rows import Row
from dschat.data.sources import load_share
from dschat.programs.blocks import ProgramBlock, program_of
from dschat.programs.run import ProgramPool
from dschat.programs.scores import ProgramScores, has_tests, tests_of
from dschat.run.distributed import gather_objects, is_main, rank, world_size
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.scores import SourceParts

# Why a row is left out.
NO_TESTS = "no tests"
UNSOLVED = "its own solution fails its tests"


def build_program_pool(config: PPOConfig) -> ProgramPool:
    """The pool that runs programs. Raises UserError if the machine cannot isolate them at the level asked for."""
    stops_early = config.programs.program_reward == "paper"  # the first error decides its reward
    return ProgramPool(
        config.programs.sandbox_level,
        config.programs.sandbox_workers,
        max_tests=config.programs.max_tests,
        to_the_end=not stops_early,
    )


def build_programs(parts: SourceParts, source: str) -> ProgramScores:
    """Scores of the programs in responses, by the tests of their rows."""
    pool = cast(ProgramPool, parts.programs)  # made by `build_program_pool`, for the step's data
    flags = parts.config.programs
    return ProgramScores(pool, flags.program_reward, parts.skips, flags.program_block)


def load_problems(
    config: PPOConfig, make: partial[tuple[list[PromptExample], Counter[str]]], pool: ProgramPool, validate: Validate
) -> StepData[PromptExample]:
    """The problems of a step's share of the data, encoded in this process; see `rows_with_tests`.

    `validate` gets the training rows and warns about them.
    """
    share = load_share(config, show=is_main())
    if is_main():
        validate(share.train)
        if not config.has_episodes:  # otherwise environments write the prompts
            warn_of_plain_prompts(share.train, make.keywords["tokenizer"], config.columns.apply_chat_template)
    flags = config.programs
    rows, untested = rows_with_tests(share.train, pool, flags.drop_unsolvable, flags.program_block)
    prompts, dropped = make(rows)
    eval_rows, eval_untested = rows_with_tests(share.eval, pool, flags.drop_unsolvable, flags.program_block)
    held_out, eval_dropped = make(eval_rows, held_out=True)
    counts = {"train": untested + dropped, "eval": eval_untested + eval_dropped}
    return StepData(prompts, held_out, share.sources, share.files, counts)


def rows_with_tests(
    rows: Sequence[Row], pool: ProgramPool, drop_unsolvable: bool = False, program_block: ProgramBlock = "last"
) -> tuple[list[Row], Counter[str]]:
    """Rows with tests and, with `drop_unsolvable`, whose first reference solution passes them.

    A row without a reference solution is kept.

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
    if not drop_unsolvable:
        return tested, +dropped

    failed = _failed_solutions(tested, pool, program_block)
    dropped[UNSOLVED] = len(failed)
    return [row for number, row in enumerate(tested) if number not in failed], +dropped


def _failed_solutions(rows: Sequence[Row], pool: ProgramPool, program_block: ProgramBlock) -> set[int]:
    """Numbers of the rows whose first reference solution fails their tests. The processes share the solutions.

    A solution may be in a fenced block, as in a response.
    """
    solutions = {number: row.chosen for number, row in enumerate(rows) if row.chosen is not None}
    local_numbers = list(solutions)[rank() :: world_size()]
    programs = [program_of(solutions[number], program_block) for number in local_numbers]
    tests = [tests_of(rows[number]) for number in local_numbers]
    outcomes = pool.run(programs, tests, [rows[number].origin for number in local_numbers])
    failed: set[int] = set()
    for number, outcome in zip(local_numbers, outcomes, strict=True):
        if outcome.status not in ("passed", "invalid"):
            failed.add(number)
    return failed.union(*gather_objects(failed))
