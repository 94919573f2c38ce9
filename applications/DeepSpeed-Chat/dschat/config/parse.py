# SPDX-License-Identifier: Apache-2.0
"""From a command line and a file to a checked configuration, and back, for every subcommand of `dschat`.

A value comes from the command line, else from the file of `--config` (see `dschat.config.files`), else from the
environment where its flag names a variable, else from the default.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.files import ConfigFile, read_file
from dschat.config.parser import FlagParser, as_text, as_words, default_value, notes_of
from dschat.config.presets import batch_sizes

Config = TypeVar("Config")
DEFAULT = "default"
PRINTS = ("--print_config", "--print-config")


@dataclass(frozen=True)
class Resolved(Generic[Config]):
    """A configuration, and where its values come from."""

    config: Config
    values: dict[str, Any]  # by field, as given: before what follows from other flags is filled in
    origins: dict[str, str]  # of each value that is no default: its flag, FILE:LINE or $VARIABLE
    rest: list[str]  # words that are no flags of it
    preset: dict[str, Any] = field(default_factory=dict)  # the key `preset` of its file

    def words(self, without: Sequence[str] = ()) -> list[str]:
        """A command line that says the same without a file, but for some flags."""
        names = [name for name in self.origins if name not in without]
        return [word for name in names for word in as_words(name, self.values[name])]

    @property
    def yaml(self) -> str:
        """A file that says the same, with where each value comes from."""
        lines = [
            (f"{name}: {_yaml_value(self.values[name])}", self.origins.get(name, DEFAULT)) for name in self.values
        ]
        width = min(48, max((len(line) for line, _ in lines), default=0))
        return "".join(f"{line:<{width}}  # {origin}\n" for line, origin in lines)


def resolve(
    config_class: type[Config],
    words: Sequence[str] | None = None,
    *,
    command: str = "",
    processes: int | None = None,
    runs_here: bool = True,
    all_known: bool = True,
    checks: bool = True,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved[Config]:
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
    has_own = "config" in {one.name for one in fields(config_class)}  # type: ignore[arg-type]
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
    file = read_file(name, command, known) if name else ConfigFile({}, {})
    values, origins = _merge(config_class, parser, file, given)
    share = int(os.environ.get("WORLD_SIZE") or 1) if processes is None else processes
    if most := file.preset.get("most_per_gpu"):
        for key, size in batch_sizes(most, values, share).items():
            if key not in values:
                values[key], origins[key] = size, f"preset, {share} processes"
    for one in fields(config_class):  # type: ignore[arg-type]
        variable = notes_of(one).environment
        if one.name not in values and variable and known.get(variable):
            values |= parser.value_of(one.name, known[variable], variable)
            origins[one.name] = f"${variable}"
    defaults = {one.name: default_value(one) for one in fields(config_class)}  # type: ignore[arg-type]
    parser.require(key for key, default in defaults.items() if default is MISSING and key not in values)
    complete = {key: values.get(key, default) for key, default in defaults.items()}
    if prints:
        print(Resolved(None, complete, origins, rest).yaml, end="", flush=True)
    made = config_class(**values)
    if isinstance(made, CommonConfig) and checks:
        made.validate()
        if runs_here and not prints:
            made.check_installed()
    if prints:
        raise SystemExit(0)
    return Resolved(made, complete, origins, rest, file.preset)


def parse(config_class: type[Config], argv: Sequence[str] | None = None, runs_here: bool = True) -> Config:
    """The configuration of a command line, see `resolve`."""
    return resolve(config_class, argv, runs_here=runs_here).config


def to_json(config: CommonConfig, plan: BatchPlan) -> str:
    """Every flag as JSON, with the batch sizes that follow from them under `batch_plan`. JSON has no infinity: a flag
    of that value is written as the text "inf".
    """
    flags = {name: "inf" if value == math.inf else value for name, value in dataclasses.asdict(config).items()}
    content = flags | {"batch_plan": dataclasses.asdict(plan)}
    return json.dumps(content, indent=2) + "\n"


def to_yaml(config: CommonConfig) -> str:
    """Every flag as a file for --config; with another --output_dir it repeats the run."""
    follows = str(Path(config.output_dir) / "tensorboard")
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    if values["tensorboard_path"] == follows:
        values["tensorboard_path"] = None
    return "".join(f"{name}: {_yaml_value(value)}\n" for name, value in values.items())


def _merge(
    config_class: type, parser: FlagParser, file: ConfigFile, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a file and of a command line, which wins, in the order of the fields; and where they come from."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, setting in file.settings.items():
        if setting.value is None:
            continue
        found = parser.value_of(key, setting.value, setting.place)
        values |= found
        origins |= dict.fromkeys(found, setting.place)
    values |= given
    origins |= {name: f"--{name}" for name in given}
    order = [one.name for one in fields(config_class)]
    return {name: values[name] for name in order if name in values}, {n: origins[n] for n in order if n in origins}


def _yaml_value(value: object) -> str:
    """On one line."""
    if value is None or isinstance(value, bool):
        return yaml.safe_dump(value).split("\n")[0]
    plain = list(map(as_text, value)) if isinstance(value, list | tuple) else as_text(value)
    if isinstance(plain, str) and not isinstance(value, str):
        return plain
    return (
        str(yaml.safe_dump(plain, default_flow_style=True, width=math.inf, allow_unicode=True))
        .split("\n...")[0]
        .strip()
    )
