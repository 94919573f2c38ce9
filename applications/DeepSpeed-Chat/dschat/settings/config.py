# SPDX-License-Identifier: Apache-2.0
"""A command's configuration: groups of flags, what differs for the command, and the rules between flags.

class SFTConfig(SupervisedConfig):
    defaults = {"learning_rate": 2e-5}

    sft: SFTFlags  # config.sft.packing is the flag --packing
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, ClassVar, Self

from dschat.settings.arguments import checked_arguments
from dschat.settings.flags import Range, check_values, flags_of, groups_of, make_group, value_of
from dschat.settings.rules import Rules, check_rules


class Config:
    """The base of every command's configuration.

    A subclass annotates its groups, under whose names they are held. Its tables are by the names of flags, and add to
    those of its base. A configuration does not change once it is made; `changed` makes another one.

    Attributes:
        defaults: defaults that differ from the groups'.
        helps: lines of --help that differ from the groups'.
        more_aliases: further spellings.
        ranges: ranges that differ from the groups'.
        rules: combinations of flags that are refused or warned of, in this order.
        arguments: the values from which it was made, without defaults and derived values.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    helps: ClassVar[Mapping[str, str]] = {}
    more_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    ranges: ClassVar[Mapping[str, Range]] = {}
    rules: ClassVar[Rules] = ()
    arguments: dict[str, Any]

    def __init__(self, **arguments: Any) -> None:
        """Make a configuration from values by the names of flags.

        Names may be other spellings of a flag, as on a command line. Paths may begin with `~`; a path, number or text
        alone may stand for a list of one.

        Raises:
            TypeError: there is no such flag, a required one is missing, or a value is of another type.
        """
        arguments = checked_arguments(type(self), arguments)

        values: dict[str, Any] = {}
        for name, flag in flags_of(type(self)).items():
            value = arguments.get(name, flag.default)
            if value is MISSING:
                raise TypeError(f"{type(self).__name__} needs a value for {name}")
            values[name] = list(value) if isinstance(value, list) else value
        self.derive(values)

        state = vars(self)
        state["arguments"] = arguments
        for group in groups_of(type(self)):
            if len(group.holder) == 1:
                state[group.holder[0]] = make_group(group.type, values)

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""

    def validate(self) -> None:
        """Check every flag, alone and against the others, and warn of unwise combinations.

        Raises:
            UserError: for the first broken rule; the message names the flag and says what to change.
        """
        check_values(self)
        check_rules(self, type(self).rules)

    def flat(self) -> dict[str, Any]:
        """The value of every flag by its name."""
        return {name: value_of(self, flag) for name, flag in flags_of(type(self)).items()}

    def changed(self, **values: Any) -> Self:
        """Configuration with other values of some flags. Values that follow from other flags are derived anew."""
        return type(self)(**(self.arguments | values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config) or type(self) is not type(other):
            return False
        return self.flat() == other.flat()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.flat().items())
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} does not change: make another one with changed(FLAG=value)")
