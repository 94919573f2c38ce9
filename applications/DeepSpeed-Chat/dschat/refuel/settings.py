# SPDX-License-Identifier: Apache-2.0
"""Flags that both settings of REFUEL share: the regression of the relative rewards of two replies.

Offline, on pairs sampled beforehand: `offline_settings.py`; online, on the users' messages of data:
`online_settings.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dschat.base.errors import UserError
from dschat.settings.flags import AT_LEAST_0, FREE, flag
from dschat.settings.rules import Rule
from dschat.settings.supervised import OneModelConfig

NO_WANDB = "give --report_to wandb, with the project in WANDB_PROJECT"


@dataclass(kw_only=True, frozen=True)
class RegressionFlags:
    """Settings of the regression and of the length of training."""

    section = "REFUEL"

    eta: float = flag(
        "step size: log-ratios of a pair are regressed on eta times the difference of their rewards",
        1.0,
        AT_LEAST_0,
        aliases=["--refuel.eta", "--rebel.eta"],
    )
    total_episodes: int | None = flag(
        "total number of training pairs, in several passes over the data if needed; an incomplete last batch is"
        " dropped; 0 or none = num_train_epochs passes",
        None,
        AT_LEAST_0,
        FREE,
    )


LENGTH_RULE: Rule[Any] = Rule(
    lambda config: config.regression.total_episodes and config.optimisation.num_train_epochs != 1,
    "--num_train_epochs {num_train_epochs} and --total_episodes {total_episodes} both say how long to train: drop"
    " one of them; --total_episodes 0 leaves it to the epochs.",
)


class RegressionConfig(OneModelConfig):
    """What both settings share."""

    step: ClassVar[int] = 3
    sequences_per_example: ClassVar[int] = 2
    compares_logprobs: ClassVar[bool] = True
    own_inert_flags: ClassVar[Mapping[str, str]] = {"track": NO_WANDB, "wandb_project_name": NO_WANDB}
    defaults: ClassVar[Mapping[str, Any]] = {
        "learning_rate": 3e-7,
        "weight_decay": 1e-6,
        "gradient_clipping": 0.0,
        "per_device_train_batch_size": 1,
    }
    more_aliases = {
        "data_path": ("--task.query_dataset",),
        "max_seq_len": ("--task.total_length",),
        "model_name_or_path": ("--base_model",),
        "learning_rate": ("--lr",),
    }
    helps = {"per_device_train_batch_size": "pairs per forward pass and process in training"}

    regression: RegressionFlags

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Batches of pairs: as many as --total_episodes fill, or --num_train_epochs passes.

        Raises:
            UserError: --total_episodes is less than one batch.
        """
        episodes = self.regression.total_episodes
        if not episodes:
            return super().total_iterations(per_epoch, size)
        if episodes < size:
            raise UserError(
                f"--total_episodes {episodes} is less than one batch of {size} pairs: make it {size} or more, or"
                " lower the batch size."
            )
        return episodes // size
