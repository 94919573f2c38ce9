# SPDX-License-Identifier: Apache-2.0
"""For mains that tests fork: small data are treated as large ones."""


def cache_from_the_first_byte() -> None:
    """Every step encodes in worker processes and keeps what it made."""
    from dschat.data import loading

    loading.LARGE = 1
