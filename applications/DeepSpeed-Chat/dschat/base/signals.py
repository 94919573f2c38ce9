# SPDX-License-Identifier: Apache-2.0
"""The signals that stop a run."""

import signal


def signals_that_stop() -> list[signal.Signals]:
    """SIGTERM, SIGINT (Ctrl-C), and SIGHUP (closed terminal) unless this process ignores it, as under nohup."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals
