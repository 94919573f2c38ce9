# SPDX-License-Identifier: Apache-2.0
"""A command line's parser from the flags of a command."""

import argparse
import difflib
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from dschat.base.errors import UserError
from dschat.settings.flags import Flag, flags_of
from dschat.settings.other_names import OTHER_VALUES, suggestion
from dschat.settings.words import (
    APPEND,
    as_text,
    is_path,
    kind_of,
    positional_flags,
    spellings,
    takes_bare_words,
    truth,
    words_of_several,
)

logger = logging.getLogger(__name__)

NOT_IN_FILES = ("help", "config", "print_config")
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
        """Adds every flag of a command, and for a training step the flags without effect."""
        usage = getattr(flags, "usage", None if positional_flags(flags) else "%(prog)s [flags]")
        super().__init__(
            prog,
            usage,
            inspect.cleandoc(flags.__doc__ or ""),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._flags = flags
        self._place = ""  # of the file that words come from
        self._declared = flags_of(flags)
        self._discreet = any(flag.secret for flag in self._declared.values())
        sections: dict[str, Any] = {}
        for flag in self._declared.values():
            title = flag.section
            if title is not None and title not in sections:
                sections[title] = self.add_argument_group(title)
            _add(sections.get(title or "", self), flag, takes_bare_words(flags))
        own: Mapping[str, str] | None = getattr(flags, "own_inert_flags", None)
        if own is not None:
            group = self.add_argument_group("accepted with a warning, without effect")
            for name, reason in (INERT_FLAGS | dict(own)).items():
                group.add_argument(*spellings(name), action=_InertAction, reason=reason, metavar="VALUE", help=reason)

    def given(self, words: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
        """Values by field, and the words that are no flags of these."""
        namespace, rest = self.parse_known_args(words)
        return vars(namespace), rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Keep a flag's value `--`, which argparse would drop as the mark before words without dashes."""
        if "" in arg_strings and (action.dest == "config" or self._may_be_left_out(action.dest)):
            name = f"--{action.dest}" if action.option_strings else action.dest.upper()
            self.error(f"argument {name}: the path is empty (is a shell variable not set?): give one, or leave it out")
        words = _FlagWords(arg_strings) if action.option_strings else arg_strings
        return super()._get_values(action, words)

    def _may_be_left_out(self, name: str) -> bool:
        """Whether a flag is a path that has a default; those that are required have rules of their own."""
        flag = self._declared.get(name)
        return flag is not None and flag.default is None and is_path(self._flags, name)

    def has(self, key: str) -> bool:
        """Whether a key of a file is a flag that files may give."""
        action = self._option_string_actions.get(spellings(key)[0])
        if action is None or key.endswith(APPEND):
            return False
        return action.dest in self._declared or action.dest not in NOT_IN_FILES

    def field_of(self, key: str) -> str | None:
        """The field of a key of a file; None of a flag without effect."""
        dest = self._option_string_actions[spellings(key)[0]].dest
        return None if dest == argparse.SUPPRESS else dest

    def unknown(self, key: str, place: str) -> str:
        """What is said of a key that is no flag."""
        if key == "config":
            return f"{place}: config is given on the command line; in a file, write `extends: FILE`."
        if key in NOT_IN_FILES:
            return f"{place}: {key} is given on the command line alone."
        elsewhere = suggestion(key, self.has)
        names = [option for option in self._option_string_actions if self.has(option.removeprefix("--"))]
        near = f"; {elsewhere}" if elsewhere else _nearest(f"--{key}", [*names, "--extends"]).replace("--", "")
        return f"{place}: {key} is no flag of `{self.prog}`{near or '; --help lists the flags.'}"

    def value_of(self, key: str, value: str | list[str], place: str) -> dict[str, Any]:
        """The field of a key in a file with its value, as a command line would give it; {} of a flag without effect.

        Raises:
            UserError: the flag has no such value; names the place.
        """
        action = self._option_string_actions[spellings(key)[0]]
        words = value if isinstance(value, list) else [value]
        if isinstance(value, list) and action.nargs not in ("+", "*"):
            raise UserError(f"{place}: {key} takes one value, not a list.")
        with self._at(place):
            if action.nargs == 0:  # a flag that takes no value on a command line
                return {action.dest: action.const if self._truth_of(key, words[0]) else not action.const}
            return vars(self.parse_args(words_of_several(key, words)))

    def _truth_of(self, key: str, word: str) -> bool:
        try:
            return truth(word)
        except argparse.ArgumentTypeError as error:
            self.error(f"argument --{key}: {error}")

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after one line; raise UserError where the words come from a file."""
        line = re.sub(r"(argument --[\w.]+)[^:]*:", r"\1:", " ".join(message.split()), count=1)
        if self._discreet:
            line = re.sub(
                r"(invalid \w+ value|invalid choice|ignored explicit argument|ambiguous option).*", r"\1", line
            )
        refused = re.match(r"argument --(\w+): invalid truth value", line)
        if refused and refused[1] in OTHER_VALUES:
            line += f"; {OTHER_VALUES[refused[1]]}"
        if self._place:
            raise UserError(f"{self._place}: {line}.")
        self.exit(2, f"{self.prog}: error: {line} (--help lists the flags)\n")

    def error_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit as `error` does, with the nearest flag that exists."""
        if self._discreet:
            self.error("some words are no flags of this command (not repeated here: one may be a key)")
        names = list(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("--")))
        near = [(name, self._suggestion(name)) for name in names]
        several = sum(bool(text) for _, text in near) > 1
        texts = [f"; {name}: {text}" if several else f"; {text}" for name, text in near if text]
        self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(texts)}")

    def require(self, missing: Iterable[str]) -> None:
        """Exit as `error` does where fields that need a value have none."""
        places = positional_flags(self._flags)
        shown = ", ".join(name.upper() if name in places else f"--{name}" for name in missing)
        if shown:
            self.error(f"the following arguments are required: {shown}")

    def _suggestion(self, unknown: str) -> str:
        """What a word of a command line that is no flag may have meant; nothing where no flag is like it."""
        elsewhere = suggestion(unknown.removeprefix("--").replace("-", "_"), self.has)
        return elsewhere or _nearest(unknown, self._option_string_actions).removeprefix("; ")

    @contextmanager
    def _at(self, place: str) -> Iterator[None]:
        self._place = place
        try:
            yield
        finally:
            self._place = ""


def _nearest(unknown: str, options: Iterable[str]) -> str:
    """The option that is most like a word, as the end of a message; empty where none is like it."""
    plain = [option for option in options if not {*option[2:]} & {*"-+"}]
    near = difflib.get_close_matches(unknown, plain, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _add(parser: Any, flag: Flag, has_positionals: bool) -> None:
    """Adds a flag to a parser or to a section of one."""
    options = {**flag.options, "help": _help(flag)}
    kind, several, convert = kind_of(flag.type)
    if several:
        options.setdefault("nargs", "*" if flag.default == [] else "+")
    if flag.positional:
        options.setdefault("nargs", None if flag.default is MISSING or several else "?")
        word = parser.add_argument(flag.name, type=convert, metavar=flag.name.upper(), **options)
        word.required = False  # a file's values are read without it; `require` asks for it at the end
        return
    names = [flag.name, *(alias.lstrip("-") for alias in flag.aliases)]
    words = [word for name in names for word in spellings(name)]
    if kind is bool:
        value = {"nargs": "?", "const": True, "type": convert, "metavar": "BOOL"}
        if has_positionals:  # which a value of a flag would swallow
            value = {"action": "store_true"}
        parser.add_argument(*words, dest=flag.name, **(options | value))
        if flag.default is True:
            opposites = dict.fromkeys(word for name in names for word in (f"--no_{name}", f"--no-{name}"))
            opposites |= dict.fromkeys(f"--no-{name.replace('_', '-')}" for name in names)
            parser.add_argument(*opposites, dest=flag.name, action="store_false", help=f"turn --{flag.name} off")
        return
    if get_origin(kind) is Literal:
        options.setdefault("choices", get_args(kind))
    options.setdefault("metavar", None if "choices" in options else _metavar(kind))
    parser.add_argument(*words, dest=flag.name, type=convert, **options)
    if several:
        options |= {"action": _AppendAction, "nargs": None, "help": argparse.SUPPRESS}
        longer = [f"{spellings(name)[0]}{APPEND}" for name in names]
        parser.add_argument(*longer, dest=flag.name, type=convert, **options)


def _metavar(kind: Any) -> str:
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")


def _help(flag: Flag) -> str:
    """The help line with the default behind it, where there is one to show."""
    default = flag.default
    if default is MISSING:
        return f"{flag.help} (required)" if flag.environment is None else flag.help
    if default is None or default is False or default == [] or default == () or default == "":
        return flag.help
    shown = " ".join(map(as_text, default)) if isinstance(default, list | tuple) else as_text(default)
    text = f"{flag.help} (default: {shown})"
    return text.replace("%", "%%") if "%" in shown else text


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag once, without its spelling with hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [option for option in action.option_strings if "-" not in option[2:]]
        metavar = self._get_default_metavar_for_optional(action)
        arguments = self._format_args(action, metavar) if action.nargs != 0 else ""
        return f"{', '.join(shown)} {arguments}".strip()


class _FlagWords(list[str]):
    """The words behind a flag, from which none is removed."""

    def remove(self, word: str) -> None:
        """Remove nothing."""


class _AppendAction(argparse.Action):
    """Adds one value to those of the same flag before it; a value that begins with a dash needs it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append."""
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), values])


class _InertAction(argparse.Action):
    """Takes an optional value, stores nothing and logs one warning however often the flag is given."""

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
