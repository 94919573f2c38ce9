# SPDX-License-Identifier: Apache-2.0
"""How many programs per second does the sandbox run, by level and number of workers?

Programs are small, with one test each, which reads, adds and prints numbers.
Seconds are wall time.
"""

import json
import time

from dschat.programs.levels import weakness
from dschat.programs.run import ProgramPool
from dschat.programs.sandbox import LEVELS, Level
from harness import report, settings_parser


def main() -> None:
    """Measures every level and prints one JSON object."""
    parser = settings_parser(__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    settings = parser.parse_args()
    figures: dict[str, object] = {}
    for level in LEVELS:
        reason = weakness(level)
        if reason:
            figures[level] = reason
        else:
            figures[level] = {workers: measure(level, workers, settings.programs) for workers in settings.workers}
    report(settings, figures)


def measure(level: Level, workers: int, programs: int) -> float:
    """Programs per second of wall time."""
    pool = ProgramPool(level, workers)
    pool.level = level  # not a stronger one
    sources = []
    tests = []
    for number in range(programs):
        sources.append(f"print(sum(map(int, input().split())) + {number})")
        tests.append(json.dumps({"inputs": ["1 2 3\n"], "outputs": [f"{6 + number}\n"]}))
    start = time.perf_counter()
    outcomes = pool.run(sources, tests, ["benchmark"] * programs)
    seconds = time.perf_counter() - start
    assert all(outcome.status == "passed" for outcome in outcomes)
    return round(programs / seconds, 1)


if __name__ == "__main__":
    main()
