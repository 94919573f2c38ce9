# SPDX-License-Identifier: Apache-2.0
"""How much memory do log-probs, learners and the phases of a run take?

    python memory.py logprobs                     # log-probs of a response at a vocabulary of 256,000
    python memory.py learners [--share_base]      # the models that each learner holds, and its peak
    python memory.py plan                         # the memory that `dschat plan` expects, and the measured one

Each piece prints one JSON object; `pieces/PIECE.py` says how its figures are measured.
"""

import argparse
from collections.abc import Callable
from types import ModuleType

from harness import report
from pieces import learners, logprobs, plan

PIECES: dict[str, ModuleType] = {"logprobs": logprobs, "learners": learners, "plan": plan}


def main() -> None:
    """Measures the piece that the command line names."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=raw)
    subparsers = parser.add_subparsers(dest="piece", required=True)
    usages = []
    for name, piece in PIECES.items():
        summary = (piece.__doc__ or "").splitlines()[0]
        defaults = argparse.ArgumentDefaultsHelpFormatter
        subparser = subparsers.add_parser(name, help=summary, description=summary, formatter_class=defaults)
        piece.add_flags(subparser)
        usages.append(subparser.format_usage())
    parser.epilog = "\n".join(usages)
    settings = parser.parse_args()
    measure: Callable[[argparse.Namespace], object] = PIECES[settings.piece].measure
    report(settings, measure(settings))


if __name__ == "__main__":
    main()
