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

import dataclasses
import json
import logging
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
from dschat.settings.file_values import ConfigFile
from dschat.settings.flag_types import as_text, holds_paths, read_value
from dschat.settings.flags import Flag, flags_by_spelling, flags_of
from dschat.settings.parser import FlagParser
from dschat.settings.variables import escape_path, escape_text, expand_path, expand_text

T = TypeVar("T")
Text = str | list[str]  # of a flag with one value, or of one with several
logger = logging.getLogger(__name__)
DEFAULT = "default"
PRINTS = ("--print_config", "--print-config")
# Flags that say what happens to a folder, a checkpoint or a repository: a repeated run must not do it again.
OF_ONE_START = ("overwrite_output_dir", "resume_from_checkpoint", "push_to_hub")


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

    # Texts: of the command line, files and the environment.
    parser = FlagParser(config_class, f"dschat {command}" if command else None)
    words_of_flags, other_words = parser.read(words)
    if other_words and all_known:
        parser.error_unknown(other_words)
    if words_of_flags.pop("print_schema", False):
        from dschat.settings.schema import json_schema

        print(json.dumps(json_schema(config_class, parser.prog), indent=2), flush=True)
        raise SystemExit(0)
    prints = words_of_flags.pop("print_config", False)
    if parser.takes_files:
        config = words_of_flags.pop("config", config)
    file = ConfigFile({}, {}, environ)
    if config is not None:
        from dschat.settings.files import read_file

        file = read_file(config, command, environ)
    _warn_of_inert_flags(parser, [*words_of_flags, *file.settings])
    values, origins = read_values(config_class, parser, words_of_flags, file, environ)

    # The preset's batch sizes, defaults.
    sizes: dict[str, int] = {}
    if "most_per_gpu" in file.preset:
        from dschat.settings.presets import batch_sizes

        sizes = batch_sizes(file.preset["most_per_gpu"], values, processes)
    for name, size in sizes.items():
        if name not in values:
            values[name] = size
            origins[name] = f"preset, {processes} processes"
    complete: dict[str, Any] = {}
    for name, flag in flags_of(config_class).items():
        complete[name] = values.get(name, flag.default)
    parser.require([name for name, value in complete.items() if value is MISSING])

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


@dataclass(frozen=True)
class Given:
    """The text of a flag's value.

    Attributes:
        text: None for a flag that is given without a value, which stands for None.
        origin: the flag, FILE:LINE or $VARIABLE.
    """

    text: Text | None
    origin: str

    def filled(self, flag: Flag, environ: Mapping[str, str]) -> Text | None:
        """The text with its variables filled in: in a path, wherever it comes from, and in any text of a file."""
        if holds_paths(flag):
            fill = expand_path
        elif self.origin.startswith(("--", "$")):
            return self.text
        else:
            fill = expand_text
        if self.text is None:
            return None
        source = self.origin if self.origin.startswith("--") else f"{self.origin}: {flag.name}"
        if isinstance(self.text, list):
            return [fill(item, source, environ) for item in self.text]
        return fill(self.text, source, environ)


def read_values(
    config_class: type,
    parser: FlagParser,
    words_of_flags: Mapping[str, Text | None],
    file: ConfigFile,
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and where each comes from, by flag, of all flags that are given.

    Raises:
        UserError: a key of the file is no flag, or a flag cannot have its value.
    """
    flags = flags_of(config_class)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, item in _collect(config_class, parser, words_of_flags, file, environ).items():
        text = item.filled(flags[name], file.environ)
        if text == "" and item.text != "":  # a variable that is empty stands for the default
            continue
        values[name] = None
        if text is not None:
            values[name] = _value(flags[name], text, item.origin, parser)
        origins[name] = item.origin
    return values, origins


def _warn_of_inert_flags(parser: FlagParser, names: Sequence[str]) -> None:
    """Log a warning for each flag that does nothing here."""
    for name in dict.fromkeys(names):
        if name in parser.inert:
            logger.warning("--%s does nothing here: %s.", name, parser.inert[name])


def _collect(
    config_class: type,
    parser: FlagParser,
    words_of_flags: Mapping[str, Text | None],
    file: ConfigFile,
    environ: Mapping[str, str],
) -> dict[str, Given]:
    """The texts of all flags that are given: words win over files, and files over the environment."""
    unknown: list[str] = []
    for key, setting in file.settings.items():
        if not parser.has(key):
            unknown.append(parser.unknown(key, setting.line))
    if unknown:
        raise UserError("\n".join(unknown))
    of_file: dict[str, Given] = {}
    flags = flags_by_spelling(config_class)
    for key, setting in file.settings.items():
        if key not in flags:
            continue
        text = setting.text()
        name = flags[key].name
        earlier = of_file.get(name)
        if earlier is not None and _file_of(earlier.origin) == _file_of(setting.line):
            raise UserError(f"{setting.line}: {key} is --{name}, which {earlier.origin} gives; keep one of them.")
        of_file[name] = Given(text, setting.line)

    texts: dict[str, Given] = {}
    for name, flag in flags_of(config_class).items():
        variable = flag.environment
        if name in words_of_flags:
            texts[name] = Given(words_of_flags[name], f"--{name}")
        elif name in of_file and of_file[name].text is not None:  # null stands for the default
            texts[name] = of_file[name]
        elif variable is not None and environ.get(variable):
            texts[name] = Given(environ[variable], f"${variable}")
    return texts


def _file_of(line: str) -> str:
    """The file of a FILE:LINE."""
    return line.rpartition(":")[0]


def _value(flag: Flag, text: Text, origin: str, parser: FlagParser) -> Any:
    """The value of a flag. Its error is that of the parser for a word, else a UserError."""
    try:
        return read_value(flag, text)
    except ValueError as error:
        problem = f"argument --{flag.name}: {error}"
        if origin.startswith("--"):
            parser.error(problem)
        raise UserError(f"{origin}: {problem}.") from error


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
    """A file for --config that repeats the run with another --output_dir: every flag but `OF_ONE_START`.

    What follows from other flags is left out, so that flags which are given beside the file decide it anew.
    """
    lines = []
    for name, flag in flags_of(type(config)).items():
        if name not in OF_ONE_START:
            value = config.arguments.get(name, flag.default)
            lines.append(f"{name}: {_yaml_value(flag, value)}\n")
    return "".join(lines)


def as_yaml(flags: type, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A file for --config that gives these values, with where each comes from in a comment.

    Args:
        flags: the class of the flags.
        values: by flag.
        origins: for each value that is not a default: its flag, FILE:LINE or $VARIABLE.
    """
    declared = flags_of(flags)
    line_of = {name: f"{name}: {_yaml_value(declared[name], value)}" for name, value in values.items()}
    widest = max((len(line) for line in line_of.values()), default=0)
    width = min(48, widest)
    lines = []
    for name, line in line_of.items():
        lines.append(f"{line:<{width}}  # {origins.get(name, DEFAULT)}\n")
    return "".join(lines)


def _yaml_value(flag: Flag, value: object) -> str:
    """A value on one line, which a file gives back as it is."""
    if value is None:
        return "null" if flag.default is None else "none"
    escape = escape_path if holds_paths(flag) else escape_text
    if isinstance(value, list | tuple):
        items = ", ".join(_yaml_scalar(escape(as_text(item))) for item in value)
        return f"[{items}]"
    text = escape(as_text(value))
    return _yaml_scalar(text) if isinstance(value, str | Path) else text


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
