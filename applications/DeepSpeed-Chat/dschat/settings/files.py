# SPDX-License-Identifier: Apache-2.0
"""Files of `--config`: YAML whose keys are flags, `extends` another file or a shipped preset, and may name variables.

    extends: tldr_gemma_2b       # a preset of the same subcommand, or a path from this file's folder
    data_path: ${PROJ_PATH}/rows.jsonl
    kl_coef: 0.03
    seed: ${SEED:-1234}
    parser_model: ${PARSER_MODEL:-}   # the flag's default where the variable is not set

Presets have one key more, `preset`, see `dschat.settings.presets`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dschat.base.errors import UserError
from dschat.settings.other_names import OTHER_VALUES
from dschat.settings.presets import PRESETS, find_preset, preset_names, variables
from dschat.settings.variables import expand_path, expand_text

TAG = "tag:yaml.org,2002:"
NULL = f"{TAG}null"
# Tags that YAML gives to plain values by itself.
PLAIN_TAGS = {f"{TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "value", "seq")}
INFINITY = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}  # YAML's spelling → ours


@dataclass(frozen=True)
class Setting:
    """A flag's value in a file, as text: the flag says what it means. None stands for the flag's default."""

    value: str | list[str] | None
    place: str  # FILE:LINE
    fault: str = ""  # why a flag cannot have what the file has for a value

    @property
    def file(self) -> str:
        """The file without the line."""
        return self.place.rpartition(":")[0]


@dataclass(frozen=True)
class ConfigFile:
    """What a file says, with what it extends."""

    settings: dict[str, Setting]  # by key
    preset: dict[str, Any]  # the key `preset`
    environ: Mapping[str, str]  # what variables in its values stand for

    @staticmethod
    def is_in(place: str, file: str) -> bool:
        """Whether a FILE:LINE is in a file."""
        return place.rpartition(":")[0] == file

    def value_of(self, key: str, in_path: bool) -> str | list[str] | None:
        """The value of a key with its variables filled in; None where that leaves nothing of it.

        Raises:
            UserError: a flag cannot have this value, or a variable is not set.
        """
        setting = self.settings[key]
        if setting.fault:
            hint = f" {key}: {OTHER_VALUES[key]}." if key in OTHER_VALUES else ""
            raise UserError(f"{setting.fault}{hint}")
        place = f"{setting.place}: {key}"
        expand = expand_path if in_path else expand_text
        if isinstance(setting.value, list):
            return [expand(text, place, self.environ) for text in setting.value]
        if not setting.value:
            return setting.value
        return expand(setting.value, place, self.environ) or None


def read_file(name: str, command: str, environ: Mapping[str, str]) -> ConfigFile:
    """Reads a file and what it extends.

    Args:
        name: path of the file, or name of a preset that is shipped.
        command: subcommand whose flags the keys are.
        environ: variables.

    Raises:
        UserError: a file is missing or no YAML, or its keys are no names or are there twice.
    """
    path = _find(expand_path(name, "--config", environ), command, None, f"--config {name}")
    read = _read(path, command, (), environ)
    known = {**environ, **variables(read.preset, environ)} if read.preset else environ
    return ConfigFile(read.settings, read.preset, known)


def _find(name: str, command: str, folder: Path | None, place: str) -> Path:
    """The file of a name; one that another extends is looked for from that one's folder."""
    path = Path(name) if folder is None else folder / name
    if path.is_file():
        return path
    preset = find_preset(command, name)
    if preset is not None:
        return preset
    known = ", ".join(preset_names(command))
    presets = f"the presets of `dschat {command}` are {known}" if known else f"`dschat {command}` has no presets"
    raise UserError(f"{place}: there is no such file; give the path of a YAML file ({presets}).")


def _read(path: Path, command: str, below: tuple[Path, ...], environ: Mapping[str, str]) -> ConfigFile:
    """Reads a file and what it extends; `below` are the files that extend it."""
    if path.resolve() in below:
        raise UserError(f"{path} extends itself: remove `extends` from one of {', '.join(map(str, below))}.")
    settings: dict[str, Setting] = {}
    preset: dict[str, Any] = {}
    base = ConfigFile({}, {}, environ)
    places: dict[str, str] = {}
    for key_node, node in _top_level(path):
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = _key(key_node, place)
        if key in places:
            raise UserError(f"{place}: {key} is there twice, first at {places[key]}; keep one of them.")
        places[key] = place
        if key == "extends":
            name = _extended(node, place, environ)
            base_path = _find(name, command, path.parent, f"{place}: extends: {name}")
            base = _read(base_path, command, (*below, path.resolve()), environ)
        elif key == "preset":
            preset = _preset(node, path, place)
        else:
            settings[key] = _setting(node, key, place)
    inherited = {key: setting for key, setting in base.settings.items() if key not in settings}
    return ConfigFile({**inherited, **settings}, {**base.preset, **preset}, environ)


def _top_level(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a file, not yet converted; none of an empty file."""
    line = 1
    try:
        content = path.read_bytes()
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        loader.name = str(path)  # in messages
        root = loader.get_single_node()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line} is not in UTF-8 ({error.reason}): save the file in that encoding.") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}; correct the file.") from error
    except RecursionError as error:
        line += loader.line
        raise UserError(f"{path}:{line} is nested too deeply: flags are not nested; write `flag: value`.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        line += root.start_mark.line
        raise UserError(f"{path}:{line}: the file must hold `flag: value` on each line, not a list or a single value.")
    return list(root.value)


def _setting(node: yaml.Node, key: str, place: str) -> Setting:
    """A key's value. A fault is kept: if the key is no flag, that is what has to be said."""
    try:
        return Setting(_text(node, f"{place}: {key}"), place)
    except UserError as error:
        return Setting(None, place, str(error))


def _key(node: yaml.Node, place: str) -> str:
    """A flag's name in the spelling with underscores."""
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise UserError(f"{place}: a key must be the name of a flag.")
    return str(node.value).removeprefix("--").replace("-", "_")


def _extended(node: yaml.Node, place: str, environ: Mapping[str, str]) -> str:
    """The name behind `extends`."""
    name = _text(node, f"{place}: extends")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{place}: extends must be one file or preset; to combine several, let each of them extend the next."
        )
    return expand_path(name, f"{place}: extends", environ)


def _preset(node: yaml.Node, path: Path, place: str) -> dict[str, Any]:
    """The key `preset` of a preset that is shipped."""
    if not path.resolve().is_relative_to(PRESETS):
        raise UserError(
            f"{place}: only shipped presets have the key preset; to start from a preset, write `extends: NAME`."
        )
    loader = yaml.SafeLoader("")
    content: dict[str, Any] = loader.construct_object(node, deep=True)
    return content


def _text(node: yaml.Node, place: str) -> str | list[str] | None:
    """A value as it is written: `on` is no truth value and `1e-5` no text here; the flag decides."""
    if node.tag not in PLAIN_TAGS and not isinstance(node, yaml.MappingNode):
        tag = node.tag.replace(TAG, "!!")
        raise UserError(f"{place} has the tag {tag}: remove the tag; a flag takes plain values.")
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL else _scalar(node)
    if not isinstance(node, yaml.SequenceNode) or not all(isinstance(item, yaml.ScalarNode) for item in node.value):
        raise UserError(f"{place} must be a value or a list of values: flags are not nested.")
    texts: list[str] = []
    for item in node.value:
        text = _text(item, place)
        if not isinstance(text, str):
            raise UserError(f"{place} has an empty item in its list: remove it, or write '' for an empty text.")
        texts.append(text)
    return texts


def _scalar(node: yaml.ScalarNode) -> str:
    text = str(node.value)
    return INFINITY.get(text.lower(), text) if node.tag == f"{TAG}float" else text
