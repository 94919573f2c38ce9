# SPDX-License-Identifier: Apache-2.0
"""A command line's parser from the flags of a command. It gives texts, which `dschat.settings.parse` reads."""

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from dschat.settings.flag_types import KINDS, as_text, type_of
from dschat.settings.flags import Flag, flags_by_spelling, flags_of
from dschat.settings.other_names import inert_flags, suggestion

# Words that are values although they begin with a dash; argparse alone does not know exponents and infinities.
NEGATIVE_NUMBER = re.compile(r"-((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf)$", re.IGNORECASE)
ONCE = {  # what to do where a flag is given twice
    "config": "give one file, which may build on another: `extends: FILE`",
    "several": "give it once, followed by all of its values",
}


class FlagParser(argparse.ArgumentParser):
    """The flags of a command in their sections, each spelled with underscores and hyphens.

    Attributes:
        inert: flags that are accepted with a warning, and why they do nothing.
        takes_files: there is --config; `dschat plan` has a flag of this name with another meaning.
    """

    def __init__(self, flags: type, prog: str | None = None) -> None:
        """Add every flag of a command, the flags about files, and for a training step the flags without effect."""
        self._declared = flags_of(flags)
        self._by_spelling = flags_by_spelling(flags)
        self._bare_words = [name for name, flag in self._declared.items() if flag.positional]
        self._has_secrets = any(flag.secret for flag in self._declared.values())
        self.inert = inert_flags(flags)
        self.takes_files = "config" not in self._declared
        super().__init__(
            prog,
            getattr(flags, "usage", None if self._bare_words else "%(prog)s [flags]"),
            inspect.cleandoc(flags.__doc__ or ""),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._negative_number_matcher = NEGATIVE_NUMBER
        takes_bare_words = bool(self._bare_words) or hasattr(flags, "other_words")
        sections: dict[str, Any] = {}
        for flag in self._declared.values():
            title = flag.section
            if title is not None and title not in sections:
                sections[title] = self.add_argument_group(title)
            _add(sections.get(title or "", self), flag, takes_bare_words)
        if self.inert:
            group = self.add_argument_group("accepted with a warning, without effect")
            for name, reason in self.inert.items():
                group.add_argument(*spellings(name), dest=name, nargs="?", metavar="VALUE", help=reason)
        if self.takes_files:
            self._add_file_flags()

    def _add_file_flags(self) -> None:
        """Add the flags of every command that are about files."""
        group = self.add_argument_group("files")
        file_help = "YAML file of flags, or the name of a preset; flags win"
        group.add_argument("--config", metavar="FILE", action=_GivenOnce, const=ONCE["config"], help=file_help)
        print_help = "print every value with where it comes from, and end"
        group.add_argument(*spellings("print_config"), action="store_true", help=print_help)
        schema_help = "print a JSON schema for such files, with which editors complete and check them, and end"
        group.add_argument(*spellings("print_schema"), action="store_true", help=schema_help)

    def read(self, words: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
        """Texts by flag, a list of them for a flag with several values, and the words that are no flags.

        Flags that are not given are missing: defaults come later, after files.
        """
        namespace, other_words = self.parse_known_args(words)
        return vars(namespace), other_words

    def has(self, name: str) -> bool:
        """Whether a file may give a flag, whose name has underscores and no dashes before it."""
        return name in self._by_spelling or name in self.inert

    def unknown(self, key: str, line: str) -> str:
        """Message about a key of a file that is not a flag.

        Args:
            key: the key.
            line: its FILE:LINE.
        """
        if key == "config":
            return f"{line}: config is given on the command line; in a file, write `extends: FILE`."
        if f"--{key}" in self._option_string_actions:
            return f"{line}: {key} is given on the command line alone."
        hint = self._hint(key, [*self._by_spelling, *self.inert, "extends"])
        return f"{line}: {key} is not a flag of `{self.prog}`; {hint or '--help lists the flags.'}"

    def _hint(self, name: str, known: Iterable[str]) -> str:
        """What an unknown flag may have meant; empty if no flag is like it."""
        other_trainers = suggestion(name, self.has)
        if other_trainers:
            return other_trainers
        nearest = difflib.get_close_matches(f"--{name}", [f"--{known_name}" for known_name in known], n=1)
        return f"did you mean {nearest[0]}?" if nearest else ""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after one line: one name of the flag, and no secrets."""
        line = re.sub(r"(argument --[\w.]+)[^:]*:", r"\1:", " ".join(message.split()), count=1)
        if self._has_secrets:
            line = re.sub(r"(invalid \w+ value|invalid choice|ignored explicit argument).*", r"\1", line)
        self.exit(2, f"{self.prog}: error: {line} (--help lists the flags)\n")

    def error_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit as `error` does, with a suggestion for each unknown flag that is like a flag of the command."""
        if self._has_secrets:
            self.error("some words are no flags of this command (not repeated here: one may be a key)")
        options: list[str] = []
        for option in self._option_string_actions:
            if "-" not in option[2:]:
                options.append(option.removeprefix("--"))
        hints: dict[str, str] = {}
        for word in unknown:
            name = word.partition("=")[0]
            hint = self._hint(name.removeprefix("--").replace("-", "_"), options) if name.startswith("--") else ""
            if hint:
                hints[name] = hint
        message = f"unrecognized arguments: {' '.join(unknown)}"
        for name, hint in hints.items():
            message += f"; {name}: {hint}" if len(hints) > 1 else f"; {hint}"
        self.error(message)

    def require(self, missing: Iterable[str]) -> None:
        """Exit as `error` does if required flags have no value."""
        shown = ", ".join(name.upper() if name in self._bare_words else f"--{name}" for name in missing)
        if shown:
            self.error(f"the following arguments are required: {shown}")


def spellings(name: str) -> list[str]:
    """`num_samples` → `--num_samples`, `--num-samples`; `n` → `-n`."""
    if len(name) == 1:
        return [f"-{name}"]
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _add(parser: Any, flag: Flag, takes_bare_words: bool) -> None:
    """Add a flag to a parser or to a section of one; `--no_NAME`, too, if it is true by default."""
    flag_type = type_of(flag.type)
    options: dict[str, Any] = {"help": _help(flag), "metavar": flag_type.kind.metavar}
    if flag.choices:
        options["metavar"] = f"{{{','.join(map(str, flag.choices))}}}"
    if flag_type.several:
        options["nargs"] = "*" if flag.may_be_empty else "+"
    if flag.positional:
        if flag.default is not MISSING and not flag_type.several:
            options["nargs"] = "?"
        action = parser.add_argument(flag.name, **(options | {"metavar": flag.name.upper()}))
        action.required = False  # a file may give it; `require` checks it at the end
        return

    names = [flag.name, *(alias.lstrip("-") for alias in flag.aliases)]
    words: list[str] = []
    for name in names:
        words += spellings(name)
    if flag_type.several:
        options |= {"action": _GivenOnce, "const": ONCE["several"]}
    elif flag_type.kind is KINDS[bool]:
        options |= {"nargs": "?", "const": "true"}
        if takes_bare_words:  # an optional value of the flag would swallow one
            options = {"action": "store_const", "const": "true", "help": options["help"]}
    elif flag.alone is not MISSING:
        options |= {"nargs": "?", "const": flag.alone}
    parser.add_argument(*words, dest=flag.name, **options)
    if flag.default is True:
        opposites: dict[str, None] = {}
        for name in names:
            opposites |= dict.fromkeys([f"--no_{name}", f"--no-{name}", f"--no-{name.replace('_', '-')}"])
        off = f"turn --{flag.name} off"
        parser.add_argument(*opposites, dest=flag.name, action="store_const", const="false", help=off)


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


class _GivenOnce(argparse.Action):
    """Refuses a second, different value; `const` says what to do.

    Of other flags the last value counts, so that a command can be repeated with a change at its end.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value or values."""
        if getattr(namespace, self.dest, values) != values:
            parser.error(f"argument --{self.dest}: it is given twice with different values: {self.const}")
        setattr(namespace, self.dest, values)
