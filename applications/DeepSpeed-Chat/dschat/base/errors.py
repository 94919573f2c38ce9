# SPDX-License-Identifier: Apache-2.0
"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Bad input. The message names the flag, file or row and says what to change.

    Command-line mains print it without a traceback and exit with status 2.
    """

    on_every_rank = False  # where all raise the same one, the main process alone prints it


class ServerLost(UserError):
    """A server that the run needs is gone. The run saves a checkpoint and ends; the message says how to go on."""
