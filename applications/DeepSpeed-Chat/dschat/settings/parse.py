# SPDX-License-Identifier: Apache-2.0
"""From a command line and a file to a checked configuration, and back, for every subcommand of `dschat`.

A value comes from the command line, else from the file of `--config`, else from the environment where its flag names a
variable, else from the default. `--print_config` prints every value with where it comes from. The value of a flag that
a preset sets:

1. files.py: `read_file` reads the preset and the files that it extends, which it overrides. Values may name variables,
   those of presets as well (presets.py: `variables`).
2. Here: `resolve` puts the command line over the file, and adds the batch sizes that a preset leaves to the number of
   processes (presets.py: `batch_sizes`), the environment and defaults.
3. config.py: a configuration fills in what follows from other flags (`derive`).
"""

import argparse
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
from dschat.settings.files import ConfigFile, file_of, read_file
from dschat.settings.flag_types import is_path, texts_of
from dschat.settings.flags import default_of, flags_of
from dschat.settings.parser import FlagParser
from dschat.settings.presets import batch_sizes
from dschat.settings.variables import escape_text, expand_path

T = TypeVar("T")
DEFAULT = "default"
PRINTS = ("--print_config", "--print-config")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A configuration, and where its values come from.

    Attributes:
        config: the configuration.
        values: by flag, before values that follow from other flags are derived.
        origins: for each value that is not a default: its flag, FILE:LINE or $VARIABLE.
        other_words: words that are no flags of the command.
        preset: the key `preset` of its file.
    """

    config: T
    values: dict[str, Any]
    origins: dict[str, str]
    other_words: list[str]
    preset: dict[str, Any] = field(default_factory=dict)

    def given(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """The values that are not defaults, but for some flags."""
        return {name: self.values[name] for name in self.origins if name not in without}

    @property
    def yaml(self) -> str:
        """File that gives these values, with where each comes from."""
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
    """Read, convert and check the values of a command's flags.

    Args:
        config_class: the class of its flags.
        words: the command line; that of the process if None.
        command: the subcommand, among whose presets `--config NAME` is looked for.
        processes: number of processes that share a preset's batch; that of the launcher if None.
        runs_here: check that the packages which the flags need are installed.
        all_known: words that are no flags are an error.
        checks: check a training step's rules.
        config: file or preset, as `--config` gives it.
        environ: environment variables; those of the process if None.

    Raises:
        UserError: a value, a combination of flags or a file is not possible; after --print_config has printed it.
        SystemExit: status 2 after one line on stderr for an unknown flag or a malformed value; status 0 after --help
            and --print_config.
    """
    environ = os.environ if environ is None else environ
    if processes is None:
        processes = int(os.environ.get("WORLD_SIZE") or 1)

    # The command line.
    parser = FlagParser(config_class, f"dschat {command}" if command else None)
    config_is_a_flag = "config" in flags_of(config_class)  # `dschat plan` has a --config with another meaning
    if not config_is_a_flag:
        _add_file_flags(parser, config_class)
    values_of_words, other_words = parser.read(words)
    if other_words and all_known:
        parser.error_unknown(other_words)
    prints = False
    if not config_is_a_flag:
        config = values_of_words.pop("config", config)
        prints = values_of_words.pop("print_config", False)

    # Files, the preset's batch sizes, the environment.
    file = ConfigFile({}, {}, environ) if config is None else read_file(config, command, environ)
    values, origins = _merge(config_class, parser, file, values_of_words)
    sizes = batch_sizes(file.preset.get("most_per_gpu", {}), values, processes)
    for name, size in sizes.items():
        if name not in values:
            values[name] = size
            origins[name] = f"preset, {processes} processes"
    _add_environment(config_class, parser, environ, values, origins)

    # Defaults.
    complete: dict[str, Any] = {}
    missing: list[str] = []
    for name, flag in flags_of(config_class).items():
        complete[name] = values.get(name, flag.default)
        if complete[name] is MISSING:
            missing.append(name)
    _check_nulls(parser, file, missing)
    parser.require(missing)

    if prints:
        print(as_yaml(config_class, complete, origins), end="", flush=True)
    made = config_class(**values)
    if isinstance(made, Config) and checks:
        made.validate()
    if isinstance(made, CommonConfig) and checks and runs_here and not prints:
        made.check_installed()
    if prints:
        raise SystemExit(0)
    return Resolved(made, complete, origins, other_words, file.preset)


class _PrintSchema(argparse.Action):
    """Prints the JSON schema of a command's files, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        """Print and end."""
        from dschat.settings.schema import json_schema

        print(json.dumps(json_schema(self.const, parser.prog), indent=2), flush=True)
        parser.exit()


def _add_file_flags(parser: FlagParser, config_class: type) -> None:
    """Add the flags of every command that are about files."""
    group = parser.add_argument_group("files")
    group.add_argument("--config", metavar="FILE", help="YAML file of flags, or the name of a preset; flags win")
    group.add_argument(*PRINTS, action="store_true", help="print every value with where it comes from, and end")
    group.add_argument(
        *("--print_schema", "--print-schema"),
        action=_PrintSchema,
        nargs=0,
        const=config_class,
        help="print a JSON schema for such files, with which editors complete and check them, and end",
    )


def _add_environment(
    config_class: type, parser: FlagParser, environ: Mapping[str, str], values: dict[str, Any], origins: dict[str, str]
) -> None:
    """Add the values of flags that have an environment variable and no value yet."""
    for name, flag in flags_of(config_class).items():
        text = environ.get(flag.environment) if flag.environment else None
        if text and name not in values:
            value = parser.value_of(name, text, str(flag.environment))
            values |= _with_paths(config_class, value, environ)
            origins[name] = f"${flag.environment}"


def parse(config_class: type[T], argv: Sequence[str] | None = None, runs_here: bool = True) -> T:
    """Configuration of a command line, see `resolve`."""
    return resolve(config_class, argv, runs_here=runs_here).config


def to_json(config: CommonConfig, plan: BatchPlan) -> str:
    """Every flag as JSON, and the batch sizes that follow from them under `batch_plan`.

    JSON has no infinity: a flag of that value is written as the text "inf".
    """
    content = config.flat()
    for name, value in content.items():
        if value == math.inf:
            content[name] = "inf"
    content["batch_plan"] = dataclasses.asdict(plan)
    return json.dumps(content, indent=2) + "\n"


def to_yaml(config: CommonConfig) -> str:
    """Every flag as a file for --config; with another --output_dir it repeats the run."""
    values = config.flat()
    if values["tensorboard_path"] == str(Path(values["output_dir"]) / "tensorboard"):
        values["tensorboard_path"] = None
    return "".join(f"{name}: {_yaml_value(type(config), name, value)}\n" for name, value in values.items())


def as_yaml(flags: type, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A file for --config that gives these values, with where each comes from in a comment.

    Args:
        flags: the class of the flags.
        values: by flag.
        origins: for each value that is not a default: its flag, FILE:LINE or $VARIABLE.
    """
    line_of = {name: f"{name}: {_yaml_value(flags, name, value)}" for name, value in values.items()}
    widest = max((len(line) for line in line_of.values()), default=0)
    width = min(48, widest)
    lines = []
    for name, line in line_of.items():
        lines.append(f"{line:<{width}}  # {origins.get(name, DEFAULT)}\n")
    return "".join(lines)


def _merge(
    config_class: type, parser: FlagParser, file: ConfigFile, values_of_words: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a file and of a command line, which wins.

    Returns:
        Values and origins by flag, in the order of the flags.
    """
    unknown = []
    for key, setting in file.settings.items():
        if not parser.has(key):
            unknown.append(parser.unknown(key, setting.line))
    if unknown:
        raise UserError("\n".join(unknown))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, setting in file.settings.items():
        name = parser.field_of(key)
        value = file.value_of(key, in_path=name is not None and is_path(config_class, name))
        if value is None:
            continue
        if name in origins and file_of(origins[name]) == file_of(setting.line):
            raise UserError(f"{setting.line}: {key} is --{name}, which {origins[name]} gives; keep one of them.")
        values |= parser.value_of(key, value, setting.line)
        if name is not None:
            origins[name] = setting.line

    values |= _with_paths(config_class, values_of_words, file.environ)
    origins |= {name: f"--{name}" for name in values_of_words}
    in_order = {name: values[name] for name in flags_of(config_class) if name in values}
    return in_order, origins


def _check_nulls(parser: FlagParser, file: ConfigFile, missing: Sequence[str]) -> None:
    """Raise UserError if a file names a required flag without a value, and nothing else gives one."""
    for key, setting in file.settings.items():
        if parser.field_of(key) in missing:
            raise UserError(f"{setting.line}: {key} has no value, and must have one: give it here or as --{key}.")


def _with_paths(flags: type, values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by flag, with `~` and variables expanded in paths."""
    expanded = dict(values)
    for name, value in values.items():
        if value is None or not is_path(flags, name):
            continue
        if isinstance(value, list | tuple):
            expanded[name] = [_expanded(path, name, environ) for path in value]
        else:
            expanded[name] = _expanded(value, name, environ)
    return expanded


def _expanded(path: str | Path, name: str, environ: Mapping[str, str]) -> str | Path:
    return type(path)(expand_path(str(path), f"--{name}", environ))


def _yaml_value(flags: type, name: str, value: object) -> str:
    """A value on one line, which a file gives back as it is."""
    if value is None:
        return "null" if default_of(flags, name) is None else "none"
    texts = texts_of(flags, name, value)
    if not is_path(flags, name):
        texts = [escape_text(text) for text in texts]
    if isinstance(value, list | tuple):
        items = ", ".join(_yaml_scalar(text) for text in texts)
        return f"[{items}]"
    return _yaml_scalar(texts[0]) if isinstance(value, str | Path) else texts[0]


def _yaml_scalar(text: str) -> str:
    """A text on one line, in quotes if an item of a list needs them."""
    dumped = yaml.safe_dump(
        [text],
        default_flow_style=True,
        default_style=None if text.isprintable() else '"',
        width=math.inf,
        allow_unicode=True,
    )
    return str(dumped).strip().removeprefix("[").removesuffix("]")
