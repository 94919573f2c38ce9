# SPDX-License-Identifier: Apache-2.0
"""Win rate by turn: which of two policies serves the user better in dialogues, as they stand after each turn.

A row of a file is a finished dialogue: {"number": 0, "messages": [{"role": "user", "content": "…"}, …]}. Rows of both
files with the same number begin with the same message. A judge model sees both dialogues up to each turn; with
--by-scores, the rows' own scores decide. Killed and started again, the same command goes on where it stood.
"""

import sys

from dschat.common.script import run_script
from dschat.reports.evaluations import run_turns

if __name__ == "__main__":
    sys.exit(run_script(lambda: run_turns(sys.argv[1:], str(__doc__)), print, goes_on=True))
