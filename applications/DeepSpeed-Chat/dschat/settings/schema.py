# SPDX-License-Identifier: Apache-2.0
"""JSON schema of a command's YAML files, with which an editor completes and checks them.

    dschat ppo --print_schema > ppo.schema.json

and, in the first line of the file for editors with a YAML language server:

    # yaml-language-server: $schema=ppo.schema.json

The schema knows types, choices, ranges and the names of flags. Rules between flags are checked by the command itself.
How YAML may hold a value of each type is said in flag_types.py: `KINDS`.
"""

import math
from collections.abc import Iterable, Mapping

from dschat.settings.flag_types import ANY_TEXT, Schema, type_of
from dschat.settings.flags import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    NOT_EMPTY,
    UP_TO_1,
    ZERO_TO_ONE,
    Flag,
    Range,
    flags_of,
)
from dschat.settings.other_names import inert_flags

VARIABLE: Schema = {"type": "string", "pattern": r"\$\{"}  # a value may name variables of the environment
# Ranges that a schema can express; others are told in the description.
LIMITS: Mapping[Range | None, Schema] = {
    NOT_EMPTY: {"minLength": 1},
    AT_LEAST_0: {"minimum": 0},
    AT_LEAST_1: {"minimum": 1},
    ABOVE_0: {"exclusiveMinimum": 0},
    ZERO_TO_ONE: {"minimum": 0, "maximum": 1},
    BELOW_1: {"minimum": 0, "exclusiveMaximum": 1},
    UP_TO_1: {"exclusiveMinimum": 0, "maximum": 1},
}


def json_schema(command: type, title: str) -> Schema:
    """JSON schema (draft 2020-12) of the files that `--config` of a command takes.

    Args:
        command: the class of its flags.
        title: name of the command.
    """
    properties: Schema = {
        "extends": {"type": "string", "description": "preset or file with further values, which this file overrides"},
        "preset": {"type": "object", "description": "only in presets that are shipped"},
    }
    for name, flag in flags_of(command).items():
        schema = _flag_schema(flag)
        properties[name] = schema
        for alias in flag.aliases:
            properties[alias.lstrip("-")] = schema | {"description": f"same as {name}"}
    for name, reason in inert_flags(command).items():
        properties[name] = {"deprecated": True, "description": f"without effect: {reason}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "patternProperties": {_other_spellings(properties): {}},
        "additionalProperties": False,
    }


def _other_spellings(names: Iterable[str]) -> str:
    """A pattern of the names with hyphens in the place of underscores, and with dashes before them."""
    patterns = "|".join(names).replace(".", r"\.").replace("_", "[-_]")
    return f"^(--)?({patterns})$"


def _flag_schema(flag: Flag) -> Schema:
    """Schema of a flag's value; null stands for the default."""
    value_schemas = _value_schemas(flag)
    alternatives = [*value_schemas, {"type": "null"}]
    if type_of(flag.type).several:
        alternatives.append({"type": "array", "items": {"anyOf": value_schemas}})
    schema: Schema = {"description": flag.help, "anyOf": alternatives}
    is_finite = not isinstance(flag.default, float) or math.isfinite(flag.default)
    if isinstance(flag.default, bool | int | float | str | list | tuple) and is_finite:
        schema["default"] = flag.default
    if flag.range is not None and flag.range not in LIMITS:
        schema["description"] += f" (must be {flag.range[1]})"
    return schema


def _value_schemas(flag: Flag) -> list[Schema]:
    """Alternatives for a single value of a flag, as YAML may read it."""
    if flag.choices:
        choices = [*flag.choices, *(str(choice) for choice in flag.choices if isinstance(choice, int))]
        if "on" in choices:  # YAML 1.1 reads `on` and `off` as booleans
            choices += [True, False]
        return [{"enum": choices}, VARIABLE]
    first, *others = type_of(flag.type).kind.schemas
    limited = first | LIMITS.get(flag.range, {})
    return [limited] if first is ANY_TEXT else [limited, *others, VARIABLE]
