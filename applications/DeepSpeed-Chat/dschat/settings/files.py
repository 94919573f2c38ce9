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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dschat.base.errors import UserError
from dschat.settings.other_names import value_hint
from dschat.settings.presets import PRESETS, find_preset, preset_names, variables
from dschat.settings.variables import expand_path, expand_text

TAG = "tag:yaml.org,2002:"
NULL = f"{TAG}null"
FLOAT = f"{TAG}float"
INFINITY = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}  # YAML's spelling → ours


@dataclass(frozen=True)
class Setting:
    """A flag's value in a file, as text, which the flag converts.

    Attributes:
        value: None stands for the flag's default.
        line: FILE:LINE.
        fault: why no flag can have this value; empty for a valid one.
    """

    value: str | list[str] | None
    line: str
    fault: str = ""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a file, with what it extends.

    Attributes:
        settings: by key.
        preset: the key `preset`.
        environ: values of the variables that its values may name.
    """

    settings: dict[str, Setting]
    preset: dict[str, Any]
    environ: Mapping[str, str]

    def value_of(self, key: str, in_path: bool) -> str | list[str] | None:
        """Value of a key with its variables filled in; None if that leaves it empty.

        Raises:
            UserError: a flag cannot have this value, or a variable is not set.
        """
        setting = self.settings[key]
        if setting.fault:
            hint = value_hint(key)
            raise UserError(f"{setting.fault} {key}: {hint}." if hint else setting.fault)
        source = f"{setting.line}: {key}"
        expand = expand_path if in_path else expand_text
        if isinstance(setting.value, list):
            return [expand(text, source, self.environ) for text in setting.value]
        if not setting.value:
            return setting.value
        return expand(setting.value, source, self.environ) or None


def file_of(line: str) -> str:
    """The file of a FILE:LINE."""
    return line.rpartition(":")[0]


def read_file(name: str, command: str, environ: Mapping[str, str]) -> ConfigFile:
    """Read a file and what it extends.

    Args:
        name: path of the file, or name of a preset that is shipped.
        command: subcommand whose flags the keys are.
        environ: environment variables.

    Raises:
        UserError: a file is missing or no YAML, or its keys are no names or are there twice.
    """
    path = _find(expand_path(name, "--config", environ), command, None, f"--config {name}")
    content = _read(path, command, (), environ)
    if not content.preset:
        return content
    return replace(content, environ={**environ, **variables(content.preset, environ)})


def _find(name: str, command: str, folder: Path | None, source: str) -> Path:
    """Path of a file or preset.

    Args:
        name: what `--config` or `extends` says.
        command: the subcommand, for presets.
        folder: folder of the file that extends this one; None for `--config`.
        source: flag or FILE:LINE, for the message.
    """
    path = Path(name) if folder is None else folder / name
    if path.is_file():
        return path
    preset = find_preset(command, name)
    if preset is not None:
        return preset
    if path.exists():
        kind = "is a folder" if path.is_dir() else "is no regular file, and would be read several times"
        raise UserError(f"{source}: {path} {kind}; give the path of a YAML file.")
    names = ", ".join(preset_names(command))
    presets = f"the presets of `dschat {command}` are {names}" if names else f"`dschat {command}` has no presets"
    raise UserError(f"{source}: there is no such file; give the path of a YAML file ({presets}).")


def _read(path: Path, command: str, below: tuple[Path, ...], environ: Mapping[str, str]) -> ConfigFile:
    """Read a file and what it extends; `below` are the files that extend it."""
    if path.resolve() in below:
        raise UserError(f"{path} extends itself: remove `extends` from one of {', '.join(map(str, below))}.")
    settings: dict[str, Setting] = {}
    preset: dict[str, Any] = {}
    base = ConfigFile({}, {}, environ)
    line_of: dict[str, str] = {}
    for key_node, node in _top_level(path):
        line = f"{path}:{key_node.start_mark.line + 1}"
        key = _key(key_node, line)
        if key in line_of:
            raise UserError(f"{line}: {key} is there twice, first at {line_of[key]}; keep one of them.")
        line_of[key] = line
        if key == "extends":
            name = _extended(node, line, environ)
            base_path = _find(name, command, path.parent, f"{line}: extends: {name}")
            base = _read(base_path, command, (*below, path.resolve()), environ)
        elif key == "preset":
            preset = _preset(node, path, line)
        else:
            settings[key] = _setting(node, key, line)

    # Keys of the file that is extended come first.
    inherited = {key: setting for key, setting in base.settings.items() if key not in settings}
    return ConfigFile(inherited | settings, base.preset | preset, environ)


def _top_level(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a file as nodes, not yet converted; an empty file has none."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))
        loader.name = str(path)  # in messages
        root = loader.get_single_node()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}; correct the file.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        raise UserError(f"{path}:{line}: the file must hold `flag: value` on each line, not a list or a single value.")
    return list(root.value)


def _setting(node: yaml.Node, key: str, line: str) -> Setting:
    """Value of a key. A fault is reported later, because a key that is not a flag is reported first."""
    try:
        return Setting(_text(node, f"{line}: {key}"), line)
    except UserError as error:
        return Setting(None, line, str(error))


def _key(node: yaml.Node, line: str) -> str:
    """A flag's name in the spelling with underscores."""
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise UserError(f"{line}: a key must be the name of a flag.")
    return str(node.value).removeprefix("--").replace("-", "_")


def _extended(node: yaml.Node, line: str, environ: Mapping[str, str]) -> str:
    """The file or preset that `extends` names."""
    name = _text(node, f"{line}: extends")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{line}: extends must be one file or preset; to combine several, let each of them extend the next."
        )
    return expand_path(name, f"{line}: extends", environ)


def _preset(node: yaml.Node, path: Path, line: str) -> dict[str, Any]:
    """The key `preset` of a preset that is shipped."""
    if not path.resolve().is_relative_to(PRESETS):
        raise UserError(
            f"{line}: only shipped presets have the key preset; to start from a preset, write `extends: NAME`."
        )
    loader = yaml.SafeLoader("")
    content: dict[str, Any] = loader.construct_object(node, deep=True)
    return content


def _text(node: yaml.Node, source: str) -> str | list[str] | None:
    """A value as it is written. YAML's own types do not matter, as `on` for true or `1e-5` for a text."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    items = node.value if isinstance(node, yaml.SequenceNode) else [None]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise UserError(f"{source} must be a value or a list of values: flags are not nested.")
    texts: list[str] = []
    for item in items:
        text = _text(item, source)
        if not isinstance(text, str):
            raise UserError(f"{source} has an empty item in its list: remove it, or write '' for an empty text.")
        texts.append(text)
    return texts


def _scalar(node: yaml.ScalarNode) -> str | None:
    """A single value as it is written, with infinity in our spelling; None for null."""
    text = str(node.value)
    if node.tag == NULL:
        return None
    if node.tag == FLOAT:
        return INFINITY.get(text.lower(), text)
    return text
