# SPDX-License-Identifier: Apache-2.0
"""A command line's parser from the flags of a command."""

import argparse
import difflib
import inspect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from dschat.base.errors import UserError
from dschat.settings.flag_types import (
    FlagType,
    as_text,
    is_path,
    positional_flags,
    spellings,
    takes_bare_words,
    truth,
    type_of,
)
from dschat.settings.flags import Flag, flags_of
from dschat.settings.other_names import suggestion, value_hint

logger = logging.getLogger(__name__)

# Words that are values although they begin with a dash; argparse alone does not know exponents and infinities.
NEGATIVE_NUMBER = re.compile(r"-((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf)$", re.IGNORECASE)
NOT_IN_FILES = ("help", "config", "print_config", "print_schema")
EMPTY_PATH = "the path is empty (is a shell variable not set?): give one, or leave it out"
_DROPOUT = "dropout is always off: the policy that samples and the one that is updated must be the same function"
_TEST_MODE = "there is no test mode: give --data_path a smaller file for a short run"

# Flags of DeepSpeed-Chat that old command lines of training hold, and why they do nothing here.
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


class FlagParser(argparse.ArgumentParser):
    """The flags of a command in their sections, each spelled with underscores and hyphens.

    Values that are not given are not in the namespace: defaults come later, after files.
    """

    def __init__(self, flags: type, prog: str | None = None) -> None:
        """Add every flag of a command, and for a training step the flags without effect."""
        usage = getattr(flags, "usage", None if positional_flags(flags) else "%(prog)s [flags]")
        super().__init__(
            prog,
            usage,
            inspect.cleandoc(flags.__doc__ or ""),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._flags = flags
        self._values: dict[str, Any] = {}  # of the flags before the word that is being converted
        self._declared = flags_of(flags)
        self._has_secrets = any(flag.secret for flag in self._declared.values())
        sections: dict[str, Any] = {}
        for flag in self._declared.values():
            title = flag.section
            if title is not None and title not in sections:
                sections[title] = self.add_argument_group(title)
            _add(sections.get(title or "", self), flag, takes_bare_words(flags))
        inert_flags: Mapping[str, str] | None = getattr(flags, "own_inert_flags", None)
        if inert_flags is not None:
            group = self.add_argument_group("accepted with a warning, without effect")
            for name, reason in (INERT_FLAGS | dict(inert_flags)).items():
                group.add_argument(*spellings(name), action=_InertAction, reason=reason, metavar="VALUE", help=reason)

    def read(self, words: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
        """Values by flag, and the words that are no flags of the command."""
        self._values = {}
        namespace, other_words = self.parse_known_args(words)
        return vars(namespace), other_words

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert words."""
        name = f"--{action.dest}" if action.option_strings else action.dest.upper()
        if "" in arg_strings and (action.dest == "config" or self._may_be_left_out(action.dest)):
            self.error(f"argument {name}: {EMPTY_PATH}")
        value = super()._get_values(action, arg_strings)
        if action.option_strings and action.dest != argparse.SUPPRESS:
            self._refuse_repetition(action, value)
        return value

    def _refuse_repetition(self, action: argparse.Action, value: Any) -> None:
        """Refuse another value for --config or a flag with several values that the command line has given already.

        Of a flag with one value the last counts, so that a command can be repeated with a change at its end.
        """
        if self._values.setdefault(action.dest, value) == value:
            return
        twice = "it is given twice with different values"
        if action.dest == "config":
            self.error(f"argument --config: {twice}: give one file, which may build on another: `extends: FILE`")
        if action.nargs in ("+", "*"):
            self.error(f"argument --{action.dest}: {twice}: give it once, followed by all of its values")

    def _may_be_left_out(self, name: str) -> bool:
        """Whether a flag is a path that is not required. Required paths have rules that refuse empty ones."""
        flag = self._declared.get(name)
        return flag is not None and flag.default is None and is_path(self._flags, name)

    def has(self, key: str) -> bool:
        """Whether a key of a file is a flag that a file may give."""
        action = self._option_string_actions.get(spellings(key)[0])
        if action is None:
            return False
        return action.dest in self._declared or action.dest not in NOT_IN_FILES

    def field_of(self, key: str) -> str | None:
        """The name of the flag that a key of a file sets; None for a flag without effect."""
        dest = self._option_string_actions[spellings(key)[0]].dest
        return None if dest == argparse.SUPPRESS else dest

    def unknown(self, key: str, line: str) -> str:
        """Message about a key of a file that is not a flag.

        Args:
            key: the key.
            line: its FILE:LINE.
        """
        if key == "config":
            return f"{line}: config is given on the command line; in a file, write `extends: FILE`."
        if key in NOT_IN_FILES:
            return f"{line}: {key} is given on the command line alone."
        other_trainers = suggestion(key, self.has)
        if other_trainers:
            remedy = f"; {other_trainers}"
        else:
            options = []
            for option in self._option_string_actions:
                if self.has(option.removeprefix("--")):
                    options.append(option)
            remedy = _nearest(f"--{key}", [*options, "--extends"]).replace("--", "")
        return f"{line}: {key} is not a flag of `{self.prog}`{remedy or '; --help lists the flags.'}"

    def value_of(self, key: str, value: str | list[str], line: str) -> dict[str, Any]:
        """Convert the value of a key in a file as that of a command line.

        Args:
            key: the key.
            value: as text.
            line: FILE:LINE of the key, or the name of an environment variable.

        Returns:
            The value by flag; empty for a flag without effect.

        Raises:
            UserError: the flag cannot have this value.
        """
        action = self._option_string_actions[spellings(key)[0]]
        if action.dest == argparse.SUPPRESS:
            action(self, argparse.Namespace(), None, action.option_strings[0])  # warns
            return {}
        flag = self._declared[action.dest]
        flag_type = type_of(flag.type)
        if isinstance(value, list) and not flag_type.several:
            raise UserError(f"{line}: {key} takes one value, not a list.")
        texts = value if isinstance(value, list) else [value]
        if not texts and action.nargs != "*":
            raise UserError(f"{line}: argument --{key}: expected at least one argument.")
        try:
            values = [_read(text, flag, flag_type, self._may_be_left_out(flag.name)) for text in texts]
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{line}: {self._readable(f'argument --{key}: {error}')}.") from error
        if action.const is False:  # the opposite of a flag that is on by default
            values = [not values[0]]
        return {flag.name: values if flag_type.several else values[0]}

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after one line."""
        self.exit(2, f"{self.prog}: error: {self._readable(message)} (--help lists the flags)\n")

    def _readable(self, message: str) -> str:
        """A message of argparse on one line: one name of the flag, no secrets, and what is known to help."""
        line = re.sub(r"(argument --[\w.]+)[^:]*:", r"\1:", " ".join(message.split()), count=1)
        if self._has_secrets:
            line = re.sub(
                r"(invalid \w+ value|invalid choice|ignored explicit argument|ambiguous option).*", r"\1", line
            )
        refused = re.match(r"argument --(\w+): invalid truth value", line)
        hint = value_hint(refused[1]) if refused else ""
        return f"{line}; {hint}" if hint else line

    def error_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit as `error` does, with a suggestion for each unknown flag that is like a flag of the command."""
        if self._has_secrets:
            self.error("some words are no flags of this command (not repeated here: one may be a key)")
        suggestions: dict[str, str] = {}
        for word in unknown:
            name = word.partition("=")[0]
            text = self._suggestion(name) if name.startswith("--") else ""
            if text:
                suggestions[name] = text
        message = f"unrecognized arguments: {' '.join(unknown)}"
        for name, text in suggestions.items():
            message += f"; {name}: {text}" if len(suggestions) > 1 else f"; {text}"
        self.error(message)

    def require(self, missing: Iterable[str]) -> None:
        """Exit as `error` does if required flags have no value."""
        positionals = positional_flags(self._flags)
        shown = ", ".join(name.upper() if name in positionals else f"--{name}" for name in missing)
        if shown:
            self.error(f"the following arguments are required: {shown}")

    def _suggestion(self, unknown: str) -> str:
        """What an unknown word may have meant; empty if no flag is like it."""
        other_trainers = suggestion(unknown.removeprefix("--").replace("-", "_"), self.has)
        return other_trainers or _nearest(unknown, self._option_string_actions).removeprefix("; ")


def _read(text: str, flag: Flag, flag_type: FlagType, may_be_left_out: bool) -> Any:
    """A value from its text in a file. Raises ArgumentTypeError, which says it as argparse does of a word."""
    if not text and may_be_left_out:
        raise argparse.ArgumentTypeError(EMPTY_PATH)
    try:
        value = flag_type.convert(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid {flag_type.kind.__name__} value: {text!r}") from error
    if flag.choices and value is not None and value not in flag.choices:
        choices = ", ".join(map(repr, flag.choices))
        raise argparse.ArgumentTypeError(f"invalid choice: {value!r} (choose from {choices})")
    return value


def _nearest(unknown: str, options: Iterable[str]) -> str:
    """The option that is most like a word, as the end of a message; empty if none is like it."""
    shown = []
    for option in options:
        if "-" not in option[2:] and option not in ("-h", "--help"):
            shown.append(option)
    nearest = difflib.get_close_matches(unknown, shown, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _add(parser: Any, flag: Flag, has_positionals: bool) -> None:
    """Add a flag to a parser or to a section of one."""
    options = {**flag.options, "help": _help(flag)}
    flag_type = type_of(flag.type)
    kind, several, convert = flag_type.kind, flag_type.several, flag_type.convert
    if several:
        options.setdefault("nargs", "*" if flag.default == [] else "+")
    if flag.positional:
        options.setdefault("nargs", None if flag.default is MISSING or several else "?")
        action = parser.add_argument(flag.name, type=convert, metavar=flag.name.upper(), **options)
        action.required = False  # a file's values are converted without it; `require` checks it at the end
        return

    names = [flag.name, *(alias.lstrip("-") for alias in flag.aliases)]
    words: list[str] = []
    for name in names:
        words += spellings(name)
    if kind is bool:
        _add_switch(parser, flag, names, words, options, has_positionals)
        return
    if get_origin(kind) is Literal:
        options.setdefault("choices", get_args(kind))
    options.setdefault("metavar", None if "choices" in options else _metavar(kind))
    parser.add_argument(*words, dest=flag.name, type=convert, **options)


def _add_switch(
    parser: Any, flag: Flag, names: Sequence[str], words: Sequence[str], options: dict[str, Any], has_positionals: bool
) -> None:
    """Add a flag that is true or false, and `--no_NAME` if it is true by default."""
    if has_positionals:  # an optional value of the flag would swallow a positional word
        parser.add_argument(*words, dest=flag.name, action="store_true", **options)
    else:
        options |= {"nargs": "?", "const": True, "type": truth, "metavar": "BOOL"}
        parser.add_argument(*words, dest=flag.name, **options)
    if flag.default is True:
        opposites: list[str] = []
        for name in names:
            opposites += [f"--no_{name}", f"--no-{name}", f"--no-{name.replace('_', '-')}"]
        unique = dict.fromkeys(opposites)
        parser.add_argument(*unique, dest=flag.name, action="store_false", help=f"turn --{flag.name} off")


def _metavar(kind: Any) -> str:
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")


def _help(flag: Flag) -> str:
    """The help line, followed by the default if there is one to show."""
    default = flag.default
    if default is MISSING:
        return f"{flag.help} (required)" if flag.environment is None else flag.help
    if default is None or default is False or default == [] or default == () or default == "":
        return flag.help
    values = default if isinstance(default, list | tuple) else [default]
    shown = " ".join(as_text(value) for value in values)
    escaped = shown.replace("%", "%%")  # argparse formats the help with %
    return f"{flag.help} (default: {escaped})"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag once, without its spelling with hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [option for option in action.option_strings if "-" not in option[2:]]
        metavar = self._get_default_metavar_for_optional(action)
        arguments = self._format_args(action, metavar) if action.nargs != 0 else ""
        return f"{', '.join(shown)} {arguments}".strip()


class _InertAction(argparse.Action):
    """Takes an optional value, stores nothing, and logs one warning however often the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str, **kwargs: Any) -> None:
        """Remember why the flag does nothing."""
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs="?", **kwargs)
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
