# SPDX-License-Identifier: Apache-2.0
"""The exception whose message is written for users, and what libraries say when another process has gone."""

import errno
import re

# Errors of gloo and NCCL when the process at the other end of a connection has ended, and of run/distributed.py:
# barrier when one does not come.
LOST_PEER = re.compile(
    r"Connection (reset|closed) by peer|remote process exited|Connection refused.*store|\(--save_timeout\)", re.I
)

# What the system says of a path that it refuses: no permission, a name that is too long, links in a circle.
REFUSED_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|before timing out")  # of gloo and NCCL, after --ddp_timeout


class UserError(Exception):
    """Bad input. The message names the flag, file or row and says what to change.

    Command-line mains print it without a traceback and exit with status 2.
    """

    on_every_rank = False  # whether all ranks raise it, so that only the main process prints it


class ServerLost(UserError):
    """A server that the run needs is gone. The run saves a checkpoint and ends; the message says how to continue."""


def user_message(error: BaseException) -> str | None:
    """The message for users of a UserError, or of a path that the system refuses; None of any other error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in REFUSED_PATH and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another path, or change its permissions."
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception of a collective says that another process of the run has ended, or does not come."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, RuntimeError) and bool(LOST_PEER.search(text) or TIMED_OUT.search(text))
