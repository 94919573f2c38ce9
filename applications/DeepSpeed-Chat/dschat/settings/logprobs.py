# SPDX-License-Identifier: Apache-2.0
"""Flags of the steps that compare log-probs: the temperature, and the KL penalty against the reference."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.errors import UserError
from dschat.settings.rules import ABOVE_0, AT_LEAST_0, AT_LEAST_1, flag


@dataclass(kw_only=True)
class LogprobFlags:
    """Of the steps whose updates compare log-probs with earlier ones."""

    _argument_group_name = "rollouts and batches"
    compares_logprobs: ClassVar[bool] = True

    temperature: float = flag("sampling temperature, also of all log-probs", 1.0, ABOVE_0)


@dataclass(kw_only=True)
class KLFlags:
    """The KL penalty, in PPO and in online REFUEL."""

    _argument_group_name = "KL penalty"

    kl_coef: float = flag(
        "coefficient of the KL penalty against the reference", 0.05, AT_LEAST_0, aliases=["--kl_ctl"]
    )
    adaptive_kl_target: float | None = flag(
        "target of the adaptive KL controller, in nats per sequence; fixed kl_coef if not given", None, ABOVE_0
    )
    adaptive_kl_horizon: int = flag(
        "responses over which the adaptive KL controller changes kl_coef",
        10000,
        AT_LEAST_1,
        only_with="adaptive_kl_target",
    )

    def check_kl(self) -> None:
        """Check these flags against each other. Raises UserError."""
        if self.adaptive_kl_target is not None and self.kl_coef == 0:
            raise UserError("--adaptive_kl_target cannot steer --kl_coef 0: give a --kl_coef above 0 to start from.")
