# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration, and from a configuration to a JSON file."""

import argparse
import dataclasses
import difflib
import inspect
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_origin, get_type_hints

from transformers import HfArgumentParser

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.inert import add_inert_flags
from dschat.config.macro_actions import parse_ngram

Config = TypeVar("Config", bound=CommonConfig)


def parse(config_class: type[Config], argv: Sequence[str] | None = None, runs_here: bool = True) -> Config:
    """Read, convert and check a command line.

    Args:
        config_class: SFTConfig, RewardConfig, DPOConfig or PPOConfig.
        argv: the arguments; those of the process if None.
        runs_here: the packages that the flags need must be installed.

    Returns:
        A configuration whose every rule holds.

    Raises:
        UserError: when a value or a combination of flags is not possible.
        SystemExit: status 2 after one line on stderr for an unknown flag or a malformed value; status 0 after --help.
    """
    parser = _Parser(
        cast(Any, config_class),
        usage="%(prog)s [flags]",
        description=(config_class.__doc__ or "").strip(),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_inert_flags(parser, config_class.own_inert_flags)
    config, unknown = parser.parse_args_into_dataclasses(
        args=argv, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        parser.error_unknown(unknown)
    config.validate()
    if runs_here:
        config.check_installed()
    return config


def to_json(config: CommonConfig, plan: BatchPlan) -> str:
    """Every flag as JSON, with the batch sizes that follow from them under `batch_plan`. JSON has no infinity: a flag
    of that value is written as the text "inf".
    """
    flags = {name: "inf" if value == math.inf else value for name, value in dataclasses.asdict(config).items()}
    content = flags | {"batch_plan": dataclasses.asdict(plan)}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


class _Parser(HfArgumentParser):
    """HfArgumentParser with one help group per section, and errors of one line."""

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Make a help group of each class; a field stands in that of the base class that declares it."""
        hints = get_type_hints(dtype, include_extras=True)
        sections = [section for section in dtype.__mro__ if section is not object]
        groups: dict[type, Any] = {}
        owners = {
            field.name: next(
                section for section in reversed(sections) if field.name in inspect.get_annotations(section)
            )
            for field in dataclasses.fields(dtype)
        }
        for section in sections:
            if section in owners.values():
                groups[section] = self.add_argument_group(section._argument_group_name)
        for field in dataclasses.fields(dtype):
            field.type = _converter(hints[field.name])
            self._parse_dataclass_field(groups[owners[field.name]], field)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after one line."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (--help lists the flags)\n")

    def error_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit as `error` does, with the nearest flag that exists."""
        known = [option for option in self._option_string_actions if "-" not in option[2:]]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _converter(hint: Any) -> Any:
    """What turns a word into a field's value: the field's type, or the function of an Annotated one."""
    return hint.__metadata__[0] if get_origin(hint) is Annotated else hint


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show, and each flag once, without its spelling with hyphens."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.option_strings[0].startswith("--no_"):
            return f"turn --{action.dest} off"
        if action.required:
            return f"{action.help} (required)"
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {int: "INT", float: "FLOAT", str: "TEXT", parse_ngram: "INT"}
        return names.get(cast(Any, action.type), "BOOL")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [option for option in action.option_strings if "-" not in option[2:]]
        arguments = (
            self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        )
        return f"{', '.join(shown)} {arguments}".strip()
