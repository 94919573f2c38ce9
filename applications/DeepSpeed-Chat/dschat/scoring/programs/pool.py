# SPDX-License-Identifier: Apache-2.0
"""Many programs at a time, each once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256

from dschat.scoring.programs.levels import strongest_level, try_out
from dschat.scoring.programs.limits import Limits
from dschat.scoring.programs.outcome import Outcome
from dschat.scoring.programs.problem import parse_problem
from dschat.scoring.programs.run import run_problem
from dschat.scoring.programs.sandbox import Level

logger = logging.getLogger(__name__)

KEPT = 100_000  # outcomes of programs seen before


class ProgramPool:
    """Runs programs on tests. Equal programs with equal tests are run once, but for `invalid` ones and time-outs."""

    def __init__(
        self,
        least: Level = "namespaces",
        workers: int = 4,
        limits: Limits | None = None,
        max_tests: int | None = None,
        to_the_end: bool = False,
    ) -> None:
        """Looks which walls stand.

        Args:
            least: weakest walls that will do.
            workers: programs at a time.
            limits: of each.
            max_tests: only so many tests of a problem, the first.
            to_the_end: run the tests after one that ended in an error, too.

        Raises:
            UserError: only weaker walls stand on this machine.
        """
        self.level, self.limits = strongest_level(least), limits or Limits()
        self._max_tests, self._to_the_end = max_tests, to_the_end
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._known: dict[str, Future[Outcome]] = {}
        reached = " and ".join(try_out(self.level)[1])
        logger.info("programs run at sandbox level %s, %d at a time", self.level, workers)
        if reached:
            logger.warning("at sandbox level %s a program reaches %s", self.level, reached)

    def run(self, programs: Sequence[str], tests: Sequence[str], origins: Sequence[str]) -> list[Outcome]:
        """Outcomes of programs, in their order.

        Args:
            programs: Python sources.
            tests: the column `input_output` of each one's row, a JSON text.
            origins: of the rows, for messages.

        Raises:
            UserError: a row's tests are of another form.
        """
        futures: list[Future[Outcome]] = []
        try:
            for each in zip(programs, tests, origins, strict=True):
                futures.append(self._submit(*each))
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:  # else the process would do all of them before it ends
                future.cancel()
            raise

    def _submit(self, program: str, tests: str, origin: str) -> Future[Outcome]:
        how = [program, tests, asdict(self.limits), self.level, self._max_tests, self._to_the_end]
        key = sha256(json.dumps(how).encode()).hexdigest()
        known = self._known.get(key)
        if known is None or (known.done() and _says_little(known)):
            if len(self._known) >= KEPT:
                self._known.clear()
            problem = parse_problem(tests, origin, self._max_tests)
            known = self._threads.submit(run_problem, program, problem, self.limits, self.level, self._to_the_end)
            self._known[key] = known
        return known


def _says_little(run: Future[Outcome]) -> bool:
    """Whether a run that has ended may end otherwise another time."""
    return run.cancelled() or run.exception() is not None or run.result().status in ("invalid", "timeout")
