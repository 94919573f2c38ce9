# SPDX-License-Identifier: Apache-2.0
"""How many programs per second does the sandbox run, by level and number of workers?

Programs are small and different, so that none is remembered: one test each, a sum of numbers that is read and printed.
Seconds are those of the clock.
"""

import json
import time

from dschat.scoring.programs.levels import weakness
from dschat.scoring.programs.run import ProgramPool
from dschat.scoring.programs.sandbox import LEVELS, Level
from harness import report, settings_parser


def main() -> None:
    """Measures and prints JSON."""
    parser = settings_parser(__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    settings = parser.parse_args()
    figures: dict[str, object] = {}
    for level in LEVELS:
        weak = weakness(level)
        figures[level] = weak or {workers: measured(level, workers, settings.programs) for workers in settings.workers}
    report(settings, figures)


def measured(level: Level, workers: int, programs: int) -> float:
    """Programs per second of the clock."""
    pool = ProgramPool(level, workers)
    pool.level = level  # not a stronger one
    sources = [f"print(sum(map(int, input().split())) + {number})" for number in range(programs)]
    tests = [json.dumps({"inputs": ["1 2 3\n"], "outputs": [f"{6 + number}\n"]}) for number in range(programs)]
    begun = time.perf_counter()
    outcomes = pool.run(sources, tests, ["benchmark"] * programs)
    seconds = time.perf_counter() - begun
    assert all(outcome.status == "passed" for outcome in outcomes)
    return round(programs / seconds, 1)


if __name__ == "__main__":
    main()
