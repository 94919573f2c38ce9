# SPDX-License-Identifier: Apache-2.0
"""Names of the data sets that judges and people know rubrics for."""

from __future__ import annotations

from dschat.errors import UserError

DATASETS = ("summarize", "hh-rlhf", "webgpt")
OTHER_NAMES = {
    "tldr": "summarize",
    "openai/summarize_from_feedback": "summarize",
    "hh": "hh-rlhf",
    "dahoas/full-hh-rlhf": "hh-rlhf",
    "openai/webgpt_comparisons": "webgpt",
}


def dataset_name(text: str) -> str:
    """The name that rows carry: summarize, hh-rlhf or webgpt.

    Args:
        text: one of these, a short name (tldr, hh) or a hub id; case does not matter.

    Raises:
        UserError: it is none of them.
    """
    name = OTHER_NAMES.get(text.lower(), text.lower())
    if name not in DATASETS:
        raise UserError(f"--dataset {text}: unknown; give {', '.join(DATASETS)}, or leave the flag out.")
    return name
