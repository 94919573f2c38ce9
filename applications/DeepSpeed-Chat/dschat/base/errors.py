# SPDX-License-Identifier: Apache-2.0
"""The exception whose message is written for users."""


class UserError(Exception):
    """Bad input. The message names the flag, file or row and says what to change.

    Command-line mains print it without a traceback and exit with status 2.
    """

    on_every_rank = False  # whether all ranks raise it, so that only the main process prints it


class ServerLost(UserError):
    """A server that the run needs is gone. The run saves a checkpoint and ends; the message says how to continue."""
