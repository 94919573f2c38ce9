# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration, and from a configuration to a JSON file.

Flags of DeepSpeed-Chat that do nothing here are accepted, so that old command lines keep working; each one says why.
"""

import argparse
import copy
import dataclasses
import difflib
import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_origin, get_type_hints

from transformers import HfArgumentParser

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.macro_actions import parse_ngram

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=CommonConfig)

_DROPOUT = "dropout is always off: the policy that samples and the one that is updated must be the same function"
_TEST_MODE = "there is no test mode: give --data_path a smaller file for a short run"

INERT_FLAGS: dict[str, str] = {
    "data_output_path": "data files are read directly, nothing is cached on disk",
    "num_padding_at_beginning": "padding is known from the attention mask, wherever it is",
    "only_optimize_lora": "with LoRA only the adapters and a new head are ever trained",
    "dropout": _DROPOUT,
    "actor_dropout": _DROPOUT,
    "critic_dropout": _DROPOUT,
    "print_answers_interval": "answers are shown at each evaluation: set --eval_interval",
    "print_loss": "losses are always written to metrics.jsonl",
    "add_eot_token": "--end_of_conversation_token alone chooses the token",
    "compute_fp32_loss": "losses are always computed in float32",
    "align_overflow": "actor and critic each handle the overflow of their own fp16 steps",
    "enable_hybrid_engine": "generation uses the training weights, there is no second engine",
    "inference_tp_size": "generation is not split over devices",
    "enable_zero3_generation_gather": "generation gathers the weights whenever they are split",
    "enable_test_mode": _TEST_MODE,
    "test_stop_step": _TEST_MODE,
}


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
    _add_inert_flags(parser, config_class.own_inert_flags)
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
    return json.dumps(content, indent=2) + "\n"


class _Parser(HfArgumentParser):
    """HfArgumentParser with one help group per section, and errors of one line."""

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Make a help group of each class; a field stands in that of the base class that declares it."""
        hints = get_type_hints(dtype, include_extras=True)
        sections = [section for section in dtype.__mro__ if section is not object]
        groups: dict[str, Any] = {}
        owners = {
            field.name: next(
                section for section in reversed(sections) if field.name in inspect.get_annotations(section)
            )
            for field in dataclasses.fields(dtype)
        }
        for section in sections:
            if section in owners.values() and section._argument_group_name not in groups:
                groups[section._argument_group_name] = self.add_argument_group(section._argument_group_name)
        for field in map(copy.copy, dataclasses.fields(dtype)):
            hint = hints[field.name]
            # What turns a word into the value: the function of an Annotated type, else the type itself.
            field.type = hint.__metadata__[0] if get_origin(hint) is Annotated else hint
            field.metadata = MappingProxyType({k: v for k, v in field.metadata.items() if k != "notes"})
            self._parse_dataclass_field(groups[owners[field.name]._argument_group_name], field)

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


class _InertAction(argparse.Action):
    """Takes an optional value, stores nothing and logs one warning however often the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str, **kwargs: Any) -> None:
        """Remember why the flag does nothing."""
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs="?", **kwargs)
        self.reason = reason
        self.warned = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Warn, the first time."""
        if not self.warned:
            logger.warning("%s does nothing here: %s.", self.option_strings[0], self.reason)
        self.warned = True


def _add_inert_flags(parser: argparse.ArgumentParser, own: Mapping[str, str]) -> None:
    """Let `parser` accept every inert flag, in both spellings, with or without a value.

    Args:
        parser: of a step.
        own: flag → reason, of flags that only this step accepts.
    """
    group = parser.add_argument_group("accepted with a warning, without effect")
    for name, reason in (INERT_FLAGS | dict(own)).items():
        options = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        group.add_argument(*options, action=_InertAction, reason=reason, metavar="VALUE", help=reason)
