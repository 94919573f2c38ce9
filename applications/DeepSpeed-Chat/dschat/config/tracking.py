# SPDX-License-Identifier: Apache-2.0
"""The flags that let others see a run: trackers and the Hugging Face hub."""

import re
from dataclasses import dataclass
from importlib.util import find_spec

from dschat.config.rules import flag
from dschat.errors import UserError

# Tracker → what to install where its package is missing.
TRACKERS = {"tensorboard": "tensorboard", "wandb": "'ma-rlhf[wandb]'"}
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(kw_only=True)
class TrackingFlags:
    """Where metrics and models go beside the output folder. Nothing is sent anywhere unless a flag here says so."""

    _argument_group_name = "trackers and the hub"

    report_to: list[str] = flag("also write metrics and samples to: tensorboard, wandb", factory=list)
    push_to_hub: str | None = flag("at the end, upload the model to this private repository, owner/name", None)

    def check_tracking(self) -> None:
        """Check names. Raises UserError."""
        for name in self.report_to:
            if name not in TRACKERS:
                raise UserError(f"--report_to {name}: there is no such tracker; give {' or '.join(TRACKERS)}.")
        check_repository("--push_to_hub", self.push_to_hub)

    def check_installed(self) -> None:
        """Check that the packages which the flags need are there. Raises UserError, which says what to install."""
        for name in self.report_to:
            if find_spec(name) is None:
                raise UserError(
                    f"--report_to {name}: the package {name} is not installed. Install it with pip install "
                    f"{TRACKERS[name]}, or drop {name} from the flag; metrics.jsonl is always written."
                )


def check_repository(flag_name: str, repository: str | None) -> None:
    """Raises UserError unless a repository is named owner/name; None passes."""
    if repository is not None and not REPOSITORY.fullmatch(repository):
        raise UserError(f"{flag_name} {repository}: give the repository as owner/name, such as you/my-model.")
