# SPDX-License-Identifier: Apache-2.0
"""From a command line and a file to a checked configuration, and back, for every subcommand of `dschat`.

A value comes from the command line, else from the file of `--config` (see `dschat.settings.files`), else from the
environment where its flag names a variable, else from the default.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.config import Config
from dschat.settings.files import ConfigFile, read_file
from dschat.settings.flags import default_of, flags_of
from dschat.settings.parser import FlagParser
from dschat.settings.presets import batch_sizes
from dschat.settings.variables import escape_text, expand_path
from dschat.settings.words import as_words, is_path, texts_of

T = TypeVar("T")
DEFAULT = "default"
PRINTS = ("--print_config", "--print-config")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A configuration, and where its values come from."""

    config: T
    values: dict[str, Any]  # by field, as given: before what follows from other flags is filled in
    origins: dict[str, str]  # of each value that is no default: its flag, FILE:LINE or $VARIABLE
    rest: list[str]  # words that are no flags of it
    preset: dict[str, Any] = field(default_factory=dict)  # the key `preset` of its file

    def words(self, without: Sequence[str] = ()) -> list[str]:
        """A command line that says the same without a file, but for some flags."""
        values = {name: self.values[name] for name in self.origins if name not in without}
        return as_words(type(self.config), values)

    @property
    def yaml(self) -> str:
        """A file that says the same, with where each value comes from."""
        return as_yaml(type(self.config), self.values, self.origins)


def resolve(
    config_class: type[T],
    words: Sequence[str] | None = None,
    *,
    command: str = "",
    processes: int | None = None,
    runs_here: bool = True,
    all_known: bool = True,
    checks: bool = True,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved[T]:
    """Reads, converts and checks what a command is told.

    Args:
        config_class: the dataclass of its flags.
        words: the command line; that of the process if None.
        command: the subcommand, among whose presets `--config NAME` is looked for.
        processes: that share a preset's batch; those of the launcher if None.
        runs_here: the packages that the flags need must be installed.
        all_known: words that are no flags are an error.
        checks: a training step's rules hold.
        config: file or preset, as `--config` gives it.
        environ: variables; those of the process if None.

    Raises:
        UserError: a value, a combination of flags or a file is not possible; after --print_config has printed it.
        SystemExit: status 2 after one line on stderr for an unknown flag or a malformed value; status 0 after --help
            and --print_config.
    """
    parser = FlagParser(config_class, f"dschat {command}" if command else None)
    flags = flags_of(config_class)
    has_own = "config" in flags
    if not has_own:
        group = parser.add_argument_group("files")
        group.add_argument("--config", metavar="FILE", help="YAML file of flags, or the name of a preset; flags win")
        shown = "print every value with where it comes from, and end"
        group.add_argument(*PRINTS, action="store_true", help=shown)
    given, rest = parser.given(words)
    if rest and all_known:
        parser.error_unknown(rest)
    name = config if has_own else given.pop("config", config)
    prints = not has_own and given.pop("print_config", False)
    known = os.environ if environ is None else environ
    file = read_file(name, command, known) if name is not None else ConfigFile({}, {}, known)
    values, origins = _merge(config_class, parser, file, given)
    share = int(os.environ.get("WORLD_SIZE") or 1) if processes is None else processes
    if most := file.preset.get("most_per_gpu"):
        for key, size in batch_sizes(most, values, share).items():
            if key not in values:
                values[key], origins[key] = size, f"preset, {share} processes"
    for key, flag in flags.items():
        variable = flag.environment
        if key not in values and variable and known.get(variable):
            values |= _with_paths(config_class, parser.value_of(key, known[variable], variable), known)
            origins[key] = f"${variable}"
    defaults = {key: flag.default for key, flag in flags.items()}
    missing = [key for key, default in defaults.items() if default is MISSING and key not in values]
    _check_nulls(parser, file, missing)
    parser.require(missing)
    complete = {key: values.get(key, default) for key, default in defaults.items()}
    if prints:
        print(as_yaml(config_class, complete, origins), end="", flush=True)
    made = config_class(**values)
    if isinstance(made, Config) and checks:
        made.validate()
    if isinstance(made, CommonConfig) and checks and runs_here and not prints:
        made.check_installed()
    if prints:
        raise SystemExit(0)
    return Resolved(made, complete, origins, rest, file.preset)


def parse(config_class: type[T], argv: Sequence[str] | None = None, runs_here: bool = True) -> T:
    """The configuration of a command line, see `resolve`."""
    return resolve(config_class, argv, runs_here=runs_here).config


def to_json(config: CommonConfig, plan: BatchPlan) -> str:
    """Every flag as JSON, with the batch sizes that follow from them under `batch_plan`. JSON has no infinity: a flag
    of that value is written as the text "inf".
    """
    flags = {name: "inf" if value == math.inf else value for name, value in config.flat().items()}
    content = flags | {"batch_plan": dataclasses.asdict(plan)}
    return json.dumps(content, indent=2) + "\n"


def to_yaml(config: CommonConfig) -> str:
    """Every flag as a file for --config; with another --output_dir it repeats the run."""
    values = config.flat()
    follows = str(Path(values["output_dir"]) / "tensorboard")
    if values["tensorboard_path"] == follows:
        values["tensorboard_path"] = None
    return "".join(f"{name}: {_yaml_value(type(config), name, value)}\n" for name, value in values.items())


def as_yaml(flags: type, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A file for --config that gives these values, with where each comes from.

    Args:
        flags: the dataclass of the flags.
        values: by field.
        origins: of each value that is no default: its flag, FILE:LINE or $VARIABLE.
    """
    lines = [f"{name}: {_yaml_value(flags, name, value)}" for name, value in values.items()]
    width = min(48, max(map(len, lines), default=0))
    places = [origins.get(name, DEFAULT) for name in values]
    return "".join(f"{line:<{width}}  # {place}\n" for line, place in zip(lines, places, strict=True))


def _merge(
    config_class: type, parser: FlagParser, file: ConfigFile, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a file and of a command line, which wins, in the order of the fields; and where they come from."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unknown = [parser.unknown(key, setting.place) for key, setting in file.settings.items() if not parser.has(key)]
    if unknown:
        raise UserError("\n".join(unknown))
    for key, setting in file.settings.items():
        name = parser.field_of(key)
        value = file.value_of(key, in_path=name is not None and is_path(config_class, name))
        if value is None:
            continue
        if name in origins and file.is_in(origins[name], setting.file):
            raise UserError(f"{setting.place}: {key} is --{name}, which {origins[name]} gives; keep one of them.")
        values |= parser.value_of(key, value, setting.place)
        if name is not None:
            origins[name] = setting.place
    values |= _with_paths(config_class, given, file.environ)
    origins |= {name: f"--{name}" for name in given}
    in_order = {name: values[name] for name in flags_of(config_class) if name in values}
    return in_order, {name: origins[name] for name in in_order if name in origins}


def _check_nulls(parser: FlagParser, file: ConfigFile, missing: Sequence[str]) -> None:
    """Raises UserError where a file names a required flag without a value, and nothing else gives one."""
    for key, setting in file.settings.items():
        if parser.field_of(key) in missing:
            raise UserError(f"{setting.place}: {key} has no value, and must have one: give it here or as --{key}.")


def _with_paths(flags: type, values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by field, with `~` and variables expanded in paths."""
    expanded = dict(values)
    for name, value in values.items():
        if value is None or not is_path(flags, name):
            continue
        if isinstance(value, list | tuple):
            expanded[name] = [type(one)(expand_path(str(one), f"--{name}", environ)) for one in value]
        else:
            expanded[name] = type(value)(expand_path(str(value), f"--{name}", environ))
    return expanded


def _yaml_value(flags: type, name: str, value: object) -> str:
    """A value on one line, which a file gives back as it is."""
    if value is None:
        return "null" if default_of(flags, name) is None else "none"
    texts = texts_of(flags, name, value)
    if not is_path(flags, name):
        texts = list(map(escape_text, texts))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml_scalar(text) for text in texts)}]"
    return _yaml_scalar(texts[0]) if isinstance(value, str | Path) else texts[0]


def _yaml_scalar(text: str) -> str:
    """A text on one line, in quotes where it needs them as an item of a list."""
    style = '"' if not text.isprintable() else None
    dumped = yaml.safe_dump([text], default_flow_style=True, default_style=style, width=math.inf, allow_unicode=True)
    return str(dumped).strip().removeprefix("[").removesuffix("]")
