# SPDX-License-Identifier: Apache-2.0
"""Documents that are made from the declarations of the flags.

    python -m dschat.reference > docs/flags.md     all flags
    python -m dschat.reference names               the tables of docs/coming-from-trl.md

`dschat completion` prints the completion of shells.
"""

import re
import sys
from argparse import SUPPRESS, Action
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dschat.cli import COMMANDS, Command
from dschat.settings import other_names
from dschat.settings.commands import CompletionOptions
from dschat.settings.flags import flags_by_spelling, flags_of
from dschat.settings.parser import FlagParser
from dschat.settings.presets import preset_names

BASH = """_dschat() {
    local IFS=$'\\n' current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=""
    local two="${COMP_WORDS[1]:-} ${COMP_WORDS[2]:-}" one=${COMP_WORDS[1]:-} command
    case "$previous:$two" in
@PRESETS@
    esac
    for command in "$two" "$one"; do
        [[ -n $words ]] || case "$command" in
@COMMANDS@
        esac
    done
    [[ $COMP_CWORD -eq 1 ]] && words="@NAMES@"
    mapfile -t COMPREPLY < <(compgen -W "$(tr ' ' '\\n' <<<"$words")" -- "$current")
    [[ ${#COMPREPLY[@]} -gt 0 ]] || mapfile -t COMPREPLY < <(compgen -f -- "$current")
}
complete -F _dschat dschat
"""
STEPS = ("sft", "reward", "dpo", "ppo")  # the commands that other trainers have, too


def page() -> Iterator[str]:
    """The lines of docs/flags.md."""
    yield "# Flags\n"
    yield "Made by `python -m dschat.reference > docs/flags.md` from the declarations. Every flag may be spelled with"
    yield "`_` or `-`, and be given in the file of `--config` under the name shown here. `--print_config` shows where"
    yield "a value comes from: the command line, the file (or what it `extends`), the environment, or the default."
    yield "`--print_schema` prints a JSON schema, with which editors complete and check such files."
    for name, command in COMMANDS.items():
        yield f"\n## dschat {name}\n"
        yield f"{command.summary[0].upper()}{command.summary[1:]}.\n"
        presets = preset_names(name)
        if presets:
            yield f"Presets: {', '.join(f'`{preset}`' for preset in presets)}.\n"
        yield "| flag | description |"
        yield "|---|---|"
        flags = flags_of(command.flags_class())
        for action in _actions(command):
            yield _table_row(action, flags[action.dest].choices)


def _table_row(action: Action, choices: Collection[Any]) -> str:
    """A flag's row in the table of its command."""
    spellings = _spellings(action) or [str(action.dest).upper()]
    names = ", ".join(f"`{spelling}`" for spelling in spellings)
    text = str(action.help).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
    if choices and action.option_strings:
        text += f" ({', '.join(map(str, choices))})"
    return f"| {names} | {text} |"


def commands_with_flag(flag: str) -> list[str]:
    """Names of the subcommands that have a flag, without dashes; those of one word first."""
    names: list[str] = []
    for name, command in COMMANDS.items():
        if flag in flags_by_spelling(command.flags_class()):
            names.append(name)
    return sorted(names, key=lambda name: len(name.split()))


def names_page() -> Iterator[str]:
    """The lines of the tables of docs/coming-from-trl.md."""
    yield "| setting | of | here | note |"
    yield "|---|---|---|---|"
    for setting in other_names.settings():
        names = dict.fromkeys(f"`{name}`" for names in setting.names.values() for name in names)
        ours = _flags_as_cell(setting.flags)
        yield _joined_row(", ".join(names), ", ".join(setting.names), ours, _as_markdown(setting.note))
    yield ""
    yield "| command or algorithm | here | note |"
    yield "|---|---|---|"
    for command in other_names.commands():
        names = dict.fromkeys(f"`{name}`" for name in command.names)
        ours = other_names.alternatives([f"`{words}`" for words in command.here])
        yield _joined_row(", ".join(names), ours, _as_markdown(command.note))


def _joined_row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _flags_as_cell(flags: Sequence[str]) -> str:
    """Flags as a cell of the table; where there are several, each with its commands."""
    if not flags:
        return "no flag"
    if len(flags) == 1:
        return f"`{flags[0]}`"
    cells = []
    for words in flags:
        names = commands_with_flag(words.split()[0].removeprefix("--"))
        shown = [name for name in names if name in STEPS] or names[:1]
        rest = " and others" if len(names) > 1 and shown[0] not in STEPS else ""
        cells.append(f"`{words}` ({', '.join(shown)}{rest})")
    return ", ".join(cells)


def _as_markdown(note: str) -> str:
    """A note with its flags as code and its pages as links."""
    flag = r"--\w+(?: (?:\d[\d.]*|N|token)\b)?"
    coded = re.sub(rf"dschat plan|{flag}(?: {flag})*", r"`\g<0>`", note)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", coded)


def completion(options: CompletionOptions) -> str:
    """A script for bash. zsh can read it with its bashcompinit."""
    # Flags of a command; of its first word also the second ones, such as `check` of `data check`.
    words_of: defaultdict[str, list[str]] = defaultdict(list)
    presets: list[str] = []
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        if second:
            words_of[first].append(second)
        for action in _actions(command):
            words_of[name] += _spellings(action)
        names = preset_names(name)
        if names:
            presets.append(f'        --config:"{name} "*) words="{" ".join(names)}" ;;')
    cases: list[str] = []
    for name, words in words_of.items():
        cases.append(f'            "{name}") words="{" ".join(words)}" ;;')
    first_words = dict.fromkeys(name.split()[0] for name in COMMANDS)
    script = BASH.replace("@PRESETS@", "\n".join(presets))
    script = script.replace("@COMMANDS@", "\n".join(cases))
    script = script.replace("@NAMES@", " ".join(first_words))
    if options.shell == "zsh":
        return f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    return script


def _actions(command: Command) -> list[Action]:
    """The flags of a subcommand as its parser has them, without the inert ones of DeepSpeed-Chat."""
    flags_class = command.flags_class()
    names = flags_of(flags_class)
    actions = FlagParser(flags_class)._actions
    shown: list[Action] = []
    for action in actions:
        if action.dest in names and action.help != SUPPRESS:
            shown.append(action)
    return shown


def _spellings(action: Action) -> list[str]:
    """Spellings of a flag with underscores; none for a positional word."""
    return [option for option in action.option_strings if "-" not in option[2:]]


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        print("\n".join(names_page()))
    else:
        print("\n".join(page()))
