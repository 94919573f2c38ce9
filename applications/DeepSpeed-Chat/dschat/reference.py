# SPDX-License-Identifier: Apache-2.0
"""What the declarations of the flags make: docs/flags.md and the completion of shells.

python -m dschat.reference > docs/flags.md
"""

from argparse import SUPPRESS, Action
from collections.abc import Iterator

from dschat.cli import COMMANDS, Command
from dschat.settings.commands import CompletionOptions
from dschat.settings.flags import flags_of
from dschat.settings.parser import FlagParser
from dschat.settings.presets import preset_names

BASH = """_dschat() {
    local IFS=$'\\n' current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=""
    local two="${COMP_WORDS[1]:-} ${COMP_WORDS[2]:-}" one=${COMP_WORDS[1]:-}
    case "$previous:$two" in
@PRESETS@
    esac
    if [[ -z $words ]]; then
        case "$two" in
@TWO@
        esac
    fi
    if [[ -z $words ]]; then
        case "$one" in
@ONE@
        esac
    fi
    [[ $COMP_CWORD -eq 1 ]] && words="@NAMES@"
    mapfile -t COMPREPLY < <(compgen -W "$(tr ' ' '\\n' <<<"$words")" -- "$current")
    [[ ${#COMPREPLY[@]} -gt 0 ]] || mapfile -t COMPREPLY < <(compgen -f -- "$current")
}
complete -F _dschat dschat
"""


def page() -> Iterator[str]:
    """The lines of docs/flags.md."""
    yield "# Flags\n"
    yield "Made by `python -m dschat.reference > docs/flags.md` from the declarations. Every flag may be spelled with"
    yield "`_` or `-`, and stand in the file of `--config` under the name shown here. `--print_config` shows where a"
    yield "value comes from: the command line, the file (or what it `extends`), the environment, or the default."
    for name, command in COMMANDS.items():
        yield f"\n## dschat {name}\n"
        yield f"{command.summary[0].upper()}{command.summary[1:]}.\n"
        presets = preset_names(name)
        if presets:
            yield f"Presets: {', '.join(f'`{preset}`' for preset in presets)}.\n"
        yield "| flag | what |"
        yield "|---|---|"
        for action in _actions(command):
            shown = [option for option in action.option_strings if "-" not in option[2:]] or [str(action.dest).upper()]
            if "--help" in shown:
                continue
            help = str(action.help).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
            choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
            yield f"| {', '.join(f'`{option}`' for option in shown)} | {help}{choices} |"


def completion(options: CompletionOptions) -> str:
    """A script for bash; zsh reads it, too, by its bashcompinit."""
    names: dict[str, None] = {}
    two: list[str] = []
    one: list[str] = []
    presets: list[str] = []
    for name, command in COMMANDS.items():
        words = [option for action in _actions(command) for option in action.option_strings if "-" not in option[2:]]
        names[name.split()[0]] = None
        below = [other.split()[1] for other in COMMANDS if other.startswith(f"{name} ")]
        line = f'{{}}"{name}{{}}") words="{" ".join([*below, *words])}" ;;'
        (two if " " in name else one).append(line.format(" " * 12, ""))
        if found := preset_names(name):
            presets.append(f'        --config:"{name} "*) words="{" ".join(found)}" ;;')
    for first in {name.split()[0]: None for name in COMMANDS if " " in name and name.split()[0] not in COMMANDS}:
        below = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
        one.append(f'            "{first}") words="{" ".join(below)}" ;;')
    script = BASH.replace("@PRESETS@", "\n".join(presets)).replace("@TWO@", "\n".join(two))
    script = script.replace("@ONE@", "\n".join(one)).replace("@NAMES@", " ".join(names))
    return script if options.shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _actions(command: Command) -> list[Action]:
    """The flags of a subcommand as its parser has them, those of DeepSpeed-Chat without effect left out."""
    kind = command.flags_class()
    actions = FlagParser(kind)._actions
    return [action for action in actions if action.dest in flags_of(kind) and action.help != SUPPRESS]


if __name__ == "__main__":
    print("\n".join(page()))
