# SPDX-License-Identifier: Apache-2.0
"""How flags are declared: fields of groups, which a command's configuration holds.

A group is a dataclass whose fields are flags. A command is a class that annotates its groups and says what differs
for it, see `dschat.settings.config`. Everything that reads declarations (parser, files, help, documents, the identity
of a run) goes through `flags_of`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dschat.base.errors import UserError

Range = tuple[Callable[[Any], bool], str]  # a predicate of a value, and the words that say what it accepts
OnResume = Literal["same", "free", "share"]
FREE: OnResume = "free"
SHARE: OnResume = "share"
FLAG = "flag"  # key of a field's metadata that holds its Flag
PARTS = "parts"  # key of a field's metadata that makes further groups, by name

AT_LEAST_0: Range = (lambda number: number >= 0, "a number of at least 0")
AT_LEAST_1: Range = (lambda number: number >= 1, "a whole number of at least 1")
ABOVE_0: Range = (lambda number: number > 0, "a number above 0")
ZERO_TO_ONE: Range = (lambda number: 0 <= number <= 1, "a number from 0 to 1")
BELOW_1: Range = (lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
UP_TO_1: Range = (lambda share: 0 < share <= 1, "a number above 0 and at most 1")
FINITE: Range = (lambda number: True, "a number")
NOT_EMPTY: Range = (bool, "a value")  # a text, or each of several

ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
HUB_KERNELS = "kernels-community/"  # the owner whose kernels transformers runs without being asked to trust others
ATTENTION: Range = (
    lambda name: name in ATTENTIONS or (name.startswith(HUB_KERNELS) and len(name) > len(HUB_KERNELS)),
    f"{', '.join(ATTENTIONS)}, or a kernel of the hub as {HUB_KERNELS}NAME",
)


@dataclass(frozen=True)
class Flag:
    """A flag of a command line.

    Attributes:
        help: its line in --help; the default is added to it.
        range: what its value, or each of its values, must be.
        on_resume: a resumed run must have the same value; or may have any (free); or may on another number of
            processes (share: it is a process's share of a batch).
        aliases: further spellings, with dashes.
        only_with: another flag, or flag and value, without which this one does nothing.
        environment: variable that holds its value where the flag is not given.
        positional: a word without dashes.
        secret: never repeated in a message.
        path: a text, or each of several, may be a path: `~` and variables in it are expanded.
        options: further arguments of argparse's `add_argument`: choices, nargs, const.
        name: the name of its field.
        type: the type of its field.
        default: MISSING where it must be given.
        section: title in --help.
        holder: attributes and keys that lead from a configuration to the group that holds the field.
    """

    help: str
    range: Range | None = None
    on_resume: OnResume = "same"
    aliases: tuple[str, ...] = ()
    only_with: str | None = None
    environment: str | None = None
    positional: bool = False
    secret: bool = False
    path: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    type: Any = None
    default: Any = field(default_factory=lambda: MISSING)
    section: str | None = None
    holder: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that it can have; none where there are other rules."""
        return tuple(self.options.get("choices") or choices_of(self.type))


def flag(
    help: str,
    default: Any = MISSING,
    range: Range | None = None,
    on_resume: OnResume = "same",
    *,
    factory: Any = MISSING,
    aliases: Sequence[str] = (),
    only_with: str | None = None,
    environment: str | None = None,
    positional: bool = False,
    secret: bool = False,
    path: bool = False,
    **options: Any,
) -> Any:
    """Declare a field of a group as a flag; without a default the flag is required. For the arguments see `Flag`."""
    made = Flag(
        help=help,
        range=range,
        on_resume=on_resume,
        aliases=tuple(aliases),
        only_with=only_with,
        environment=environment,
        positional=positional,
        secret=secret,
        path=path,
        options=options,
    )
    return field(default=default, default_factory=factory, metadata={FLAG: made})


def parts(groups: Callable[[], Mapping[str, type]]) -> Any:
    """Declare a field of a group that holds further groups, by name; `groups` says which."""

    def make() -> dict[str, Any]:
        return {name: group() for name, group in groups().items()}

    return field(default_factory=make, metadata={PARTS: groups})


@dataclass(frozen=True)
class FlagTable:
    """The flags of a dataclass that knows none, for `Annotated[Group, FlagTable(…)]`; other fields are no flags."""

    section: str
    flags: Mapping[str, Flag]  # by field


@dataclass(frozen=True)
class FlagGroup:
    """A group of a command."""

    holder: tuple[str, ...]
    type: Any  # its dataclass
    table: FlagTable | None = None


def groups_of(command: type) -> tuple[FlagGroup, ...]:
    """The groups of a command, its own before those of its base; a plain dataclass of flags is its own only group."""
    return _groups_of(command)


@cache
def _groups_of(command: Any) -> tuple[FlagGroup, ...]:
    if is_dataclass(command):
        return (FlagGroup((), command), *_parts_of((), command))
    groups: list[FlagGroup] = []
    hints = get_type_hints(command, include_extras=True)
    for base in command.__mro__:
        for name in inspect.get_annotations(base):
            kind: Any = hints[name]
            tables: list[FlagTable] = []
            if get_origin(kind) is Annotated:
                kind, *tables = get_args(kind)
            if is_dataclass(kind):
                groups.append(FlagGroup((name,), kind, *tables))
                groups += _parts_of((name,), kind)
    return tuple(groups)


def _parts_of(holder: tuple[str, ...], group: Any) -> list[FlagGroup]:
    """The groups that a group holds."""
    found: list[FlagGroup] = []
    for one in fields(group):
        if PARTS in one.metadata:
            found += [FlagGroup((*holder, one.name, name), part) for name, part in one.metadata[PARTS]().items()]
    return found


def flags_of(command: type) -> Mapping[str, Flag]:
    """Every flag of a command or group by its name, in the order of --help.

    Raises:
        TypeError: two groups have a flag of one name, or the command changes a flag that it does not have.
    """
    return _flags_of(command)


@cache
def _flags_of(command: Any) -> Mapping[str, Flag]:
    flags: dict[str, Flag] = {}
    for group in groups_of(command):
        for one in _flags_of_group(group):
            if one.name in flags:
                raise TypeError(f"{command.__name__}: two groups have a flag {one.name}")
            flags[one.name] = one
    changes = {"default": "defaults", "help": "helps", "aliases": "more_aliases", "range": "ranges"}
    for attribute, table in changes.items():
        for name, value in _merged(command, table).items():
            if name not in flags:
                raise TypeError(f"{command.__name__}.{table}: there is no flag {name}")
            if attribute == "aliases":
                value = (*flags[name].aliases, *value)
            flags[name] = replace(flags[name], **{attribute: value})
    return flags


def _flags_of_group(group: FlagGroup) -> list[Flag]:
    hints = get_type_hints(group.type, include_extras=True)
    section = getattr(group.type, "section", None) if group.table is None else group.table.section
    flags: list[Flag] = []
    for one in _in_order(group.type):
        declared = one.metadata.get(FLAG) if group.table is None else group.table.flags.get(one.name)
        if declared is None:
            continue
        default = declared.default if declared.default is not MISSING else default_of_field(one)
        flags.append(
            replace(
                declared,
                name=one.name,
                type=hints[one.name],
                default=default,
                section=section,
                holder=group.holder,
            )
        )
    return flags


def _in_order(group: Any) -> "list[Field[Any]]":
    """Fields of a dataclass, its own before those of its bases."""
    classes: list[Any] = [base for base in group.__mro__ if is_dataclass(base)]

    def depth(one: "Field[Any]") -> int:
        return max(place for place, base in enumerate(classes) if one.name in inspect.get_annotations(base))

    return sorted(fields(group), key=depth)


def _merged(command: type, table: str) -> dict[str, Any]:
    """What a command and its bases say in one of their tables."""
    merged: dict[str, Any] = {}
    for base in reversed(command.__mro__):
        merged |= vars(base).get(table, {})
    return merged


def make_group(group: type, values: Mapping[str, Any], table: FlagTable | None = None) -> Any:
    """A group whose flags have these values, by name; others have the group's defaults."""
    arguments: dict[str, Any] = {}
    for one in fields(group):
        if PARTS in one.metadata:
            arguments[one.name] = {name: make_group(part, values) for name, part in one.metadata[PARTS]().items()}
        elif one.name in values and (FLAG in one.metadata or table is not None):
            arguments[one.name] = values[one.name]
    return group(**arguments)


def holder_of(config: Any, flag: Flag) -> Any:
    """The group of a configuration that holds a flag."""
    held = config
    for name in flag.holder:
        held = held[name] if isinstance(held, dict) else getattr(held, name)
    return held


def value_of(config: Any, flag: Flag) -> Any:
    """The value that a configuration gives a flag."""
    return getattr(holder_of(config, flag), flag.name)


def default_of_field(one: "Field[Any]") -> Any:
    """The default of a dataclass's field; MISSING where it must be given."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def default_of(command: type, name: str) -> Any:
    """The default of a flag of a command or group."""
    return flags_of(command)[name].default


def flags_on_resume(command: type, kind: OnResume) -> frozenset[str]:
    """The flags of a command that a resumed run treats alike."""
    return frozenset(name for name, flag in flags_of(command).items() if flag.on_resume == kind)


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a type allows: those of a Literal, also of one with None; of others none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    for part in get_args(hint):
        if choices := choices_of(part):
            return choices
    return ()


def check_values(config: Any) -> None:
    """Check each flag of a configuration or group by its own declaration: its range, then whether it does something.

    None passes.

    Raises:
        UserError: for the first flag that is refused.
    """
    flags = flags_of(type(config))
    for name, flag in flags.items():
        value = value_of(config, flag)
        if value is None:
            continue
        _check_choice(name, value, flag.choices)
        if flag.range is not None:
            _check_range(name, value, flag.range)
    for name, flag in flags.items():
        value = value_of(config, flag)
        if flag.only_with and value != flag.default and not _is_given(config, flag.only_with):
            raise UserError(f"--{name} {value} does nothing on its own: add --{flag.only_with}, or drop it.")


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    for one in value if isinstance(value, list | tuple) else [value]:
        if choices and one not in choices:
            known = ", ".join(map(str, choices))
            raise UserError(f"--{name} {one} is unknown: give one of {known}.")


def _check_range(name: str, value: Any, range: Range) -> None:
    if range is NOT_EMPTY:
        if not value or (isinstance(value, list | tuple) and "" in value):
            raise UserError(f"--{name} is empty: give a value, or drop the flag.")
        return
    accepts, wanted = range
    for number in value if isinstance(value, list | tuple) else [value]:
        is_number = isinstance(number, str) or math.isfinite(number)
        if not (is_number and accepts(number)):
            raise UserError(f"--{name} {number} is out of range: give {wanted}.")


def _is_given(config: Any, other: str) -> bool:
    """Whether a flag has a value, or that after its name."""
    name, _, wanted = other.partition(" ")
    value = value_of(config, flags_of(type(config))[name])
    return value == wanted if wanted else value is not None
