# SPDX-License-Identifier: Apache-2.0
"""A command's configuration: groups of flags, what differs for the command, and the rules between flags.

class SFTConfig(SupervisedConfig):
    defaults = {"learning_rate": 2e-5}

    sft: SFTFlags  # config.sft.packing is the flag --packing
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from dschat.settings.flags import Range, check_values, flags_of, groups_of, make_group, value_of
from dschat.settings.rules import Rules, check_rules


class Config:
    """The base of every command's configuration.

    A subclass annotates its groups, under whose names they are held. Its tables are by the names of flags, and add to
    those of its base.

    Attributes:
        defaults: other defaults than the groups'.
        helps: other lines of --help.
        more_aliases: further spellings.
        ranges: other ranges.
        rules: what is refused or warned of, in this order.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    helps: ClassVar[Mapping[str, str]] = {}
    more_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    ranges: ClassVar[Mapping[str, Range]] = {}
    rules: ClassVar[Rules] = ()

    def __init__(self, **values: Any) -> None:
        """Takes values by the names of flags.

        Raises:
            TypeError: there is no such flag, or a required one is missing.
        """
        flags = flags_of(type(self))
        unknown = [name for name in values if name not in flags]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no flag {', '.join(unknown)}")
        complete = {name: flag.default for name, flag in flags.items() if name in type(self).other_defaults()}
        complete = {name: list(value) if isinstance(value, list) else value for name, value in complete.items()}
        complete |= values
        for group in groups_of(type(self)):
            if len(group.holder) == 1:
                setattr(self, group.holder[0], make_group(group.type, complete, group.table))
        self.complete()

    def complete(self) -> None:
        """Fill in the values that follow from other flags."""

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
        """A configuration with other values of some flags."""
        return type(self)(**(self.flat() | values))

    @classmethod
    def other_defaults(cls) -> set[str]:
        """The flags whose default is not their group's."""
        return {name for base in cls.__mro__ for name in vars(base).get("defaults", {})}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Config) and self.flat() == other.flat()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.flat().items())
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is no group: a flag is set in the group that holds it."""
        flag = flags_of(type(self)).get(name)
        if flag is not None and name not in {group.holder[0] for group in groups_of(type(self))}:
            raise AttributeError(f"{type(self).__name__}: set {'.'.join(flag.holder)}.{name}")
        super().__setattr__(name, value)
