# SPDX-License-Identifier: Apache-2.0
"""Flags for the settings of advantage estimators, which `macro_actions.settings` declares and describes."""

from collections.abc import Mapping
from dataclasses import fields

from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, ZERO_TO_ONE, Flag, FlagTable, Range
from macro_actions.settings import DESCRIPTION, NEEDS, Bounds, EstimatorSettings, SettingDescription

RANGES: Mapping[Bounds, Range] = {
    "above 0": ABOVE_0,
    "at least 0": AT_LEAST_0,
    "at least 1": AT_LEAST_1,
    "0 to 1": ZERO_TO_ONE,
}


def flags_of_some() -> list[str]:
    """Flags that some estimators read and others do not, in order."""
    names: dict[str, None] = {}
    for needs in NEEDS.values():
        names |= dict.fromkeys(sorted(needs.reads))
    return list(names)


def flags_of_settings() -> dict[str, Flag]:
    """The flags of the described fields of `EstimatorSettings`; its other fields follow from the run."""
    flags = {}
    for item in fields(EstimatorSettings):
        if DESCRIPTION not in item.metadata:
            continue
        setting: SettingDescription = item.metadata[DESCRIPTION]
        flags[item.name] = Flag(
            setting.summary,
            None if setting.bounds is None else RANGES[setting.bounds],
            only_with=setting.only_with,
            choices=setting.choices,
        )
    return flags


ESTIMATOR_FLAGS = FlagTable("credit assignment", flags_of_settings())
