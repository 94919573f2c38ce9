# SPDX-License-Identifier: Apache-2.0
"""Names of the data sets whose responses are compared with each other, as folders of results and rubrics have them."""

import logging
import re

from dschat.base.errors import UserError
from dschat.data.known_sets import KNOWN_SETS, find_known

logger = logging.getLogger(__name__)

OWN_NAME = re.compile(r"\w[\w.-]*")
COMPARED_SETS = tuple(known_set.compared_as for known_set in KNOWN_SETS if known_set.compared_as)


def compared_set(text: str, own: bool = False, remedy: str = "leave the flag out") -> str:
    """The name in results of the set that a `--dataset` names.

    Args:
        text: hub id or short name of a published set, or a name for the user's own data.
        own: whether the user's own data are allowed.
        remedy: how to give the user's own data if they are not allowed, for messages.

    Returns:
        One of COMPARED_SETS, or the name of the user's data; the latter is logged.

    Raises:
        UserError: there is no such set, its responses are not compared, or the user's name cannot be a folder's.
    """
    known_set = find_known(text)
    if known_set is not None and known_set.compared_as:
        return known_set.compared_as
    if known_set is not None or not own:
        raise UserError(f"--dataset {text}: unknown; give {', '.join(COMPARED_SETS)}, or {remedy}.")
    if not OWN_NAME.fullmatch(text):
        raise UserError(
            f"--dataset {text}: the name of your own data may hold only letters, digits, '.', '-' and '_'."
        )
    logger.info("--dataset %s: a data set of your own (published ones: %s)", text, ", ".join(COMPARED_SETS))
    return text
