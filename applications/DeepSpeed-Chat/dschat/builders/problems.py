# SPDX-License-Identifier: Apache-2.0
"""Problems that a program can be tested on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from dschat.data.examples import PromptExample
from dschat.data.loading import StepData
from dschat.data.rows import Row
from dschat.data.sources import ShareFlags, load_share
from dschat.run.distributed import gather_objects, is_main, rank, world_size
from dschat.scoring.programs.run import ProgramPool
from dschat.scoring.programs.scores import has_tests, run_solutions

# Why a row is left out.
NO_TESTS = "no tests"
UNSOLVED = "its own solution fails its tests"


def load_problems(
    flags: ShareFlags,
    make: partial[tuple[list[PromptExample], Counter[str]]],
    pool: ProgramPool,
    drop_unsolvable: bool,
) -> StepData[PromptExample]:
    """The problems of a step's share, encoded in this process; see `rows_with_tests`."""
    share = load_share(flags, show=is_main())
    rows, left_out = rows_with_tests(share.train, pool, drop_unsolvable)
    held_out_rows, left_out_eval = rows_with_tests(share.eval, pool, drop_unsolvable)
    prompts, dropped = make(rows)
    held_out, dropped_eval = make(held_out_rows, held_out=True)
    counts = {"train": left_out + dropped, "eval": left_out_eval + dropped_eval}
    return StepData(prompts, held_out, share.sources, share.files, counts)


def rows_with_tests(
    rows: Sequence[Row], pool: ProgramPool, drop_unsolvable: bool = False
) -> tuple[list[Row], Counter[str]]:
    """Rows that have a test and, if asked for, whose first reference solution passes; one without any counts as such.

    Args:
        rows: with the column `input_output`.
        pool: runs the solutions; the processes share them.
        drop_unsolvable: run the solutions.

    Returns:
        The rows in their order; reason → number of the others.

    Raises:
        UserError: a row's tests are of another form.
    """
    tested = [row for row in rows if has_tests(row)]
    dropped = Counter({NO_TESTS: len(rows) - len(tested)})
    if drop_unsolvable:
        own = list(range(len(tested)))[rank() :: world_size()]
        outcomes = run_solutions([tested[number] for number in own], pool)
        failed = {own[i] for i, found in outcomes.items() if found.status not in ("passed", "invalid")}
        everywhere = set().union(*gather_objects(failed))
        dropped[UNSOLVED] = len(everywhere)
        tested = [row for number, row in enumerate(tested) if number not in everywhere]
    return tested, +dropped
