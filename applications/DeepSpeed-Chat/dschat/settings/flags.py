# SPDX-License-Identifier: Apache-2.0
"""How flags are declared: fields of groups, which a command's configuration holds.

A group is a dataclass whose fields are flags, or `EstimatorSettings`, whose settings become flags. A command annotates
its groups and says what differs for it, see `dschat.settings.config`. Everything that reads declarations (parser,
files, help, documents, the identity of a run) goes through `flags_of`.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dschat.base.errors import UserError
from macro_actions.settings import DESCRIPTION, Bounds, SettingDescription

Range = tuple[Callable[[Any], bool], str]  # a predicate of a value, and the words that say what it accepts
OnResume = Literal["same", "free", "share"]
FREE: OnResume = "free"
SHARE: OnResume = "share"
FLAG = "flag"  # key of a field's metadata that holds its Flag
PARTS = "parts"  # key of a field's metadata for a field that holds groups; its value returns their classes by name

AT_LEAST_0: Range = (lambda number: 0 <= number < math.inf, "a number of at least 0")
AT_LEAST_1: Range = (lambda number: 1 <= number < math.inf, "a whole number of at least 1")
PORT: Range = (lambda number: 1 <= number <= 65535, "a port from 1 to 65535")
ABOVE_0: Range = (lambda number: 0 < number < math.inf, "a number above 0")
ZERO_TO_ONE: Range = (lambda number: 0 <= number <= 1, "a number from 0 to 1")
BELOW_1: Range = (lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
UP_TO_1: Range = (lambda share: 0 < share <= 1, "a number above 0 and at most 1")
FINITE: Range = (math.isfinite, "a number")
RANGE_OF_BOUNDS: Mapping[Bounds, Range] = {
    "above 0": ABOVE_0,
    "at least 0": AT_LEAST_0,
    "at least 1": AT_LEAST_1,
    "0 to 1": ZERO_TO_ONE,
}
NOT_EMPTY: Range = (bool, "a value")  # a text, or each of several

TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")  # days, hours, minutes, seconds


def seconds_of(time: str) -> int:
    """Seconds of a time that is written as HH:MM:SS or D-HH:MM:SS; 0 for any other text."""
    match = TIME.fullmatch(time)
    if match is None:
        return 0
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


DURATION: Range = (
    lambda time: seconds_of(time) > 0,
    "a time above 0 with hours, minutes and seconds: HH:MM:SS, or D-HH:MM:SS",
)

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
        help: its line in --help, to which the default is added.
        range: what the value, or each of several values, must be.
        on_resume: whether a resumed run must have the value of the earlier run (same), may have another one (free), or
            may have another one on another number of processes (share: it is a process's share of a batch).
        aliases: other spellings, with dashes.
        only_with: another flag, or a flag and its value, without which this one does nothing.
        environment: environment variable that holds the value if the flag is not given.
        positional: the flag is a word without dashes.
        secret: the value is never repeated in a message.
        path: the value, or each of several, may be a path, in which `~` and variables are expanded.
        choices: the values to choose from; empty if the value is free.
        alone: value of the flag without a value; MISSING if it needs one.
        may_be_empty: a list without values is a value, too.
        name: name of its field.
        type: type of its field.
        default: MISSING if the flag is required.
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
    choices: Collection[Any] = ()
    alone: Any = field(default_factory=lambda: MISSING)
    may_be_empty: bool = False
    name: str = ""
    type: Any = None
    default: Any = field(default_factory=lambda: MISSING)
    section: str | None = None
    holder: tuple[str, ...] = ()


def flag(
    help: str,
    default: Any = MISSING,
    range: Range | None = None,
    on_resume: OnResume = "same",
    *,
    factory: Any = MISSING,
    aliases: Sequence[str] = (),
    choices: Collection[Any] = (),
    **attributes: Any,
) -> Any:
    """Declare a field of a group as a flag; without a default the flag is required. For the arguments see `Flag`."""
    made = Flag(help, range, on_resume, tuple(aliases), choices=choices, **attributes)
    return field(default=default, default_factory=factory, metadata={FLAG: made})


def parts(groups: Callable[[], Mapping[str, type]]) -> Any:
    """Declare a field of a group that holds other groups by name.

    Args:
        groups: returns the classes of these groups by name.
    """

    def make() -> dict[str, Any]:
        return {name: group() for name, group in groups().items()}

    return field(default_factory=make, metadata={PARTS: groups})


@dataclass(frozen=True)
class GroupRow:
    """A group that another folder declares, in `Annotated[Any, GroupRow(…)]`; imported when the flags are read.

    Attributes:
        group: "module:class" in dschat, a dataclass of flags.
        rules: "module:constant" in dschat, the rules between its flags and others; empty for none.
    """

    group: str
    rules: str = ""


@dataclass(frozen=True)
class FlagGroup:
    """A group of a command.

    Attributes:
        holder: attributes and keys that lead from a configuration to the group.
        type: its dataclass.
        rules: of `dschat.settings.rules`, which it brings with it.
    """

    holder: tuple[str, ...]
    type: Any
    rules: tuple[Any, ...] = ()


def groups_of(command: type) -> tuple[FlagGroup, ...]:
    """Groups of a command, before those of its base. A plain dataclass of flags is its only group."""
    return _groups_of(command)


@cache
def _groups_of(command: Any) -> tuple[FlagGroup, ...]:
    if is_dataclass(command):
        return (FlagGroup((), command), *_parts_of((), command))
    groups: list[FlagGroup] = []
    hints = get_type_hints(command, include_extras=True)
    for base in command.__mro__:
        for name in inspect.get_annotations(base):
            group = _group_of_attribute(name, hints[name])
            if is_dataclass(group.type):
                groups.append(group)
                groups += _parts_of((name,), group.type)
    return tuple(groups)


def _group_of_attribute(name: str, hint: Any) -> FlagGroup:
    """The group that an attribute of a command is annotated with."""
    if get_origin(hint) is not Annotated:
        return FlagGroup((name,), hint)
    row: GroupRow = get_args(hint)[1]
    rules = resolve_name(f"dschat.{row.rules}") if row.rules else ()
    return FlagGroup((name,), resolve_name(f"dschat.{row.group}"), rules)


def _parts_of(holder: tuple[str, ...], group: Any) -> list[FlagGroup]:
    """The groups that a group holds."""
    held_groups: list[FlagGroup] = []
    for item in fields(group):
        if PARTS not in item.metadata:
            continue
        for name, part in item.metadata[PARTS]().items():
            held_groups.append(FlagGroup((*holder, item.name, name), part))
    return held_groups


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
        for flag in _flags_of_group(group):
            if flag.name in flags:
                raise TypeError(f"{command.__name__}: two groups have a flag {flag.name}")
            flags[flag.name] = flag
    changes = {"default": "defaults", "help": "helps", "aliases": "more_aliases", "range": "ranges"}
    for attribute, table in changes.items():
        for name, value in _merged(command, table).items():
            if name not in flags:
                raise TypeError(f"{command.__name__}.{table}: there is no flag {name}")
            if attribute == "aliases":
                value = (*flags[name].aliases, *value)
            flags[name] = replace(flags[name], **{attribute: value})
    return flags


def flags_by_spelling(command: type) -> dict[str, Flag]:
    """Flags of a command by each of their spellings, without dashes at the beginning and with underscores."""
    flags: dict[str, Flag] = {}
    for name, flag in flags_of(command).items():
        for spelling in (name, *flag.aliases):
            flags[spelling.lstrip("-").replace("-", "_")] = flag
    return flags


def _flags_of_group(group: FlagGroup) -> list[Flag]:
    hints = get_type_hints(group.type, include_extras=True)
    section = getattr(group.type, "section", None)
    flags: list[Flag] = []
    for item in _in_order(group.type):
        declared = _declaration_of(item)
        if declared is None:
            continue
        default = declared.default
        if default is MISSING:
            default = default_of_field(item)
        hint = hints[item.name]
        flag = replace(
            declared,
            choices=declared.choices or choices_of(hint),
            may_be_empty=declared.may_be_empty or default == [],
            name=item.name,
            type=hint,
            default=default,
            section=section,
            holder=group.holder,
        )
        flags.append(flag)
    return flags


def _declaration_of(item: "Field[Any]") -> Flag | None:
    """The flag that a field is declared as; None for a field that is no flag."""
    setting: SettingDescription | None = item.metadata.get(DESCRIPTION)
    if setting is None:
        flag: Flag | None = item.metadata.get(FLAG)
        return flag
    bounds = None if setting.bounds is None else RANGE_OF_BOUNDS[setting.bounds]
    return Flag(setting.summary, bounds, only_with=setting.only_with, choices=setting.choices)


def _in_order(group: Any) -> "list[Field[Any]]":
    """Fields of a dataclass, before those of its bases."""
    classes: list[Any] = [base for base in group.__mro__ if is_dataclass(base)]

    def depth(item: "Field[Any]") -> int:
        return max(level for level, base in enumerate(classes) if item.name in inspect.get_annotations(base))

    return sorted(fields(group), key=depth)


def _merged(command: type, table: str) -> dict[str, Any]:
    """The rows of a table of a command (`defaults`, `helps`, …), with those of its bases."""
    merged: dict[str, Any] = {}
    for base in reversed(command.__mro__):
        merged |= vars(base).get(table, {})
    return merged


def make_group(group: type, values: Mapping[str, Any]) -> Any:
    """Make a group from values by the names of flags; other flags have the group's defaults."""
    arguments: dict[str, Any] = {}
    for item in fields(group):
        if PARTS in item.metadata:
            parts_of_group = item.metadata[PARTS]().items()
            arguments[item.name] = {name: make_group(part, values) for name, part in parts_of_group}
        elif item.name in values and _declaration_of(item) is not None:
            arguments[item.name] = values[item.name]
    return group(**arguments)


def holder_of(config: Any, flag: Flag) -> Any:
    """The group of a configuration that holds a flag."""
    group = config
    for name in flag.holder:
        group = group[name] if isinstance(group, dict) else getattr(group, name)
    return group


def value_of(config: Any, flag: Flag) -> Any:
    """Value of a flag in a configuration."""
    return getattr(holder_of(config, flag), flag.name)


def default_of_field(item: "Field[Any]") -> Any:
    """Default of a dataclass's field; MISSING if it has none."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def default_of(command: type, name: str) -> Any:
    """Default of a flag of a command or group."""
    return flags_of(command)[name].default


def flags_on_resume(command: type, kind: OnResume) -> frozenset[str]:
    """Flags of a command by how a resumed run treats them, see `Flag.on_resume`."""
    names = []
    for name, flag in flags_of(command).items():
        if flag.on_resume == kind:
            names.append(name)
    return frozenset(names)


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, or of a Literal that is part of a union or list; empty for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    for part in get_args(hint):
        if choices := choices_of(part):
            return choices
    return ()


def check_values(config: Any) -> None:
    """Check each flag of a configuration or group by its declaration: choices and range, then `only_with`.

    None is always allowed.

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
            # A preset's value cannot be dropped on the command line.
            has_value = isinstance(flag.default, (int, float, str)) and not isinstance(flag.default, bool)
            instead = f" (if a file sets it: --{name} {flag.default})" if has_value else ""
            raise UserError(f"--{name} {value} does nothing on its own: add --{flag.only_with}, or drop it{instead}.")


def _check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    if not choices:
        return
    for item in value if isinstance(value, list | tuple) else [value]:
        if item not in choices:
            names = ", ".join(str(choice) for choice in choices)
            raise UserError(f"--{name} {item} is unknown: give one of {names}.")


def _check_range(name: str, value: Any, range: Range) -> None:
    if range is NOT_EMPTY:
        if not value or (isinstance(value, list | tuple) and "" in value):
            raise UserError(f"--{name} is empty: give a value, or drop the flag.")
        return
    accepts, wanted = range
    for number in value if isinstance(value, list | tuple) else [value]:
        if not accepts(number):
            raise UserError(f"--{name} {number} is out of range: give {wanted}.")


def _is_given(config: Any, other: str) -> bool:
    """Whether a flag has a value and is not False.

    Args:
        config: a configuration or group.
        other: a flag, or a flag and the value that it must have, such as `rollout_engine vllm`.
    """
    name, _, wanted = other.partition(" ")
    value = value_of(config, flags_of(type(config))[name])
    if wanted:
        return bool(value == wanted)
    return value is not None and value is not False
