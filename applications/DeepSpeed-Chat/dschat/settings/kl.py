# SPDX-License-Identifier: Apache-2.0
"""Flags of the KL penalty against the reference, in PPO and in online REFUEL."""

from dataclasses import dataclass
from typing import Any

from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, flag
from dschat.settings.rules import Rule


@dataclass(kw_only=True, frozen=True)
class KLFlags:
    """The KL penalty."""

    section = "KL penalty"

    kl_coef: float = flag(
        "coefficient of the KL penalty against the reference model", 0.05, AT_LEAST_0, aliases=["--kl_ctl"]
    )
    adaptive_kl_target: float | None = flag(
        "target KL of the adaptive controller, in nats per response; kl_coef stays constant if not given",
        None,
        ABOVE_0,
    )
    adaptive_kl_horizon: int = flag(
        "horizon of the adaptive KL controller, in responses; larger values change kl_coef more slowly",
        10000,
        AT_LEAST_1,
        only_with="adaptive_kl_target",
    )


KL_RULES: tuple[Rule[Any], ...] = (  # of a configuration with the group kl
    Rule(
        lambda config: config.kl.adaptive_kl_target is not None and config.kl.kl_coef == 0,
        "--adaptive_kl_target cannot steer --kl_coef 0: give a --kl_coef above 0 to start from.",
    ),
)
