# SPDX-License-Identifier: Apache-2.0
"""`dschat data preview --environment`: rows with the messages that environments begin their episodes with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from dschat.base.errors import UserError
from dschat.data import command
from dschat.data.options import PreviewOptions
from dschat.data.rows import Row
from dschat.settings.common import OptimisationFlags
from dschat.settings.flags import default_of
from dschat.turns.settings import EpisodeFlags


def run(options: PreviewOptions) -> str:
    """Shows each source."""
    environment = options.preview.environment
    if environment is None:
        return command.preview(options)
    return command.preview(options, partial(begin_episodes, environment))


def begin_episodes(environment: str, rows: Sequence[Row]) -> list[Row]:
    """Rows whose prompts are what environments say first, as in the first iteration with the default --seed.

    Args:
        environment: ``module.py:Class``.
        rows: the first ones of the data.

    Raises:
        UserError: the class cannot be loaded, or an environment fails; names its row.
    """
    from dschat.run.state import SeedKind
    from dschat.turns.environments import EnvironmentPool, Failure, environment_seed

    run_seed = default_of(OptimisationFlags, "seed")
    calls = []
    for number, row in enumerate(rows):
        calls.append(("reset", row.extra, environment_seed(run_seed, SeedKind.TRAINING, 0, number)))
    flags = EpisodeFlags()
    with closing(EnvironmentPool(environment, flags.environment_timeout, flags.environment_workers)) as pool:
        with pool.episodes(len(rows)) as processes:
            results = pool.call(processes, calls)
        arguments = pool.traits.template_arguments

    begun: list[Row] = []
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Failure):
            raise UserError(f"{row.origin}: {result.problem}")
        assert isinstance(result, list)  # what reset returns
        begun.append(replace(row, prompt=None, messages=result, template_arguments=row.template_arguments | arguments))
    return begun
