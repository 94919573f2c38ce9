# SPDX-License-Identifier: Apache-2.0
"""Environment variables that hold secrets: their names, and their values as requests may carry them."""

import os
import re

from dschat.base.errors import UserError

WRONG_KEY = "{} holds characters that no key has; copy it again."
# Parts of names. Neither the settings of tokenizers nor the names of authors and of hosts without a proxy are secrets.
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|KEY|SECRET|PASSW|PASSPHRASE|_PASS$|CREDENTIAL|AUTH(?!OR)|(?<!NO_)PROXY|COOKIE|WEBHOOK",
    re.IGNORECASE,
)


def secret_of(variable: str) -> str:
    """The secret in an environment variable; empty if there is none. Raises UserError, see `checked_secret`."""
    return checked_secret(variable, os.environ.get(variable))


def checked_secret(source: str, value: str | None) -> str:
    """A secret without blanks around it, such as the line end of a file.

    Raises:
        UserError: it holds characters that no header can carry; names the source and not the secret.
    """
    secret = (value or "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise UserError(WRONG_KEY.format(source))
    return secret
