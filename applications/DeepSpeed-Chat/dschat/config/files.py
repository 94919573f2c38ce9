# SPDX-License-Identifier: Apache-2.0
"""Files of `--config`: YAML whose keys are flags, `extends` another file or a shipped preset, and may name variables.

    extends: tldr_gemma_2b       # a preset of the same subcommand, or a path from this file's folder
    data_path: ${PROJ_PATH}/rows.jsonl
    kl_coef: 0.03
    seed: ${SEED:-1234}
    parser_model: ${PARSER_MODEL:-}   # the flag's default where the variable is not set

Presets have one key more, `preset`, see `dschat.config.presets`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dschat.config.presets import find_preset, preset_names, variables
from dschat.errors import UserError

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Setting:
    """A flag's value in a file, as text: the flag says what it means. None stands for the flag's default."""

    value: str | list[str] | None
    place: str  # FILE:LINE


@dataclass(frozen=True)
class ConfigFile:
    """What a file says, with what it extends."""

    settings: dict[str, Setting]  # by key
    preset: dict[str, Any]  # the key `preset`


def read_file(name: str, command: str, environ: Mapping[str, str]) -> ConfigFile:
    """Reads a file, what it extends, and its variables.

    Args:
        name: path of the file, or name of a preset that is shipped.
        command: subcommand whose flags the keys are.
        environ: variables.

    Raises:
        UserError: a file is missing or no YAML, its keys are no names or are there twice, its values are neither texts
            nor lists of them, or a variable is not set.
    """
    found = _read(_find(name, command, None), command, ())
    known = {**environ, **variables(found.preset, environ)} if found.preset else environ
    settings = {key: Setting(_filled_in(one, known), one.place) for key, one in found.settings.items()}
    return ConfigFile(settings, found.preset)


def _find(name: str, command: str, folder: Path | None) -> Path:
    """The file of a name; one that another extends is looked for from that one's folder."""
    path = Path(name).expanduser() if folder is None else folder / name
    if path.is_file():
        return path
    preset = find_preset(command, name)
    if preset is not None:
        return preset
    asked = f"--config {name}" if folder is None else f"extends: {name} in {folder}"
    known = ", ".join(preset_names(command))
    presets = f"the presets of `dschat {command}` are {known}" if known else f"`dschat {command}` has no presets"
    raise UserError(f"{asked}: there is no such file; give the path of a YAML file ({presets}).")


def _read(path: Path, command: str, below: tuple[Path, ...]) -> ConfigFile:
    if path.resolve() in below:
        raise UserError(f"{path} extends itself: remove `extends` from one of {', '.join(map(str, below))}.")
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return ConfigFile({}, {})
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} must hold `flag: value` on each line.")
    settings: dict[str, Setting] = {}
    preset: dict[str, Any] = {}
    base = ConfigFile({}, {})
    for key_node, node in root.value:
        key, place = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key in settings:
            raise UserError(f"{place}: {key} is there twice; keep one of them.")
        if key == "extends":
            base = _read(_find(str(node.value), command, path.parent), command, (*below, path.resolve()))
        elif key == "preset" and isinstance(node, yaml.MappingNode):
            preset = loader.construct_object(node, deep=True)
        else:
            settings[key.removeprefix("--").replace("-", "_")] = Setting(_text(node, f"{place}: {key}"), place)
    return ConfigFile({**base.settings, **settings}, {**base.preset, **preset})


def _text(node: yaml.Node, place: str) -> str | list[str] | None:
    """Of a value, as it is written: `on` is no truth value and `1e-5` no text here; the flag decides."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL else str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [str(item.value) for item in node.value]
    raise UserError(f"{place} must be a value or a list of values: flags are not nested.")


def _filled_in(setting: Setting, environ: Mapping[str, str]) -> str | list[str] | None:
    def fill(text: str) -> str:
        return VARIABLE.sub(value, text)

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        found = environ.get(name) or default
        if found is None:
            raise UserError(f"{setting.place}: the variable {name} is not set; set it, or write ${{{name}:-DEFAULT}}.")
        return found

    if isinstance(setting.value, list):
        return [fill(text) for text in setting.value]
    return None if setting.value is None else fill(setting.value) or None
