# SPDX-License-Identifier: Apache-2.0
"""What a file of `--config` says, as files.py reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dschat.base.errors import UserError
from dschat.settings.other_names import value_hint

NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Setting:
    """The value of a key.

    Attributes:
        key: the key, with underscores.
        node: the value, which YAML has not converted.
        line: FILE:LINE.
    """

    key: str
    node: yaml.Node
    line: str

    def text(self) -> str | list[str] | None:
        """The value as it is written, or several; YAML's own types, as `on` for true, do not matter. None for null.

        Raises:
            UserError: the value is nested, or a list has an empty item.
        """
        if isinstance(self.node, yaml.ScalarNode):
            return _scalar(self.node)
        items = self.node.value if isinstance(self.node, yaml.SequenceNode) else [None]
        texts: list[str] = []
        for item in items:
            if not isinstance(item, yaml.ScalarNode):
                hint = value_hint(self.key) or "flags are not nested"
                raise UserError(f"{self.line}: {self.key} must be a value or a list of values: {hint}.")
            text = _scalar(item)
            if text is None:
                raise UserError(
                    f"{self.line}: {self.key} has an empty item in its list: remove it, or write '' for an empty text."
                )
            texts.append(text)
        return texts


def _scalar(node: yaml.ScalarNode) -> str | None:
    return None if node.tag == NULL else str(node.value)


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
