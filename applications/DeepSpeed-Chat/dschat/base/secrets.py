# SPDX-License-Identifier: Apache-2.0
"""Names of environment variables that may hold secrets."""

import re

# Parts of names. Neither the settings of tokenizers nor the names of authors and of hosts without a proxy are secrets.
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|KEY|SECRET|PASSW|PASSPHRASE|_PASS$|CREDENTIAL|AUTH(?!OR)|(?<!NO_)PROXY|COOKIE|WEBHOOK",
    re.IGNORECASE,
)
