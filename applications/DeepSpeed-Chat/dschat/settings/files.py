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
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dschat.base.errors import UserError
from dschat.settings.file_values import ConfigFile, Setting
from dschat.settings.presets import PRESETS, find_preset, preset_names, variables
from dschat.settings.variables import expand_path


def read_file(name: str, command: str, environ: Mapping[str, str]) -> ConfigFile:
    """Read a file and what it extends.

    Args:
        name: path of the file, or name of a preset that is shipped.
        command: subcommand whose flags the keys are.
        environ: environment variables.

    Raises:
        UserError: a file is missing or is not valid YAML, or a key is no name of a flag or is repeated.
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
    for key_node, node in _top_level(path):
        line = f"{path}:{key_node.start_mark.line + 1}"
        key = _key(key_node, line)
        if key in settings:
            raise UserError(f"{line}: {key} is there twice, first at {settings[key].line}; keep one of them.")
        settings[key] = Setting(key, node, line)

    base = ConfigFile({}, {}, environ)
    extends = settings.pop("extends", None)
    if extends is not None:
        name = _extended(extends, environ)
        base_path = _find(name, command, path.parent, f"{extends.line}: extends: {name}")
        base = _read(base_path, command, (*below, path.resolve()), environ)
    preset: dict[str, Any] = {}
    if "preset" in settings:
        preset = _preset(settings.pop("preset"), path)
    # Keys of the file that is extended come first: a later key wins, also over an alias of the same flag.
    inherited = {key: setting for key, setting in base.settings.items() if key not in settings}
    return ConfigFile(inherited | settings, base.preset | preset, environ)


def _top_level(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a file as nodes, not yet converted; an empty file has none."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            root = yaml.compose(stream, yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}; correct the file.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        raise UserError(f"{path}:{line}: the file must hold `flag: value` on each line, not a list or a single value.")
    return list(root.value)


def _key(node: yaml.Node, line: str) -> str:
    """A flag's name in the spelling with underscores."""
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise UserError(f"{line}: a key must be the name of a flag.")
    return str(node.value).removeprefix("--").replace("-", "_")


def _extended(extends: Setting, environ: Mapping[str, str]) -> str:
    """The file or preset that `extends` names."""
    name = extends.text()
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{extends.line}: extends must be one file or preset; to combine several, let each of them extend the next"
            " one."
        )
    return expand_path(name, f"{extends.line}: extends", environ)


def _preset(preset: Setting, path: Path) -> dict[str, Any]:
    """The key `preset` of a preset that is shipped."""
    if not path.resolve().is_relative_to(PRESETS):
        raise UserError(
            f"{preset.line}: only shipped presets have the key preset; to start from a preset, write `extends: NAME`."
        )
    content: dict[str, Any] = yaml.SafeLoader("").construct_object(preset.node, deep=True)
    return content
