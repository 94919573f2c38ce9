# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.quickstart.standby STEP` imports what a training step needs, then waits for its command line.

The imports take seconds. A pipeline starts this process for its next step while another one runs, and sends the words
after `dschat` as JSON to standard input (`Standbys` in subcommands.py). Then this is `python -m dschat WORDS`. If
standard input ends without words, the process ends.
"""

import json
import os
import runpy
import signal
import sys
from importlib import import_module
from pkgutil import resolve_name

from dschat.base.steps import STEPS_BY_COMMAND

# What every training step imports before its own modules, in this order.
FIRST_MODULES = ("dschat.engine.process_group", "dschat.plan.minimum", "dschat.run.output")


def wait_and_run(step: str) -> None:
    """Imports a step's modules, waits for words and runs `dschat` with them, which ends this process."""
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a waiting process without a message
    for module in FIRST_MODULES:
        import_module(module)
    resolve_name(f"dschat.{STEPS_BY_COMMAND[step].train}")

    text = sys.stdin.read()
    if not text:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    signal.signal(signal.SIGINT, on_interrupt)
    sys.argv[1:] = json.loads(text)
    runpy.run_module("dschat", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    wait_and_run(sys.argv[1])
